"""The manual of `gateway load` against the code."""

import re
from pathlib import Path

import typer.main
import yaml

from gateway.cli.tuning.load import app
from gateway.tuning.load.outcomes import WORDS
from gateway.tuning.load.traffic_file import part

MANUAL = (Path(__file__).parents[3] / "docs" / "load.md").read_text()
COMMAND = typer.main.get_command(app)


def test_every_code_of_ours_is_told_with_its_words():
    for code, words in WORDS.items():
        assert f"| `{code}` | {words} |" in MANUAL


def test_options_are_told_and_exist():
    options = {name for one in COMMAND.params for name in one.opts}
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", MANUAL))
    assert told - options == set()
    assert {name for name in options if name.startswith("--")} - told <= {"--install-completion", "--show-completion"}


def test_the_file_of_the_manual_is_one():
    (text,) = re.findall(r"```yaml\n(.*?)```", MANUAL, re.DOTALL)
    classes = yaml.safe_load(text)["classes"]
    parts = [
        part(one, at="c", folder=Path(), url="http://127.0.0.1:8080", key="", environ={"BULK_KEY": "k"})
        for one in classes
    ]
    assert [(one.traffic.name, one.traffic.rows, one.ask.key) for one in parts] == [
        ("people", 1, ""),
        ("bulk", 32, "k"),
    ]
