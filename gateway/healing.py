"""Self-healing: a model whose process has died on a server is unloaded and loaded there again.

Triton goes on calling such a model ready, restarts nothing, and takes a load for done; only an unload before it helps.
An ensemble that is made of the model comes and goes with it by itself; other models of the server are not disturbed.
One worker does it for all: it takes a lease, and leaves word for the others.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Final

from gateway.core.breaker import BreakerBoard
from gateway.core.errors import BackendError, Fault
from gateway.core.types import Place
from gateway.ports import Backend, EventLog, HealthObserver, Leases, ModelServer

LEASE_S: Final = 30.0  # how long no other tries while one does, and after one has failed
HEARD_S: Final = 5.0  # how long the others, who ask once a second, may learn that it was healed; then it may die again
RENEW_S: Final = 10.0  # a load may take longer than the lease
CLOSE_S: Final = 5.0  # a heal under way is let finish at a stop: half of it is a model that is not there
HEALED: Final = "healed"
FAILED: Final = "failed"
NOT_ALLOWED: Final = "not_allowed"
_NOT_ALLOWED_TEXT: Final = "explicit model load / unload is not allowed"  # Triton's, outside of explicit model control

_log = logging.getLogger(__name__)


class Healer:
    """Owns the heals that are under way. `heal` is called again and again, once a second."""

    def __init__(
        self,
        *,
        backends: Mapping[str, Backend],
        board: BreakerBoard,
        leases: Leases,
        observer: HealthObserver,
        events: EventLog | None = None,
    ) -> None:
        self._backends = backends
        self._board = board
        self._leases = leases
        self._observer = observer
        self._events = events
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self._heard: dict[Place, str] = {}  # the last word about a dead model that was followed

    def heal(self) -> None:
        """Begin to heal every dead model that is not being healed yet. Does not wait."""
        dead = {_dead(at, breaker.dead_model) for at, breaker in self._board.all().items() if breaker.dead_model}
        self._heard = {place: word for place, word in self._heard.items() if place in dead or word.startswith(HEALED)}
        for place in dead:
            server = self._backends.get(place.backend)
            is_allowed = not self._heard.get(place, "").startswith(NOT_ALLOWED)
            if place not in self._tasks and is_allowed and isinstance(server, ModelServer):
                self._tasks[place] = asyncio.create_task(self._heal(place, server), name=f"heal {place}")
                self._tasks[place].add_done_callback(lambda _, done=place: self._tasks.pop(done, None))

    async def close(self) -> None:
        """Let heals under way finish, for a few seconds."""
        tasks = set(self._tasks.values())
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _heal(self, place: Place, server: ModelServer) -> None:
        lease = f"heal:{place}"
        if not await self._leases.take(lease, LEASE_S):
            word = await self._leases.word(lease)
            is_news = self._heard.get(place) != word
            self._heard[place] = word
            if word.startswith(HEALED) and is_news:  # once: should it die again, that is for the next lease
                self._close_breakers(place)
            return
        keeping = asyncio.create_task(self._keep(lease))
        try:
            fault = await _reload(place, server)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        outcome = _outcome(fault)
        word = f"{outcome} {uuid.uuid4()}"
        self._heard[place] = word
        await self._leases.keep(lease, LEASE_S if fault else HEARD_S, word=word)
        if fault is None:
            self._close_breakers(place)
        await self._tell(place, outcome, fault)

    async def _keep(self, lease: str) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._leases.keep(lease, LEASE_S)

    def _close_breakers(self, place: Place) -> None:
        """Everything that was out for this model's death is in again: ensembles that are made of it, too."""
        for at, breaker in self._board.all().items():
            if breaker.dead_model and _dead(at, breaker.dead_model) == place:
                self._board.healed(at)

    async def _tell(self, place: Place, outcome: str, fault: Fault | None) -> None:
        self._observer.healed(place, outcome)
        detail = fault.message if fault else ""
        if fault is None:
            _log.warning("a model whose process had died was loaded anew", extra={"place": str(place)})
        else:
            _log.error(
                "a model whose process has died could not be loaded anew",
                extra={"place": str(place), "outcome": outcome, "reason": detail},
            )
        if self._events is not None:
            await self._events.add(
                {
                    "at": time.time(),
                    "event": f"model_heal_{outcome}",
                    "backend": place.backend,
                    "model": place.model,
                    "replica": place.replica,
                    "detail": detail,
                }
            )


def _dead(at: Place, model: str) -> Place:
    """The dead model behind a place: the same, or a part of it."""
    return Place(backend=at.backend, model=model, replica=at.replica)


async def _reload(place: Place, server: ModelServer) -> Fault | None:
    """Unload and load; None where that went well."""
    try:
        await server.unload(place.model, replica=place.replica)
        await server.load(place.model, replica=place.replica)
    except BackendError as error:
        return error.fault
    return None


def _outcome(fault: Fault | None) -> str:
    if fault is None:
        return HEALED
    return NOT_ALLOWED if fault.reply and _NOT_ALLOWED_TEXT in fault.reply.text else FAILED
