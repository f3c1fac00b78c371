"""The OpenAI-compatible paths: chat, embeddings, models. Their answers pass through; ours have their shape."""

import base64
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.body import json_object
from gateway.api.endpoint import Api, Visit
from gateway.api.errors import openai_body
from gateway.api.headers import limit_headers, route_headers
from gateway.api.tasks import NUMPY, unary
from gateway.core.errors import GatewayError, InternalError, InvalidInput, MalformedRequest, UnknownModel
from gateway.core.types import Answer, Delta, Event, Message, Started
from gateway.pipeline import Task
from gateway.tasks.chat import Chat, parse_body
from gateway.tasks.text_embedding import TextEmbedding


async def chat_completions(visit: Visit) -> Response:
    """`POST /v1/chat/completions`, streamed or whole."""
    body = json_object(visit.request.headers, visit.body)
    task = _task_of_model(visit.api, body, Chat.name)
    visit.task = task.name
    parsed = parse_body(body)
    request = visit.inference(task, parsed, stream=parsed.stream)
    if not parsed.stream:
        started, message, _ = await unary(visit.api.pipeline, request)
        if not isinstance(message, Message):
            raise InternalError("a chat answer was expected")
        return Response(message.body, media_type="application/json", headers=_headers(started))
    events = visit.api.pipeline.handle(request)
    # The first event tells the route, or raises: only then is the status line written.
    started_event = await anext(events)
    if not isinstance(started_event, Started):
        raise InternalError("the answer had no start")
    return EventStream(events, headers=_headers(started_event))


async def embeddings(visit: Visit) -> Response:
    """`POST /v1/embeddings`, answered by the tensor backends of a text-embedding task."""
    body = json_object(visit.request.headers, visit.body)
    task = _task_of_model(visit.api, body, TextEmbedding.name)
    visit.task = task.name
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise InvalidInput("must be float or base64", field="encoding_format")
    dimensions = body.get("dimensions")
    if dimensions is not None and dimensions != task.contract.output_schema["properties"]["dimensions"]["const"]:
        raise InvalidInput("this model's vectors have one size and cannot be shortened", field="dimensions")
    try:
        parsed = task.contract.parse({"text": body.get("input")}, {})
        started, answer, _ = await unary(visit.api.pipeline, visit.inference(task, parsed))
    except InvalidInput as error:  # the same words, under the name that this path's caller used
        error.field = (error.field or "").replace("input.text", "input") or None
        raise
    if not isinstance(answer, Answer):
        raise InternalError("a tensor answer was expected")
    tokens = answer.usage.input_tokens or 0
    document = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": _encoded(vector, encoding)}
            for i, vector in enumerate(answer.output["embeddings"])
        ],
        "model": body["model"],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return Response(orjson.dumps(document, option=NUMPY), media_type="application/json", headers=_headers(started))


async def list_models(visit: Visit) -> Response:
    """Every name that the `model` field takes, for this key."""
    names = [n for n, task in visit.api.models.items() if _may(visit, task)]
    return _json({"object": "list", "data": [_model(name) for name in names]})


async def get_model(visit: Visit) -> Response:
    """One model."""
    name = visit.request.path_params["model"]
    if name not in visit.api.models or not _may(visit, visit.api.models[name]):
        raise UnknownModel("there is no such model; GET /v1/models lists them", field="model")
    return _json(_model(name))


class EventStream(Response):
    """An answer's events as server-sent events, each sent the moment it comes.

    A failure on the way is told in the stream, which then ends without `[DONE]`: a client can always tell a
    whole answer from a broken one.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Event, None], headers: Mapping[str, str]) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send until the end; closing the events cancels the backend's work when the caller left."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = b"data: [DONE]\n\n"
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    if isinstance(event, Delta):
                        await send(_body(sse(event.data)))
            except GatewayError as error:
                last = sse(orjson.dumps(openai_body(error)))
        await send(_body(last))
        await send({"type": "http.response.body", "body": b""})


def sse(payload: bytes) -> bytes:
    """One server-sent event; a payload of several lines keeps them."""
    return b"data: " + payload.replace(b"\n", b"\ndata: ") + b"\n\n"


def _body(chunk: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


def _task_of_model(api: Api, body: Mapping[str, Any], contract: str) -> Task:
    model = body.get("model")
    if not isinstance(model, str):
        raise MalformedRequest("must be the name of a model", field="model")
    task = api.pipeline.tasks.get(api.models.get(model, ""))
    if task is None or task.contract.name != contract:
        raise UnknownModel("there is no such model for this path; GET /v1/models lists them", field="model")
    return task


def _encoded(vector: Any, encoding: object) -> Any:
    """Numbers, or little-endian float32 in base64 (what the openai SDK asks for)."""
    if encoding == "float":
        return vector
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode()


def _may(visit: Visit, task: str) -> bool:
    return visit.caller.tasks is None or task in visit.caller.tasks


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "gateway"}


def _headers(started: Started) -> dict[str, str]:
    return {**limit_headers(started.verdict), **route_headers(started.route)}


def _json(document: object) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
