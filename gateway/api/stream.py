"""`/v1/tasks/{task}/stream`: one sequence over a WebSocket, chunks in, results out. docs/streaming.md has its words."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson
from starlette.types import Message, Receive, Scope, Send

from gateway.api.answers import timing, unary
from gateway.api.auth import authorize, authorized_priority, shown_key
from gateway.api.body import json_object
from gateway.api.cors import may_come_from
from gateway.api.endpoint import NOBODY, Api, Visit, request_id
from gateway.api.errors import problem, problem_body
from gateway.api.request_headers import Headers, headers_of, priority, timeout_us
from gateway.core.errors import (
    Forbidden,
    GatewayError,
    InternalError,
    MalformedRequest,
    NoHealthyBackend,
    NotFound,
    SequenceLost,
    SequencesUnavailable,
    SequenceUnknown,
    Unauthorized,
    UnsupportedMediaType,
)
from gateway.core.trace import Trace
from gateway.core.types import Answer, Caller, Finished, InferenceRequest, Priority, SequenceStep
from gateway.core.watching.record import RequestRecord
from gateway.http.asgi import DRAINING, refuse_websocket
from gateway.pipeline import Task

PROTOCOL: Final = "gateway.v1"
MAX_UNANSWERED: Final = 16  # chunks taken and not answered; half a second of speech. Beyond it nothing is read
MAX_REFUSED: Final = 16  # chunks in a row, then the client does not listen
IDLE_S: Final = 60.0  # without a chunk
MAX_ID: Final = 128
_BEARER = "bearer."
_BINARY_FIELD = "audio"
_JSON = {"content-type": "application/json"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Closing:
    """How a stream ends: RFC 6455's code, and a reason of ours."""

    code: int
    reason: str


DONE = Closing(1000, "done")
GOING_AWAY = Closing(1001, "the gateway stops: start a new sequence on another connection")
UNSUPPORTED = Closing(1003, "this task takes no such messages")
POLICY = Closing(1008, "too many chunks in a row were refused")
INTERNAL = Closing(1011, "the gateway failed on this stream")
TRY_LATER = Closing(1013, "nobody can answer now: try again later")
IDLE = Closing(4408, "no chunk came for too long")
BARRED = Closing(4401, "the key is not in force any more")
LOST = Closing(4410, "the sequence is gone: start a new one")

_ENDS: Mapping[type[GatewayError], Closing] = {
    SequenceLost: LOST,
    SequenceUnknown: LOST,
    NoHealthyBackend: TRY_LATER,
    SequencesUnavailable: TRY_LATER,
    Unauthorized: BARRED,
    UnsupportedMediaType: UNSUPPORTED,
    InternalError: INTERNAL,
}
"""The errors after which a stream cannot go on; after any other the next chunk may do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the handshake has settled for all chunks. `identify` tells whether its key is still in force.

    `priority` is the one that was asked for, if any: what the key may of it, it may have later too. `traced`
    gives each chunk a span of its own.
    """

    id: str
    caller: Caller
    identify: Callable[[], Awaitable[Caller]]
    task: Task
    timeout_us: int
    priority: Priority | None
    traced: Callable[[], Trace | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One message: a task's input, and the caller's own name for it. `is_end`: no other follows."""

    given: object
    parameters: Mapping[str, Any]
    id: str | int | None = None
    is_end: bool = False


class StreamEndpoint:
    """The path as an ASGI application: who may not enter gets a plain HTTP answer."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket from its handshake to its close."""
        api, headers = self._api, headers_of(scope)
        began_us, traced = api.pipeline.clock(), partial(api.traced, headers, scope)
        visit = Visit(
            api=api, scope=scope, headers=headers, id=request_id(headers), received_us=began_us, caller=NOBODY
        )
        await receive()  # websocket.connect
        try:
            identify = self._caller(scope, headers)
            visit.caller = await identify()
            if api.shedding.is_behind:
                api.shedding.check(visit.caller, headers, is_taken=False)
            opening = _enter(visit, identify, traced=traced)
        except GatewayError as error:
            visit.trace = traced()
            visit.refused(error)
            response = problem(error)
            response.headers["x-request-id"] = visit.id
            await refuse_websocket(response, send)
            return
        chosen = PROTOCOL if PROTOCOL in scope["subprotocols"] else None
        told = [(b"x-request-id", opening.id.encode())]
        draining = scope["extensions"].get(DRAINING) or asyncio.Event()
        with suppress(OSError):  # the peer has left
            await send({"type": "websocket.accept", "subprotocol": chosen, "headers": told})
            await Stream(api, opening, send).run(receive, draining)

    def _caller(self, scope: Scope, headers: Headers) -> Callable[[], Awaitable[Caller]]:
        """What tells who comes, now and later. Raises `Unauthorized`, and `Forbidden` for another site's page."""
        origin = headers.get("origin")
        if origin is not None and not may_come_from(self._api.cors_origins, origin):
            raise Forbidden("pages of this origin may not use the gateway", field="origin")
        # Browsers cannot set headers on a WebSocket: they offer the key as a second protocol.
        offered: list[str] = scope["subprotocols"]
        keys = (name.removeprefix(_BEARER) for name in offered if name.startswith(_BEARER))
        key = next(keys, None)
        shown = shown_key(scope, headers, offered=key)
        return lambda: self._api.keys.authenticate(shown, origin)


def _enter(visit: Visit, identify: Callable[[], Awaitable[Caller]], *, traced: Callable[[], Trace | None]) -> Opening:
    """What the socket is for. Raises `GatewayError`."""
    task = visit.enter(visit.api.task(visit.scope["path_params"]["task"]))
    asked = priority(visit.headers)
    authorized_priority(visit.caller, asked)
    if not task.contract.is_sequence:
        raise NotFound(f"the task '{task.name}' has no stream: it keeps no state from request to request")
    return Opening(
        id=visit.id,
        caller=visit.caller,
        identify=identify,
        task=task,
        timeout_us=timeout_us(visit.headers, task),
        priority=asked,
        traced=traced,
    )


class Stream:
    """One open socket. Chunks are answered one after another, in their order, as the model takes them anyway."""

    def __init__(self, api: Api, opening: Opening, send: Send) -> None:
        self._api = api
        self._opening = opening
        self._send = send
        self._taken: asyncio.Queue[Message | None] = asyncio.Queue(MAX_UNANSWERED)
        self._sequence = uuid.uuid4().hex
        self._has_begun = False
        self._number = 0
        self._refused = 0

    async def run(self, receive: Receive, draining: asyncio.Event) -> None:
        """Read and answer until the end; a peer that leaves cancels what is being worked on."""
        answering = asyncio.create_task(self._answer_all())
        reading = asyncio.create_task(self._read(receive, answering))
        heeding = asyncio.create_task(self._heed(draining, reading))
        tasks = (answering, reading, heeding)
        try:
            await asyncio.wait({answering})
            closing = None if answering.cancelled() else answering.result()
        except asyncio.CancelledError:
            if not draining.is_set():
                raise
            closing = GOING_AWAY  # the drain time is over
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if closing is not None:
            await self._send({"type": "websocket.close", "code": closing.code, "reason": closing.reason})

    async def _read(self, receive: Receive, answering: asyncio.Task[Closing]) -> None:
        """Take what comes as far as there is room; then the socket is not read, and its peer has to wait."""
        while (message := await receive())["type"] != "websocket.disconnect":
            await self._taken.put(message)
        answering.cancel()

    async def _heed(self, draining: asyncio.Event, reading: asyncio.Task[None]) -> None:
        """When the server stops: say so, take nothing more, and answer what was taken."""
        await draining.wait()
        with suppress(OSError):
            await self._say({"type": "going_away"})
        reading.cancel()
        await self._taken.put(None)

    async def _answer_all(self) -> Closing:
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    message = await self._taken.get()
            except TimeoutError:
                return IDLE
            closing = GOING_AWAY if message is None else await self._answer(message)
            if closing is not None:
                return closing

    async def _answer(self, message: Message) -> Closing | None:
        """Answer one message; how the stream ends with it, or None."""
        told: dict[str, Any] = {}
        try:
            chunk = _chunk(message, self._opening.task)
            if chunk is None:
                return DONE
            self._number += 1
            told = {"number": self._number} | ({} if chunk.id is None else {"id": chunk.id})
            output, finished = await self._infer(chunk)
        except GatewayError as error:
            return await self._tell(error, told)
        except Exception:  # noqa: BLE001 - the request boundary: never a stack trace to a caller
            _log.exception("stream failed", extra={"request_id": self._opening.id})
            return await self._tell(InternalError("the gateway failed on this chunk"), told)
        self._refused = 0
        await self._say({**told, "output": output, "timing": timing(finished.timing)})
        return DONE if chunk.is_end else None

    async def _infer(self, chunk: Chunk) -> tuple[Mapping[str, Any], Finished]:
        opening, pipeline = self._opening, self._api.pipeline
        now_us, trace = pipeline.clock(), opening.traced()
        number = self._number
        try:
            caller = await opening.identify()  # a socket lives long: its key may have been revoked meanwhile
            authorize(caller, opening.task.name)
            granted = authorized_priority(caller, opening.priority)
            parsed = opening.task.contract.parse(chunk.given, chunk.parameters)
        except GatewayError as error:
            self._record(error, now_us, trace)
            raise
        request = InferenceRequest(
            id=f"{opening.id}-{number}",
            task=opening.task.name,
            caller=caller,
            input=parsed,
            received_us=now_us,
            deadline_us=now_us + opening.timeout_us,
            sequence=SequenceStep(id=self._sequence, is_start=not self._has_begun, is_end=chunk.is_end),
            priority=granted,
            trace=trace,
        )
        _, answer, finished = await unary(pipeline, request)
        if not isinstance(answer, Answer):
            raise InternalError("a task answer was expected")
        self._has_begun = True
        return answer.output, finished

    async def _tell(self, error: GatewayError, told: Mapping[str, Any]) -> Closing | None:
        """An error in its chunk's place."""
        self._refused += 1
        document: dict[str, Any] = {**told, "error": problem_body(error)}
        if error.retry_after_us is not None:
            document["retry_after_ms"] = -(-error.retry_after_us // 1000)
        await self._say(document)
        return _ENDS.get(type(error)) or (POLICY if self._refused >= MAX_REFUSED else None)

    async def _say(self, document: Mapping[str, Any]) -> None:
        text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY).decode()
        await self._send({"type": "websocket.send", "text": text})

    def _record(self, error: GatewayError, began_us: int, trace: Trace | None) -> None:
        """A chunk refused before the pipeline, which writes the records of the others."""
        opening, pipeline = self._opening, self._api.pipeline
        record = RequestRecord(
            id=f"{opening.id}-{self._number}",
            task=opening.task.name,
            tenant=opening.caller.tenant,
            key_id=opening.caller.key_id,
            total_us=pipeline.clock() - began_us,
            error=error,
            trace=trace,
        )
        pipeline.observer.refused(record)


def _chunk(message: Message, task: Task) -> Chunk | None:
    """A message as a chunk; None for the end. Raises `GatewayError`."""
    binary = message.get("bytes")
    if binary is not None:
        if _BINARY_FIELD not in task.contract.input_schema["properties"]:
            raise UnsupportedMediaType(f"the task '{task.name}' takes no binary messages")
        return Chunk(given={_BINARY_FIELD: binary}, parameters={})
    document = json_object(_JSON, message["text"].encode())
    if document == {"type": "end"}:
        return None
    for name in document:
        if name not in ("input", "parameters", "id", "end"):
            raise MalformedRequest("unknown field; a chunk has input, parameters, id, end", field=name[:80])
    parameters, chosen, is_end = document.get("parameters", {}), document.get("id"), document.get("end", False)
    if not isinstance(parameters, Mapping):
        raise MalformedRequest("must be an object", field="parameters")
    if not isinstance(is_end, bool):
        raise MalformedRequest("must be true or false", field="end")
    if chosen is not None and (not isinstance(chosen, str | int) or len(str(chosen)) > MAX_ID):
        raise MalformedRequest(f"must be a number, or a text of at most {MAX_ID} characters", field="id")
    return Chunk(given=document.get("input"), parameters=parameters, id=chosen, is_end=is_end)
