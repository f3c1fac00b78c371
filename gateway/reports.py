"""What a worker tells of itself, once a second, for the control plane to show and to explain with.

Everything in it is what this worker alone sees; the control plane adds workers up.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.core.switches import Scope, is_for_places
from gateway.core.types import InferenceRequest, Place
from gateway.pipeline import Pipeline
from gateway.shadowing import Copy
from gateway.walk import Walk


def report(pipeline: Pipeline) -> Mapping[str, Any]:
    """As JSON's types. Places stand as rows of backend, model, version, replica, and what is told of them.

    `in_flight`: requests at each place; `tasks`: by task, those that wait included; `waiting`: before each backend;
    `shut`: places that breakers keep out, and why; `replicas`: of each backend that is on; `standings`: what
    strategies see of LLM endpoints (requests, tokens, first-token time in microseconds or null); `engines`: what LLM
    servers say of themselves; `drains`: what is still under way of each drain's scope, by the switch's id; `shadows`:
    how many copies are under way, and how many were not sent so far.
    """
    now_us = pipeline.clock()
    walks = list(pipeline.under_way.values())
    at = Counter(place for walk in walks for place in walk.places())
    copies = list(pipeline.shadows.at_servers()) if pipeline.shadows else []
    at.update(copy.place for copy in copies)
    backends = pipeline.backends
    shut = ((place, pipeline.board.why_not(place, now_us)) for place in pipeline.board.all())
    return {
        "at_ms": pipeline.wall_clock() // 1000,
        "in_flight": [[*_row(place), count] for place, count in at.items()],
        "tasks": dict(Counter(walk.task.name for walk in walks)),
        "waiting": {name: sum(gate.waiting().values()) for name, gate in pipeline.gates.items()},
        "shut": [[*_row(place), reason] for place, reason in shut if reason],
        "replicas": {name: list(backend.replicas()) for name, backend in backends.items()},
        "standings": _standings(pipeline, now_us),
        "engines": _engines(pipeline),
        "drains": _drains(pipeline, walks, copies),
        "shadows": _shadows(pipeline),
    }


def _row(place: Place) -> tuple[str, str, str, str]:
    return place.backend, place.model, place.version, place.replica


def _shadows(pipeline: Pipeline) -> Mapping[str, int]:
    shadows = pipeline.shadows
    return {} if shadows is None else {"in_flight": shadows.in_flight, "skipped": shadows.skipped}


def _standings(pipeline: Pipeline, now_us: int) -> list[list[Any]]:
    rows = []
    for place in pipeline.loads.places():
        standing = pipeline.loads.standing(place, now_us=now_us)
        measured = standing.first_token_us if standing.is_measured else None
        rows.append([*_row(place), standing.requests, standing.tokens, measured])
    return rows


def _engines(pipeline: Pipeline) -> list[list[Any]]:
    rows = []
    for name, backend in pipeline.backends.items():
        for replica in backend.replicas() or ("",):
            load = backend.engine_load(replica)
            if load is not None:
                rows.append([name, replica, load.running, load.waiting, load.kv_used])
    return rows


def _drains(pipeline: Pipeline, walks: Iterable[Walk], copies: Iterable[Copy]) -> dict[str, int]:
    """By the id of each drain: how many requests of its scope, and copies, are not over."""
    switches = pipeline.rules.current().switches.in_force(pipeline.wall_clock() // 1000)
    under_way = [(walk.request, tuple(walk.places())) for walk in walks]
    under_way += [(copy.request, (copy.place,)) for copy in copies]
    return {
        one.id: sum(_is_of(one.scope, request, places) for request, places in under_way)
        for one in switches
        if one.action == "drain"
    }


def _is_of(scope: Scope, request: InferenceRequest, places: Iterable[Place]) -> bool:
    """Whether the request is among what a drain waits for."""
    if is_for_places(scope) and any(scope.has_place(place) for place in places):
        return True
    return scope.has_request(request)
