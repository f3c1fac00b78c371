"""What all commands show alike: names folded where they may be, instants as short as they can be, eighty columns."""

from datetime import UTC, datetime

import pytest
from rich.console import Console

from gateway.cli.show import add, folded, table, when

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("triton/text_embedding", 30, ["triton/text_embedding"]),
        ("triton/text_embedding", 12, ["triton/text_", "embedding"]),
        ("triton/image_classification:9@127.0.0.1:8001", 16, ["triton/image_", "classification:", "9@127.0.0.1:8001"]),
        ("openai/gpt-4.1", 10, ["openai/", "gpt-4.1"]),
        ("a.example.com", 10, ["a.example.", "com"]),
        ("the rule text-embedding", 14, ["the rule", "text-embedding"]),  # not within a word that has room below
        ("one\ntwo three", 8, ["one", "two", "three"]),
        ("", 5, [""]),
    ],
)
def test_names_are_broken_after_their_signs(text, width, lines):
    assert folded(text, width).split("\n") == lines


def test_a_table_folds_names_and_never_figures_or_ids():
    shown = table("id", "place", "ms", right=("ms",), whole=("id",))
    add(shown, "73f51c2c7e1e", "triton/[text]_embedding", "12,345.6")
    console = Console(width=40, record=True)
    with console.capture() as printed:
        console.print(shown)
    cells = [line.split() for line in printed.get().splitlines()]
    assert ["73f51c2c7e1e", "triton/[text]_", "12,345.6"] in cells
    assert ["embedding"] in cells


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("2026-03-01T09:05:07.250Z", "09:05:07"),
        ("2026-02-28T23:59:59Z", "2026-02-28 23:59"),
        (1_772_355_907_250, "09:05:07"),
        (None, "-"),
    ],
)
def test_of_today_the_time_is_enough(at, said):
    assert when(at, NOW) == said
