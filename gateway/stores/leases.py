"""`ports.Leases`: in Redis for all workers of a deployment, on a dict for one process.

In Redis a lease is the string `{prefix}lease:{name}`, which holds its word and expires.
"""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from redis.asyncio import Redis

from gateway.ports import Clock
from gateway.stores.redis_script import UNREACHABLE

TIMEOUT_S: Final = 0.5
_Answer = TypeVar("_Answer")


class RedisLeases:
    """See `ports.Leases`."""

    def __init__(self, client: Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    async def take(self, name: str, ttl_s: float) -> bool:
        """SET with NX: the first of all has it."""
        return bool(await _bounded(self._client.set(self._key(name), "", nx=True, px=int(ttl_s * 1000))))

    async def keep(self, name: str, ttl_s: float, *, word: str = "") -> None:
        """The same key with a new word and a new end."""
        await _bounded(self._client.set(self._key(name), word, px=int(ttl_s * 1000)))

    async def word(self, name: str) -> str:
        """What the key holds."""
        found = await _bounded(self._client.get(self._key(name)))
        return found.decode() if isinstance(found, bytes) else found or ""

    def _key(self, name: str) -> str:
        return f"{self._prefix}lease:{name}"


class MemoryLeases:
    """See `ports.Leases`. Those that have ended are dropped when another is taken."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[str, tuple[int, str]] = {}  # by name: until when, and the word

    async def take(self, name: str, ttl_s: float) -> bool:
        """Whether nobody had it."""
        now_us = self._clock()
        self._held = {one: held for one, held in self._held.items() if held[0] > now_us}
        if name in self._held:
            return False
        self._held[name] = (now_us + int(ttl_s * 1e6), "")
        return True

    async def keep(self, name: str, ttl_s: float, *, word: str = "") -> None:
        """A new word and a new end."""
        self._held[name] = (self._clock() + int(ttl_s * 1e6), word)

    async def word(self, name: str) -> str:
        """What was left."""
        until_us, word = self._held.get(name, (0, ""))
        return word if until_us > self._clock() else ""


async def _bounded(call: Awaitable[_Answer]) -> _Answer | None:
    """The answer; None where Redis has none for us within the time."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await call
    except UNREACHABLE:
        return None
