"""The OpenAI-compatible paths: chat, embeddings, models. Their answers pass through; ours have their shape."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response

from gateway.api.answers import answer_headers, json_answer, unary
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
from gateway.core.types import Answer, Delta, Event, Message
from gateway.pipeline import Task
from gateway.tasks.chat import Chat, parse_body
from gateway.tasks.text_embedding import TextEmbedding


async def chat_completions(visit: Visit) -> Response:
    """`POST /v1/chat/completions`, streamed or whole."""
    body = json_object(visit.headers, visit.body)
    task = visit.enter(_task_of_model(visit.api, body, Chat.name))
    parsed = parse_body(body)
    request = visit.inference(task, parsed, stream=parsed.stream)
    if not parsed.stream:
        started, message, _ = await unary(visit.api.pipeline, request)
        if not isinstance(message, Message):
            raise InternalError("a chat answer was expected")
        return Response(message.body, media_type="application/json", headers=answer_headers(started))
    return await streamed(visit.api, request, _FORM)


async def embeddings(visit: Visit) -> Response:
    """`POST /v1/embeddings`, answered by the tensor backends of a text-embedding task."""
    body = json_object(visit.headers, visit.body)
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


def _written(event: Event) -> bytes | None:
    return b"data: " + event.data + b"\n\n" if isinstance(event, Delta) else None


def _error_event(error: GatewayError) -> bytes:
    return b"data: " + orjson.dumps(openai_document(error)) + b"\n\n"


_FORM = StreamForm(media_type="text/event-stream", written=_written, failed=_error_event, end=b"data: [DONE]\n\n")


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
