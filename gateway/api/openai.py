"""The OpenAI-compatible paths: chat, embeddings, models. Their answers pass through; ours have their shape."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.answers import answer_headers, json_answer, unary
from gateway.api.body import json_object
from gateway.api.endpoint import Api, Visit
from gateway.api.errors import openai_document
from gateway.core.errors import (
    GatewayError,
    InternalError,
    InvalidInput,
    MalformedRequest,
    NoHealthyBackend,
    UnknownModel,
)
from gateway.core.types import Answer, Delta, Event, Message, Started
from gateway.pipeline import Task
from gateway.tasks.chat import Chat, parse_body
from gateway.tasks.text_embedding import TextEmbedding

SLOW_READER_S = 5.0  # past the request's deadline, for what is still on its way to the caller


async def chat_completions(visit: Visit) -> Response:
    """`POST /v1/chat/completions`, streamed or whole."""
    body = json_object(visit.request.headers, visit.body)
    task = visit.enter(_task_of_model(visit.api, body, Chat.name))
    parsed = parse_body(body)
    request = visit.inference(task, parsed, stream=parsed.stream)
    if not parsed.stream:
        started, message, _ = await unary(visit.api.pipeline, request)
        if not isinstance(message, Message):
            raise InternalError("a chat answer was expected")
        return Response(message.body, media_type="application/json", headers=answer_headers(started))
    events = visit.api.pipeline.handle(request)
    # The first event tells the route, or raises: only then is the status line written.
    started_event = await anext(events)
    if not isinstance(started_event, Started):
        raise InternalError("the answer had no start")
    left_s = (request.deadline_us - visit.api.pipeline.clock()) / 1e6
    headers = answer_headers(started_event)
    return EventStream(events, headers=headers, timeout_s=left_s + SLOW_READER_S, is_ready=visit.api.is_ready)


async def embeddings(visit: Visit) -> Response:
    """`POST /v1/embeddings`, answered by the tensor backends of a text-embedding task."""
    body = json_object(visit.request.headers, visit.body)
    task = visit.enter(_task_of_model(visit.api, body, TextEmbedding.name))
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
    return json_answer(document, started)


async def list_models(visit: Visit) -> Response:
    """Every name that the `model` field takes, for this key."""
    names = [n for n, task in visit.api.models.items() if _may(visit, task)]
    return json_answer({"object": "list", "data": [_model(name) for name in names]})


async def get_model(visit: Visit) -> Response:
    """One model."""
    name = visit.request.path_params["model"]
    if name not in visit.api.models or not _may(visit, visit.api.models[name]):
        raise UnknownModel("there is no such model; GET /v1/models lists them", field="model")
    return json_answer(_model(name))


class EventStream(Response):
    """An answer's events as server-sent events, each sent the moment it comes.

    A failure on the way is told in the stream, which then ends without `[DONE]`: a client can always tell a whole
    answer from a broken one. So is a stop of the gateway (`is_ready` turns false) that cannot wait any longer. A reader
    so slow that `timeout_s` runs out is cut off.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        is_ready: Callable[[], bool],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._timeout_s = timeout_s
        self._is_ready = is_ready

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send until the end; closing the events cancels the backend's work when the caller left."""
        async with aclosing(self._events) as events:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    await self._send_all(events, send)

    async def _send_all(self, events: AsyncGenerator[Event, None], send: Send) -> None:
        last = b"data: [DONE]\n\n"
        try:
            async for event in events:
                if isinstance(event, Delta):
                    await send(_body(b"data: " + event.data + b"\n\n"))
        except GatewayError as error:
            last = _error_event(error)
        except asyncio.CancelledError:
            if self._is_ready():
                raise
            last = _error_event(NoHealthyBackend("the gateway stops: what was received is incomplete"))
        await send(_body(last))
        await send({"type": "http.response.body", "body": b""})


def _error_event(error: GatewayError) -> bytes:
    return b"data: " + orjson.dumps(openai_document(error)) + b"\n\n"


def _body(chunk: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


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


def _may(visit: Visit, task: str) -> bool:
    return visit.caller.tasks is None or task in visit.caller.tasks


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "gateway"}
