"""docs/operating.md against the commands: what it says to type is taken, and no command is missing."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from gateway.__main__ import app

MANUAL = (Path(__file__).parents[3] / "docs" / "operating.md").read_text()
LINES = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", MANUAL, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("gateway ")
]


def found(words: list[str]):
    """The command, and what is given to it."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    return command, words


@pytest.mark.parametrize("line", LINES)
def test_what_it_says_to_type_is_taken(line):
    command, given = found(shlex.split(line)[1:])
    command.make_context(line, given)  # fails for options that there are not, and for those that are missing


def test_every_command_is_told():
    table = re.findall(r"^\| `gateway (.*?) \|", MANUAL, re.MULTILINE)
    told = {word for row in table for word in re.findall(r"[a-z-]+", row)}
    groups = typer.main.get_command(app).commands
    names = {name for name, one in groups.items() if not one.hidden}
    names |= {name for one in groups.values() for name in getattr(one, "commands", {})}
    assert names <= told
