"""Whole answers: from the pipeline's events to a JSON response with its headers."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson

from gateway.api.headers import cost_headers, limit_headers, recall_headers, route_headers, usd
from gateway.core.errors import InternalError
from gateway.core.types import (
    NOTHING_USED,
    Answer,
    Finished,
    InferenceRequest,
    Message,
    Started,
    Tensors,
    Timing,
    Usage,
)
from gateway.http.exchange import Response
from gateway.pipeline import Pipeline


async def unary(
    pipeline: Pipeline, request: InferenceRequest, *, on_admitted: Callable[[], object] | None = None
) -> tuple[Started, Answer | Message | Tensors, Finished]:
    """The events of an answer that comes whole. `on_admitted`: see `Pipeline.handle`."""
    started: Started | None = None
    answer: Answer | Message | Tensors | None = None
    finished: Finished | None = None
    async with aclosing(pipeline.handle(request, on_admitted=on_admitted)) as events:
        async for event in events:
            match event:
                case Started():
                    started = event
                case Answer() | Message() | Tensors():
                    answer = event
                case Finished():
                    finished = event
    if started is None or answer is None or finished is None:
        raise InternalError("the answer came without its parts")
    return started, answer, finished


def json_answer(document: Any, started: Started | None = None, usage: Usage | None = None) -> Response:
    """`document` as JSON; numpy arrays are written as they are, without a copy into Python numbers."""
    body = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, media_type="application/json", headers=answer_headers(started, usage) if started else None)


def answer_headers(started: Started, usage: Usage | None = None) -> dict[str, str]:
    """The state of the limits, the route taken, and the cost where it is known before the answer is sent."""
    costs = {} if usage is None else cost_headers(usage)
    headers = {**limit_headers(started.verdict), **route_headers(started.route), **costs}
    if started.recalled is None:
        return headers
    if costs and started.recalled.is_again:
        headers |= cost_headers(replace(usage or NOTHING_USED, cost_nano_usd=0))
    return headers | recall_headers(started.recalled)


def answer_id(started: Started, request: InferenceRequest) -> str:
    """The request's; of an answer that is given again under its idempotency key, that of the first time."""
    return (started.recalled.id if started.recalled else "") or request.id


def exact_usd(nano_usd: int) -> orjson.Fragment:
    """A cost as a JSON number, with the digits of the header."""
    return orjson.Fragment(usd(nano_usd))


def timing(lengths: Timing) -> dict[str, float | None]:
    """Where a request's time went, in milliseconds."""
    return {
        "total_ms": lengths.total_us / 1000,
        "admit_ms": lengths.admit_us / 1000,
        "queue_ms": None if lengths.queue_us is None else lengths.queue_us / 1000,
        "backend_ms": lengths.backend_us / 1000,
    }
