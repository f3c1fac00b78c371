"""Who waits for a free place at a server, and who is next: interactive before batch, then in order of arrival."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from gateway.core.types import Priority

FEWEST_STAYS: Final = 8  # before that, nothing is foretold
STAY_WEIGHT: Final = 1 / 16  # of the newest stay in the mean: the last sixteen or so count
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Stays:
    """How long requests stay at a server, from being sent to having ended: a mean in which the last ones count most."""

    count: int = 0
    mean_us: float = 0.0

    def with_one(self, stayed_us: int) -> "Stays":
        """One more has left."""
        weight = max(STAY_WEIGHT, 1 / (self.count + 1))  # plain at first
        return Stays(self.count + 1, self.mean_us + weight * (max(0, stayed_us) - self.mean_us))


def expected_wait_us(stays: Stays, *, ahead: int, max_in_flight: int) -> int | None:
    """How long one waits at a full server behind `ahead` others; None while too few have been seen to tell.

    Of `max_in_flight` requests that each stay for `stays.mean_us`, one leaves every `mean_us / max_in_flight`; it is
    the newcomer's turn after `ahead + 1` of them. Who comes later and goes before it all the same is not foreseen.
    """
    if stays.count < FEWEST_STAYS:
        return None
    return int((ahead + 1) * stays.mean_us / max_in_flight)


class WaitingLine(Generic[_Item]):
    """A bounded line; every step costs the same, however many wait."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._count = 0
        self._by_priority: dict[Priority, OrderedDict[int, _Item]] = {
            "interactive": OrderedDict(),
            "batch": OrderedDict(),
        }

    def __len__(self) -> int:
        return sum(map(len, self._by_priority.values()))

    def ahead_of(self, priority: Priority) -> int:
        """How many go before a newcomer of `priority`."""
        return len(self._by_priority["interactive"]) if priority == "interactive" else len(self)

    def join(self, item: _Item, priority: Priority) -> tuple[int, _Item | None]:
        """Take a place; returns its number and whom it put out.

        In a full line that is the newcomer itself, or for an interactive one the batch request that came last.
        """
        self._count += 1
        put_out: _Item | None = None
        if len(self) >= self._bound:
            batch = self._by_priority["batch"]
            if priority == "batch" or not batch:
                return self._count, item
            _, put_out = batch.popitem()
        self._by_priority[priority][self._count] = item
        return self._count, put_out

    def leave(self, number: int) -> None:
        """Give up a place, if it is still held."""
        for line in self._by_priority.values():
            line.pop(number, None)

    def next(self) -> _Item | None:
        """The first in line, who leaves it; None where nobody waits."""
        for line in self._by_priority.values():
            if line:
                return line.popitem(last=False)[1]
        return None
