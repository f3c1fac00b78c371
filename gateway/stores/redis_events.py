"""What happened to backends lately, for the control plane to show: the list `{prefix}events` of JSON, newest first."""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Final

from redis.asyncio import Redis

from gateway.ports import JsonObject
from gateway.stores.redis_script import UNREACHABLE, answering

KEPT: Final = 100
TIMEOUT_S: Final = 1.0

_log = logging.getLogger(__name__)


class RedisEvents:
    """See `ports.EventLog` and `admin_ports.Events`."""

    def __init__(self, client: Redis, prefix: str) -> None:
        self._client = client
        self._key = f"{prefix}events"

    async def add(self, event: JsonObject) -> None:
        """Write it down; of more than a hundred the oldest are forgotten. Without Redis the log alone has it."""
        try:
            async with asyncio.timeout(TIMEOUT_S), self._client.pipeline(transaction=False) as steps:
                steps.lpush(self._key, json.dumps(event))
                steps.ltrim(self._key, 0, KEPT - 1)
                await steps.execute()
        except UNREACHABLE:
            _log.warning("an event could not be written down", extra={"event": dict(event)})

    async def read(self, limit: int = KEPT) -> Sequence[JsonObject]:
        """The newest first. Raises `RulesUnavailable` when Redis does not answer."""
        async with answering("the events", TIMEOUT_S):
            return [json.loads(text) for text in await self._client.lrange(self._key, 0, limit - 1)]
