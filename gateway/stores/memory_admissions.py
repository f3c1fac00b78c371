"""`ports.Admissions` on a `Book`: for one process, for tests, and for a worker while Redis is out of reach."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from gateway.core.admissions import Ask, Book, Reply, Wanted, turn_late, verdict_of
from gateway.core.errors import OrderingUnavailable
from gateway.core.rate_limit import shared_out, spent_of
from gateway.core.types import Verdict
from gateway.ports import Clock

OWNER: Final = "here"
FORGET_EVERY: Final = 4096  # admissions


class MemoryAdmissions:
    """See `ports.Admissions`. `wall_us` tells Unix time in microseconds.

    `workers` tells among how many such processes the limits are shared out; `is_degraded`: it stands in for Redis.
    """

    def __init__(self, wall_us: Clock, *, workers: Callable[[], int] = lambda: 1, is_degraded: bool = False) -> None:
        self._wall_us = wall_us
        self._workers = workers
        self._is_degraded = is_degraded
        self._book = Book(lease_us=None)
        self._count = itertools.count(1)
        self._turns: dict[str, asyncio.Event] = {}

    async def admit(self, wanted: Wanted) -> "MemoryAdmission":
        """See `ports.Admissions`; out of reach are only those that order needs: the other workers."""
        if wanted.ordering_key and not wanted.orders_alone and self._workers() > 1:
            raise OrderingUnavailable("several workers need Redis to keep an order", field="x-ordering-key")
        return self.admitted(wanted)

    def admitted(self, wanted: Wanted) -> "MemoryAdmission":
        """The same without waiting."""
        number, now_us = next(self._count), self._wall_us()
        if number % FORGET_EVERY == 0:
            self._book.forget(now_us)
        queue = f"{wanted.tenant}:{wanted.ordering_key}" if wanted.ordering_key else ""
        takes = shared_out(wanted.takes, self._workers())
        ask = Ask(id=f"local:{number}", owner=OWNER, takes=takes, queue=queue, queue_bound=wanted.queue_bound)
        reply, woken = self._book.admit(ask, now_us=now_us)
        self._wake(woken)
        verdict = verdict_of(ask, reply)
        return MemoryAdmission(self, ask, reply, replace(verdict, degraded=True) if self._is_degraded else verdict)

    async def turn(self, admission: str, within_us: int) -> None:
        """Wait for the turn of one that is not first."""
        event = self._turns[admission] = asyncio.Event()
        try:
            async with asyncio.timeout(within_us / 1e6):
                await event.wait()
        except TimeoutError:
            raise turn_late() from None
        finally:
            del self._turns[admission]

    def settle(self, ask: Ask, *, tokens: int, nano_usd: int) -> None:
        """Give back and put right."""
        spent = spent_of(ask.takes, tokens=tokens, nano_usd=nano_usd)
        self._wake(self._book.settle(OWNER, ask.id, spent, now_us=self._wall_us()))

    def is_first(self, admission: str) -> bool:
        """Whether it has its turn."""
        return self._book.is_first(OWNER, admission)

    def _wake(self, admissions: Iterable[str]) -> None:
        for admission in admissions:
            if admission in self._turns:
                self._turns[admission].set()


class MemoryAdmission:
    """See `ports.Admission`."""

    __slots__ = ("_ask", "_of", "verdict")

    is_lost = False

    def __init__(self, of: MemoryAdmissions, ask: Ask, reply: Reply, verdict: Verdict) -> None:
        self._of = of
        self._ask = ask if reply.admitted and (ask.queue or any(take.is_held for take in ask.takes)) else None
        self.verdict = verdict

    async def turn(self, *, within_us: int) -> None:
        """See `ports.Admission`."""
        if self._ask is not None and self._ask.queue and not self._of.is_first(self._ask.id):
            await self._of.turn(self._ask.id, within_us)

    def settle(self, *, tokens: int, nano_usd: int) -> None:
        """See `ports.Admission`."""
        ask, self._ask = self._ask, None
        if ask is not None:
            self._of.settle(ask, tokens=tokens, nano_usd=nano_usd)
