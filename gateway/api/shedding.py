"""What a worker refuses because it is itself behind: first requests of priority batch, then all.

A worker is one event loop, which does what has come turn by turn. Where more comes than it can do, its turns get
longer, every request in them later, and in the end all are answered too late. So a heart beats on the loop. Where a
beat comes late, the worker takes in only what it can do in time: it keeps the instant until which it has work (a
virtual queue, as in the generic cell rate algorithm of ITU-T I.371). Each request that is let in puts that off by what
one costs; where it lies too far ahead, the next one is refused. One late beat may be one large request: the queue is
taken for empty then. After another one soon after it, what made that late is taken to lie ahead again.

Beats are late, and requests cost, in processor time of the loop's thread: a worker that others keep from its core, or a
machine that stands still, has no more to do than before.

Refusals take the time that answers need. So most are turned away by their head alone, with bytes that are ready
(`App.turned_away`); they are counted, and have no record each. Whose key says batch, and what a page's script is to
read, is refused at the door, with a record.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, Protocol

from gateway.api.request_headers import Headers
from gateway.core.errors import QueueFull
from gateway.core.types import Caller, Priority
from gateway.ports import Clock

BEAT_S: Final = 0.05
BATCH_SHARE: Final = 0.5  # of the work that may lie ahead of an interactive request
LOOKS_BACK: Final = 4  # beats of which two are late where there is a backlog: a short turn comes after a long one
CALM: Final = 20  # beats in time, with nothing refused, after which a worker is no longer behind
KEEP: Final = 0.9  # of what a request has cost by the beats before
FEWEST: Final = 32  # requests that are let in at once, however dear they seem: one large one would keep out all others
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
        most_us: how much work may lie ahead of an interactive request; 0: nothing is refused.
        spent_us: the processor time of the loop's thread.
        now_us: a monotonic clock.
        told: hears of each request that is refused.

    Attributes:
        is_behind: some may have to be refused; only then the rest need be asked.
        begun: requests that came to the door.
    """

    def __init__(self, most_us: int, spent_us: Clock, now_us: Clock, told: Told | None = None) -> None:
        self.is_behind = False
        self.begun = 0
        self._most_us: Mapping[Priority, float] = {"batch": most_us * BATCH_SHARE, "interactive": most_us}
        self._spent_us = spent_us
        self._now_us = now_us
        self._told = told
        self._beat: asyncio.TimerHandle | None = None
        self._beaten_us = self._counted = 0  # processor time, and `begun`, at the last beat
        self._late: deque[bool] = deque(maxlen=LOOKS_BACK)  # of the last beats
        self._has_refused = False  # since the last beat
        self._calm = 0  # beats since one that was late, or refused something
        self._work_us = self._requests = 0.0  # of the last beats, the later the more
        self._cost_us = 0.0
        self._busy_until_us = 0.0
        self._turned_away: Counter[Priority] = Counter()  # since the last beat
        self._to_log: Counter[str] = Counter()
        self._log_at = 0.0

    def start(self) -> None:
        """Beat from now on, in the running loop."""
        if self._most_us["interactive"]:
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
        if self._busy_until_us - self._now_us() > self._most_us[priority]:
            self._turned_away[priority] += 1
            return True
        self._take()
        return False

    def check(self, caller: Caller, headers: Headers, *, is_taken: bool) -> None:
        """Raise `QueueFull` where a request of `caller` has to be refused. `is_taken`: its head was let in."""
        says_batch = headers.get("x-priority", "").lower() == "batch"
        priority: Priority = "batch" if caller.priority == "batch" or says_batch else "interactive"
        if is_taken and (says_batch or priority == "interactive"):
            return
        if self._busy_until_us - self._now_us() > self._most_us[priority]:
            self._has_refused = True
            if self._told is not None:
                self._told.shed(priority)
            raise behind()
        if not is_taken:
            self._take()

    def _take(self) -> None:
        """One more is in the virtual queue."""
        self._busy_until_us = max(self._now_us(), self._busy_until_us) + self._cost_us

    def _next(self) -> None:
        self._beaten_us, self._counted = self._spent_us(), self.begun
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._beats)

    def _beats(self) -> None:
        spent_us = self._spent_us() - self._beaten_us
        late_us = spent_us - BEAT_S * 1e6
        is_late = late_us > self._most_us["batch"]
        self._late.append(is_late)
        self._calm = 0 if is_late or self._has_refused or self._turned_away else self._calm + 1
        self.is_behind = is_late or (self.is_behind and self._calm < CALM)
        if is_late and sum(self._late) > 1:
            self._busy_until_us = max(self._busy_until_us, self._now_us() + late_us)
        # By the beats before: what this one was late by may be one large request, for which many others have waited.
        self._cost_us = min(self._work_us / max(1.0, self._requests), self._most_us["interactive"] / FEWEST)
        self._work_us = self._work_us * KEEP + spent_us
        self._requests = self._requests * KEEP + self.begun - self._counted
        self._has_refused = False
        if self._turned_away or self._to_log:
            self._tell()
        self._next()

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


UNBOUNDED: Final = Shedding(0, lambda: 0, lambda: 0)
"""Refuses nothing."""
