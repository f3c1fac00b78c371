"""Waking up at an instant, to some tens of microseconds."""

import asyncio
import ctypes
import os
import time
from contextlib import suppress
from typing import Final, Self

_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME of timerfd_settime(2)
_NS: Final = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Wakes one waiter at an instant of `time.monotonic`.

    Event loops count in milliseconds (epoll's and libuv's unit), which at thousands of requests per second would send
    them in bunches. Linux has a timer that is a file (`timerfd_create(2)`); elsewhere the loop's own timers serve.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._at = _Itimerspec()
        self._fd = -1
        if hasattr(self._libc, "timerfd_create"):
            self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._rings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)

    async def until(self, instant: float) -> None:
        """Return as soon as it is `instant`."""
        if self._fd < 0:
            await asyncio.sleep(instant - time.monotonic())
            return
        at_ns = max(1, int(instant * _NS))  # 0 would mean never
        self._at.value.seconds, self._at.value.nanoseconds = divmod(at_ns, _NS)
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(self._at), None)
        self._waiter = self._loop.create_future()
        await self._waiter

    def _rings(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._fd, 8)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
