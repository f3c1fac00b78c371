"""The reference pages are what the code says now, and the code says something of everything."""

import argparse
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import Settings
from release.documents import control_plane
from release.references import PAGES, all_commands, examples_of, renewed, runtime_commands, told

DOCS = Path(__file__).parents[3] / "docs"
UNITS = {
    r"_ms(_mean)?$": "milliseconds",
    r"_s$": "seconds",
    r"_us$": "microseconds",
    r"_ratio$": "0 to 1",
    r"usd": "US dollars",
    r"percent": "percent",
    r"_tokens$": "token",
}
"""What is said of fields whose names end so."""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str):
    page = (DOCS / name).read_text()
    assert renewed(page, PAGES[name]()) == page, f"`make docs` writes docs/{name} anew"


def test_every_setting_says_what_it_is_for():
    schema = Settings.model_json_schema()
    sections = {"the file": schema, **schema["$defs"]}
    silent = [
        f"{section}.{name}"
        for section, found in sections.items()
        for name, field in found.get("properties", {}).items()
        if not told(name, field)
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("words", "command"), list(all_commands()), ids=lambda one: one if isinstance(one, str) else ""
)
def test_every_command_says_what_it_does_and_shows_how(words: str, command: object):
    assert command.help.split("Try:")[0].strip()
    assert any(words in example for example in examples_of(command))
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    assert [one.opts for one in options if one.name != "help" and not one.help] == []


@pytest.mark.parametrize(("name", "command"), runtime_commands())
def test_every_option_of_the_local_runtime_says_what_it_is_for(name: str, command: argparse.ArgumentParser):
    silent = [one.dest for one in command._actions if not one.help]
    assert silent == []
    assert f"python -m local_runtime {name}" in (command.epilog or "")


@functools.cache
def described() -> dict[str, str]:
    """What the control plane's document says of each field of a body, and of each parameter of a call."""
    document = control_plane()
    found = {
        name: words for part, one in document["components"]["schemas"].items() for name, words in fields(part, one)
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for one in operation.get("parameters", ()):
                found[f"{method} {path} {one['name']}"] = one.get("description", "")
            contents = [operation.get("requestBody", {}), operation["responses"].get("200", {})]
            for schema in (kind["schema"] for one in contents for kind in one.get("content", {}).values() if kind):
                found |= dict(fields(f"{method} {path}", schema))
    return found


def fields(at: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Those of a schema and of what stands inside it."""
    for name, field in schema.get("properties", {}).items():
        yield f"{at}.{name}", field.get("description", "")
        yield from fields(f"{at}.{name}", field)
    inside = [
        schema.get("items"),
        schema.get("additionalProperties"),
        *schema.get("anyOf", ()),
        *schema.get("oneOf", ()),
    ]
    for one in inside:
        if isinstance(one, Mapping):
            yield from fields(at, one)


def test_every_field_of_the_control_plane_says_what_it_is():
    assert len(described()) > 500
    assert [name for name, words in described().items() if not words] == []


def test_every_quantity_of_the_control_plane_says_its_unit():
    for ending, unit in UNITS.items():
        named = {name: words for name, words in described().items() if re.search(ending, name.rpartition(".")[2])}
        assert named, ending
        assert {name: words for name, words in named.items() if unit not in words} == {}
