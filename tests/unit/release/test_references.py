"""The reference pages are what the code says now, and the code says something of everything."""

import argparse
from pathlib import Path

import pytest

from gateway.settings import Settings
from release.references import PAGES, all_commands, examples_of, renewed, runtime_commands, told

DOCS = Path(__file__).parents[3] / "docs"


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
