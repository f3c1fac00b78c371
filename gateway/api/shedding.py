"""What a worker refuses because it is itself behind: first requests of priority batch, then all.

A worker is one event loop, which does what has come turn by turn. Where more comes than it can do, its turns get
longer, every request in them later, and in the end all are answered too late. So a heart beats on the loop: where two
beats in a row come later than they may, requests that are begun after that are refused until the heart has beaten
again. Each turn so takes in as much as it can do in that time. One late beat says nothing.

Late is told by the processor time that the loop's thread has spent since the last beat: a worker that others keep from
its core, or a machine that stands still, has no more to do than before.

Refusals take the time that answers need. So most are turned away by their head alone, with bytes that are ready
(`App.turned_away`); they are counted, and have no record each. Whose key says batch, and what a page's script is to
read, is refused at the door, with a record.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Final, Protocol

from gateway.api.request_headers import Headers
from gateway.core.errors import QueueFull
from gateway.core.types import Caller, Priority
from gateway.ports import Clock

BEAT_S: Final = 0.05
SHARES: Final[Mapping[Priority, float]] = {"batch": 0.5, "interactive": 1.0}
"""Of the time that the heart may be late: from when on requests are refused."""
LOG_S: Final = 1.0  # between two lines of the log

_log = logging.getLogger(__name__)


class Told(Protocol):
    """Who hears of what is shed."""

    def shed(self, priority: Priority) -> None:
        """A request was refused at the door, and has a record."""
        ...

    def turned_away(self, priority: Priority, count: int) -> None:
        """So many were turned away by their head."""
        ...


class Shedding:
    """The heart of one worker.

    Args:
        late_us: how late it may beat; 0: nothing is refused.
        spent_us: the processor time of the loop's thread.
        told: hears of each request that is refused.

    Attributes:
        is_behind: the last beat was so late that some may have to be refused; only then the rest need be asked.
    """

    def __init__(self, late_us: int, spent_us: Clock, told: Told | None = None) -> None:
        self.is_behind = False
        self._late_us = late_us
        self._spent_us = spent_us
        self._told = told
        self._due_us = 0
        self._until_us: dict[Priority, float] = {"batch": math.inf, "interactive": math.inf}  # of processor time
        self._beat: asyncio.TimerHandle | None = None
        self._turned_away: Counter[Priority] = Counter()  # since the last beat
        self._to_log: Counter[str] = Counter()
        self._log_at = 0.0

    def start(self) -> None:
        """Beat from now on, in the running loop."""
        if self._late_us:
            self._next()

    def close(self) -> None:
        """Stop; nothing is refused any more."""
        self.is_behind = False
        if self._beat is not None:
            self._beat.cancel()
            self._tell()

    def turns_away(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request that is begun now has to be refused, as far as its head says; it is counted then."""
        priority: Priority = "batch" if headers.get(b"x-priority", b"").lower() == b"batch" else "interactive"
        if self._spent_us() <= self._until_us[priority]:
            return False
        self._turned_away[priority] += 1
        return True

    def check(self, caller: Caller, headers: Headers) -> None:
        """Raise `QueueFull` where a request of `caller` that is begun now has to be refused."""
        is_batch = caller.priority == "batch" or headers.get("x-priority", "").lower() == "batch"
        priority: Priority = "batch" if is_batch else "interactive"
        if self._spent_us() > self._until_us[priority]:
            if self._told is not None:
                self._told.shed(priority)
            raise behind()

    def _next(self) -> None:
        self._due_us = self._spent_us() + int(BEAT_S * 1e6)
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._late)

    def _late(self) -> None:
        was_late_us = self._spent_us() - self._due_us
        if self._turned_away or self._to_log:
            self._tell()
        self._next()
        self.is_behind = False
        for priority, share in SHARES.items():
            bound_us = self._late_us * share
            is_late = was_late_us > bound_us
            self._until_us[priority] = self._due_us + bound_us if is_late else math.inf
            self.is_behind = self.is_behind or is_late

    def _tell(self) -> None:
        """Count what was turned away, and write of it once a second."""
        for priority, count in self._turned_away.items():
            self._to_log[priority] += count
            if self._told is not None:
                self._told.turned_away(priority, count)
        self._turned_away.clear()
        now = asyncio.get_running_loop().time()
        if self._to_log and now >= self._log_at:
            _log.warning("requests were turned away: %s", behind().detail, extra=dict(self._to_log))
            self._to_log.clear()
            self._log_at = now + LOG_S


def behind() -> QueueFull:
    """What those that are shed are told."""
    return QueueFull("this gateway worker has more to do than it can")


UNBOUNDED: Final = Shedding(0, lambda: 0)
"""Refuses nothing."""
