"""`ports.Answers` for one process, and for tests; and the waiters of one process, whoever tells them."""

import asyncio
import heapq
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from gateway.core.answers import Claim, Found, Slot, room_of
from gateway.core.errors import IdempotencyUnavailable
from gateway.ports import ClaimEnd, Clock


class Waiters:
    """Who waits in this process, by slot."""

    def __init__(self) -> None:
        self._events: dict[Slot, set[asyncio.Event]] = defaultdict(set)

    def tell(self, slot: Slot) -> None:
        """A claim on `slot` has ended."""
        for event in self._events.get(slot, ()):
            event.set()

    def tell_all(self) -> None:
        """Any may have."""
        for events in self._events.values():
            for event in events:
                event.set()

    @asynccontextmanager
    async def waiting(self, slot: Slot) -> AsyncGenerator[ClaimEnd, None]:
        """See `ports.Answers`."""
        event = asyncio.Event()

        async def ended(within_s: float) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await event.wait()
            event.clear()

        self._events[slot].add(event)
        try:
            yield ended
        finally:
            self._events[slot].discard(event)
            if not self._events[slot]:
                del self._events[slot]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    fingerprint: str
    answer: bytes
    kept_us: int
    until_us: int


class _Owner:
    """An owner's answers of a kind, by name."""

    def __init__(self) -> None:
        self.kept: dict[str, _Kept] = {}
        self.total = 0
        self._ends: list[tuple[int, str]] = []  # a heap; of those that were forgotten or kept anew too

    def keep(self, name: str, kept: _Kept, *, max_bytes: int) -> None:
        """Keep it, if it is not too large by itself; what has ended goes, and so do those that end first."""
        self.forget(name)
        while self._ends and (self._ends[0][0] <= kept.kept_us or self.total + room_of(kept.answer) > max_bytes):
            until_us, first = heapq.heappop(self._ends)
            if first in self.kept and self.kept[first].until_us == until_us:
                self.forget(first)
        if room_of(kept.answer) <= max_bytes:
            self.kept[name] = kept
            self.total += room_of(kept.answer)
            heapq.heappush(self._ends, (kept.until_us, name))

    def forget(self, name: str) -> None:
        """Nothing where it is not there."""
        kept = self.kept.pop(name, None)
        if kept is not None:
            self.total -= room_of(kept.answer)


class MemoryAnswers:
    """See `ports.Answers`. An owner's answers of a kind have `max_bytes` in all.

    Where it does not stand alone, it keeps caches for its own process, and takes no idempotency keys.
    """

    def __init__(self, clock: Clock, *, max_bytes: int, stands_alone: bool = True) -> None:
        self._stands_alone = stands_alone
        self._clock = clock
        self._max_bytes = max_bytes
        self._owners: dict[tuple[str, str], _Owner] = defaultdict(_Owner)  # by kind and owner
        self._claims: dict[Slot, tuple[Claim, int]] = {}  # until when
        self._waiters = Waiters()
        self.waiting = self._waiters.waiting

    async def claim(self, claim: Claim, *, lease_us: int, max_age_us: int | None = None) -> Found:
        """See `ports.Answers`."""
        if claim.slot.kind == "once" and not self._stands_alone:
            raise IdempotencyUnavailable("several workers need Redis for idempotency keys", field="idempotency-key")
        slot, now_us = claim.slot, self._clock()
        kept = self._owners[slot.kind, slot.owner].kept.get(slot.name)
        if kept is not None and kept.until_us > now_us:
            if kept.fingerprint != claim.fingerprint:
                return Found(state="other")
            age_us = now_us - kept.kept_us
            if max_age_us is None or age_us <= max_age_us:
                return Found(state="kept", answer=kept.answer, age_us=age_us, left_us=kept.until_us - now_us)
        other = self._holder(slot)
        if other is not None and other != claim:
            return Found(state="busy" if other.fingerprint == claim.fingerprint else "other")
        self._claims[slot] = (claim, now_us + lease_us)
        return Found(state="fresh")

    async def renew(self, claim: Claim, *, lease_us: int) -> None:
        """See `ports.Answers`."""
        if self._holder(claim.slot) == claim:
            self._claims[claim.slot] = (claim, self._clock() + lease_us)

    async def keep(self, claim: Claim, answer: bytes, *, for_us: int) -> bool:
        """See `ports.Answers`."""
        slot, now_us = claim.slot, self._clock()
        if self._holder(slot) != claim:
            return False
        kept = _Kept(fingerprint=claim.fingerprint, answer=answer, kept_us=now_us, until_us=now_us + for_us)
        self._owners[slot.kind, slot.owner].keep(slot.name, kept, max_bytes=self._max_bytes)
        await self.release(claim)
        return True

    async def release(self, claim: Claim) -> None:
        """See `ports.Answers`."""
        if self._holder(claim.slot) == claim:
            del self._claims[claim.slot]
            self._waiters.tell(claim.slot)

    def _holder(self, slot: Slot) -> Claim | None:
        """Whose slot it is now."""
        claim, until_us = self._claims.get(slot, (None, 0))
        return claim if until_us > self._clock() else None
