"""Active health: every second the places that matter are probed on each replica, and the breakers hear of it.

Those are the places that the rules name, and, where callers name models themselves, the servers and whatever is out.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from gateway.core.attempts import CONSEQUENCES
from gateway.core.breaker import Breaker, BreakerBoard, server_of
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.loads import LoadBoard
from gateway.core.rules import RuleSet
from gateway.core.types import ANY, Place
from gateway.gate import Gate
from gateway.healing import Healer
from gateway.ports import Backend, Clock, HealthObserver, RuleSource

INTERVAL_S: Final = 1.0
TIMEOUT_S: Final = 2.0  # the adapters bound their probes at 1 s; this only guards against one that does not
SILENCE_US: Final = 60_000_000  # a model that a caller named is forgotten when no request was sent to it for so long

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traces:
    """What requests, and not probes, have left on a breaker, and since when it is unchanged."""

    failures: int
    trial_until_us: int
    since_us: int


class Prober:
    """Owns the probing tasks; `start` returns after the first round, so that the first request knows health."""

    def __init__(  # noqa: PLR0913 - all that it watches and tells
        self,
        *,
        backends: Mapping[str, Backend],
        rules: RuleSource,
        board: BreakerBoard,
        clock: Clock,
        observer: HealthObserver,
        healer: Healer | None = None,
        gates: Mapping[str, Gate] | None = None,
        loads: LoadBoard | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._backends = backends
        self._rules = rules
        self._board = board
        self._clock = clock
        self._observer = observer
        self._healer = healer
        self._gates = gates or {}
        self._loads = loads or LoadBoard()
        self._interval_s = interval_s
        self._tasks: list[asyncio.Task[None]] = []
        self._told: dict[Place, bool] = {}
        self._traces: dict[Place, _Traces] = {}

    async def start(self) -> None:
        """Probe once, then go on in the background."""
        await self._probe_all()
        self._tasks = [
            asyncio.create_task(_every(self._interval_s, self._probe_all), name="probes"),
            asyncio.create_task(_every(self._interval_s, self._collect_all), name="figures"),
        ]

    async def close(self) -> None:
        """Stop probing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._healer is not None:
            await self._healer.close()

    async def _probe_all(self) -> None:
        rules = self._rules.current()
        named = frozenset(one for place in places(rules) for one in self._replicas_of(place))
        servers = {server_of(place) for place in named}
        called = self._called(named, servers)
        self._board.keep_only(named | servers | called, now_us=self._clock())
        self._loads.keep_only(named | called)
        out = {place for place in servers | called if self._board.of(place).open_until_us is not None}
        probed = {p for p in named | out if p.backend in self._backends and self._backends[p.backend].is_probed}
        self._told = {place: healthy for place, healthy in self._told.items() if place in probed}
        await asyncio.gather(*(self._probe(place) for place in probed))
        if self._healer is not None:
            self._healer.heal()
        self._observer.health(self._shown(named | servers), rules)
        self._observer.waiting({name: sum(gate.waiting().values()) for name, gate in self._gates.items()})

    def _called(self, named: Collection[Place], servers: Collection[Place]) -> set[Place]:
        """Models and versions that callers named themselves and whose breakers still have something to say."""
        now_us = self._clock()
        lately = {}
        for place, breaker in self._board.all().items():
            if place in named or place in servers or server_of(place) not in servers:
                continue
            seen = self._traces.get(place)
            traces = (breaker.failures, breaker.trial_until_us)
            if seen is None or (seen.failures, seen.trial_until_us) != traces:
                seen = _Traces(failures=traces[0], trial_until_us=traces[1], since_us=now_us)
            if breaker.dead_model or now_us - seen.since_us < SILENCE_US:  # the dead wait to be healed
                lately[place] = seen
        self._traces = lately
        return set(lately)

    def _shown(self, named: Collection[Place]) -> Mapping[Place, Breaker]:
        """What is told: of the models that callers name only those that exist, lest their names fill the metrics."""
        breakers = {place: self._board.of(place) for place in (*self._told, *self._board.all())}
        return {
            place: breaker
            for place, breaker in breakers.items()
            if place in named or breaker.dead_model or self._told.get(place)
        }

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
            loads = {replica: backend.engine_load(replica) for replica in backend.replicas() or ("",)}
            self._observer.engines(name, {replica: load for replica, load in loads.items() if load is not None})
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
    """Every place that an enabled rule names; the server itself where callers name the model."""
    return frozenset(
        replace(target.place, version="") if target.place.model == ANY else target.place
        for rule in rules.rules
        if rule.enabled
        for target in (*rule.split, *rule.fallback)
    )
