"""What a worker refuses because it is itself behind: first requests of priority batch, then all.

A worker is one event loop, which does what has come turn by turn. Where more comes than it can do, its turns get
longer, every request in them later, and in the end all are answered too late. So a heart beats on the loop: where two
beats in a row come later than they may, requests that are begun after that are refused until the heart has beaten
again. Each turn so takes in as much as it can do in that time. One late beat says nothing.

Late is told by the processor time that the loop's thread has spent since the last beat: a worker that others keep from
its core, or a machine that stands still, has no more to do than before.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from gateway.api.request_headers import Headers
from gateway.core.errors import QueueFull
from gateway.core.types import Caller, Priority
from gateway.ports import Clock

BEAT_S: Final = 0.05
BATCH_SHARE: Final = 0.5  # of the time that the heart may be late for interactive requests


class Shedding:
    """The heart of one worker.

    Args:
        late_us: how late it may beat; 0: nothing is refused.
        spent_us: the processor time of the loop's thread.
        shed: told of each request that is refused.

    Attributes:
        is_behind: the last beat was so late that some may have to be refused; only then `check` need be asked.
    """

    def __init__(self, late_us: int, spent_us: Clock, shed: Callable[[Priority], object]) -> None:
        self.is_behind = False
        self._late_us = late_us
        self._spent_us = spent_us
        self._shed = shed
        self._due_us = 0
        self._was_late_us = 0
        self._beat: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Beat from now on, in the running loop."""
        if self._late_us:
            self._next()

    def close(self) -> None:
        """Stop; nothing is refused any more."""
        self.is_behind = False
        if self._beat is not None:
            self._beat.cancel()

    def check(self, caller: Caller, headers: Headers) -> None:
        """Raise `QueueFull` where a request that is begun now has to be refused."""
        is_batch = caller.priority == "batch" or headers.get("x-priority", "").lower() == "batch"
        bound_us = self._late_us * BATCH_SHARE if is_batch else self._late_us
        if min(self._spent_us() - self._due_us, self._was_late_us) > bound_us:
            self._shed("batch" if is_batch else "interactive")
            raise QueueFull("this gateway worker has more to do than it can")

    def _next(self) -> None:
        self._due_us = self._spent_us() + int(BEAT_S * 1e6)
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._late)

    def _late(self) -> None:
        self._was_late_us = self._spent_us() - self._due_us
        self.is_behind = self._was_late_us > self._late_us * BATCH_SHARE
        self._next()


def _nobody(_: Priority) -> None:
    """Nobody is told."""


UNBOUNDED: Final = Shedding(0, lambda: 0, _nobody)
"""Refuses nothing."""
