"""The Open Inference Protocol over HTTP, with Triton's extensions.

No framework and no threads: a request costs its own parsing and nothing else. A client that disconnects takes its
request out of the queue (Triton runs on).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, TypeAlias

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import InferAnswer
from local_runtime.protocol import oip_describe
from local_runtime.protocol.answering import INTERNAL_TEXT, infer_once, server_version
from local_runtime.protocol.http_connection import Exchange
from local_runtime.protocol.http_exchange import BINARY_TYPE, HttpError, Reply, compressed, error_reply, plain_body
from local_runtime.protocol.http_routes import METHODS, Route, known_route
from local_runtime.protocol.json_text import dump, error_body
from local_runtime.protocol.metrics import CONTENT_TYPE, render
from local_runtime.protocol.oip_generate import DECOUPLED, ONE_ANSWER, decode_generate, encode_generate
from local_runtime.protocol.oip_json import Body, JsonInfer, decode_infer, decode_raw, encode_infer
from local_runtime.protocol.oip_repository import read_index, read_load, read_unload
from local_runtime.repository.completion import triton_json
from local_runtime.runtime import LocalRuntime

_log = logging.getLogger(__name__)
_Call: TypeAlias = Callable[[Route, Exchange], Awaitable[Reply]]

STATUS: Mapping[ErrorCode, HTTPStatus] = MappingProxyType(
    {
        ErrorCode.INVALID_ARG: HTTPStatus.BAD_REQUEST,
        ErrorCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
        ErrorCode.UNSUPPORTED: HTTPStatus.NOT_IMPLEMENTED,
        ErrorCode.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
        ErrorCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
        ErrorCode.CANCELLED: HTTPStatus.BAD_REQUEST,
        ErrorCode.ALREADY_EXISTS: HTTPStatus.BAD_REQUEST,
        ErrorCode.UNKNOWN: HTTPStatus.BAD_REQUEST,
        ErrorCode.DEADLINE: HTTPStatus.GATEWAY_TIMEOUT,
    }
)
_NOT_OFFERED = "shared memory, trace and log settings are not offered by this server"


class HttpApp:
    """Answers HTTP from one runtime. `max_input_bytes` bounds a request's body, compressed or not."""

    def __init__(self, runtime: LocalRuntime, *, max_input_bytes: int) -> None:
        self._runtime = runtime
        self.max_input_bytes = max_input_bytes
        self._calls: Mapping[str, _Call] = {
            "infer": self._infer,
            "generate": self._generate,
            "server": self._server,
            "live": self._live,
            "ready": self._ready,
            "metrics": self._metrics,
            "metadata": self._metadata,
            "model_ready": self._model_ready,
            "config": self._config,
            "stats": self._stats,
            "index": self._index,
            "load": self._load,
            "unload": self._unload,
            "shared_memory_status": self._no_regions,
            "not_offered": self._not_offered,
        }

    def __call__(self, exchange: Exchange) -> None:
        """One request: its answer goes to the exchange, now or later."""
        try:
            found = self._found(exchange)
        except HttpError as error:
            exchange.reply(error_reply(error.status, error.text, error.headers))
            return
        exchange.task = asyncio.get_running_loop().create_task(self._respond(found, exchange))

    async def _respond(self, found: Route, exchange: Exchange) -> None:
        try:
            reply = await self._reply(found, exchange)
        except asyncio.CancelledError:
            exchange.abort()  # its client has left, most likely; if not, it shall not wait for ever
            raise
        except Exception:  # noqa: BLE001 - the boundary of a request: logged, and the client gets an answer
            _log.exception("a request failed in the HTTP server")
            reply = error_reply(HTTPStatus.INTERNAL_SERVER_ERROR, INTERNAL_TEXT)
        if reply is None:
            exchange.end()
        elif exchange.is_streaming:
            exchange.abort()  # events of a stream cannot become an error, and its end must not look like a good one
        else:
            exchange.reply(reply)

    async def _reply(self, found: Route, exchange: Exchange) -> Reply | None:
        """The answer in one piece; None where all of it went out as events."""
        try:
            if found.call == "generate_stream":
                return await self._generate_stream(found, exchange)
            return await self._calls[found.call](found, exchange)
        except InferenceError as error:
            return error_reply(STATUS[error.code], error.message)
        except HttpError as error:
            return error_reply(error.status, error.text, error.headers)

    def _found(self, exchange: Exchange) -> Route:
        head = exchange.head
        found = known_route(head.path)
        if found is None:
            raise HttpError(HTTPStatus.NOT_FOUND, "Not Found")
        method = METHODS[found.call]
        if method and head.method != method and not (method == b"GET" and head.method == b"HEAD"):
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "Method Not Allowed", headers=((b"allow", method),))
        return found

    def _body(self, exchange: Exchange) -> bytes:
        return plain_body(exchange.body, exchange.head.content_encoding, max_bytes=self.max_input_bytes)

    # --- inference ------------------------------------------------------------------------------

    async def _infer(self, found: Route, exchange: Exchange) -> Reply:
        body = self._body(exchange)
        head = exchange.head
        json_length = None if head.json_length is None else _length(head.json_length)
        if json_length == 0:
            asked = self._raw(found, body)
        else:
            asked = decode_infer(found.model, found.version, body, json_length=json_length)
        answer = await infer_once(self._runtime, asked.request, counts=asked.classes, decoupled=DECOUPLED)
        reply = _infer_reply(encode_infer(answer, asked))
        return compressed(reply, head.accept_encoding) if head.accept_encoding else reply

    def _raw(self, found: Route, body: bytes) -> JsonInfer:
        metadata = self._runtime.model_metadata(found.model, found.version)
        is_batched = self._runtime.model_config(found.model, found.version).max_batch_size > 0
        return decode_raw(metadata, found.version, body, is_batched=is_batched)

    async def _generate(self, found: Route, exchange: Exchange) -> Reply:
        body = self._body(exchange)
        request = decode_generate(self._runtime.model_metadata(found.model, found.version), found.version, body)
        only: InferAnswer | None = None
        async with contextlib.aclosing(self._runtime.stream(request)) as answers:
            async for answer in answers:
                if answer.error is not None:
                    raise answer.error
                if not answer.outputs:
                    continue
                if only is not None:
                    raise InferenceError(ErrorCode.INTERNAL, ONE_ANSWER)
                only = answer
        if only is None:
            raise InferenceError(ErrorCode.INTERNAL, ONE_ANSWER)
        return Reply(content=encode_generate(only, request_id=request.request_id))

    async def _generate_stream(self, found: Route, exchange: Exchange) -> Reply | None:
        """Answers as server-sent events; what fails before the first is a plain answer, which comes back."""
        body = self._body(exchange)
        request = decode_generate(self._runtime.model_metadata(found.model, found.version), found.version, body)
        async with contextlib.aclosing(self._events(request)) as events:
            async for status, event in events:
                if not exchange.is_streaming and status is not HTTPStatus.OK:
                    return Reply(status=status, content=event)
                await exchange.event(event)
        return None

    async def _events(self, request: Any) -> AsyncGenerator[tuple[HTTPStatus, bytes], None]:
        try:
            async with contextlib.aclosing(self._runtime.stream(request)) as answers:
                async for answer in answers:
                    if answer.error is not None:
                        yield STATUS[answer.error.code], error_body(answer.error.message)
                    elif answer.outputs:
                        yield HTTPStatus.OK, encode_generate(answer, request_id=request.request_id)
        except InferenceError as error:
            yield STATUS[error.code], error_body(error.message)

    # --- what there is --------------------------------------------------------------------------

    async def _server(self, _found: Route, _exchange: Exchange) -> Reply:
        return Reply(content=dump(oip_describe.server(server_version())))

    async def _live(self, _found: Route, _exchange: Exchange) -> Reply:
        return Reply()  # no body, as in Triton: its aio client never reads one, and would lose the connection

    async def _ready(self, _found: Route, _exchange: Exchange) -> Reply:
        """Where it is not ready, Triton answers 400; 503 is what load balancers and other such servers know."""
        return Reply(status=HTTPStatus.OK if self._runtime.is_server_ready() else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _model_ready(self, found: Route, _exchange: Exchange) -> Reply:
        if self._runtime.is_ready(found.model, found.version):
            return Reply()
        return error_reply(HTTPStatus.SERVICE_UNAVAILABLE, "Model version not ready")

    async def _metadata(self, found: Route, _exchange: Exchange) -> Reply:
        return Reply(content=dump(oip_describe.metadata(self._runtime.model_metadata(found.model, found.version))))

    async def _config(self, found: Route, _exchange: Exchange) -> Reply:
        return Reply(content=triton_json(self._runtime.model_config(found.model, found.version)).encode())

    async def _stats(self, found: Route, _exchange: Exchange) -> Reply:
        return Reply(content=dump(oip_describe.statistics(self._runtime.statistics(found.model, found.version))))

    async def _metrics(self, _found: Route, _exchange: Exchange) -> Reply:
        page = render(self._runtime.statistics(), self._runtime.custom_metrics.families())
        return Reply(content=page.encode(), content_type=CONTENT_TYPE)

    async def _no_regions(self, _found: Route, _exchange: Exchange) -> Reply:
        return Reply(content=b"[]")

    async def _not_offered(self, _found: Route, _exchange: Exchange) -> Reply:
        raise InferenceError(ErrorCode.UNSUPPORTED, _NOT_OFFERED)

    # --- model control --------------------------------------------------------------------------

    async def _index(self, _found: Route, exchange: Exchange) -> Reply:
        index = self._runtime.index(ready_only=read_index(self._body(exchange)))
        return Reply(content=dump(oip_describe.index(index)))

    async def _load(self, found: Route, exchange: Exchange) -> Reply:
        config, files = read_load(self._body(exchange))
        await self._runtime.load(found.model, config=config, files=files or None)
        return Reply()

    async def _unload(self, found: Route, exchange: Exchange) -> Reply:
        await self._runtime.unload(found.model, unload_dependents=read_unload(self._body(exchange)))
        return Reply()


def _length(field: bytes) -> int:
    if not field.isdigit():
        raise HttpError(HTTPStatus.BAD_REQUEST, "Inference-Header-Content-Length must be a number of bytes")
    return int(field[:20])


def _infer_reply(body: Body) -> Reply:
    if body.json_length is None:
        return Reply(content=body.content)
    return Reply(
        content=body.content,
        content_type=BINARY_TYPE,
        headers=((b"inference-header-content-length", b"%d" % body.json_length),),
    )
