"""Who asks when: arrivals of several kinds of traffic, the same for a measured run and for a simulated one. Pure.

An arrival process is a renewal process of mean gap 1 (its shape) stretched along the integral of the rate (its speed):
so that a ramp may be constant, Poisson or bursty alike. Same seed, same arrivals.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError

from gateway.core.types import Priority

Shape = Literal["poisson", "constant", "bursty"]
_PACE: Final = ("rate", "ramp_to", "concurrency", "think_ms", "speed", "burstiness")
_AMOUNTS: Final = (*_PACE, "rows", "slo_ms", "sequence_length", "sequence_gap_ms")
BURSTINESS: Final = 4.0
"""Squared coefficient of variation of the gaps of `bursty` where none is said; Poisson's is 1, constant's is 0."""

MOST_REQUESTS: Final = 20_000_000
"""Of one class in one run: hours of one core, and a third of a gigabyte of latencies."""
MOST_CALLERS: Final = 100_000
_BURSTIEST: Final = 10_000.0


class TrafficError(ValueError):
    """Traffic that cannot be made; the text begins with the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """One kind of traffic. One of `rate`, `concurrency` and `trace` is given.

    Attributes:
        name: in reports.
        rate: requests per second, whatever the answers do (open loop); to `ramp_to` by the end, evenly, where given.
        concurrency: so many callers, each of which asks again `think_ms` after its answer (closed loop).
        trace: instants in seconds since the start, each one request, in order; `speed` times as fast.
        arrivals: the shape of `rate`; `burstiness` is for `bursty` alone, see `BURSTINESS`.
        rows: of the batch dimension that each request brings.
        priority / tenant: the caller's.
        slo_ms: an answer within it is a good one; 0: every answer is.
        sequence_length: what comes are sequences of so many requests, each of which is due `sequence_gap_ms` after the
            answer to the one before; `rate`, `concurrency` and `trace` then say how many begin. 0: single requests.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    name: str = "all"
    rate: float = 0.0
    ramp_to: float = 0.0
    concurrency: int = 0
    think_ms: float = 0.0
    trace: tuple[float, ...] = ()
    speed: float = 1.0
    arrivals: Shape = "poisson"
    burstiness: float = BURSTINESS
    rows: int = 1
    priority: Priority = "interactive"
    tenant: str = "load"
    slo_ms: float = 0.0
    sequence_length: int = 0
    sequence_gap_ms: float = 0.0

    def __post_init__(self) -> None:
        given = [name for name in ("rate", "concurrency", "trace") if getattr(self, name)]
        if len(given) != 1:
            told = f"not {' and '.join(given)}" if given else "and none is given"
            raise TrafficError(f"{self.name}: one of rate, concurrency and trace says how much, {told}")
        if self.ramp_to and not self.rate:
            raise TrafficError(f"{self.name}.ramp_to: only a rate can ramp")
        for name in _AMOUNTS:
            number = getattr(self, name)
            if not math.isfinite(number) or number < 0:
                raise TrafficError(f"{self.name}.{name}: must be a number from 0 on, not {number}")
        if self.sequence_gap_ms and not self.sequence_length:
            raise TrafficError(f"{self.name}.sequence_gap_ms: there is none without a sequence_length")
        if self.burstiness and not 1 / _BURSTIEST <= self.burstiness <= _BURSTIEST:  # beyond, gaps are 0 to a computer
            raise TrafficError(f"{self.name}.burstiness: must be 0, or {1 / _BURSTIEST:g} to {_BURSTIEST:g}")
        if self.rows < 1 or not self.speed:
            raise TrafficError(f"{self.name}: rows must be at least 1 and speed above 0")
        if any(later < earlier for earlier, later in zip((0.0, *self.trace), self.trace, strict=False)):
            raise TrafficError(f"{self.name}.trace: instants must be in order, from 0 on")

    @property
    def is_open(self) -> bool:
        """Whether requests come whatever the answers do."""
        return not self.concurrency


_FORM: Final = TypeAdapter(TrafficClass)


def parse_class(given: Mapping[str, Any], *, at: str = "traffic") -> TrafficClass:
    """A class as it stands in a file. Raises `TrafficError` naming the field."""
    try:
        return _FORM.validate_json(
            orjson.dumps(given)
        )  # strict of JSON takes a list for a tuple, and no text for a number
    except ValidationError as error:
        first = error.errors()[0]
        inner = first.get("ctx", {}).get("error")
        if isinstance(inner, TrafficError):
            raise inner from None
        raise TrafficError(f"{'.'.join(map(str, (at, *first['loc'])))}: {first['msg']}") from None
    except orjson.JSONEncodeError as error:  # what JSON cannot say: a date, a key that is no text
        raise TrafficError(f"{at}: {error}") from error


def check_amount(classes: Iterable[TrafficClass], *, duration_s: float) -> None:
    """Raises `TrafficError` for more requests, or callers, than one process can send, or count, in that time."""
    for one in classes:
        expected = (one.rate + (one.ramp_to or one.rate)) / 2 * duration_s
        if expected > MOST_REQUESTS:
            raise TrafficError(
                f"{one.name}.rate: {expected:,.4g} requests in {duration_s:g} s: {MOST_REQUESTS:,} at most"
            )
        if one.concurrency > MOST_CALLERS:
            raise TrafficError(f"{one.name}.concurrency: {MOST_CALLERS:,} callers at most")


def arrivals(traffic: TrafficClass, rng: random.Random, *, duration_s: float) -> Iterator[float]:
    """The instants, in seconds from the start and in order, at which requests of an open class come."""
    if traffic.trace:
        yield from (at_s for one in traffic.trace if (at_s := one / traffic.speed) < duration_s)
        return
    begin, end = traffic.rate, traffic.ramp_to or traffic.rate
    whole = (begin + end) / 2 * duration_s
    passed = 0.0
    for gap in _gaps(traffic, rng):
        passed += gap
        if passed >= whole:
            return
        yield _instant(passed, begin=begin, end=end, duration_s=duration_s)


def _gaps(traffic: TrafficClass, rng: random.Random) -> Iterator[float]:
    """Gaps of mean 1, for ever."""
    if traffic.arrivals == "poisson":
        while True:
            yield rng.expovariate(1.0)
    if traffic.arrivals == "constant" or not traffic.burstiness:
        while True:
            yield 1.0
    shape = 1 / traffic.burstiness  # of a gamma distribution: the squared coefficient of variation is 1 / shape
    while True:
        yield rng.gammavariate(shape, traffic.burstiness)


def _instant(passed: float, *, begin: float, end: float, duration_s: float) -> float:
    """When the integral of a rate that goes evenly from `begin` to `end` has reached `passed`."""
    slope = (end - begin) / duration_s
    if not slope:
        return passed / begin
    # begin * t + slope * t^2 / 2 = passed, in the form that keeps its digits for small slopes
    return 2 * passed / (begin + math.sqrt(max(0.0, begin * begin + 2 * slope * passed)))
