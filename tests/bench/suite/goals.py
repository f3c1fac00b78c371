"""What a row's figures must be, and whether they are. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

OURS = "ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run of a subject. Runs with the same `round` were made one after the other and are compared."""

    subject: str
    round: int
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What `figure` of `subject` must be: `at` least or most `bound`.

    `against` names the subject that it is held against, round by round: by the ratio of the two, or by how much more it
    is than the other's. Without one the figure itself must keep the bound. `of` is the other's figure, where it has
    another name.
    """

    figure: str
    at: Literal["least", "most"]
    bound: float
    subject: str = OURS
    against: str = ""
    by: Literal["ratio", "difference"] = "ratio"
    of: str = ""

    @property
    def words(self) -> str:
        """The goal as the table has it."""
        sign = ">=" if self.at == "least" else "<="
        if not self.against:
            return f"{sign} {shown(self.bound)}"
        if self.by == "ratio":
            return f"{sign} {self.bound:g}x {self.against}"
        return f"{sign} {self.against} + {self.bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What all rounds say of a goal. All is None where nothing was measured; `peer` also where the goal has no peer.

    Attributes:
        ours: the subject's figure, the median over the rounds.
        peer: the other's.
        held: what the bound was held against: the median over the rounds of ratio, difference or figure.
        spread: the lowest and the highest of the rounds.
    """

    goal: Goal
    rounds: int = 0
    ours: float | None = None
    peer: float | None = None
    held: float | None = None
    spread: tuple[float, float] | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None where it was not measured."""
        if self.held is None:
            return None
        return self.held >= self.goal.bound if self.goal.at == "least" else self.held <= self.goal.bound


def verdict(goal: Goal, runs: Iterable[Run]) -> Verdict:
    """What these runs say of a goal."""
    ours: dict[int, float] = {}
    peer: dict[int, float] = {}
    for run in runs:
        if run.subject == goal.subject and goal.figure in run.figures:
            ours[run.round] = run.figures[goal.figure]
        elif run.subject == goal.against and (goal.of or goal.figure) in run.figures:
            peer[run.round] = run.figures[goal.of or goal.figure]
    own, other = median_of(ours.values()), median_of(peer.values())
    values = _held(goal, ours, peer)
    if not values:
        return Verdict(goal=goal, ours=own, peer=other)
    return Verdict(
        goal=goal,
        rounds=len(values),
        ours=own,
        peer=other,
        held=statistics.median(values),
        spread=(min(values), max(values)),
    )


def _held(goal: Goal, ours: Mapping[int, float], peer: Mapping[int, float]) -> list[float]:
    if not goal.against:
        return list(ours.values())
    pairs = [(ours[number], peer[number]) for number in sorted(ours.keys() & peer.keys())]
    if goal.by == "difference":
        return [own - other for own, other in pairs]
    return [own / other for own, other in pairs if other]


def median_of(values: Iterable[float]) -> float | None:
    """None of nothing."""
    found = list(values)
    return statistics.median(found) if found else None


def medians(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Every figure's median over the rounds, by subject."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for figure, value in run.figures.items():
            found.setdefault(run.subject, {}).setdefault(figure, []).append(value)
    return {
        subject: {figure: statistics.median(values) for figure, values in figures.items()}
        for subject, figures in found.items()
    }


def shown(value: float | None) -> str:
    """A figure with some three digits that mean something."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 or value == 0 else f"{value:.3f}"
