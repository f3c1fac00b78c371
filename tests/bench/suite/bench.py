"""What a row is given, and how it measures: subjects in turns, A B A B, so that a change of the machine meets all."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.suite.goals import Goal, Run

Figures = Mapping[str, float]
Measure = Callable[[], Awaitable[Figures]]


class Failed(Exception):
    """A subject could not be measured; the text says why, for the report."""


@dataclass(kw_only=True)
class Bench:
    """One row under way.

    Attributes:
        folder: for the row's files; it is emptied after it.
        peers: where peers' environments are.
        cores: that there are; the first is the subject's, the last the load's.
        seconds: length of a run, a whole number: what wrk takes.
        say: tells who waits what goes on.
    """

    folder: Path
    peers: Path
    rounds: int
    seconds: int
    is_quick: bool
    cores: Sequence[int]
    say: Callable[[str], None]
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def core(self) -> int:
        """The one that the subject has alone."""
        return self.cores[0]

    @property
    def load_core(self) -> int:
        """That of the load, the upstream, Redis and this process."""
        return self.cores[-1]

    def note(self, text: str) -> None:
        """Put it into the report, once."""
        if text not in self.notes:
            self.notes.append(text)
            self.say(text)

    def failed(self, text: str) -> None:
        """The same for what went wrong."""
        self.errors.append(text)
        self.say(f"failed: {text}")

    def record(self, subject: str, number: int, figures: Figures) -> None:
        """Keep a run."""
        self.runs.append(Run(subject=subject, round=number, figures=dict(figures)))

    async def in_turns(self, subjects: Mapping[str, Measure], *, warms_up: bool = True, rounds: int = 0) -> None:
        """Every subject once in each round. One that fails is told, and left out from then on.

        The round that warms up is not kept. `rounds`: other than the row's.
        """
        rounds = rounds or self.rounds
        alive = dict(subjects)
        for number in range(-1 if warms_up else 0, rounds):
            for name, measure in subjects.items():
                if name not in alive:
                    continue
                try:
                    figures = await measure()
                except Failed as error:
                    del alive[name]
                    self.failed(f"{name}: {error}")
                    continue
                told = ", ".join(f"{figure} {value:,.4g}" for figure, value in figures.items())
                self.say(f"{'warm-up' if number < 0 else f'round {number + 1} of {rounds}'}: {name}: {told}")
                if number >= 0:
                    self.record(name, number, figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One path of the goals. `name` is what `--only` takes."""

    name: str
    title: str
    goals: tuple[Goal, ...]
    measure: Callable[[Bench], Awaitable[None]]
