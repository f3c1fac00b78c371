"""Active health: every second each place that the rules name is probed, and the breakers hear of it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from gateway.core.attempts import CONSEQUENCES
from gateway.core.breaker import BreakerBoard, server_of
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.rules import RuleSet
from gateway.core.types import Place
from gateway.ports import Backend, Clock, HealthObserver, RuleSource

INTERVAL_S = 1.0
TIMEOUT_S = 2.0  # the adapters bound their probes at 1 s; this only guards against one that does not

_log = logging.getLogger(__name__)


class Prober:
    """Owns the probing tasks; `start` returns after the first round, so that the first request knows health."""

    def __init__(
        self,
        *,
        backends: Mapping[str, Backend],
        rules: RuleSource,
        board: BreakerBoard,
        clock: Clock,
        observer: HealthObserver,
    ) -> None:
        self._backends = backends
        self._rules = rules
        self._board = board
        self._clock = clock
        self._observer = observer
        self._tasks: list[asyncio.Task[None]] = []
        self._told: dict[Place, bool] = {}

    async def start(self) -> None:
        """Probe once, then go on in the background."""
        await self._probe_all()
        self._tasks = [
            asyncio.create_task(_every(INTERVAL_S, self._probe_all), name="probes"),
            asyncio.create_task(_every(INTERVAL_S, self._collect_all), name="batch sizes"),
        ]

    async def close(self) -> None:
        """Stop probing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _probe_all(self) -> None:
        rules = self._rules.current()
        named = frozenset(one for place in places(rules) for one in self._replicas_of(place))
        self._board.keep_only(named | {server_of(place) for place in named})
        self._told = {place: healthy for place, healthy in self._told.items() if place in named}
        await asyncio.gather(*(self._probe(place) for place in named if place.backend in self._backends))
        self._observer.health(self._board.all(), rules.revision)

    def _replicas_of(self, place: Place) -> list[Place]:
        """The place on each replica of its backend."""
        backend = self._backends.get(place.backend)
        names = backend.replicas() if backend is not None else ()
        return [replace(place, replica=name) for name in names] or [place]

    async def _probe(self, place: Place) -> None:
        fault: Fault | None = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._backends[place.backend].probe(place)
        except BackendError as error:
            fault = error.fault
        except TimeoutError:
            fault = Fault(kind=FaultKind.TIMEOUT, message="the probe had no answer")
        # What does not count against a backend when a request meets it (it is full) does not when a probe does.
        counted = fault.kind if fault and CONSEQUENCES[fault.kind].blames_backend else None
        self._board.probed(place, now_us=self._clock(), fault=counted)
        self._tell(place, fault)

    def _tell(self, place: Place, fault: Fault | None) -> None:
        """Log a change of health, once."""
        if self._told.get(place) is (fault is None):
            return
        self._told[place] = fault is None
        if fault is None:
            _log.info("place is healthy", extra={"place": str(place)})
        else:
            _log.warning("place is not healthy", extra={"place": str(place), "reason": fault.message})

    async def _collect_all(self) -> None:
        await asyncio.gather(*(self._collect(name, backend) for name, backend in self._backends.items()))

    async def _collect(self, name: str, backend: Backend) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                self._observer.figures(name, await backend.figures())
        except (BackendError, TimeoutError):
            return  # the probe has told it already


async def _every(interval_s: float, step: Callable[[], Awaitable[None]]) -> None:
    """Repeat `step`, whatever becomes of one of them: health must not freeze."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await step()
        except Exception:  # noqa: BLE001 - the supervisor of these tasks
            _log.exception("a round of health checks failed")


def places(rules: RuleSet) -> frozenset[Place]:
    """Every place that an enabled rule names."""
    return frozenset(target.place for rule in rules.rules if rule.enabled for target in (*rule.split, *rule.fallback))
