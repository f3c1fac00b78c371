"""The control plane's paths about models: what each server has and counts, load and unload on all, deploys."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Query

from gateway.admin.access.actors import Visit
from gateway.admin.access.door import CurrentVisit
from gateway.admin.document import refuses
from gateway.admin.fields import PAGE_SIZE, DeployPath, ModelPath
from gateway.admin.models.deploy import Deploy, Pace
from gateway.admin.models.deploys import Deploys, shown
from gateway.admin.models.fleet import (
    LOOK_S,
    READY,
    ModelBackend,
    Servers,
    Spot,
    everywhere,
    figures_of,
    first_line,
    told,
    versions_of,
)
from gateway.admin.models.model_bodies import (
    ControlOut,
    DeployIn,
    DeployOut,
    DeploysOut,
    EventsOut,
    FannedOut,
    FiguresOut,
    LoadIn,
    ModelOut,
    ModelsOut,
    OutcomeOut,
    ReplicaOut,
    UnloadIn,
    UnreachableOut,
    VersionOut,
)
from gateway.admin_ports import Events
from gateway.core.errors import BackendBroke, DeployConflict, Fault, UnknownDeploy, UnknownModel
from gateway.core.models import ModelFigures
from gateway.core.rollouts.model_move import WHOLE
from gateway.ports import JsonObject

LOAD_S = 600.0  # large weights and a warm-up take minutes
EVENTS = 200  # those kept in view of one model
HALF = 50
_UNDONE: Final = refuses(UnknownModel, UnknownDeploy, DeployConflict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlane:
    """What the paths work on; without `events` none are told."""

    servers: Servers
    deploys: Deploys
    events: Events | None = None


def model_routes(plane: ModelPlane) -> APIRouter:
    """`/models`, `/events` and `/deploys`."""
    router = APIRouter()
    for part in (_models(plane), _control(plane), _deploys(plane)):
        router.include_router(part)
    return router


def _models(plane: ModelPlane) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/models")
    async def get_models() -> ModelsOut:
        """Every model of every backend: its versions on each server, its counters, and what happened to it."""
        items, silent = await _all_models(plane)
        return ModelsOut(items=items, unreachable=[*_unreachable(plane.servers), *silent])

    @router.get("/models/{model}", openapi_extra=refuses(UnknownModel))
    async def get_model(model: ModelPath) -> ModelsOut:
        """One model, on every backend that has it."""
        found, silent = await _all_models(plane)
        items = [one for one in found if one.model == model]
        if not items:
            raise UnknownModel(f"no server that can be reached has the model '{model}'"[:200])
        return ModelsOut(items=items, unreachable=[*_unreachable(plane.servers), *silent])

    @router.get("/events")
    async def get_events(limit: Annotated[int, Query(ge=1, le=1000, description=PAGE_SIZE)] = 100) -> EventsOut:
        """Models that were found dead, and what became of them."""
        return EventsOut(items=[dict(event) for event in await _read(plane, limit)])

    return router


def _control(plane: ModelPlane) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.post("/models/{model}/load", openapi_extra=refuses(UnknownModel, BackendBroke))
    async def load_model(model: ModelPath, visit: CurrentVisit, body: LoadIn | None = None) -> ControlOut:
        """Load it, or load it anew, on every server; 502 where no server has done it."""
        wish = body or LoadIn()
        config = json.dumps(wish.config) if isinstance(wish.config, dict) else wish.config

        async def load(server: ModelBackend, replica: str) -> None:
            await server.load(model, replica=replica, config=config)

        servers = await _having(plane.servers.only(wish.backend), model)
        done = _outcome(model, "load", await everywhere(servers, load, timeout_s=LOAD_S))
        # A configuration may have parameters that are secrets.
        visit.tell("model.load", model, after={**_fanned(done), "has_config": config is not None})
        return done

    @router.post("/models/{model}/unload", openapi_extra=refuses(UnknownModel, BackendBroke))
    async def unload_model(model: ModelPath, visit: CurrentVisit, body: UnloadIn | None = None) -> ControlOut:
        """Unload it on every server; what it has begun it finishes."""
        wish = body or UnloadIn()

        async def unload(server: ModelBackend, replica: str) -> None:
            await server.unload(model, replica=replica, unload_dependents=wish.unload_dependents)

        servers = await _having(plane.servers.only(wish.backend), model)
        done = _outcome(model, "unload", await everywhere(servers, unload, timeout_s=LOAD_S))
        visit.tell("model.unload", model, after=_fanned(done))
        return done

    return router


def _deploys(plane: ModelPlane) -> APIRouter:
    router = APIRouter(tags=["deploys"])
    deploys = plane.deploys

    def out(deploy: Mapping[str, object]) -> DeployOut:
        return DeployOut.model_validate(deploy)

    def begun(deploy: Deploy, visit: Visit) -> DeployOut:
        told = {"deploy": deploy.id, "model": deploy.model, "version": deploy.new, "status": deploy.status}
        visit.tell(visit.action, visit.target, before={"version": deploy.old}, after=told)
        return out(shown(deploy))

    @router.post("/models/{model}/deploy", status_code=202, openapi_extra=refuses(UnknownModel, DeployConflict))
    async def deploy_model(model: ModelPath, body: DeployIn, visit: CurrentVisit) -> DeployOut:
        """Move its callers to a version that lies in the repository; goes on after the answer."""
        percents = tuple(p for p in (body.canary, HALF, WHOLE) if p >= body.canary)
        pace = Pace(
            percents=tuple(dict.fromkeys(percents)),
            hold_s=body.hold_s,
            max_error_ratio=body.max_error_ratio,
            load_timeout_s=body.load_timeout_s,
        )
        return begun(await deploys.start(model, body.version, backend=body.backend, pace=pace), visit)

    @router.post("/models/{model}/rollback", status_code=202, openapi_extra=_UNDONE)
    async def rollback_model(model: ModelPath, visit: CurrentVisit) -> DeployOut:
        """Undo its last deploy; goes on after the answer."""
        return begun(await deploys.rollback_model(model), visit)

    @router.get("/deploys")
    async def get_deploys() -> DeploysOut:
        """The last hundred deploys."""
        return DeploysOut(items=[out(shown(one)) for one in await deploys.recent()])

    @router.get("/deploys/{deploy_id}", openapi_extra=refuses(UnknownDeploy))
    async def get_deploy(deploy_id: DeployPath) -> DeployOut:
        """One deploy as it is now."""
        return out(shown(await deploys.get(deploy_id)))

    @router.post(
        "/deploys/{deploy_id}/rollback",
        status_code=202,
        openapi_extra=_UNDONE,
    )
    async def rollback_deploy(deploy_id: DeployPath, visit: CurrentVisit) -> DeployOut:
        """Undo it; goes on after the answer. Of one that is done the answer is the deploy back."""
        return begun(await deploys.rollback(deploy_id), visit)

    @router.post("/deploys/{deploy_id}/continue", status_code=202, openapi_extra=refuses(UnknownDeploy, DeployConflict))
    async def continue_deploy(deploy_id: DeployPath, visit: CurrentVisit) -> DeployOut:
        """Go on with one that was interrupted, where it was."""
        return begun(await deploys.go_on(deploy_id), visit)

    return router


async def _all_models(plane: ModelPlane) -> tuple[list[ModelOut], list[UnreachableOut]]:
    """The models, and the backends none of whose servers answers."""
    servers = plane.servers.reachable
    found, figures, events = await asyncio.gather(
        everywhere(servers, lambda server, replica: server.index(replica), timeout_s=LOOK_S),
        figures_of(servers, timeout_s=LOOK_S),
        _read(plane, EVENTS),
    )
    silent = []
    models = []
    for backend in servers:
        indexes = {spot: answer for spot, answer in found.items() if spot.backend == backend}
        faults = [answer for answer in indexes.values() if isinstance(answer, Fault)]
        if faults and len(faults) == len(indexes):
            silent.append(UnreachableOut(backend=backend, reason=f"it does not answer: {told(faults[0])}"))
        names = {str(entry["name"]) for index in indexes.values() if not isinstance(index, Fault) for entry in index}
        models += [
            ModelOut(
                model=name,
                backend=backend,
                replicas=[_replica(spot, index, name) for spot, index in indexes.items()],
                figures=[_figures(one) for one in figures[backend] if one.model == name],
                events=[
                    dict(event) for event in events if (event.get("backend"), event.get("model")) == (backend, name)
                ],
            )
            for name in sorted(names)
        ]
    return models, silent


async def _having(servers: Servers, model: str) -> dict[str, ModelBackend]:
    """The backends in whose repository the model is. Raises `UnknownModel`, and `BackendBroke` where none can tell."""
    found = await everywhere(servers.reachable, lambda server, replica: server.index(replica))
    names = {
        spot.backend
        for spot, index in found.items()
        if not isinstance(index, Fault) and any(entry.get("name") == model for entry in index)
    }
    if not names and found and all(isinstance(index, Fault) for index in found.values()):
        raise BackendBroke("no model server answers")
    if not names:
        raise UnknownModel(f"no server that can be reached has the model '{model}'"[:200])
    return {name: servers.reachable[name] for name in names}


async def _read(plane: ModelPlane, limit: int) -> Sequence[JsonObject]:
    return () if plane.events is None else await plane.events.read(limit)


def _unreachable(servers: Servers) -> list[UnreachableOut]:
    return [UnreachableOut(backend=name, reason=reason) for name, reason in servers.unreachable.items()]


def _replica(spot: Spot, index: list[JsonObject] | Fault, model: str) -> ReplicaOut:
    if isinstance(index, Fault):
        return ReplicaOut(replica=spot.replica, ready=False, versions=[], error=told(index))
    versions = [
        VersionOut(version=version, state=state.state, reason=first_line(state.reason))
        for version, state in versions_of(index, model).items()
    ]
    return ReplicaOut(replica=spot.replica, ready=any(one.state == READY for one in versions), versions=versions)


def _figures(figures: ModelFigures) -> FiguresOut:
    requests = figures.requests or 1
    return FiguresOut(
        replica=figures.replica,
        version=figures.version,
        requests=figures.requests,
        failures=figures.failures,
        inferences=figures.inferences,
        executions=figures.executions,
        mean_batch_size=round(figures.inferences / figures.executions, 2) if figures.executions else 0.0,
        queue_us=figures.queue_us // requests,
        compute_input_us=figures.compute_input_us // requests,
        compute_infer_us=figures.compute_infer_us // requests,
        compute_output_us=figures.compute_output_us // requests,
        batch_sizes=dict(figures.batch_sizes),
    )


def _fanned(done: ControlOut) -> JsonObject:
    return {
        "replicas": done.applied.replicas,
        "of": done.applied.of,
        "backends": sorted({o.backend for o in done.outcomes}),
    }


def _outcome(model: str, action: str, found: Mapping[Spot, Fault | None]) -> ControlOut:
    """What became of it everywhere. Raises `BackendBroke` where nobody has done it."""
    outcomes = [
        OutcomeOut(
            backend=spot.backend, replica=spot.replica, ok=fault is None, error="" if fault is None else told(fault)
        )
        for spot, fault in found.items()
    ]
    done = sum(one.ok for one in outcomes)
    if not done:
        first = next(iter(outcomes), None)
        where = (
            f"{Spot(backend=first.backend, replica=first.replica)}: {first.error}" if first else "there is no server"
        )
        raise BackendBroke(f"{action} of '{model}': {where}")
    applied = FannedOut(replicas=done, of=len(outcomes))
    return ControlOut.model_validate({"model": model, "action": action, "applied": applied, "outcomes": outcomes})
