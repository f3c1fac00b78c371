"""What a sweep measures next, and what is best of what it has measured. Pure: the same runs, the same next one.

Coarse to fine. The setting that was found is measured first; then come short runs of settings that lie far apart, of
those first that are often right (`_classics`); then short runs where the most may be gained, by what two Gaussian
processes (Rasmussen and Williams, 2006, algorithm 2.1) make of the runs so far: one of the throughput, one of the p99,
both in logarithms, since batches and delays multiply. What may be gained is the expected improvement times the
probability that p99 stays within its bound (Gardner et al., "Bayesian optimization with inequality constraints", 2014).
The few best of these are measured again, for longer, and of those one is chosen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from gateway.tuning.sweep.settings import Cell

SHARE: Final = 0.25
"""A quick sweep makes fewer runs than this share of the cells."""
LEAST_RUNS: Final = 4
MOST_RUNS: Final = 48  # beyond, more of them found nothing better on the surfaces of the tests
_LONG: Final = ((16, 3), (8, 2), (0, 1))  # from so many runs on, so many of them are long
_COARSE: Final = 0.5  # of the short runs are laid out beforehand; or more, for all that are often right
_LENGTHS: Final = (0.2, 0.4, 0.8, 1.6, 3.2)  # of correlation, in ranges of an axis
_NOISES: Final = (1e-3, 1e-2, 5e-2)  # variance of a run against that of the surface
_PASSES: Final = 2
_NOTHING: Final = 1e-3  # per second; has a logarithm
_SQRT5: Final = math.sqrt(5)

Matrix = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is wanted: most answers within `p99_ms` per second (0: most answers), of settings that keep the bounds.

    `memory_bytes` is what the server's process may take; 0 for any.
    """

    p99_ms: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A run, as the search sees it; one that failed has no goodput and an infinite p99."""

    cell: Cell
    is_long: bool
    qps: float
    goodput: float
    p99_ms: float
    memory_bytes: int = 0

    def keeps(self, goal: Goal) -> bool:
        """Whether it is within the bounds."""
        return (
            self.goodput > 0
            and (not goal.p99_ms or self.p99_ms <= goal.p99_ms)
            and (not goal.memory_bytes or self.memory_bytes <= goal.memory_bytes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A run to make. `why` is for the reader."""

    cell: Cell
    is_long: bool
    why: Literal["as found", "every setting", "far apart", "promising", "once more"]


def rank(seen: Seen, goal: Goal) -> tuple[bool, float, float]:
    """The higher the better: within the bounds, by its goodput, by its p99."""
    return seen.keeps(goal), seen.goodput, -seen.p99_ms


def best(seen: Sequence[Seen], goal: Goal) -> Seen | None:
    """The best of the long runs; of all, where none is long or none of them is within the bounds. None of none."""
    ordered = sorted(seen, key=lambda one: (one.is_long, *rank(one, goal)), reverse=True)
    long = [one for one in ordered if one.is_long]
    if long and (long[0].keeps(goal) or not any(one.keeps(goal) for one in ordered)):
        return long[0]
    return max(ordered, key=lambda one: rank(one, goal), default=None)


def front(seen: Sequence[Seen]) -> list[Seen]:
    """The runs that no other beats in both throughput and p99 (Pareto), by throughput."""
    found: list[Seen] = []
    lowest = math.inf
    for one in sorted(seen, key=lambda run: (-run.qps, run.p99_ms)):
        if one.p99_ms < lowest:
            found.append(one)
            lowest = one.p99_ms
    return found[::-1]


def budget(cells: int) -> int:
    """Runs of a quick sweep of so many cells."""
    return min(cells, MOST_RUNS, max(LEAST_RUNS, math.ceil(SHARE * cells) - 1))


def next_step(cells: Sequence[Cell], seen: Sequence[Seen], *, goal: Goal, is_brute_force: bool = False) -> Step | None:
    """The next run of a sweep over `cells` that has `seen` these; None at its end."""
    done = {one.cell for one in seen}
    if is_brute_force:
        left = next((cell for cell in cells if cell not in done), None)
        return None if left is None else Step(cell=left, is_long=True, why="every setting")
    runs = budget(len(cells))
    long = next(number for least, number in _LONG if runs >= least)
    if not seen:
        start = max((cell for cell in cells if cell.setting == cells[0].setting), key=_load)
        return Step(cell=start, is_long=False, why="as found")
    if sum(not one.is_long for one in seen) < runs - long:
        step = _short_step(cells, seen, goal=goal, runs=runs - long)
        if step is not None:
            return step
    again = {one.cell for one in seen if one.is_long}
    candidates = [one for one in _smoothed(seen, _points(cells), goal) if one.cell not in again]
    if len(again) >= long or not candidates:
        return None
    return Step(cell=max(candidates, key=lambda one: rank(one, goal)).cell, is_long=True, why="once more")


def _short_step(cells: Sequence[Cell], seen: Sequence[Seen], *, goal: Goal, runs: int) -> Step | None:
    """One of `runs` short runs, of something new, the first of them far apart; None where nothing new may fit."""
    done = {one.cell for one in seen}
    left = [cell for cell in cells if cell not in done and _may_fit(cell, seen, goal)]
    if not left:
        return None
    points, classics = _points(cells), _classics(cells)
    if len(seen) >= max(2, round(_COARSE * runs), min(1 + len(classics), runs - 1)):
        return Step(cell=_promising(left, seen, points, goal), is_long=False, why="promising")
    cell = _farthest([cell for cell in classics if cell in left] or left, [one.cell for one in seen], points)
    return Step(cell=cell, is_long=False, why="far apart")


def _load(cell: Cell) -> float:
    return cell.load.rate or cell.load.concurrency


def _may_fit(cell: Cell, seen: Sequence[Seen], goal: Goal) -> bool:
    """Not what has at least as many rows and instances as a setting that took too much memory."""
    return not goal.memory_bytes or not any(
        one.memory_bytes > goal.memory_bytes
        and cell.setting.max_batch_size >= one.cell.setting.max_batch_size
        and cell.setting.count >= one.cell.setting.count
        for one in seen
    )


def _points(cells: Sequence[Cell]) -> dict[Cell, Matrix]:
    """Each cell as a point, every axis from 0 to 1: by the order of its values, since they are chosen evenly.

    The last coordinate is how full the batches can be: callers for each place in the instances' batches. Sizes that so
    few callers never fill are the same size.
    """
    columns = [
        [math.log2(_most_rows(cell)) for cell in cells],
        _ordered([cell.setting.delay_us for cell in cells]),
        _ordered([cell.setting.count for cell in cells]),
        _ordered([sum(cell.setting.preferred) for cell in cells]),
        _ordered([_load(cell) for cell in cells]),
        [float(cell.setting.batching != "dynamic") for cell in cells],
        [_fill(cell) for cell in cells],
    ]
    scaled = [
        [(one - min(column)) / (max(column) - min(column)) for one in column]
        for column in columns
        if max(column) > min(column)
    ]
    return {cell: np.array([column[place] for column in scaled]) for place, cell in enumerate(cells)}


def _most_rows(cell: Cell) -> int:
    size = max(1, cell.setting.max_batch_size)
    return min(size, cell.load.concurrency + 1) if cell.load.concurrency else size


def _classics(cells: Sequence[Cell]) -> Sequence[Cell]:
    """For each number of instances under each load the two that are often right.

    Sizes that all callers together fill just so, waiting for all of them; and the largest size, waiting for nobody.
    """
    found: dict[Cell, None] = {}
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.setting.count, cell.load), []).append(cell)
    for group in groups.values():
        found[min(group, key=lambda cell: (cell.setting.delay_us, -cell.setting.max_batch_size))] = None
        waiting = [cell for cell in group if cell.setting.delay_us and cell.setting.max_batch_size > 1]
        if waiting:
            nearest = min(abs(_fill(cell)) for cell in waiting)
            just = sorted((cell for cell in waiting if abs(_fill(cell)) <= nearest), key=_delay)
            found[just[len(just) // 2]] = None
    return tuple(found)


def _delay(cell: Cell) -> int:
    return cell.setting.delay_us


def _fill(cell: Cell) -> float:
    if not cell.load.concurrency:
        return 0.0
    places = cell.setting.count * max(1, cell.setting.max_batch_size)
    return max(-3.0, min(3.0, math.log2(cell.load.concurrency / places)))


def _ordered(values: Sequence[float]) -> list[float]:
    order = sorted(set(values))
    return [float(order.index(value)) for value in values]


def _farthest(left: Sequence[Cell], taken: Sequence[Cell], points: dict[Cell, Matrix]) -> Cell:
    """The one that lies farthest from all that are taken."""
    there = np.stack([points[cell] for cell in taken])
    distances = [float(np.min(np.sum((there - points[cell]) ** 2, axis=1))) for cell in left]
    return left[int(np.argmax(distances))]


def _promising(left: Sequence[Cell], seen: Sequence[Seen], points: dict[Cell, Matrix], goal: Goal) -> Cell:
    """The one of the highest expected gain."""
    at = np.stack([points[cell] for cell in left])
    throughput, spread = _fitted(seen, points, _log_qps).at(at)
    within = np.ones(len(left))
    if goal.p99_ms:
        p99, p99_spread = _fitted(seen, points, _log_p99).at(at)
        within = _cumulative((math.log(goal.p99_ms) - p99) / p99_spread)
    kept = [_log_qps(one) for one in _smoothed(seen, points, goal) if one.keeps(goal)]
    if not kept:  # first one that is within the bounds at all
        return left[int(np.argmax(np.log(np.maximum(within, 1e-12)) + 0.1 * throughput))]
    lead = (throughput - max(kept)) / spread
    gain = spread * (lead * _cumulative(lead) + np.exp(-(lead**2) / 2) / math.sqrt(2 * math.pi))
    return left[int(np.argmax(gain * within))]


def _smoothed(seen: Sequence[Seen], points: dict[Cell, Matrix], goal: Goal) -> list[Seen]:
    """The short runs without their noise, as far as their neighbours tell; bounds as measured."""
    short = [one for one in seen if not one.is_long]
    if len(short) < LEAST_RUNS:
        return short
    mean, _ = _fitted(seen, points, _log_qps).at(np.stack([points[one.cell] for one in short]))
    return [
        Seen(
            cell=one.cell,
            is_long=False,
            qps=float(np.exp(smooth)),
            goodput=one.goodput / max(one.qps, _NOTHING) * float(np.exp(smooth)),
            p99_ms=one.p99_ms,
            memory_bytes=one.memory_bytes,
        )
        for one, smooth in zip(short, mean, strict=True)
        if one.goodput > 0 or not goal.p99_ms
    ] or short


def _log_qps(seen: Seen) -> float:
    return math.log(max(seen.qps, _NOTHING))


def _log_p99(seen: Seen) -> float:
    return math.log(min(max(seen.p99_ms, _NOTHING), 1e7))


def _cumulative(at: Matrix) -> Matrix:
    """Of the normal distribution."""
    return np.array([0.5 * (1 + math.erf(one / math.sqrt(2))) for one in at])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A Gaussian process that has seen some values: Matern 5/2, a length for each axis."""

    points: Matrix
    lengths: Matrix
    lower: Matrix  # Cholesky factor of the covariance over the variance
    weights: Matrix
    mean: float
    variance: float
    evidence: float

    def at(self, points: Matrix) -> tuple[Matrix, Matrix]:
        """Mean and standard deviation of the surface at `points`."""
        across = _matern((points[:, None, :] - self.points[None, :, :]) ** 2 @ self.lengths**-2)
        solved = np.linalg.solve(self.lower, across.T)
        spread = np.sqrt(np.maximum(1e-9, self.variance * (1 - np.sum(solved**2, axis=0))))
        return self.mean + across @ self.weights, spread


def _fitted(seen: Sequence[Seen], points: dict[Cell, Matrix], value: Callable[[Seen], float]) -> _Process:
    """With the lengths, and the noise, under which the values are likeliest; one axis after the other."""
    at = np.stack([points[one.cell] for one in seen])
    apart = (at[:, None, :] - at[None, :, :]) ** 2
    values = np.array([value(one) for one in seen])
    lengths, noise = np.full(at.shape[1], 0.8), _NOISES[1]

    def evidence(lengths: Matrix, noise: float) -> float:
        return _process(at, apart, values, lengths=lengths, noise=noise).evidence

    for _ in range(_PASSES):
        for axis in range(at.shape[1]):
            lengths = max((_with(lengths, axis, length) for length in _LENGTHS), key=lambda one: evidence(one, noise))
        noise = max(_NOISES, key=lambda one: evidence(lengths, one))
    return _process(at, apart, values, lengths=lengths, noise=noise)


def _process(at: Matrix, apart: Matrix, values: Matrix, *, lengths: Matrix, noise: float) -> _Process:
    covariance = _matern(apart @ lengths**-2) + (noise + 1e-9) * np.eye(len(at))
    lower: Matrix = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    mean = float(np.mean(values))
    solved = np.linalg.solve(lower, values - mean)
    variance = max(1e-6, float(solved @ solved) / len(values))
    return _Process(
        points=at,
        lengths=lengths,
        lower=lower,
        weights=np.linalg.solve(lower.T, solved),
        mean=mean,
        variance=variance,
        # the logarithm of the marginal likelihood, with the variance at its best, without constants; and a slight
        # leaning to long lengths: few runs tell little of short ones
        evidence=-float(np.sum(np.log(np.diag(lower))))
        - len(values) / 2 * math.log(variance)
        + 0.1 * float(np.sum(np.log(lengths))),
    )


def _with(lengths: Matrix, axis: int, length: float) -> Matrix:
    changed = lengths.copy()
    changed[axis] = length
    return changed


def _matern(squared: Matrix) -> Matrix:
    """Matern 5/2 of variance 1, by the squared distance."""
    distance = np.sqrt(squared)
    found: Matrix = (1 + _SQRT5 * distance + 5 / 3 * squared) * np.exp(-_SQRT5 * distance)
    return found
