"""Every command has help with an example, and `--json` where it asks the control plane; completion is there."""

import re
from collections.abc import Iterator

import click
import pytest
import typer.main
from typer.testing import CliRunner

from gateway.__main__ import app


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group) or hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        elif not command.hidden:
            yield (*path, name), command


ALL = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_has_an_example_of_the_command_itself(path):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*path, "--help"])
    assert done.exit_code == 0
    assert re.search(rf"(Examples?:|Try:)[\s\S]*gateway {' '.join(path)}\b", done.stdout)


@pytest.mark.parametrize(
    "path", [path for path, one in ALL.items() if any("--admin-url" in p.opts for p in one.params)], ids=" ".join
)
def test_commands_of_the_control_plane_speak_json(path):
    assert any("--json" in parameter.opts for parameter in ALL[path].params)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(app, ["--show-completion", shell], prog_name="gateway")
    assert done.exit_code == 0
    assert "_GATEWAY_COMPLETE" in done.stdout


def test_completion_offers_the_commands():
    line = {"_GATEWAY_COMPLETE": "complete_bash", "COMP_WORDS": "gateway rules ", "COMP_CWORD": "2"}
    done = CliRunner(env=line).invoke(app, [], prog_name="gateway")
    assert {"get", "diff", "check", "apply", "rollback"} <= set(done.stdout.split())
