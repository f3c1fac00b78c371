"""Active health: every second each target of the rules is probed, and the breakers hear of it."""

import asyncio
import logging
from collections.abc import Mapping

from gateway.core.breaker import BreakerBoard
from gateway.core.errors import BackendError, FaultKind
from gateway.core.routing import RuleSet, Target
from gateway.ports import Backend, Clock, HealthObserver, RuleSource

INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 2.0  # the adapters bound their probes at 1 s; this only guards against one that does not

_log = logging.getLogger(__name__)


class Prober:
    """Owns the probing task; `start` returns after the first round, so that the first request knows health."""

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
        self._task: asyncio.Task[None] | None = None
        self._was: dict[tuple[str, str], str | None] = {}

    async def start(self) -> None:
        """Probe once, then go on in the background."""
        await self._round()
        self._task = asyncio.create_task(self._run(), name="prober")

    async def close(self) -> None:
        """Stop probing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self._round()

    async def _round(self) -> None:
        rules = self._rules.current()
        await asyncio.gather(*(self._probe(t) for t in targets(rules) if t.backend in self._backends))
        self._observer.health(self._board.all(), rules.revision)
        await asyncio.gather(*(self._statistics(name, backend) for name, backend in self._backends.items()))

    async def _probe(self, target: Target) -> None:
        fault: FaultKind | None = None
        message: str | None = None
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._backends[target.backend].probe(target.model, target.version)
        except BackendError as error:
            fault, message = error.fault.kind, error.fault.message
        except TimeoutError:
            fault, message = FaultKind.TIMEOUT, "the probe had no answer"
        self._board.probed(target.backend, target.model, now_us=self._clock(), fault=fault)
        self._tell(target, message)

    def _tell(self, target: Target, message: str | None) -> None:
        """Log a change of health, once."""
        key = (target.backend, target.model)
        if key in self._was and (self._was[key] is None) == (message is None):
            return
        self._was[key] = message
        if message is None:
            _log.info("backend is healthy", extra={"target": str(target)})
        else:
            _log.warning("backend is not healthy", extra={"target": str(target), "reason": message})

    async def _statistics(self, name: str, backend: Backend) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                self._observer.batch_sizes(name, await backend.batch_sizes())
        except (BackendError, TimeoutError):
            return  # the probe has told it already


def targets(rules: RuleSet) -> frozenset[Target]:
    """Every target that an enabled rule names, by backend, model and version."""
    return frozenset(
        Target(backend=t.backend, model=t.model, version=t.version)
        for rule in rules.rules
        if rule.enabled
        for t in (*rule.split, *rule.fallback)
    )
