"""What others have written is shown on a terminal, and orders nothing there."""

import ast
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.__main__ import app
from gateway.cli.admin_client import Admin, Failure
from gateway.cli.rules.words import changes_text
from gateway.cli.show import add, fields, show, show_json, table
from gateway.cli.terminal import visible

ORDERS = "\x1b[2J\x1b]0;title\x07\x9b31m\r\x08\u202egnp.exe\u200b\x7f"
MARKUP = "[bold]b[/bold] [link=https://evil.example]l[/link] [/red] :bomb: \\[x]"


def is_plain(text: str) -> bool:
    return all(one.isprintable() or one == "\n" for one in text)


def test_what_is_seen_is_what_was_written():
    assert visible("Grüße, 日本 🙂\n\tindented") == "Grüße, 日本 🙂\n\tindented"
    assert visible("a\x1b[31mb\u202ec") == r"a\u001b[31mb\u202ec"


@pytest.mark.parametrize("text", [ORDERS, MARKUP])
def test_words_of_others_are_shown_as_they_are(capsys, text):
    cells = table("heading")
    add(cells, text)
    for shown in (cells, fields({"name": text, text: "value"}), text):
        show(shown)
    with pytest.raises(Failure):
        raise Failure(text, 1)
    show(changes_text([{"change": "changed", "rule": "r", "fields": [{"field": "f", "before": text, "after": None}]}]))
    out, err = capsys.readouterr()
    assert is_plain(out)
    assert is_plain(err)
    words = "".join(out.split())
    assert words.count("".join(visible(text).split())) >= 4
    assert visible(text) in err


def test_json_is_the_same_and_orders_nothing(capsys):
    show_json({"reason": f"Grüße {ORDERS}"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"reason": f"Grüße {ORDERS}"}
    assert "Grüße" in out
    assert not set("\x1b\x9b\x07\x7f\r") & set(out)


def test_the_token_is_in_no_trace():
    assert "SECRET" not in repr(Admin("http://127.0.0.1:1", "SECRET"))


def told(names: str, **more) -> dict:
    return {**dict.fromkeys(names.split(), "x"), **more}


SAID = f"{MARKUP}{ORDERS}"
SERVER = {"replica": "r", "error": SAID, "versions": []}
DOCUMENTS = {
    "/models": {
        "items": [told("model backend", replicas=[SERVER])],
        "unreachable": [told("backend", reason=SAID)],
    },
    "/deploys": {"items": [told("id model old new status step", weight=0, reason=SAID)]},
    "/audit": {
        "items": [told("actor role from action target outcome", at="2026-01-01T00:00:00.000Z", reason=SAID)],
        "next": None,
    },
}


@pytest.mark.parametrize("command", ["models list", "models deploys", "audit list"])
def test_a_command_shows_what_servers_and_people_say(monkeypatch, command):
    monkeypatch.setattr(Admin, "ask", lambda _, __, path, **___: DOCUMENTS[path.partition("?")[0]])
    given = {"GATEWAY_ADMIN_URL": "http://127.0.0.1:1", "GATEWAY_ADMIN_TOKEN": "t", "COLUMNS": "400"}
    shown = CliRunner().invoke(app, command.split(), env=given)
    assert shown.exit_code == 0, shown.output
    assert is_plain(shown.output)
    assert "[bold]b[/bold]" in shown.output
    assert ":bomb:" in shown.output


COMMANDS = Path(__file__).parents[3] / "gateway" / "cli"
PLAIN = {"json.dumps", "text"}  # with ASCII alone; the rules as YAML, which escapes for itself
SAYERS = ("terminal.py", "show.py")


def test_no_command_writes_by_another_way():
    """Words go by `say` and `show`; `typer.echo` is for JSON."""
    for file in COMMANDS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if file.name in SAYERS or not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called != "print", file
            if called == "typer.echo":
                given = node.args[0]
                assert ast.unparse(given.func if isinstance(given, ast.Call) else given) in PLAIN, file


def test_faults_of_a_file_and_of_a_repository_order_nothing(tmp_path):
    told = json.dumps(ORDERS)
    (tmp_path / "gateway.yaml").write_text(f"backends: {{}}\ntasks: {{}}\nrules: [{{{told}: 1}}]\n{told}: 1\n")
    checked = CliRunner().invoke(app, ["check", str(tmp_path / "gateway.yaml")])
    assert checked.exit_code == 78
    assert is_plain(checked.output)
    repository = tmp_path / "models"
    (repository / "m\x1b[2J" / "1").mkdir(parents=True)
    (repository / "m\x1b[2J" / "config.pbtxt").write_text('backend: "python"')
    checked = CliRunner().invoke(app, ["check", str(repository)])
    assert "m\\u001b[2J" in checked.output
    assert is_plain(checked.output)
