"""An event loop whose time is simulated: it never waits, and jumps to the next instant at which something is due.

What runs on it is asyncio code as it is: timers, futures, timeouts. There are no files, sockets or threads.
"""

import asyncio
from typing import Any, Final

_RESOLUTION_S: Final = 1e-9


class NothingDue(RuntimeError):
    """The work is not done, and nothing is going to happen any more: it waits for itself."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Begins at 0 s. Two things due at the same instant happen in the order in which they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._selector = _Jump(self)
        self._clock_resolution = _RESOLUTION_S
        self._scheduled: list[asyncio.TimerHandle]  # the loop's own, earliest first

    def time(self) -> float:
        """Simulated seconds since the start; it never goes back."""
        return self._now_s

    def now_us(self) -> int:
        """The same in microseconds, as the gateway's clocks tell."""
        return round(self._now_s * 1e6)

    def jump(self, timeout_s: float | None) -> None:
        """What would be waited for has come."""
        if timeout_s is None:
            raise NothingDue("nothing is due any more, and the simulation has not ended")
        if timeout_s > 0:
            self._now_s = max(self._now_s, self._scheduled[0].when())

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""


class _Jump:
    """In the selector's place: what the loop would sleep for is over at once."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> tuple[()]:
        """Nothing has come from outside, for that is not there."""
        self._loop.jump(timeout_s)
        return ()
