"""What the tuning commands call by one name is read in one way, and means the same in each of them."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from gateway.__main__ import app
from gateway.cli.admin_client import Failure
from gateway.cli.tuning.options import duration_s, shapes_of, slo_of
from gateway.cli.tuning.progress import EVERY_S, Lines
from gateway.tuning.slo import Slo

COMMANDS = typer.main.get_command(app).commands
TUNING = ("load", "sweep", "simulate", "plan", "advise")


def options(name: str) -> set[str]:
    return {option for one in COMMANDS[name].params for option in one.opts}


@pytest.mark.parametrize(
    ("option", "commands"),
    [
        ("--slo", TUNING),
        ("--duration", ("load", "sweep")),
        ("--triton", ("load", "sweep")),
        ("--shape", ("load", "sweep")),
        ("--seed", ("load", "simulate", "plan")),
        ("--json", TUNING),
    ],
)
def test_one_thing_has_one_name(option, commands):
    assert {name for name in TUNING if option in options(name)} == set(commands)


@pytest.mark.parametrize("option", ["--p99-ms", "--target-p99", "--seconds", "--grpc", "--length"])
def test_and_no_other(option):
    assert not [name for name in TUNING if option in options(name)]


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2.5s", 2.5), ("1m30s", 90), ("2h", 7200), ("1d", 86_400), ("0s", 0)]
)
def test_times(text, seconds):
    assert duration_s(text, "--duration") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1 s", "1e3s", "٣s", "5ms3", "1w", "9" * 20 + "s"])
def test_what_is_no_time_is_told_in_one_line(text, capsys):
    with pytest.raises(Failure):
        duration_s(text, "--warmup")
    assert capsys.readouterr().err == f"--warmup {text}: write a time as 500ms, 10s or 1m30s\n"


def test_an_slo_may_be_bound_to_percentiles(capsys):
    assert slo_of("") is None
    assert slo_of("p95=5ms") == Slo(ms=5, percent=95)
    assert slo_of("5ms", percentiles=("p99",)) == Slo(ms=5)
    with pytest.raises(Failure):
        slo_of("p95=5ms", percentiles=("p99",))
    assert capsys.readouterr().err == "--slo p95=5ms: must be of one of the percentiles p99\n"


def test_shapes():
    assert shapes_of(None) == {}
    assert shapes_of(["X:3,4", "a:b:5", "S:"]) == {"X": (3, 4), "a:b": (5,), "S": ()}


@pytest.mark.parametrize("text", ["3,4", "X:3,", "X:0", "X:-1", "X:a", ":3", "X:99999999"])
def test_what_is_no_shape(text, capsys):
    with pytest.raises(Failure):
        shapes_of([text])
    assert capsys.readouterr().err == f"--shape {text}: write INPUT:D,D\n"


def test_lines_of_progress_come_at_intervals(capsys):
    now = [0.0]
    lines = Lines(clock=lambda: now[0])
    for at_s, words in ((1, "a"), (EVERY_S, "b"), (EVERY_S + 1, "c"), (2 * EVERY_S, "d")):
        now[0] = at_s
        lines.tell(words)
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "b\nd\n")


DOCS = Path(__file__).parents[3] / "docs"
LINES = [
    line.partition(" #")[0].strip()
    for name in TUNING
    for block in re.findall(r"```bash\n(.*?)```", (DOCS / f"{name}.md").read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("gateway ")
]


@pytest.mark.parametrize("line", LINES)
def test_what_the_pages_say_to_type_is_taken(line):
    _, name, *given = shlex.split(line)
    COMMANDS[name].make_context(line, given)  # fails for options that there are not


@pytest.mark.parametrize("name", TUNING)
def test_every_option_is_on_its_page(name):
    page = (DOCS / f"{name}.md").read_text()
    of_all = {"--help", "--admin-url", "--admin-token", "--config"}  # docs/doctor.md, docs/operating.md
    assert sorted(one for one in options(name) - of_all if one.startswith("--") and one not in page) == []
