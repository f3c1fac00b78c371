"""What the tuning commands call by one name, read in one way; what cannot be read ends the command."""

import re
from collections.abc import Collection, Sequence
from typing import Final

from gateway.cli.admin_client import EXIT_USAGE, Failure
from gateway.tuning.slo import Slo, parse_slo

_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART: Final = r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h|d)"
_TIME: Final = re.compile(f"(?:{_PART})+")
_DIGITS: Final = 7  # of a dimension: what is made up has to fit into memory


def duration_s(text: str, option: str) -> float:
    """`500ms`, `2.5s`, `1m30s` in seconds."""
    if not text.isascii() or not _TIME.fullmatch(text):
        raise Failure(f"{option} {text}: write a time as 500ms, 10s or 1m30s", EXIT_USAGE)
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, text))


def slo_of(text: str, *, percentiles: Collection[str] = ()) -> Slo | None:
    """`50ms` or `p99=50ms`; None where nothing is given. Only of `percentiles`, where the command knows no others."""
    if not text:
        return None
    try:
        slo = parse_slo(text)
    except ValueError as error:
        raise Failure(f"--slo {error}", EXIT_USAGE) from error
    if percentiles and f"p{slo.percent:g}" not in percentiles:
        raise Failure(f"--slo {text}: must be of one of the percentiles {', '.join(percentiles)}", EXIT_USAGE)
    return slo


def shapes_of(texts: Sequence[str] | None) -> dict[str, tuple[int, ...]]:
    """`INPUT:D,D`, each of another input: its dimensions without the batch."""
    return dict(_shape(text) for text in texts or ())


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, dims = text.rpartition(":")
    parts = dims.split(",") if dims else []
    if not name or not all(one.isascii() and one.isdecimal() and len(one) <= _DIGITS and int(one) for one in parts):
        raise Failure(f"--shape {text}: write INPUT:D,D", EXIT_USAGE)
    return name, tuple(int(one) for one in parts)
