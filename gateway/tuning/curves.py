"""How long a model takes by the size of its batch: what a sweep measures and a simulation draws from. Pure.

Times are kept as they were measured and not as an average: the tail of a latency is made of them.
"""

import random
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

FORM: Final = "latency-curve/1"
MOST_US: Final = 1e12
"""Of a time: eleven days."""
_DIGITS: Final = 9


class CurveError(ValueError):
    """A curve that cannot be read; the text begins with the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCurve:
    """Times of one model on one kind of machine, in microseconds.

    Attributes:
        model: its name.
        compute_us: by the rows of a batch, how long an instance was busy with it: samples, in ascending order.
        overhead_us: from the caller to the queue and back, for a request that neither waits nor is computed: samples,
            in ascending order; empty for none.
        slowdown: by the number of instances that are busy on one server at once, how many times as long each takes.
        source: where it was measured, in words.
    """

    model: str
    compute_us: Mapping[int, tuple[float, ...]]
    overhead_us: tuple[float, ...] = ()
    slowdown: Mapping[int, float] = field(default_factory=dict)
    source: str = ""
    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        if not self.compute_us or any(not samples for samples in self.compute_us.values()):
            raise CurveError("compute_us: must have at least one time for each size")
        if any(rows < 1 for rows in self.compute_us) or any(s[0] < 0 for s in self.compute_us.values()):
            raise CurveError("compute_us: sizes must be at least 1, and times 0 or more")
        object.__setattr__(self, "_sizes", tuple(sorted(self.compute_us)))

    def draw_us(self, rows: int, rng: random.Random, *, busy: int = 1) -> float:
        """A time for a batch of `rows` while `busy` instances of the server are at work, itself included."""
        return self.at(rows, rng.random()) * self.slowed(busy)

    def mean_us(self, rows: int, *, busy: int = 1) -> float:
        """The expected time."""
        steps = 64
        return sum(self.at(rows, (step + 0.5) / steps) for step in range(steps)) / steps * self.slowed(busy)

    def at(self, rows: int, share: float) -> float:
        """The time that `share` (0 to 1) of the batches of `rows` take less than.

        Between two measured sizes and beyond the largest along a straight line; below the smallest as the smallest.
        """
        sizes = self._sizes
        place = bisect_left(sizes, rows)
        if (place < len(sizes) and sizes[place] == rows) or len(sizes) == 1 or place == 0:
            return _quantile(self.compute_us[sizes[min(place, len(sizes) - 1)]], share)
        low, high = (sizes[place - 1], sizes[place]) if place < len(sizes) else sizes[-2:]
        below, above = _quantile(self.compute_us[low], share), _quantile(self.compute_us[high], share)
        return max(0.0, below + (above - below) * (rows - low) / (high - low))

    def slowed(self, busy: int) -> float:
        """How many times as long a batch takes while `busy` instances are at work; as the nearest measured below."""
        known = [number for number in self.slowdown if number <= busy]
        return self.slowdown[max(known)] if known else 1.0

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {
            "form": FORM,
            "model": self.model,
            "source": self.source,
            "compute_us": {str(rows): list(self.compute_us[rows]) for rows in self._sizes},
            "overhead_us": list(self.overhead_us),
            "slowdown": {str(busy): factor for busy, factor in sorted(self.slowdown.items())},
        }


def parse_curve(given: object) -> LatencyCurve:
    """A curve out of a file. A time may stand alone instead of a list. Raises `CurveError` naming the field."""
    if not isinstance(given, Mapping):
        raise CurveError("must be an object")
    known = ("form", "model", "source", "compute_us", "overhead_us", "slowdown")
    for name in given:
        if name not in known:
            raise CurveError(f"{name}: unknown; there are {', '.join(known)}")
    if given.get("form", FORM) != FORM:
        raise CurveError(f"form: must be '{FORM}', not {given['form']!r}")
    for name in ("model", "source"):
        if not isinstance(given.get(name, ""), str):
            raise CurveError(f"{name}: must be a text")
    sizes = given.get("compute_us")
    if not isinstance(sizes, Mapping):
        raise CurveError("compute_us: must say for each size of a batch how long it takes")
    compute = {_whole(rows, at="compute_us"): _samples(times, at=f"compute_us.{rows}") for rows, times in sizes.items()}
    if len(compute) < len(sizes):
        raise CurveError("compute_us: a size is there twice")
    slowdown = given.get("slowdown") or {}
    if not isinstance(slowdown, Mapping):
        raise CurveError("slowdown: must say for numbers of busy instances how many times as long they take")
    return LatencyCurve(
        model=given.get("model", ""),
        compute_us=compute,
        overhead_us=_samples(given.get("overhead_us") or (), at="overhead_us"),
        slowdown={
            _whole(busy, at="slowdown"): _factor(factor, at=f"slowdown.{busy}") for busy, factor in slowdown.items()
        },
        source=given.get("source", ""),
    )


def _samples(given: object, *, at: str) -> tuple[float, ...]:
    times = [given] if isinstance(given, int | float) else given
    if not isinstance(times, list | tuple):
        raise CurveError(f"{at}: must be a number or a list of numbers")
    for one in times:
        if isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one <= MOST_US:
            raise CurveError(f"{at}: must be numbers from 0 to {MOST_US:g}, not {str(one)[:40]}")
    return tuple(sorted(float(one) for one in times))


def _factor(given: object, *, at: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= MOST_US:
        raise CurveError(f"{at}: must be a number above 0, not {str(given)[:40]}")
    return float(given)


def _whole(text: object, *, at: str) -> int:
    is_number = isinstance(text, int | str) and not isinstance(text, bool)
    if not is_number or not (digits := str(text)).isdecimal() or len(digits) > _DIGITS or not int(digits):
        raise CurveError(f"{at}: must have whole numbers from 1 on, of {_DIGITS} digits at most, not {str(text)[:40]}")
    return int(digits)


def _quantile(samples: tuple[float, ...], share: float) -> float:
    """Between two samples along a straight line."""
    place = share * (len(samples) - 1)
    low = int(place)
    if low + 1 >= len(samples):
        return samples[-1]
    return samples[low] + (samples[low + 1] - samples[low]) * (place - low)
