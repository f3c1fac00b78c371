"""The task API: `POST /v1/infer`, `POST /v1/tasks/{task}`, `GET /v1/tasks[/{task}]`."""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response

from gateway.api.body import form, json_object, media_type
from gateway.api.endpoint import Visit
from gateway.api.headers import limit_headers, route_headers
from gateway.core.errors import InternalError, InvalidInput, MalformedRequest, UnsupportedMediaType
from gateway.core.routing import Target
from gateway.core.types import Answer, Finished, InferenceRequest, Message, Route, Started, Timing, Usage
from gateway.pipeline import Pipeline, Task

NUMPY = orjson.OPT_SERIALIZE_NUMPY  # embeddings stay arrays until they are written


async def infer(visit: Visit) -> Response:
    """`{"task", "input", "parameters"?}` -> the task's answer."""
    document = json_object(visit.request.headers, visit.body)
    _only(document, ("task", "input", "parameters"))
    task = visit.api.task(document.get("task"))
    return await _answer(visit, task, document.get("input"), document.get("parameters", {}))


async def infer_task(visit: Visit) -> Response:
    """The same for one task; also as `multipart/form-data` and raw `image/*`."""
    task = visit.api.task(visit.request.path_params["task"])
    kind = media_type(visit.request.headers)
    if kind == "multipart/form-data":
        fields = await form(visit.request.headers, visit.body)
        upload = fields.pop("file", None)
        given = {**_typed(task, fields), **({"image": upload} if upload is not None else {})}
        return await _answer(visit, task, given, {})
    if kind.startswith("image/"):
        if "image" not in task.contract.input_schema["properties"]:
            raise UnsupportedMediaType(f"the task '{task.name}' takes no image", field="content-type")
        given = {**_typed(task, dict(visit.request.query_params)), "image": visit.body}
        return await _answer(visit, task, given, {})
    document = json_object(visit.request.headers, visit.body)
    _only(document, ("input", "parameters"))
    return await _answer(visit, task, document.get("input"), document.get("parameters", {}))


async def list_tasks(visit: Visit) -> Response:
    """Every task that this key may use: its schemas and where its requests go now."""
    allowed = visit.caller.tasks
    tasks = [t for t in visit.api.pipeline.tasks.values() if allowed is None or t.name in allowed]
    return _json({"items": [_described(visit.api.pipeline, t) for t in tasks]})


async def get_task(visit: Visit) -> Response:
    """One task, as in the list."""
    return _json(_described(visit.api.pipeline, visit.api.task(visit.request.path_params["task"])))


async def _answer(visit: Visit, task: Task, given: object, parameters: object) -> Response:
    visit.task = task.name
    if not isinstance(parameters, Mapping):
        raise InvalidInput("must be an object", field="parameters")
    request = visit.inference(task, task.contract.parse(given, parameters))
    started, answer, finished = await unary(visit.api.pipeline, request)
    if isinstance(answer, Message):
        raise InternalError("a task answer was expected")
    return _json(
        {
            "id": request.id,
            "task": task.name,
            "output": answer.output,
            "route": _route(started.route),
            "usage": _usage(answer.usage),
            "timing": _timing(finished.timing),
        },
        headers={**limit_headers(started.verdict), **route_headers(started.route)},
    )


async def unary(pipeline: Pipeline, request: InferenceRequest) -> tuple[Started, Answer | Message, Finished]:
    """The events of an answer that comes whole."""
    started: Started | None = None
    answer: Answer | Message | None = None
    finished: Finished | None = None
    async with aclosing(pipeline.handle(request)) as events:
        async for event in events:
            match event:
                case Started():
                    started = event
                case Answer() | Message():
                    answer = event
                case Finished():
                    finished = event
    if started is None or answer is None or finished is None:
        raise InternalError("the answer came without its parts")
    return started, answer, finished


def _typed(task: Task, fields: Mapping[str, str | bytes]) -> dict[str, object]:
    """Text of forms and queries as the contract's schema wants it; what does not fit is left for its parser."""
    properties = task.contract.input_schema["properties"]
    typed: dict[str, object] = {}
    for name, value in fields.items():
        wants_integer = properties.get(name, {}).get("type") == "integer"
        is_number = isinstance(value, str) and value.isdecimal() and len(value) <= 18  # noqa: PLR2004 - int64
        typed[name] = int(value) if wants_integer and is_number else value
    return typed


def _only(document: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in document:
        if name not in known:
            raise MalformedRequest(f"unknown field; this path takes {', '.join(known)}", field=name[:80])


def _described(pipeline: Pipeline, task: Task) -> dict[str, Any]:
    routes = [
        {
            "rule": rule.name,
            "split": [_target(pipeline, t) for t in rule.split],
            "fallback": [_target(pipeline, t) for t in rule.fallback],
        }
        for rule in pipeline.rules.current().rules
        if rule.enabled and rule.match.task in ("*", task.name)
    ]
    return {
        "task": task.name,
        "contract": task.contract.name,
        "input_schema": task.contract.input_schema,
        "output_schema": task.contract.output_schema,
        "timeout_ms": task.timeout_us // 1000,
        "routes": routes,
    }


def _target(pipeline: Pipeline, target: Target) -> dict[str, Any]:
    reason = pipeline.why_not(target)
    return {
        "backend": target.backend,
        "model": target.model,
        "version": target.version or None,
        "weight": target.weight,
        "healthy": reason is None,
        "reason": reason,
    }


def _route(route: Route) -> dict[str, Any]:
    return {
        "backend": route.backend,
        "model": route.model,
        "version": route.version or None,
        "rule": route.rule,
        "attempts": route.attempts,
    }


def _usage(usage: Usage) -> dict[str, int]:
    counts = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
    return {name: count for name, count in counts.items() if count is not None}


def _timing(timing: Timing) -> dict[str, float | None]:
    return {
        "total_ms": timing.total_us / 1000,
        "admit_ms": timing.admit_us / 1000,
        "queue_ms": None if timing.queue_us is None else timing.queue_us / 1000,
        "backend_ms": timing.backend_us / 1000,
    }


def _json(document: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(document, option=NUMPY), media_type="application/json", headers=dict(headers or {}))
