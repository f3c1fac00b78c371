"""Figures in words."""

import time
from datetime import UTC, datetime

import pytest

from gateway.console import words
from gateway.console.charts import drawn
from gateway.console.pages.keys import usual
from gateway.console.tables import act, bar, chip, having


@pytest.mark.parametrize(
    ("say", "given", "said"),
    [
        (words.number, None, "-"),
        (words.number, 12345, "12,345"),
        (words.rate, 3.14, "3.1"),
        (words.rate, 1234.4, "1,234"),
        (words.millis, 4.24, "4.2 ms"),
        (words.millis, 44.4, "44 ms"),
        (words.millis, 12_340, "12.3 s"),
        (words.percent, 0.1234, "12.3 %"),
        (words.usd, 0, "$0.00"),
        (words.usd, 0.00123, "$0.0012"),
        (words.usd, 1234.5, "$1,234.50"),
        (words.lasting, 249, "4:09"),
        (words.lasting, 3900, "1 h 05 min"),
        (words.lasting, 180_000, "2 d 2 h"),
        (words.lasting, -3, "0:00"),
        (words.when, "2026-01-31T12:00:00.500+02:00", "2026-01-31 10:00:00"),
        (words.when, 1_769_860_800_000, "2026-01-31 12:00:00"),
        (words.when, None, "-"),
        (words.moment, None, None),
        (words.moment, 1_769_860_800_123, {"text": "2026-01-31 12:00:00", "title": "2026-01-31T12:00:00.123Z"}),
        (words.place, {"backend": "triton", "model": "m", "version": "2"}, "triton/m:2"),
        (words.place, {"backend": "llm", "model": ""}, "llm/*"),
        (words.short, {"a": 1, "b": "x"}, "a: 1, b: x"),
        (words.short, "x" * 200, "x" * 119 + "\u2026"),
    ],
)
def test_words(say, given, said):
    assert say(given) == said


def test_a_moment_of_today_needs_no_date():
    now_ms = round(time.time() * 1000)
    found = words.moment(now_ms)
    assert found is not None
    assert found["title"].endswith(f"T{found['text'][-8:]}.{now_ms % 1000:03d}Z")
    assert "-" not in found["text"] or found["title"][:10] != f"{datetime.now(UTC):%Y-%m-%d}"


def test_pairs_end_without_dashes():
    assert (words.pair("4", "5"), words.pair("4", "-"), words.pair("-", "-")) == ("4 / 5", "4", "-")


def test_rows_are_found_by_what_they_show():
    rows = [
        {
            "key": "a",
            "name": "chat",
            "split": [chip("1. openai/gpt", title="not shown")],
            "acts": [act("x", "Weights")],
        },
        {"key": "b", "name": "images", "split": [chip("triton/m")], "share": bar(0.5, "50 %"), "at": None},
    ]
    assert having(rows, "") == rows
    assert having(rows, " OpenAI chat ") == rows[:1]
    assert having(rows, "50") == rows[1:]
    assert having(rows, "weights") == having(rows, "not shown") == having(rows, "none") == []


def test_limits_without_a_field_of_their_own_stay_as_they_are():
    own = [{"requests": 60, "per": "minute", "shared_by": "key"}, {"concurrent": 4}, {"usd": 0.5, "per": "day"}]
    others = [
        {"requests": 60, "per": "minute"},  # a second one of a kind
        {"tokens": 9, "per": "hour"},
        {"tokens": 9, "per": "day", "task": "chat"},
        {"tokens": 9, "per": "day", "burst": 5},
        {"tokens": 9, "per": "day", "shared_by": "tenant"},
    ]
    known, rest = usual([*own, *others])
    assert known == {("requests", "minute"): 60, ("concurrent", None): 4, ("usd", "day"): 0.5}
    assert rest == others


def test_a_point_with_nothing_beside_it_is_drawn_as_a_dot():
    dot = {"value": [2, 5.0], "symbol": "circle", "symbolSize": 5}
    assert drawn([(1, None), (2, 5.0), (3, None), (4, 1.0), (5, 2.0)]) == [
        [1, None],
        dot,
        [3, None],
        [4, 1.0],
        [5, 2.0],
    ]
