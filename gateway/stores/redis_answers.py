"""Answers that are kept for all workers: `ports.Answers` in Redis, by its clock.

Layout, for each owner T (a tenant, or `*` for what all share) in one slot of a Redis Cluster; every key expires:
- `{prefix}answers:{T}:<kind>:kept:<name>`: a hash, see `lua/claim_answer.lua`;
- `{prefix}answers:{T}:<kind>:claim:<name>`: a string, see there;
- `{prefix}answers:{T}:<kind>:index` and `:sizes`: see `lua/end_answer.lua`.

The end of a claim is told on the channel `{prefix}answered`, to which a worker listens from the first time on that
a request of its own waits for another's answer.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from redis.asyncio import Redis

from gateway.core.answers import Claim, Found, Slot, State, room_of
from gateway.core.errors import IdempotencyUnavailable
from gateway.ports import ClaimEnd
from gateway.stores.memory_answers import Waiters
from gateway.stores.redis_script import UNREACHABLE, Lanes, listen, load_script

MAX_CONNECTIONS: Final = 8  # at once; the client's others are for limits and rules, and one beyond them is an error
PAUSE_S: Final = 1.0  # after a failure of Redis
_STATES: Final[Mapping[bytes, State]] = {b"fresh": "fresh", b"kept": "kept", b"busy": "busy", b"other": "other"}

_log = logging.getLogger(__name__)


class RedisAnswers:
    """See `ports.Answers`. No operation has longer than `timeout_s` for Redis."""

    def __init__(self, client: Redis, prefix: str, *, max_bytes: int, timeout_s: float = 0.4) -> None:
        self._client = client
        self._prefix = prefix
        self._max_bytes = max_bytes
        self._lanes = Lanes(MAX_CONNECTIONS, timeout_s)
        self._claim = load_script("claim_answer")
        self._renew = load_script("renew_answer")
        self._end = load_script("end_answer")
        self._channel = f"{prefix}answered"
        self._waiters = Waiters()
        self._listening: asyncio.Task[None] | None = None

    async def claim(self, claim: Claim, *, lease_us: int, max_age_us: int | None = None) -> Found:
        """See `ports.Answers`."""
        keys = [self._key(claim.slot, "kept"), self._key(claim.slot, "claim")]
        max_age_ms = "" if max_age_us is None else max_age_us // 1000
        args: list[str | int] = [claim.by, claim.fingerprint, _ms(lease_us), max_age_ms]
        async with self._bounded():
            found = await self._claim.run(self._client, keys, args)
            return _found(found)

    async def renew(self, claim: Claim, *, lease_us: int) -> None:
        """See `ports.Answers`."""
        async with self._bounded():
            await self._renew.run(self._client, [self._key(claim.slot, "claim")], [_own(claim), _ms(lease_us)])

    async def keep(self, claim: Claim, answer: bytes, *, for_us: int) -> bool:
        """See `ports.Answers`."""
        slot = claim.slot
        room = [room_of(answer), self._max_bytes]
        kept = [slot.name, claim.fingerprint, answer, _ms(for_us), *room, self._of(slot) + "kept:"]
        return await self._ended(claim, kept)

    async def release(self, claim: Claim) -> None:
        """See `ports.Answers`."""
        await self._ended(claim, [])

    @asynccontextmanager
    async def waiting(self, slot: Slot) -> AsyncGenerator[ClaimEnd, None]:
        """See `ports.Answers`."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name="answers")
        async with self._waiters.waiting(slot) as ended:
            yield ended

    async def close(self) -> None:
        """Stop listening."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def _ended(self, claim: Claim, kept: list[Any]) -> bool:
        slot = claim.slot
        keys = [self._key(slot, "claim"), self._key(slot, "kept"), self._of(slot) + "index", self._of(slot) + "sizes"]
        told = json.dumps([slot.kind, slot.owner, slot.name])
        async with self._bounded():
            return bool(await self._end.run(self._client, keys, [_own(claim), self._channel, told, *kept]))

    def _of(self, slot: Slot) -> str:
        return f"{self._prefix}answers:{{{slot.owner}}}:{slot.kind}:"

    def _key(self, slot: Slot, what: str) -> str:
        return f"{self._of(slot)}{what}:{slot.name}"

    async def _listen(self) -> None:
        while True:
            try:
                await listen(self._client, self._channel, self._heard)
            except UNREACHABLE:
                await asyncio.sleep(PAUSE_S)
            except Exception:  # noqa: BLE001 - the supervisor of this task
                _log.exception("word of an answer could not be taken")
                await asyncio.sleep(PAUSE_S)

    def _heard(self, told: str) -> None:
        """An empty text: something may have been missed."""
        if not told:
            self._waiters.tell_all()
            return
        try:
            kind, owner, name = json.loads(told)
            self._waiters.tell(Slot(kind=kind, owner=owner, name=name))
        except (ValueError, TypeError):
            return  # not a word of ours

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        """Bound one operation, and tell its failures in our own words; what is stored there may be anybody's."""
        try:
            async with self._lanes.one():
                yield
        except (*UNREACHABLE, LookupError, ValueError, TypeError) as error:
            raise IdempotencyUnavailable("the store that keeps answers does not answer") from error


def _own(claim: Claim) -> str:
    return f"{claim.by} {claim.fingerprint}"


def _ms(length_us: int) -> int:
    return max(1, length_us // 1000)


def _found(told: list[Any]) -> Found:
    state = _STATES[told[0]]
    if state == "kept":
        _, answer, age_ms, left_ms = told
        return Found(state="kept", answer=answer, age_us=int(age_ms) * 1000, left_us=max(0, int(left_ms)) * 1000)
    return Found(state=state)
