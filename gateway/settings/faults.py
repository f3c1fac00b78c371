"""What is wrong with a document that pydantic has refused, in the words of YAML and JSON instead of Python's."""

import re
from collections.abc import Mapping
from typing import Any, Final

_WORDS: Final = {
    "extra_forbidden": "unknown field",
    "missing": "is required",
    "union_tag_not_found": "kind is required",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "mapping_type": "must be a mapping of names to values",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of fields to values",
    "string_type": "must be a text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "datetime_parsing": "must be an instant such as 2027-01-31T00:00:00Z",
    "datetime_from_date_parsing": "must be an instant such as 2027-01-31T00:00:00Z",
    "timezone_aware": "must be an instant with its time zone, such as 2027-01-31T00:00:00Z",
}
_BEGINS: Final = re.compile(r"^(?:Value error, |(?:Input|String|Value|Tuple|List) should )")


class ConfigError(ValueError):
    """A configuration that cannot be used; one line for each fault, with the file's line number."""


def fault_words(fault: Mapping[str, Any]) -> str:
    """One fault of `ValidationError.errors()` as a sentence without its place: `must be greater than or equal to 1`."""
    return _WORDS.get(fault["type"]) or _BEGINS.sub(_opening, fault["msg"])


def _opening(found: re.Match[str]) -> str:
    return "" if found[0].startswith("Value error") else "must "
