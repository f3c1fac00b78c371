"""The cheapest setting that holds an SLO: bounds from a latency curve, and a search over simulated runs. Pure.

The runs are the caller's (`Probe`). More replicas are taken to be no worse, which holds but for chance: what is chosen
was run, and so was one replica less, unless the bound rules it out.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.tuning.curves import LatencyCurve

PERCENTILES: Final[Mapping[str, float]] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
FULLEST: Final = 0.95
"""Of what replicas can compute at most, how much is ever planned: with the last 5 % queues take (1 / 0.05)^2 = 400
batches and more to find their length, so that no run of a fair size could tell what becomes of them."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """A model's batching on each replica, in Triton's words; `count` is of its `instance_group`."""

    max_batch_size: int
    max_queue_delay_microseconds: int
    preferred_batch_size: tuple[int, ...] = ()
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one simulated run.

    Attributes:
        holds: whether the SLO did, in every class that has one.
        latency_ms: at the wanted percentile, of the class that is nearest to its SLO or furthest beyond.
        strain: `latency_ms` by its SLO; infinite where nothing was answered.
        good: of the requests that came, the share answered right and within the SLO: of the worst class.
        p50_ms / p99_ms / qps / goodput: of all classes together, the last two per second.
        busy / mean_batch / queue_ms / compute_ms: of the planned servers.
        requests: that were counted.
        replicas: that were simulated: fewer than planned where a part stands for the whole.
    """

    holds: bool
    latency_ms: float
    strain: float
    good: float
    p50_ms: float
    p99_ms: float
    qps: float
    goodput: float
    busy: float
    mean_batch: float
    queue_ms: float
    compute_ms: float
    requests: int
    replicas: int


class Probe(Protocol):
    """Runs a setting once."""

    def __call__(self, setting: Setting, replicas: int, *, seed: int, whole: bool) -> Outcome:
        """The outcome; with `whole` as many replicas as said are simulated, else a part may stand for them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setting to look at.

    Attributes:
        least: replicas, fewer than which cannot hold the SLO whatever happens.
        impossible: why no number of replicas can; empty where that is not known.
    """

    setting: Setting
    least: int = 1
    impossible: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A setting on so many replicas, and its runs, one for each seed until one did not hold."""

    setting: Setting
    replicas: int
    whole: bool
    outcomes: tuple[Outcome, ...]

    @property
    def holds(self) -> bool:
        """For every seed."""
        return all(one.holds for one in self.outcomes)

    @property
    def worst(self) -> Outcome:
        """The run furthest from holding; of equal ones the first."""
        return max(self.outcomes, key=lambda one: (not one.holds, one.strain))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search came to.

    Attributes:
        chosen: the fewest replicas, and of the settings that hold on so many the one with the lowest latency, as the
            search saw it; checked whole. None where none holds.
        below: the same setting on one replica less, whole, which does not hold; None where the bound rules it out.
        scaled: the chosen setting on as many replicas, as the search itself saw it.
        settings: the fewest replicas of each setting that were found to hold, fewest first.
        front: of all that holds, each point with a lower latency than any on as many replicas or fewer.
        closest: of all that does not, the one that comes nearest; only where nothing is chosen.
        ruled_out: candidates that were never run: their bound was above what another one needs.
        runs: simulated.
    """

    chosen: Point | None
    below: Point | None = None
    scaled: Point | None = None
    settings: tuple[Point, ...] = ()
    front: tuple[Point, ...] = ()
    closest: Point | None = None
    ruled_out: tuple[Candidate, ...] = ()
    runs: int = 0


# --- bounds -------------------------------------------------------------------------------------------------------


def capacity(curve: LatencyCurve, setting: Setting, *, rows: int = 1) -> float:
    """The most rows per second that a replica can compute; nothing waits for anything there.

    With batches of the best size, and as many instances at work as is best. Requests bring `rows`, or multiples of it.
    """
    return max(
        busy * size / max(curve.mean_us(size, busy=busy), 1e-3) * 1e6
        for size in _corners(curve, setting.max_batch_size, rows)
        for busy in range(1, setting.count + 1)
    )


def floor_ms(curve: LatencyCurve, setting: Setting, *, share: float, rows: int = 1) -> float:
    """The least that `share` of the requests can take less than: computing in a batch of the best size, and the way."""
    slowed = min(curve.slowed(busy) for busy in range(1, setting.count + 1))
    compute = min(curve.at(size, share) for size in _corners(curve, setting.max_batch_size, rows))
    return (compute * slowed + min(curve.overhead_us, default=0.0)) / 1e3


def _corners(curve: LatencyCurve, most: int, rows: int) -> list[int]:
    """Sizes of batches of requests of `rows`, among which are the quickest and that with the most rows per second.

    Between measured sizes times are on a straight line: there, both are at the ends. So a `most` of millions is cheap.
    """
    sizes = {rows, most // rows * rows}
    for measured in curve.compute_us:
        sizes |= {measured // rows * rows, measured // rows * rows + rows}
    return sorted(size for size in sizes if rows <= size <= max(rows, most))


def best_size(curve: LatencyCurve, most: int) -> int:
    """The measured size up to `most` with the most rows per second; of equal ones the largest."""
    sizes = [size for size in curve.compute_us if size <= most] or [most]
    return max(sizes, key=lambda size: (size / max(curve.mean_us(size), 1e-3), size))


def settings_of(
    curve: LatencyCurve,
    *,
    sizes: Iterable[int],
    delays_us: Iterable[int],
    counts: Iterable[int],
    rows: Sequence[int] = (1,),
) -> tuple[Setting, ...]:
    """All combinations that can take requests of `rows`, without those that would behave as another one.

    Where a smaller size than `max_batch_size` computes more rows per second, the batch may also be sent off at that
    one: `preferred_batch_size`.
    """
    delays, instances = sorted(set(delays_us)), sorted(set(counts))
    found: list[Setting] = []
    for size in sorted({size for size in sizes if size >= max(rows)}):
        best = best_size(curve, size)
        is_shared = size >= 2 * min(rows)  # else no two requests are ever in one batch, and a delay is for nothing
        for delay in delays if is_shared else delays[:1]:
            is_preferred = delay and 2 * min(rows) <= best < size and best % math.gcd(*rows) == 0
            for count, preferred in itertools.product(instances, ((), (best,)) if is_preferred else ((),)):
                found.append(
                    Setting(
                        max_batch_size=size,
                        max_queue_delay_microseconds=delay,
                        preferred_batch_size=preferred,
                        count=count,
                    )
                )
    return tuple(found)


# --- search -------------------------------------------------------------------------------------------------------


def search(candidates: Sequence[Candidate], probe: Probe, *, seeds: Sequence[int], most_replicas: int) -> Found:
    """The setting that holds for all `seeds` on the fewest replicas, `most_replicas` at most.

    First each setting as cheaply as `probe` can, in the order of their bounds and only as far as it may be better than
    the best so far; then the best whole, with one replica more or less until it is on the edge.
    """
    runs = _Runs(probe, seeds)
    fewest: dict[Candidate, int] = {}
    ruled_out: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (bool(one.impossible), one.least, one.setting)):
        best = min(fewest.values(), default=None)
        if one.impossible or one.least > (most_replicas if best is None else best):
            ruled_out.append(one)
            continue
        number = runs.fewest_from(one, most_replicas) if best is None else runs.fewest_below(one, best)
        if number is not None:
            fewest[one] = number
    chosen = _checked(fewest, runs, most_replicas)
    points = runs.points
    below = points.get((chosen.setting, chosen.replicas - 1, True)) if chosen else None
    unmet = [point for point in points.values() if not point.holds]
    return Found(
        chosen=chosen,
        below=below,
        scaled=points.get((chosen.setting, chosen.replicas, False)) if chosen else None,
        settings=tuple(
            sorted((points[one.setting, n, False] for one, n in fewest.items()), key=lambda p: (p.replicas, _strain(p)))
        ),
        front=tuple(_front(points.values())),
        closest=min(unmet, key=_strain, default=None) if chosen is None else None,
        ruled_out=tuple(ruled_out),
        runs=runs.count,
    )


def _strain(point: Point) -> float:
    return point.worst.strain


def _checked(fewest: Mapping[Candidate, int], runs: "_Runs", most: int) -> Point | None:
    """The best of `fewest`, whole. Those that come next are looked at as long as they may need fewer replicas."""
    chosen: Point | None = None
    for one, number in sorted(
        fewest.items(), key=lambda item: (item[1], _strain(runs.points[item[0].setting, item[1], False]))
    ):
        if chosen is not None and number >= chosen.replicas:
            break
        settled = runs.fewest_around(one, number, most if chosen is None else chosen.replicas - 1)
        if settled is not None:
            chosen = runs.points[one.setting, settled, True]
    return chosen


def _front(points: Iterable[Point]) -> Iterator[Point]:
    lowest = float("inf")
    for point in sorted((one for one in points if one.holds), key=lambda one: (one.replicas, _strain(one))):
        if _strain(point) < lowest:
            lowest = _strain(point)
            yield point


@dataclass(slots=True)
class _Runs:
    """What was run so far, and how few replicas do for a setting."""

    probe: Probe
    seeds: Sequence[int]
    count: int = 0
    points: dict[tuple[Setting, int, bool], Point] = field(default_factory=dict)

    def holds(self, one: Candidate, replicas: int, *, whole: bool) -> bool:
        """For all seeds; the first that says no is enough."""
        key = (one.setting, replicas, whole)
        if key not in self.points:
            outcomes: list[Outcome] = []
            for seed in self.seeds:
                outcomes.append(self.probe(one.setting, replicas, seed=seed, whole=whole))
                self.count += 1
                if not outcomes[-1].holds:
                    break
            self.points[key] = Point(setting=one.setting, replicas=replicas, whole=whole, outcomes=tuple(outcomes))
        return self.points[key].holds

    def fewest_from(self, one: Candidate, most: int, *, start: int = 0, whole: bool = False) -> int | None:
        """Up from the bound (or `start`) in growing steps, then halving; None where not even `most` do."""
        number = max(one.least, start)
        below, step = number - 1, 1
        if number > most:
            return None
        while not self.holds(one, number, whole=whole):
            if number == most:
                return None
            below, number, step = number, min(most, number + step), step * 2
        return self._between(one, below, number, whole=whole)

    def fewest_below(self, one: Candidate, best: int, *, whole: bool = False) -> int | None:
        """Down from `best` in growing steps, then halving; None where so many do not do."""
        if not self.holds(one, best, whole=whole):
            return None
        below, number, step = one.least - 1, best, 1
        while number > one.least:
            tried = max(one.least, number - step)
            if not self.holds(one, tried, whole=whole):
                below = tried
                break
            number, step = tried, step * 2
        return self._between(one, below, number, whole=whole)

    def fewest_around(self, one: Candidate, near: int, most: int) -> int | None:
        """Whole, from what was found with a part: up or down from there."""
        if near > most:
            return None
        if self.holds(one, near, whole=True):
            return self.fewest_below(one, near, whole=True)
        return self.fewest_from(one, most, start=near + 1, whole=True)

    def _between(self, one: Candidate, below: int, number: int, *, whole: bool) -> int:
        """`number` do, `below` do not: the edge between them."""
        while number - below > 1:
            middle = (below + number) // 2
            if self.holds(one, middle, whole=whole):
                number = middle
            else:
                below = middle
        return number
