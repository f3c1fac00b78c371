"""What is there, and changing it: metadata, configuration, statistics, readiness; index, load and unload."""

import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from gateway.api.auth import authorize_admin
from gateway.api.endpoint import Visit
from gateway.api.oip.errors import not_ready, refusing
from gateway.api.oip.infer import body_of
from gateway.api.oip.servers import ask, entered, servers
from gateway.core.errors import BackendBroke, BackendError, Fault, GatewayError, MalformedRequest, UnsupportedByBackend
from gateway.core.texts import replied
from gateway.core.types import Place
from gateway.http.exchange import Response
from gateway.model_control import ask_every_replica, on_every_replica
from gateway.ports import JsonObject, ModelServer
from gateway.tasks import oip
from gateway.tasks.tensor import check_name
from local_runtime.protocol.http_routes import Route
from local_runtime.protocol.json_text import dump
from local_runtime.protocol.oip_repository import read_index, read_load, read_unload

# What model servers offer their own clients and this path does not.
_NOT_OFFERED: Final = frozenset({"system_shared_memory", "cuda_shared_memory", "trace", "logging"})
_NO_REGIONS: Final = (
    "shared memory is not offered: a client's regions cannot be reached from here. Send tensors as bytes"
)
_NO_SETTINGS: Final = "trace and log settings are not offered here: they are the model server's own"
_VERSION: Final = re.compile(r"[1-9][0-9]*")


async def server(visit: Visit, _found: Route) -> Response:
    """Name, version and extensions of the first server that answers."""
    told = await ask(visit, lambda server, place: server.server_metadata(place.replica))
    extensions = [name for name in told.get("extensions", ()) if name not in _NOT_OFFERED]
    return _json({**told, "extensions": extensions})


async def metadata(visit: Visit, found: Route) -> Response:
    """A model's inputs and outputs."""
    return _json(await _of_model(visit, found, lambda server, place: server.metadata(place)))


async def config(visit: Visit, found: Route) -> Response:
    """A model's whole configuration."""
    return _json(await _of_model(visit, found, lambda server, place: server.config(place)))


async def statistics(visit: Visit, found: Route) -> Response:
    """What the first server that answers has counted, of one model or of all."""
    if found.model:
        told = await _of_model(visit, found, lambda server, place: server.statistics(place))
    else:
        told = await ask(visit, lambda server, place: server.statistics(replace(place, model="")))
    models = visit.caller.models
    rows = [_in_order(row) for row in told["model_stats"] if models is None or row.get("name") in models]
    return _json({**told, "model_stats": rows})


async def model_ready(visit: Visit, found: Route) -> Response:
    """Whether any server can be asked for the model now; 503 where none can."""
    entered(visit)
    backends = visit.api.pipeline.backends
    try:
        await _of_model(visit, found, lambda _, place: backends[place.backend].probe(place))
    except GatewayError:
        return not_ready("Model version not ready")
    return Response(media_type="application/json")


async def index(visit: Visit, _found: Route) -> Response:
    """The models of the repository; where servers differ, a row says so."""
    authorize_admin(visit.caller)
    with refusing():
        ready_only = read_index(await body_of(visit))

    async def told(server: ModelServer, _place: Place) -> Mapping[str, list[JsonObject] | Fault]:
        rows = await ask_every_replica(server, lambda replica: server.index(replica, ready_only=ready_only))
        faults = [answer for answer in rows.values() if isinstance(answer, Fault)]
        if len(faults) == len(rows):
            raise BackendError(faults[0])
        return rows

    return _json(_merged(await ask(visit, told)))


async def load(visit: Visit, found: Route) -> Response:
    """Load a model on every server that the rule names; 200 when all of them have it ready."""
    authorize_admin(visit.caller)
    with refusing():
        settings, files = read_load(await body_of(visit))
    for path in files:
        _check_path(path)
    return await _everywhere(
        visit,
        found,
        lambda server, replica: server.load(found.model, replica=replica, config=settings, files=files or None),
    )


async def unload(visit: Visit, found: Route) -> Response:
    """Unload a model on every server that the rule names."""
    authorize_admin(visit.caller)
    with refusing():
        with_dependents = read_unload(await body_of(visit))
    return await _everywhere(
        visit,
        found,
        lambda server, replica: server.unload(found.model, replica=replica, unload_dependents=with_dependents),
    )


async def no_regions(visit: Visit, _found: Route) -> Response:
    """No shared memory is registered, ever."""
    entered(visit)
    return _json([])


async def not_offered(visit: Visit, _found: Route) -> Response:
    """Clients' shared memory, trace and log settings."""
    entered(visit)
    is_memory = "sharedmemory" in visit.request.url.path
    raise UnsupportedByBackend(_NO_REGIONS if is_memory else _NO_SETTINGS)


async def _of_model(visit: Visit, found: Route, call: Callable[[ModelServer, Place], Awaitable[Any]]) -> Any:
    entered(visit)
    check_name(found.model, found.version)
    return await ask(visit, call, model=found.model, version=found.version)


async def _everywhere(visit: Visit, found: Route, call: Callable[[ModelServer, str], Awaitable[None]]) -> Response:
    check_name(found.model)
    faults: dict[str, Fault | None] = {}
    for name, server in servers(visit, found.model).items():
        outcomes = await on_every_replica(server, partial(call, server))
        faults |= {f"{name}@{replica}" if replica else name: fault for replica, fault in outcomes.items()}
    failed = {place: fault for place, fault in faults.items() if fault is not None}
    if failed:
        raise _failure(found.call, faults)
    return Response(media_type="application/json")


def _failure(call: str, faults: Mapping[str, Fault | None]) -> GatewayError:
    """What became of the call at each server; the status is that of the first that failed."""
    first = next(fault for fault in faults.values() if fault is not None)
    outcomes = {place: "done" if fault is None else _words(fault) for place, fault in faults.items()}
    told = "; ".join(f"{place}: {outcome}" for place, outcome in outcomes.items())
    error = BackendBroke(f"{call}: {told}")
    if first.reply is not None:
        text = first.reply.text if len(faults) == 1 else f"{call}: {told}"
        error.reply = replace(first.reply, text=text)
    return error


def _words(fault: Fault) -> str:
    return replied(fault.reply.text) if fault.reply is not None else f"not reached ({fault.kind.value})"


def _check_path(path: str) -> None:
    """Raise `MalformedRequest` unless a file of a load lies in the folder of one of the model's versions."""
    version, _, rest = path.partition("/")
    if not _VERSION.fullmatch(version) or not rest or not all(oip.is_name(part) for part in rest.split("/")):
        raise MalformedRequest("a file of a load must be named file:<version>/<name>")


def _merged(rows: Mapping[str, Sequence[JsonObject] | Fault]) -> list[JsonObject]:
    """One row for each model and version: as it is where all servers say the same."""
    by_version: dict[tuple[str, str], dict[str, JsonObject]] = defaultdict(dict)
    for replica, told in rows.items():
        for row in () if isinstance(told, Fault) else told:
            by_version[row["name"], row.get("version", "")][replica] = row
    return [_agreed(versions, rows) for versions in by_version.values()]


def _agreed(told: Mapping[str, JsonObject], rows: Mapping[str, object]) -> JsonObject:
    states = {
        replica: "UNREACHABLE" if isinstance(rows[replica], Fault) else told.get(replica, {}).get("state", "ABSENT")
        for replica in rows
    }
    first = next(iter(told.values()))
    if len(set(states.values())) == 1:
        return first
    worst = next((row for row in told.values() if row.get("state") != "READY"), first)
    return {**worst, "reason": ", ".join(f"{replica}: {state}" for replica, state in states.items())}


def _in_order(model: JsonObject) -> JsonObject:
    """A model's counters as Triton's HTTP server orders them, other than its messages do."""
    late = ("batch_stats", "memory_usage")
    return {name: value for name, value in model.items() if name not in late} | {
        name: model[name] for name in late if name in model
    }


def _json(document: Any) -> Response:
    return Response(dump(document), media_type="application/json")
