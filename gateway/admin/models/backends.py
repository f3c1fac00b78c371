"""The control plane's path about backends: each server as a probe finds it, and as the workers see it."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter

from gateway.admin.models.fleet import LOOK_S, ModelBackend, Servers, Spot, everywhere, told
from gateway.admin.models.model_bodies import BackendOut, BackendsOut, EngineOut, ServerOut
from gateway.admin.watching.workers import report_of
from gateway.admin_ports import RuleStore
from gateway.core.errors import Fault, RulesUnavailable
from gateway.core.switches import NO_SWITCHES, Switches
from gateway.core.types import ANY, Place
from gateway.core.watching.worker_view import WorkerView

OFF: Final = "no worker has it on: theirs may be another configuration"
UNTOLD: Final = "not known now: no worker tells anything, or Redis does not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What the workers' reports say, and the switches; `is_known` is false where they could not be read."""

    views: Sequence[WorkerView] = ()
    switches: Switches = NO_SWITCHES
    now_ms: int = 0

    @property
    def is_known(self) -> bool:
        return bool(self.views)

    def backends(self) -> Iterable[str]:
        """Those that some worker has on."""
        return dict.fromkeys(name for view in self.views for name in view.replicas)

    def replicas(self, backend: str) -> Sequence[str]:
        """Its servers by name; one without a name where it has but one."""
        names = dict.fromkeys(name for view in self.views for name in view.replicas.get(backend, ()))
        return list(names) or ([""] if any(backend in view.replicas for view in self.views) else [])

    def waiting(self, backend: str) -> int | None:
        """Before its servers, in all workers."""
        return sum(view.waiting.get(backend, 0) for view in self.views) if self.is_known else None

    def in_flight(self, spot: Spot) -> int | None:
        """At this server, from all workers."""
        key = (spot.backend, spot.replica)
        return sum(view.in_flight.get(key, 0) for view in self.views) if self.is_known else None

    def shut(self, spot: Spot) -> dict[str, int]:
        """What breakers keep out of this server, with its reason; and in how many workers."""
        counts: dict[str, int] = {}
        for view in self.views:
            for place, reason in view.shut.items():
                if (place.backend, place.replica) == (spot.backend, spot.replica):
                    name = (
                        "" if place.model == ANY else f"{place.model}{':' + place.version if place.version else ''}: "
                    )
                    counts[name + reason] = counts.get(name + reason, 0) + 1
        return counts

    def is_shut(self, spot: Spot) -> bool:
        """Whether no worker sends anything there."""
        server = Place(backend=spot.backend, model=ANY, replica=spot.replica)
        return self.is_known and all(server in view.shut for view in self.views)

    def closing(self, spot: Spot) -> list[str]:
        """The ids of the switches that block or drain this server, or its backend."""
        place = Place(backend=spot.backend, model="", replica=spot.replica)
        return [
            one.id
            for one in self.switches.in_force(self.now_ms)
            if one.action in ("block", "drain") and one.scope.kind != "model" and one.scope.has_place(place)
        ]

    def engine(self, spot: Spot) -> EngineOut | None:
        """What its engine said last."""
        newest = sorted(self.views, key=lambda view: view.at_ms)
        loads = [view.engines[key] for view in newest if (key := (spot.backend, spot.replica)) in view.engines]
        if not loads:
            return None
        return EngineOut(running=loads[-1].running, waiting=loads[-1].waiting, kv_used=loads[-1].kv_used)


def backend_routes(servers: Servers, rules: RuleStore | None) -> APIRouter:
    """`/backends`. Backends that `servers` knows the kind of and nothing else are LLM endpoints."""
    router = APIRouter(tags=["backends"])

    @router.get("/backends")
    async def get_backends() -> BackendsOut:
        """All backends: model servers that can be reached are probed now; the rest is as the workers see it."""
        found, seen = await asyncio.gather(everywhere(servers.reachable, _probe, timeout_s=LOOK_S), _read(rules))
        names = dict.fromkeys([*servers.reachable, *servers.unreachable, *servers.kinds, *seen.backends()])
        return BackendsOut(items=[_backend(name, servers, found, seen) for name in names])

    return router


async def _probe(server: ModelBackend, replica: str) -> float:
    """How long an answer takes, in milliseconds."""
    began = time.perf_counter()
    await server.probe(Place(backend="", model=ANY, replica=replica))
    return round((time.perf_counter() - began) * 1000, 2)


async def _read(rules: RuleStore | None) -> _Told:
    """Probes are worth showing without what workers tell."""
    if rules is None:
        return _Told()
    try:
        workers, switches = await rules.workers(), await rules.switches()
    except RulesUnavailable:
        return _Told()
    views = [view for view in map(report_of, workers) if view.at_ms]
    return _Told(views=views, switches=switches, now_ms=round(time.time() * 1000))


def _backend(name: str, servers: Servers, found: Mapping[Spot, float | Fault], seen: _Told) -> BackendOut:
    probed = {spot: answer for spot, answer in found.items() if spot.backend == name}
    spots = list(probed) or [Spot(backend=name, replica=replica) for replica in seen.replicas(name)]
    detail = servers.unreachable.get(name, "")
    is_on = bool(seen.replicas(name)) if seen.is_known else None
    if is_on is False:
        detail = servers.why_off.get(name, OFF)
    elif not spots:
        detail = detail or UNTOLD
    return BackendOut(
        backend=name,
        kind=servers.kinds.get(name, ""),
        reachable=name in servers.reachable,
        is_on=is_on,
        detail=detail,
        repository=servers.repositories.get(name, ""),
        waiting=seen.waiting(name),
        replicas=[_server(spot, probed.get(spot), seen, is_only=len(spots) == 1) for spot in spots],
    )


def _server(spot: Spot, answer: float | Fault | None, seen: _Told, *, is_only: bool) -> ServerOut:
    of = len(seen.views)
    shut = [
        reason if count == of else f"{reason} ({count} of {of} workers)" for reason, count in seen.shut(spot).items()
    ]
    is_fault = isinstance(answer, Fault)
    return ServerOut(
        replica=spot.replica,
        live=not is_fault if answer is not None else not seen.is_shut(spot),
        latency_ms=None if isinstance(answer, Fault) else answer,
        error=told(answer) if isinstance(answer, Fault) else "",
        in_flight=seen.in_flight(spot),
        waiting=seen.waiting(spot.backend) if is_only else None,
        shut=shut,
        switches=seen.closing(spot),
        engine=seen.engine(spot),
    )
