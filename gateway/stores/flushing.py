"""What a worker counts in memory and writes to Redis every now and then, all of it in one round trip."""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Final

from gateway.stores.redis_script import UNREACHABLE

TIMEOUT_S: Final = 1.0

_log = logging.getLogger(__name__)


class Flushing(ABC):
    """Writes every `every_s` seconds, and once more when it is closed. `name` is what the log calls it.

    Attributes:
        lost: how much Redis has not taken, and was let go.
    """

    def __init__(self, name: str, every_s: float) -> None:
        self.lost = 0
        self._name = name
        self._every_s = every_s
        self._is_failing = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    async def _write(self) -> bool:
        """Write what there is within `TIMEOUT_S`; false where there is nothing.

        Raises `UNREACHABLE`; what is then let go is counted in `lost`.
        """

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.create_task(self._forever(), name=self._name)

    async def close(self) -> None:
        """Write what is left, and stop."""
        self._closing.set()  # and not cancelled: what is on its way would be lost
        if self._task is not None:
            await self._task
        await self.flush()

    async def flush(self) -> bool:
        """Write what there is; false where Redis does not take it, which is logged once until it does again."""
        try:
            has_written = await self._write()
        except UNREACHABLE as error:
            if not self._is_failing:
                _log.warning("not_written", extra={"what": self._name, "error": type(error).__name__})
            self._is_failing = True
            return False
        if has_written and self._is_failing:
            self._is_failing = False
            _log.warning("written_again", extra={"what": self._name, "lost": self.lost})
        return True

    async def _forever(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._closing.wait()
            try:
                await self.flush()
            except Exception:  # noqa: BLE001 - the supervisor of this task
                _log.exception("flush_failed", extra={"what": self._name})


def write_in_background(*all_of_them: Flushing) -> Callable[[], Awaitable[None]]:
    """Start them; returns what closes them, all at once: a Redis that hangs holds up the end of a worker once."""
    for one in all_of_them:
        one.start()

    async def close() -> None:
        await asyncio.gather(*(one.close() for one in all_of_them))

    return close
