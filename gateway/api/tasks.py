"""The task API: `POST /v1/infer`, `POST /v1/tasks/{task}`, `GET /v1/tasks[/{task}]`."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.api.answers import answer_id, exact_usd, json_answer, timing, unary
from gateway.api.body import form, gathered, is_json, json_object, media_type
from gateway.api.endpoint import Visit
from gateway.api.oip.errors import refusing
from gateway.api.request_headers import with_ordering_key
from gateway.core.errors import InternalError, InvalidInput, MalformedRequest, UnsupportedMediaType
from gateway.core.rules import Target
from gateway.core.types import NOTHING_USED, Answer, Finished, Message, Route, Started, Tensors, Usage
from gateway.http.exchange import Response
from gateway.pipeline import Pipeline, Task
from gateway.tasks import oip
from gateway.tasks.tensor import TensorInput

_MEDIA: Final = ("image", "audio")  # fields that come as files, and the content types of files without a form
_ORDERING_KEY: Final = "ordering_key"
_FILE: Final = "file"  # in a form, another name for them


async def infer(visit: Visit) -> Response:
    """`{"task", "input", "parameters"?, "ordering_key"?}` -> the task's answer."""
    document = json_object(visit.headers, visit.body)
    _only(document, ("task", "input", "parameters", _ORDERING_KEY))
    _put_in_order(visit, document)
    task = visit.enter(visit.api.task(document.get("task")))
    return await _answer(visit, task, document.get("input"), document.get("parameters", {}))


async def infer_task(visit: Visit) -> Response:
    """The same for one task; also as `multipart/form-data` and raw `image/*` and `audio/*`."""
    task = visit.enter(visit.api.task(visit.scope["path_params"]["task"]))
    kind = media_type(visit.headers)
    if kind == "multipart/form-data":
        parts = await form(visit.headers, visit.body)
        named = [(_media(task) if name == _FILE else name, value) for name, value in parts]
        return await _answer(visit, task, _typed(task, gathered(named)), {})
    medium = kind.partition("/")[0]
    if medium in _MEDIA:
        if medium != _media(task):
            raise UnsupportedMediaType(f"the task '{task.name}' takes no {medium}", field="content-type")
        query = visit.request.query_params.multi_items() if visit.scope["query_string"] else ()
        named = [*query, (medium, visit.body)]
        return await _answer(visit, task, _typed(task, gathered(named)), {})
    if not is_json(kind):
        raw = "" if _media(task) == _FILE else f", {_media(task)}/*"
        raise UnsupportedMediaType(f"send application/json, multipart/form-data{raw}", field="content-type")
    document = json_object(visit.headers, visit.body)
    _only(document, ("input", "parameters", _ORDERING_KEY))
    _put_in_order(visit, document)
    return await _answer(visit, task, document.get("input"), document.get("parameters", {}))


async def list_tasks(visit: Visit) -> Response:
    """Every task that this key may use: its schemas and where its requests go now."""
    allowed = visit.caller.tasks
    tasks = [t for t in visit.api.pipeline.tasks.values() if allowed is None or t.name in allowed]
    return json_answer({"items": [_described(visit, task) for task in tasks]})


async def get_task(visit: Visit) -> Response:
    """One task, as in the list."""
    task = visit.enter(visit.api.task(visit.scope["path_params"]["task"]))
    return json_answer(_described(visit, task))


async def _answer(visit: Visit, task: Task, given: object, parameters: object) -> Response:
    document, started, finished = await answered(visit, task, given, parameters)
    return json_answer(document, started, finished.usage)


async def answered(
    visit: Visit, task: Task, given: object, parameters: object, *, on_admitted: Callable[[], object] | None = None
) -> tuple[dict[str, Any], Started, Finished]:
    """The task's answer as a document, with the events around it. Raises `GatewayError`.

    `on_admitted`: see `Pipeline.handle`.
    """
    if not isinstance(parameters, Mapping):
        raise InvalidInput("must be an object", field="parameters")
    parsed = task.contract.parse(given, parameters)
    if isinstance(parsed, TensorInput):
        request = visit.inference(task, parsed, model=parsed.model, version=parsed.version, sequence=parsed.sequence)
    else:
        request = visit.inference(task, parsed)
    started, answer, finished = await unary(visit.api.pipeline, request, on_admitted=on_admitted)
    document = {
        "id": answer_id(started, request),
        "task": task.name,
        "output": output_of(answer),
        "route": _route(started.route),
        "usage": _usage(finished.usage),
        "timing": timing(finished.timing),
    }
    return document, started, finished


def output_of(answer: Answer | Message | Tensors) -> Mapping[str, Any]:
    """An answer as the task's JSON. Raises `MalformedRequest` for tensors that have no form in it."""
    if isinstance(answer, Answer):
        return answer.output
    if isinstance(answer, Tensors):
        with refusing():
            return {"outputs": oip.documents(answer.outputs)}
    raise InternalError("a task answer was expected")


def _media(task: Task) -> str:
    """The field of a task's input that a file is for; `file` where it takes none, which its contract refuses."""
    return next((name for name in _MEDIA if name in task.contract.input_schema["properties"]), _FILE)


def _typed(task: Task, fields: Mapping[str, str | bytes | list[str]]) -> dict[str, object]:
    """Text of forms and queries as the contract's schema wants it; what does not fit is left for its parser."""
    properties = task.contract.input_schema["properties"]
    typed: dict[str, object] = {}
    for name, value in fields.items():
        wants_integer = properties.get(name, {}).get("type") == "integer"
        if wants_integer and isinstance(value, str) and value.isdecimal() and len(value) <= 18:  # noqa: PLR2004 - int64
            typed[name] = int(value)
        else:
            typed[name] = value
    return typed


def _put_in_order(visit: Visit, document: Mapping[str, Any]) -> None:
    """The body's `ordering_key` is as good as the header's."""
    if _ORDERING_KEY in document:
        visit.headers = with_ordering_key(visit.headers, document[_ORDERING_KEY])


def _only(document: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in document:
        if name not in known:
            raise MalformedRequest(f"unknown field; this path takes {', '.join(known)}", field=name[:80])


def _described(visit: Visit, task: Task) -> dict[str, Any]:
    pipeline = visit.api.pipeline
    rule = pipeline.rules.current().rule_for(visit.caller, task=task.name)
    return {
        "task": task.name,
        "contract": task.contract.name,
        "input_schema": task.contract.input_schema,
        "output_schema": task.contract.output_schema,
        "timeout_ms": task.timeout_us // 1000,
        "route": None
        if rule is None
        else {
            "rule": rule.name,
            "split": [_target(pipeline, target) for target in rule.split],
            "fallback": [_target(pipeline, target) for target in rule.fallback],
        },
    }


def _target(pipeline: Pipeline, target: Target) -> dict[str, Any]:
    reason = pipeline.why_not_any(target.place)
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


def _usage(usage: Usage) -> dict[str, Any]:
    """What is known of it; that something is a guess is said only where it is one."""
    if usage is NOTHING_USED:  # as of all tensors
        return {}
    known = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "cost_usd": None if usage.cost_nano_usd is None else exact_usd(usage.cost_nano_usd),
        "estimated": usage.is_estimated or None,
        "estimated_scores": usage.estimated_scores or None,
    }
    return {name: value for name, value in known.items() if value is not None}
