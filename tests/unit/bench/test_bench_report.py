"""The report of `python -m tests.bench`: nothing is lost in its file, and nothing hidden in its tables."""

import json
from pathlib import Path

import pytest

from tests.bench.suite.goals import Goal, Run
from tests.bench.suite.report import BEGIN, END, Found, Report, into_page, markdown, parse
from tests.bench.suite.rows import ROWS

GOALS = (
    Goal(figure="rps", at="least", bound=0.5, against="peer"),
    Goal(figure="p99 ms", at="most", bound=1.0, against="peer"),
    Goal(figure="rps", at="least", bound=8, against="absent"),
)
RUNS = tuple(
    Run(subject=subject, round=number, figures={"rps": rps + number, "p99 ms": p99})
    for number in range(3)
    for subject, rps, p99 in (("ours", 600.0, 4.0), ("peer", 1000.0, 2.0))
)
ROW = Found(
    name="relay",
    title="chat relay",
    date="2026-11-30T18:00:00+00:00",
    revision="abc1234+",
    load=(0.1, 2.0),
    goals=GOALS,
    runs=RUNS,
    notes=("absent is not installed",),
)


def row(name: str, **fields) -> Found:
    return Found(**{**{one: getattr(ROW, one) for one in Found.__slots__}, "name": name, **fields})


REPORT = Report(setting={"machine": "x86_64, 2 cores"}, rows={"relay": ROW})


def test_a_report_comes_back_out_of_its_json():
    again = parse(json.loads(json.dumps(REPORT.as_json())))
    assert again == REPORT
    assert again.rows["relay"].runs == RUNS


def test_the_json_has_medians_and_verdicts_too():
    (found,) = REPORT.as_json()["rows"]
    assert found["medians"]["peer"]["rps"] == 1001
    assert [one["holds"] for one in found["verdicts"]] == [True, False, None]


def test_what_is_missed_is_told_and_what_was_not_measured_is_not():
    (missed,) = REPORT.missed
    assert "p99 ms <= 1x peer: 2.00" in missed
    failing = REPORT.with_row(row("stream", runs=(), errors=("no upstream:\nits last line",)))
    assert "stream: no upstream:" in failing.missed
    assert "- **failed**: no upstream:\n\n      its last line" in markdown(failing)


def test_a_row_takes_the_place_of_the_one_before():
    both = REPORT.with_row(row("stream")).with_row(row("relay", runs=()))
    assert list(both.rows) == ["relay", "stream"]
    assert both.rows["relay"].runs == ()
    assert REPORT.rows["relay"].runs == RUNS


def test_the_tables_tell_every_goal_every_figure_and_every_fault():
    text = markdown(REPORT.with_row(row("stream", errors=("a stream broke",))))
    assert "| chat relay | rps | 601 | 1,001 | 0.600 | >= 0.5x peer | yes | 0.600 to 0.601 | 3 |" in text
    assert "| chat relay | p99 ms | 4.00 | 2.00 | 2.00 | <= 1x peer | **NO** | 2.00 to 2.00 | 3 |" in text
    assert "| chat relay | rps | 601 | - | - | >= 8x absent | not measured |  | 0 |" in text
    assert "| peer | 1,001 | 2.00 |" in text
    assert "- absent is not installed" in text
    assert "- **failed**: a stream broke" in text
    assert "x86_64, 2 cores" in text
    assert "2026-11-30T18:00 at abc1234+" in text
    assert "load average before each row: 0.1 to 0.1" in text


def test_a_sign_of_tables_in_a_text_breaks_none():
    text = markdown(REPORT.with_row(row("relay", title="a | b")))
    assert "| a \\| b | rps |" in text


def test_tables_go_between_the_marks_of_a_page():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    put = into_page(page, "new\n")
    assert put == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert into_page(put, "newer") == put.replace("new", "newer")
    with pytest.raises(ValueError, match="the page has no"):
        into_page("no marks", "new")


def test_the_manual_has_a_place_for_figures_and_tells_every_row():
    page = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    assert "| new |" in into_page(page, "| new |")
    assert [name for name in ROWS if f"| `{name}` |" not in page] == []
