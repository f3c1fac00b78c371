"""Word among workers that a model's process has died on a server, on the channel `{prefix}deaths`.

Triton needs a second to notice for each request that waits for a dead process. The first worker that hears it tells the
others, whose requests then need not wait for a second of their own.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import Callable
from typing import Final

from redis.asyncio import Redis

from gateway.core.errors import Fault, FaultKind
from gateway.core.types import Place
from gateway.stores.redis_script import UNREACHABLE, listen

TIMEOUT_S: Final = 0.5
PAUSE_S: Final = 1.0  # after a failure of Redis

_log = logging.getLogger(__name__)
Heard = Callable[[Place, Fault], None]


class RedisDeaths:
    """Tells and hears. Without Redis nobody is told, and each worker finds out by itself."""

    def __init__(self, client: Redis, prefix: str) -> None:
        self._client = client
        self._channel = f"{prefix}deaths"
        self._id = uuid.uuid4().hex  # what we say ourselves is no news
        self._listening: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()

    def start(self, heard: Heard) -> None:
        """Call `heard` for each death that another worker tells of."""
        self._listening = asyncio.create_task(self._listen(heard), name="deaths")

    def tell(self, place: Place, fault: Fault) -> None:
        """Tell the others, without waiting."""
        words = (self._id, place.backend, place.replica, place.model, fault.dead_model)
        telling = asyncio.create_task(self._publish(json.dumps(words)))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def close(self) -> None:
        """Stop both."""
        tasks = [*self._telling, *([self._listening] if self._listening else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _publish(self, message: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._client.publish(self._channel, message)
        except UNREACHABLE:
            _log.warning("the other workers could not be told that a model's process has died")

    async def _listen(self, heard: Heard) -> None:
        while True:
            try:
                await listen(self._client, self._channel, lambda message: self._take(message, heard))
            except UNREACHABLE:
                await asyncio.sleep(PAUSE_S)
            except Exception:  # noqa: BLE001 - the supervisor of this task
                _log.exception("word of a death could not be taken")
                await asyncio.sleep(PAUSE_S)

    def _take(self, message: str, heard: Heard) -> None:
        try:
            teller, backend, replica, model, dead_model = json.loads(message)
        except (ValueError, TypeError):
            return  # not a word of ours
        if teller != self._id:
            fault = Fault(kind=FaultKind.DEAD, message="another worker found its process dead", dead_model=dead_model)
            heard(Place(backend=backend, model=model, replica=replica), fault)
