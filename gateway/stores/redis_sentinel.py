"""The master that sentinels name. Every new connection asks them again, so a failover is followed by itself.

A master that is gone breaks its connections; one that hangs has each call ended by the caller's own bound, and the
connection with it. Where a master was made a replica, Redis closes its clients' connections, and one that writes all
the same is told so and asks again.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.settings.redis import RedisPlace
from gateway.stores.redis_cluster import NOT_SO

ASK_S: Final = 0.5


def sentinel_client(place: RedisPlace, links: Mapping[str, Any], options: Mapping[str, Any]) -> Redis:
    """A client for the master. `links` are how to reach a sentinel, `options` how to reach the master."""
    asking = {**links, "retry": Retry(NoBackoff(), 0), "password": place.sentinel_password or None}
    sentinels = _Sentinels(place.nodes, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]  # the library's
    client: Redis = sentinels.master_for(place.master, connection_pool_class=_Pool, **options)
    return client


class _Sentinels(Sentinel):
    """Asks all of them at once, and once for all connections that want to know at the same time."""

    _asked: asyncio.Task[tuple[str, int]] | None = None

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """The first answer counts: a sentinel that hangs must not keep the others from being heard."""
        if self._asked is None:
            self._asked = asyncio.create_task(self._ask(service_name))
            self._asked.add_done_callback(self._answered)
        return await asyncio.shield(self._asked)

    def _answered(self, asked: asyncio.Task[tuple[str, int]]) -> None:
        self._asked = None
        if not asked.cancelled():
            asked.exception()  # who wanted to know may be gone

    async def _ask(self, name: str) -> tuple[str, int]:
        sentinels: list[Any] = self.sentinels
        words = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
        asked = [asyncio.create_task(sentinel.execute_command(*words)) for sentinel in sentinels]
        try:
            for answer in asyncio.as_completed(asked, timeout=ASK_S):
                try:
                    found = await answer
                    if found is not None:
                        host, port = found
                        return host.decode(), int(port)
                except (RedisError, OSError, *NOT_SO):
                    continue
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise MasterNotFoundError(f"no sentinel names the master {name!r}")


class _Pool(SentinelConnectionPool):
    """Its client's owner closes it; the connections to the sentinels go with it."""

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()
