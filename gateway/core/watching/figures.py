"""What became of requests, added up: how many, how many failed and how, how long they took, what they used.

A `Tally` is of one kind of request at one place; times are kept as a histogram whose steps grow by a tenth, so that a
percentile read out of it is at most a tenth too high.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

STEP: Final = 1.1
_LOG_STEP: Final = math.log(STEP)


class Series(NamedTuple):
    """Whose requests a tally counts; `rule` is empty where none took them, and the place where they came to none."""

    task: str
    rule: str
    backend: str
    model: str
    version: str


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one series. Times in microseconds by the step of their histogram; costs in 1e-9 US dollars.

    Attributes:
        requests: those that ended with the answer of this place; with no place, those that got none.
        errors: of these, those that did not end well (`client_closed` is no error).
        attempts / failed_attempts: of requests at this place, whoever answered in the end.
        violations: of the failed attempts, those whose answer broke the contract or the protocol.
        agreed / disagreed: comparisons with the shadow of what this place answered.
    """

    requests: int = 0
    errors: int = 0
    attempts: int = 0
    failed_attempts: int = 0
    violations: int = 0
    agreed: int = 0
    disagreed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_nano_usd: int = 0
    whole: dict[int, int] = field(default_factory=dict)
    first_token: dict[int, int] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Count `other` in."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, others in ((self.whole, other.whole), (self.first_token, other.first_token)):
            for step, count in others.items():
                mine[step] = mine.get(step, 0) + count


COUNTS: Final = (
    *("requests", "errors", "attempts", "failed_attempts", "violations", "agreed", "disagreed"),
    *("input_tokens", "output_tokens", "cost_nano_usd"),
)

Figures = Mapping[Series, Tally]
"""The tallies of some time."""


def step_of(time_us: int) -> int:
    """The step of the histogram that holds `time_us`."""
    return math.ceil(math.log(max(1, time_us)) / _LOG_STEP)


def percentile_us(histogram: Mapping[int, int], share: float) -> int | None:
    """The upper end of the step below which `share` (0 to 1) of the times lie; None where there are none."""
    left = math.ceil(share * sum(histogram.values()))
    if not left:
        return None
    for step in sorted(histogram):
        left -= histogram[step]
        if left <= 0:
            return round(STEP**step)
    return None


def total(figures: Iterable[tuple[Series, Tally]]) -> Tally:
    """All of them as one."""
    found = Tally()
    for _, tally in figures:
        found.add(tally)
    return found
