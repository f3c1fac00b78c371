"""Figures in words."""

import pytest

from gateway.console import words


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
        (words.place, {"backend": "triton", "model": "m", "version": "2"}, "triton/m:2"),
        (words.place, {"backend": "llm", "model": ""}, "llm/*"),
        (words.short, {"a": 1, "b": "x"}, "a: 1, b: x"),
        (words.short, "x" * 200, "x" * 119 + "\u2026"),
    ],
)
def test_words(say, given, said):
    assert say(given) == said
