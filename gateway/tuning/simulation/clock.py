"""An event loop whose time is simulated: it never waits, and jumps to the next instant at which something is due.

What runs on it is asyncio code as it is: timers, futures, timeouts. There are no files, sockets or threads.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeVarTuple

_Args = TypeVarTuple("_Args")


class NothingDue(RuntimeError):
    """The work is not done, and nothing is going to happen any more: it waits for itself."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Begins at 0 s. Two things due at the same instant happen in the order in which they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._selector = _Jump(self)
        self._clock_resolution = math.ulp(0.0)  # what is due so soon is due now: two instants are never made one
        self._scheduled: list[asyncio.TimerHandle]  # the loop's own, earliest first
        self._numbers = itertools.count()

    def time(self) -> float:
        """Simulated seconds since the start; it never goes back."""
        return self._now_s

    def now_us(self) -> int:
        """The same in microseconds, as the gateway's clocks tell."""
        return round(self._now_s * 1e6)

    def call_at(
        self, when: float, callback: Callable[[*_Args], object], *args: *_Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As of any loop; a heap alone would not keep the order of those that are due at the same instant."""
        timer = _Timer(when, callback, args, self, context)
        timer.number = next(self._numbers)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # noqa: SLF001 - by this the loop counts those that are cancelled
        return timer

    def jump(self, timeout_s: float | None) -> None:
        """What would be waited for has come."""
        if timeout_s is None:
            raise NothingDue("nothing is due any more, and the simulation has not ended")
        if timeout_s > 0:
            self._now_s = max(self._now_s, self._scheduled[0].when())
            self._clock_resolution = math.ulp(self._now_s)

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""


class _Timer(asyncio.TimerHandle):
    """One of two that are due at the same instant is the first that was asked for."""

    __slots__ = ("number",)
    _when: float  # the standard library's own
    _scheduled: bool
    number: int

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        assert isinstance(other, _Timer)  # noqa: S101 - all of this loop are
        return self._when < other._when or (self._when == other._when and self.number < other.number)


class _Jump:
    """In the selector's place: what the loop would sleep for is over at once."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> tuple[()]:
        """Nothing has come from outside, for that is not there."""
        self._loop.jump(timeout_s)
        return ()
