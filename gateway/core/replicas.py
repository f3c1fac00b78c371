"""Which of several replicas to send a request to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

FEW: Final = 8
"""Of so many replicas all are looked at for every request; of more, two that are drawn may be enough."""

Draw = Callable[[], float]
"""Chance, given from outside: numbers in [0, 1)."""


def two_choices(loads: Sequence[int], draw: Draw) -> tuple[int, ...]:
    """Two of the replicas, drawn by chance, as indices into `loads` (requests in flight); the less loaded first.

    The power of two choices (Mitzenmacher, 2001): nearly as even as always taking the least loaded, and gateways that
    know nothing of each other do not all run to the same one. The second is where to go on when the first fails.
    """
    count = len(loads)
    if count < 2:  # noqa: PLR2004 - nothing to choose
        return tuple(range(count))
    first, second = two_of(count, draw)
    return (first, second) if loads[first] <= loads[second] else (second, first)


def two_of(count: int, draw: Draw) -> tuple[int, int]:
    """Two different numbers below `count` (at least 2): every pair, in either order, is as likely as any other."""
    first = int(draw() * count)
    second = int(draw() * (count - 1))
    return first, second + (second >= first)


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaLoads(Mapping[str, int]):
    """The loads of many replicas, each asked for when somebody looks at it."""

    names: Sequence[str]
    load: Callable[[str], int]

    def __getitem__(self, name: str) -> int:
        return self.load(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
