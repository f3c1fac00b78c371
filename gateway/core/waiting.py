"""Who waits for a free place at a server, and who is next: interactive before batch, then in order of arrival."""

from collections import OrderedDict
from typing import Generic, TypeVar

from gateway.core.types import Priority

_Item = TypeVar("_Item")


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
