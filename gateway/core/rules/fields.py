"""Reading the fields of a rule's document: each reader returns the value or raises `RuleError` naming the field."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_SECRETS: Final = (
    *("authorization", "cookie", "token", "secret", "password", "passwd", "credential", "credentials", "jwt"),
    *("apikey", "api-key", "access-key", "secret-key", "subscription-key"),
)
"""How names of what holds a secret end."""
_Choice = TypeVar("_Choice", bound=str)


class RuleError(ValueError):
    """A rule set that cannot be taken; the text names the rule and the field."""


def mapping_at(entry: object, at: str) -> Mapping[str, Any]:
    """An object with texts as names."""
    if not isinstance(entry, Mapping) or not all(isinstance(k, str) for k in entry):
        raise RuleError(f"{at}: must be a mapping")
    return entry


def only_known(fields: Mapping[str, Any], known: Sequence[str], at: str) -> None:
    """Refuse fields that are not among `known`."""
    for name in fields:
        if name not in known:
            raise RuleError(f"{at}: unknown field '{name}'{suggest(name, known)}")


def name_at(value: object, at: str) -> str:
    """A name that may stand in headers, logs and keys."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise RuleError(f"{at}: must be a name of letters, digits and . _ : / - (at most 128)")
    return value


def names_secret(name: str) -> bool:
    """Whether what has this name is a secret by it. Rules, and what they match on, are shown to all who may look."""
    return name.lower().replace("_", "-").endswith(_SECRETS)


def count_at(value: object, most: int, at: str, *, least: int = 0) -> int:
    """A whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RuleError(f"{at}: must be a whole number from {least} to {most}")
    return value


def number_at(value: object, least: float, most: float, at: str) -> float:
    """A number from `least` to `most`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise RuleError(f"{at}: must be a number from {least:g} to {most:g}")
    return value


def list_at(entry: object, at: str) -> Sequence[object]:
    """A list."""
    if not isinstance(entry, Sequence) or isinstance(entry, str | bytes):
        raise RuleError(f"{at}: must be a list")
    return entry


def flag_at(value: object, at: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise RuleError(f"{at}: must be true or false")
    return value


def choice_at(value: object, choices: Sequence[_Choice], at: str) -> _Choice:
    """One of `choices`."""
    for one in choices:
        if value == one:
            return one
    raise RuleError(f"{at}: must be one of {', '.join(choices)}")


def suggest(word: str, known: Iterable[str]) -> str:
    """The known word that is nearest, as a hint; empty where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
