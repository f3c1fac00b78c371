"""Reports as tables, CSV and a page."""

import csv
import dataclasses
import io
import re
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from gateway.tuning import charts, rendering
from gateway.tuning.charts import Axis, Line
from gateway.tuning.report import Report, ServerReport, Tally, class_report, timeline


def report(*, title="a run", names=("people", "bulk")):
    tallies = []
    for name in names:
        tally = Tally(name=name, slo_ms=20, rows=2, from_s=0, until_s=4)
        for number in range(40):
            due_s = number / 10
            tally.due(due_s)
            if number:
                tally.ended(due_s, due_s + number / 1000, "ok" if number % 10 else "queue_full")
        tally.streamed(1.0, first_token_s=1.01, gaps_ms=[5.0], tokens=2)
        tallies.append(tally)
    server = ServerReport(
        backend="triton",
        model="<m>",
        executions=12,
        mean_batch=2.5,
        queue_ms=1,
        compute_ms=3,
        queue_share=0.25,
        batch_sizes={1: 4, 4: 8},
    )
    return Report(
        kind="load",
        title=title,
        setting={"generator": "3 % of a core"},
        seconds=4,
        whole=class_report(tallies, name="all", seconds=4),
        classes=tuple(class_report([one], name=one.name, seconds=4) for one in tallies),
        servers=(server,),
        timeline=timeline(tallies),
        notes=("mind <this>\x1b[2J",),
        cost_usd=1.5,
    )


def shown(given, width=160):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(rendering.table(given))
    return console.file.getvalue()


def test_the_table_has_every_class_end_and_server():
    text = shown(report())
    for word in (
        "all",
        "people",
        "bulk",
        "queue_full",
        "unfinished",
        "triton/<m>",
        "25%",
        "1: 4, 4: 8",
        "3 % of a core",
    ):
        assert word in text
    assert "mind <this>" in text
    assert "\x1b" not in text


def test_one_class_alone_is_told_once():
    text = shown(report(names=("people",)))
    assert "people" in text
    assert " all " not in text
    assert "<td>all</td>" not in rendering.html_text([report(names=("people",))])
    assert len(list(csv.DictReader(io.StringIO(rendering.csv_text(report(names=("people",))))))) == 1


def test_the_table_fits_a_terminal():
    text = shown(report(), width=80)
    for word in ("people", "offered/s", "answered/s", "p99.9", "latency,", "12", "2.50", "25%", "busy"):
        assert word in text


def test_an_empty_report_is_a_table_and_a_page_too():
    empty = Tally(name="a", slo_ms=0, rows=1, from_s=0, until_s=1)
    bare = Report(kind="load", title="t", setting={}, seconds=1, whole=class_report([empty], name="a", seconds=1))
    assert "a" in shown(bare)
    assert "<svg" not in rendering.html_text([bare])
    assert rendering.csv_text(bare).count("\n") == 2


def test_csv_has_a_line_for_each_class():
    rows = list(csv.DictReader(io.StringIO(rendering.csv_text(report(), report(title="other")))))
    assert [(row["run"], row["class"]) for row in rows][:4] == [
        *[("a run", name) for name in ("all", "people", "bulk")],
        ("other", "all"),
    ]
    people = rows[1]
    assert (people["sent"], people["ok"], people["failed"], people["unfinished"]) == ("40", "36", "3", "1")
    assert people["codes"] == "ok=36 queue_full=3"
    assert float(people["latency_p50_ms"]) == pytest.approx(report().classes[0].latency.p50, abs=1e-3)
    assert list(rows[0]) == list(rendering.CSV_COLUMNS)


def test_the_page_stands_alone_and_tells_others_words_as_words():
    page = rendering.html_text([report(title="<b>")])
    assert "<b>" not in page.replace("<body>", "")
    assert "mind &lt;this&gt;" in page
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)
    assert page.count("<svg") == 4
    assert "prefers-color-scheme: dark" in page


def test_several_runs_are_compared_first():
    page = rendering.html_text([report(title="one"), report(title="two")])
    assert page.index("Latency against throughput") < page.index("<h2>one</h2>")


def svg_of(figure):
    return ET.fromstring(re.search(r"<svg.*</svg>", figure, re.DOTALL)[0])  # noqa: S314 - made here


def test_axes_are_named_and_all_lies_within_the_picture():
    drawn = [Line(name="p99", points=[(0.0, 3.0), (1.0, None), (2.0, 40_000.0)])]
    figure = charts.lines("t", drawn, x=Axis(name="time (s)"), y=Axis(name="latency (ms)"))
    svg = svg_of(figure)
    texts = [one.text for one in svg.iter("text")]
    assert {"time (s)", "latency (ms)", "0"} <= set(texts)
    assert "40k" in texts
    assert svg.find("path").get("d").count("M") == 2  # a gap
    for circle in svg.iter("circle"):
        assert 0 <= float(circle.get("cx")) <= charts.WIDTH
        assert 0 <= float(circle.get("cy")) <= charts.HEIGHT


@pytest.mark.parametrize("count", [1, 2, 30, 200])
def test_words_below_an_axis_do_not_touch(count):
    figures = [
        charts.bars("t", [(str(1000 + n), 1.0) for n in range(count)], x=Axis(name="x"), y=Axis(name="y")),
        charts.lines(
            "t",
            [Line(name="a", points=[(1000.0 + n, 1.0) for n in range(count)])],
            x=Axis(name="x"),
            y=Axis(name="y"),
        ),
    ]
    for figure in figures:
        below = [one for one in svg_of(figure).iter("text") if one.text not in ("x", "y") and one.get("x")]
        by_height = {}
        for one in below:
            by_height.setdefault(one.get("y"), []).append(float(one.get("x")))
        widest = max(by_height.values(), key=len)
        assert all(b - a > 30 for a, b in zip(sorted(widest), sorted(widest)[1:], strict=False))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (999, "999"), (12_000, "12k"), (1.5e6, "1.5M"), (2e9, "2G")]
)
def test_numbers_of_an_axis_are_short(value, text):
    assert charts.number(value) == text


def test_nothing_is_drawn_of_nothing():
    axis = Axis(name="a")
    assert charts.lines("t", [Line(name="a", points=[(1.0, None)])], x=axis, y=axis) == ""
    assert charts.bars("t", [], x=axis, y=axis) == ""
    assert charts.bars("t", [("a", 0.0)], x=axis, y=axis) == ""
    assert charts.lines("t", [Line(name="a", points=[(1.0, 0.0)])], x=axis, y=axis)


def test_a_report_without_a_cost_tells_none():
    assert "cost" not in shown(dataclasses.replace(report(), cost_usd=None))
