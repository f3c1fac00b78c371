"""Where sequences live, for all workers and replicas of the gateway: `core.sequences.Pins` inside Redis.

Layout, all under one prefix and in one slot of a Redis Cluster, since a pin and its number change together:
- `{prefix}sequence:{all}:pin:<owner>`: a hash, see `lua/find_sequence.lua`;
- `{prefix}sequence:{all}:number:<backend>/<model>:<number>`: a hash of the number's `owner`, and `until` when.

Both expire by themselves. Each operation is one script, so one round trip.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from gateway.core.errors import SequencesUnavailable
from gateway.core.sequences import Pin
from gateway.core.types import Place
from gateway.stores.redis_script import UNREACHABLE, Lanes, load_script

MAX_CONNECTIONS = 8  # at once; the client's others are for limits and rules, and one beyond them is an error


class RedisSequenceStore:
    """`SequenceStore` over Redis, by its clock. No operation has longer than `timeout_s` for Redis."""

    def __init__(self, client: Redis, prefix: str, *, timeout_s: float = 0.4) -> None:
        self._client = client
        self._prefix = f"{prefix}sequence:{{all}}:"
        self._lanes = Lanes(MAX_CONNECTIONS, timeout_s)
        self._find = load_script("find_sequence")
        self._pin = load_script("pin_sequence")
        self._close = load_script("close_sequence")
        self._now = ""  # Redis's own clock; tests give the instant

    async def find(self, owner: str, *, for_us: int) -> Pin | None:
        """See `ports.SequenceStore`."""
        async with self._bounded():
            found = await self._find.run(self._client, [self._key(owner)], [self._now, owner, for_us])
            return None if found is None else _pin(found)

    async def pin(self, owner: str, place: Place, numbers: Sequence[int], *, idle_us: int, for_us: int) -> int | None:
        """See `ports.SequenceStore`."""
        keys = [f"{self._prefix}number:{place.backend}/{place.model}:{number}" for number in numbers]
        args: list[str | int] = [self._now, owner, _written(place), idle_us, for_us, *map(str, numbers)]
        async with self._bounded():
            number = await self._pin.run(self._client, [self._key(owner), *keys], args)
            return None if number is None else int(number)

    async def lose(self, owner: str, pin: Pin) -> None:
        """See `ports.SequenceStore`."""
        await self._closed(owner, pin, "lost")

    async def end(self, owner: str, pin: Pin) -> None:
        """See `ports.SequenceStore`."""
        await self._closed(owner, pin, "end")

    async def _closed(self, owner: str, pin: Pin, how: str) -> None:
        args: list[str | int] = [self._now, _written(pin.place), str(pin.number), how]
        async with self._bounded():
            await self._close.run(self._client, [self._key(owner)], args)

    def _key(self, owner: str) -> str:
        return f"{self._prefix}pin:{owner}"

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        """Bound one operation, and tell its failures in our own words; what is stored there may be anybody's."""
        try:
            async with self._lanes.one():
                yield
        except (*UNREACHABLE, ValueError, TypeError) as error:
            raise SequencesUnavailable("the store that says where sequences live does not answer") from error


def _written(place: Place) -> str:
    return json.dumps([place.backend, place.model, place.version, place.replica])


def _pin(found: Sequence[Any]) -> Pin:
    where, number, idle_us, silent_us, is_lost = found
    backend, model, version, replica = json.loads(where)
    return Pin(
        place=Place(backend=backend, model=model, version=version, replica=replica),
        number=int(number),
        idle_us=int(idle_us),
        silent_us=int(silent_us),
        is_lost=is_lost in (b"1", "1"),
    )
