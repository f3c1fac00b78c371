"""Inference in the words of the Open Inference Protocol: infer, generate, generate_stream."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Final, TypeVar

from gateway.api.answers import answer_headers, unary
from gateway.api.endpoint import Visit
from gateway.api.event_stream import StreamForm, streamed
from gateway.api.oip.errors import oip_document, refusing, told_as
from gateway.api.oip.servers import ask, entered
from gateway.core.errors import BackendError, BodyTooLarge, GatewayError, InternalError, MalformedRequest
from gateway.core.models import ModelFacts
from gateway.core.types import Event, InferenceRequest, Started, Tensor, Tensors
from gateway.http.exchange import Response
from gateway.tasks import oip
from gateway.tasks.tensor import TensorInput, check_name, named
from local_runtime.protocol.http_exchange import BINARY_TYPE, Reply, compressed, plain_body
from local_runtime.protocol.http_routes import Route
from local_runtime.protocol.oip_generate import DECOUPLED, ONE_ANSWER, generated, read_generate
from local_runtime.protocol.oip_json import Asked, Body, answer_body, read_infer, read_raw

_Result = TypeVar("_Result")

HEADER_LENGTH: Final = "inference-header-content-length"
_LARGE: Final = 1024 * 1024  # bytes whose reading, writing or packing (100 MB/s or less) would hold up all others
_DECOUPLED_OVER_GRPC: Final = "ModelInfer RPC doesn't support models with decoupled transaction policy"
_EVENTS, _LINES = "text/event-stream", "application/x-ndjson"


async def infer(visit: Visit, found: Route) -> Response:
    """One answer as JSON, with tensors as bytes behind it where they are wanted so; or all of a decoupled model's.

    With `Accept: text/event-stream` or `application/x-ndjson` each of the model's answers is sent when it comes.
    """
    entered(visit)
    check_name(found.model, found.version)
    asked = await _asked(visit, found)
    stream = _stream_type(visit)
    with told_as(visit.id, asked.request_id):
        if stream:
            _refuse_bytes(asked)
            return await _streamed(visit, found, asked, lambda tensors: _document(found, asked, tensors).content)
        started, tensors = await _once(visit, _request(visit, named(found.model, found.version, asked)))
    with refusing():
        body = await _aside(lambda: _document(found, asked, tensors), size=_size(tensors))
    reply = Reply(content=body.content, headers=())
    if body.json_length is not None:
        reply.content_type = BINARY_TYPE
        reply.headers = ((HEADER_LENGTH.encode(), b"%d" % body.json_length),)
    return await _response(visit, reply, started)


async def generate(visit: Visit, found: Route) -> Response:
    """The one answer of a model as a JSON object."""
    asked = await _generation(visit, found)
    with told_as(visit.id, asked.request_id):
        call = named(found.model, found.version, asked, stream=True)
        started, tensors = await _only(visit, _request(visit, call))
    with refusing():
        content = await _aside(lambda: _generated(found, asked, tensors), size=_size(tensors))
    return await _response(visit, Reply(content=content), started)


async def generate_stream(visit: Visit, found: Route) -> Response:
    """Every answer of a model as a JSON object, sent when it comes."""
    asked = await _generation(visit, found)
    with told_as(visit.id, asked.request_id):
        return await _streamed(visit, found, asked, lambda tensors: _generated(found, asked, tensors))


async def body_of(visit: Visit) -> bytes:
    """The body, unpacked. Raises `BodyTooLarge`, `UnsupportedMediaType`, `MalformedRequest`."""
    encoding = visit.headers.get("content-encoding", "").strip().lower()
    if not encoding:
        return visit.body
    limit = visit.api.body.max_bytes
    try:
        with refusing():
            return await _aside(
                lambda: plain_body(visit.body, encoding.encode("latin-1"), max_bytes=limit), size=len(visit.body)
            )
    except BodyTooLarge as error:
        raise BodyTooLarge(f"the body is larger than the {limit} bytes taken here once it is unpacked") from error


# --- what is asked --------------------------------------------------------------------------------


async def _asked(visit: Visit, found: Route) -> Asked[Tensor]:
    body = await body_of(visit)
    length = _json_length(visit)
    if length == 0:
        facts = await _facts(visit, found)
        with refusing():
            return read_raw(oip.described(facts), body, oip.Wire, is_batched=facts.max_batch_size > 0)
    # Bytes of numbers stay where they are; all else is taken one by one.
    is_bytes = length is not None and b"BYTES" not in body[:length]
    with refusing():
        return await _aside(
            lambda: read_infer(found.model, body, oip.Wire, json_length=length),
            size=length if length is not None and is_bytes else len(body),
        )


async def _generation(visit: Visit, found: Route) -> Asked[Tensor]:
    entered(visit)
    check_name(found.model, found.version)
    body = await body_of(visit)
    facts = await _facts(visit, found)
    with refusing():
        return await _aside(lambda: read_generate(oip.described(facts), body, oip.Wire), size=len(body))


async def _facts(visit: Visit, found: Route) -> ModelFacts:
    return await ask(visit, lambda server, place: server.facts(place), model=found.model, version=found.version)


def _json_length(visit: Visit) -> int | None:
    given = visit.headers.get(HEADER_LENGTH)
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal()):
        raise MalformedRequest("Inference-Header-Content-Length must be a number of bytes")
    return int(given[:20])


def _refuse_bytes(asked: Asked[Tensor]) -> None:
    if asked.is_binary or any(asked.binary.values()):
        raise MalformedRequest("a stream of answers is JSON: no output can come in the binary data format")


def _request(visit: Visit, call: TensorInput, *, stream: bool = False) -> InferenceRequest:
    task = visit.task or entered(visit)
    return visit.inference(task, call, stream=stream, model=call.model, version=call.version, sequence=call.sequence)


# --- what is answered -----------------------------------------------------------------------------


async def _once(visit: Visit, request: InferenceRequest) -> tuple[Started, Tensors]:
    try:
        started, tensors, _ = await unary(visit.api.pipeline, request)
    except GatewayError as error:
        if error.reply is not None and error.reply.text == _DECOUPLED_OVER_GRPC:
            error.detail, error.reply = DECOUPLED, None
        raise
    if not isinstance(tensors, Tensors):
        raise InternalError("a tensor answer was expected")
    return started, tensors


async def _only(visit: Visit, request: InferenceRequest) -> tuple[Started, Tensors]:
    """The one answer of a stream that holds anything."""
    started: Started | None = None
    only: Tensors | None = None
    async with aclosing(visit.api.pipeline.handle(request)) as events:
        async for event in events:
            if isinstance(event, Started):
                started = event
            elif isinstance(event, Tensors) and event.outputs:
                if only is not None:
                    raise MalformedRequest(ONE_ANSWER)
                only = event
    if started is None or only is None:
        raise MalformedRequest(ONE_ANSWER)
    return started, only


async def _streamed(visit: Visit, found: Route, asked: Asked[Tensor], document: Callable[[Tensors], bytes]) -> Response:
    before, after, kind = (b"", b"\n", _LINES) if _stream_type(visit) == _LINES else (b"data: ", b"\n\n", _EVENTS)

    def written(event: Event) -> bytes | None:
        if not isinstance(event, Tensors) or not event.outputs:
            return None
        with refusing():
            return before + document(event) + after

    def failed(error: GatewayError) -> bytes:
        if isinstance(error.__cause__, BackendError):  # the model's own words say more than that it broke off
            error.reply = error.__cause__.fault.reply
        with suppress(GatewayError), told_as(visit.id, asked.request_id):
            raise error
        return before + oip_document(error) + after

    form = StreamForm(media_type=kind, written=written, failed=failed)
    call = named(found.model, found.version, asked, stream=True)
    return await streamed(visit.api, _request(visit, call, stream=True), form)


async def _response(visit: Visit, reply: Reply, started: Started) -> Response:
    """The answer, packed as its caller accepts it."""
    accepted = visit.headers.get("accept-encoding", "").encode("latin-1")
    if accepted:
        reply = await _aside(lambda: compressed(reply, accepted), size=len(reply.content))
    headers = answer_headers(started) | {name.decode(): value.decode() for name, value in reply.headers}
    return Response(reply.content, headers=headers, media_type=reply.content_type.decode())


def _size(tensors: Tensors) -> int:
    return sum(len(one.data) for one in tensors.outputs)


async def _aside(work: Callable[[], _Result], *, size: int) -> _Result:
    return await asyncio.to_thread(work) if size > _LARGE else work()


def _document(found: Route, asked: Asked[Tensor], tensors: Tensors) -> Body:
    return answer_body(
        (found.model, tensors.version),
        oip.outputs(tensors.outputs, asked),
        request_id=asked.request_id,
        parameters=tensors.parameters,
    )


def _generated(found: Route, asked: Asked[Tensor], tensors: Tensors) -> bytes:
    values = {one.name: oip.values(one) for one in tensors.outputs}
    return generated((found.model, tensors.version), values, request_id=asked.request_id, parameters=tensors.parameters)


def _stream_type(visit: Visit) -> str:
    """The kind of stream that the caller accepts; empty where it names none."""
    accepted = visit.headers.get("accept", "")
    return next((kind for kind in (_EVENTS, _LINES) if kind in accepted), "")
