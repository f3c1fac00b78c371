"""The OpenAI-compatible paths. Upstreams' answers pass through, but for their cost; our own have their shape."""

import base64
import itertools
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson

from gateway.api.answers import answer_headers, exact_usd, json_answer, unary
from gateway.api.auth import authorize_model
from gateway.api.body import json_object
from gateway.api.endpoint import Api, Visit
from gateway.api.errors import openai_document
from gateway.api.event_stream import StreamForm, streamed
from gateway.core.errors import (
    GatewayError,
    InternalError,
    InvalidInput,
    MalformedRequest,
    UnknownModel,
)
from gateway.core.types import Answer, Delta, Deltas, Event, Message, OpenAIApi, Usage
from gateway.http.exchange import Response
from gateway.pipeline import Task
from gateway.tasks.chat import Chat, Parse, parse_chat, parse_completion, parse_responses
from gateway.tasks.text_embedding import TextEmbedding

_DONE: Final = b"data: [DONE]\n\n"


async def chat_completions(visit: Visit) -> Response:
    """`POST /v1/chat/completions`, streamed or whole."""
    return await _generated(visit, parse_chat)


async def completions(visit: Visit) -> Response:
    """`POST /v1/completions`, streamed or whole."""
    return await _generated(visit, parse_completion)


async def responses(visit: Visit) -> Response:
    """`POST /v1/responses`, streamed or whole, by upstreams that have it."""
    return await _generated(visit, parse_responses)


async def _generated(visit: Visit, parse: Parse) -> Response:
    """An upstream's own answer to a body of one of its APIs."""
    body = json_object(visit.headers, visit.body)
    task = visit.enter(_task_of_model(visit.api, body, Chat.name))
    parsed = parse(body)
    named = body["model"]
    request = visit.inference(task, parsed, stream=parsed.stream, model="" if named == task.name else named)
    if parsed.stream:
        return await streamed(visit.api, request, _stream_form(parsed.api))
    started, message, finished = await unary(visit.api.pipeline, request)
    if not isinstance(message, Message):
        raise InternalError("a chat answer was expected")
    answer = with_cost(message.body, finished.usage, parsed.api)
    return Response(answer, media_type="application/json", headers=answer_headers(started, finished.usage))


async def embeddings(visit: Visit) -> Response:
    """`POST /v1/embeddings`, answered by the tensor backends of a text-embedding task."""
    body = json_object(visit.headers, visit.body)
    task = visit.enter(_task_of_model(visit.api, body, TextEmbedding.name))
    if body["model"] != task.name:
        authorize_model(visit.caller, body["model"])
    encoding = body.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise InvalidInput("must be float or base64", field="encoding_format")
    dimensions = body.get("dimensions")
    if not isinstance(task.contract, TextEmbedding):
        raise InternalError("a text-embedding contract was expected")
    if dimensions is not None and dimensions != task.contract.dimensions:
        raise InvalidInput("this model's vectors have one size and cannot be shortened", field="dimensions")
    try:
        parsed = task.contract.parse({"text": body.get("input")}, {})
        started, answer, finished = await unary(visit.api.pipeline, visit.inference(task, parsed))
    except InvalidInput as error:  # the same words, under the name that this path's caller used
        error.field = (error.field or "").replace("input.text", "input") or None
        raise
    if not isinstance(answer, Answer):
        raise InternalError("a tensor answer was expected")
    tokens = finished.usage.input_tokens or 0  # told, or else our own estimate
    document = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": _encoded(vector, encoding)}
            for i, vector in enumerate(answer.output["embeddings"])
        ],
        "model": body["model"],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens} | _cost(finished.usage),
    }
    return json_answer(document, started, finished.usage)


async def list_models(visit: Visit) -> Response:
    """Every name that the `model` field takes, for this key."""
    names = [name for name in visit.api.models if _may(visit, name)]
    return json_answer({"object": "list", "data": [_model(name) for name in names]})


async def get_model(visit: Visit) -> Response:
    """One model."""
    name = visit.request.path_params["model"]
    if name not in visit.api.models or not _may(visit, name):
        raise UnknownModel("there is no such model; GET /v1/models lists them", field="model")
    return json_answer(_model(name))


def with_cost(body: bytes, usage: Usage, api: OpenAIApi) -> bytes:
    """A whole answer, or the event that tells its usage, with the cost in it; without a price, the very same bytes.

    Where the upstream told no usage, a whole answer bears our own count, marked so.
    """
    if usage.cost_nano_usd is None:
        return body
    document = orjson.loads(body)
    inner = document.get("response")  # the responses API puts the answer into its events
    answer = inner if isinstance(inner, dict) else document
    told = answer.get("usage")
    if not isinstance(told, dict):
        if not usage.is_estimated:
            return body
        told = _counted(usage, api)
    answer["usage"] = told | _cost(usage)
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError:  # nested so deeply that it can be read, but not written
        return body


def _cost(usage: Usage) -> dict[str, Any]:
    return {} if usage.cost_nano_usd is None else {"cost_usd": exact_usd(usage.cost_nano_usd)}


def _counted(usage: Usage, api: OpenAIApi) -> dict[str, Any]:
    given, made = usage.input_tokens or 0, usage.output_tokens or 0
    names = ("input_tokens", "output_tokens") if api == "responses" else ("prompt_tokens", "completion_tokens")
    return {names[0]: given, names[1]: made, "total_tokens": given + made, "estimated": True}


def _stream_form(api: OpenAIApi) -> StreamForm:
    """How `api` writes its streams. The responses API names its events, counts them, and has no `[DONE]`."""
    count = itertools.count()

    def written(event: Event) -> bytes | None:
        if isinstance(event, Deltas):
            return event.wire
        if not isinstance(event, Delta):
            return None
        next(count)
        data = event.data if event.usage is None else with_cost(event.data, event.usage, api)
        return _event(data, event.event)

    def failed(error: GatewayError) -> bytes:
        document = openai_document(error)
        if api != "responses":
            return _event(orjson.dumps(document))
        told = document["error"]
        named = {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]}
        # With `error` too: the official client raises at it, in this API as in the others.
        return _event(orjson.dumps({**named, "sequence_number": next(count), **document}), b"error")

    return StreamForm(
        media_type="text/event-stream", written=written, failed=failed, end=b"" if api == "responses" else _DONE
    )


def _event(data: bytes, name: bytes = b"") -> bytes:
    return b"event: " + name + b"\ndata: " + data + b"\n\n" if name else b"data: " + data + b"\n\n"


def _task_of_model(api: Api, body: Mapping[str, Any], contract: str) -> Task:
    model = body.get("model")
    if not isinstance(model, str):
        raise MalformedRequest("must be the name of a model", field="model")
    task = api.pipeline.tasks.get(api.models.get(model, ""))
    if task is None:
        raise UnknownModel("there is no such model; GET /v1/models lists them", field="model")
    if task.contract.name != contract:
        raise UnknownModel(f"this model is for {task.contract.name}, not for this path", field="model")
    return task


def _encoded(vector: Any, encoding: object) -> Any:
    """Numbers, or little-endian float32 in base64 (what the openai SDK asks for)."""
    if encoding == "float":
        return vector
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode()


def _may(visit: Visit, name: str) -> bool:
    """Whether the key may use this name; a task's own is the task, any other the name of a model."""
    caller, task = visit.caller, visit.api.models[name]
    may_name = name == task or caller.models is None or name in caller.models
    return may_name and (caller.tasks is None or task in caller.tasks)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "gateway"}
