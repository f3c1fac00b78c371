"""The door: what every data-plane path does around its handler, once.

request id -> key -> body -> handler -> response; the whole is cancelled when the caller leaves, and every error
becomes one of the closed list in the path's own form.
"""

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.types import Scope

from gateway.api.auth import KeyRing, authorize, authorize_model, authorized_priority, shown_key
from gateway.api.body import BodyLimits, drain, media_type, read_body
from gateway.api.errors import ErrorForm
from gateway.api.request_headers import (
    Headers,
    idempotency_key,
    ordering_key,
    priority,
    sequence_step,
    session,
    timeout_us,
)
from gateway.api.shedding import UNBOUNDED, Shedding
from gateway.core.errors import ClientClosed, GatewayError, InternalError, InvalidInput, UnknownTask
from gateway.core.fingerprints import canonical, digest
from gateway.core.trace import Trace, incoming
from gateway.core.types import Caller, InferenceRequest, SequenceStep
from gateway.core.watching.record import RequestRecord
from gateway.http.exchange import Exchange, Response
from gateway.pipeline import Pipeline, Task

_log = logging.getLogger(__name__)
NOBODY: Final = Caller(key_id="", tenant="")
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # nothing that could forge a log line or a header
_SAFE_BYTES = re.compile(_SAFE_ID.pattern.encode())

Traced = Callable[[Headers, Scope], Trace | None]
"""The trace of a request by its headers and its ASGI scope; None where there is none."""


def passed_through(headers: Headers, _scope: Scope) -> Trace | None:
    """The caller's own trace, which is sent on and not recorded."""
    return incoming(headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """What the data plane's handlers share. `models` maps every name of an OpenAI `model` field to its task.

    `cors_origins`: web pages whose scripts may read the answers; `*` is any, empty none. `traced` says of what trace a
    request is. `shedding` says what is refused because this worker is behind.
    """

    pipeline: Pipeline
    keys: KeyRing
    models: Mapping[str, str]
    body: BodyLimits
    is_ready: Callable[[], bool]
    cors_origins: frozenset[str] = frozenset()
    traced: Traced = passed_through
    shedding: Shedding = UNBOUNDED

    def task(self, name: object) -> Task:
        """The task `name`. Raises `UnknownTask`, or `InvalidInput` where it is no name at all."""
        if not isinstance(name, str):
            raise InvalidInput("must be the name of a task; GET /v1/tasks lists them", field="task")
        found = self.pipeline.tasks.get(name)
        if found is None:
            raise UnknownTask("there is no such task; GET /v1/tasks lists them", field="task")
        return found


@dataclass(slots=True, kw_only=True)
class Visit:
    """One request at the door. `walked` tells whether the pipeline has taken over its record."""

    api: Api
    scope: Scope
    headers: Headers
    id: str
    received_us: int
    caller: Caller
    body: bytes = b""
    task: Task | None = None
    walked: bool = False
    trace: Trace | None = None

    @property
    def request(self) -> Request:
        """Its address, read; most handlers do without."""
        return Request(self.scope)

    def enter(self, task: Task) -> Task:
        """The visit is for `task`. Raises `Forbidden` where the key is not, before any work is done for it."""
        self.task = task
        authorize(self.caller, task.name)
        return task

    def inference(
        self,
        task: Task,
        parsed: Any,
        *,
        stream: bool = False,
        model: str = "",
        version: str = "",
        sequence: SequenceStep | None = None,
    ) -> InferenceRequest:
        """This visit as the pipeline takes it. Raises `MalformedRequest` and `InvalidInput` for bad headers.

        `model` and `version` are those that the caller names; `sequence`, where its body says it, stands above the
        headers. Raises `Forbidden` for a model or a priority that the key may not have.
        """
        headers = self.headers
        if model:
            authorize_model(self.caller, model)
        key = idempotency_key(headers)
        request = InferenceRequest(
            id=self.id,
            task=task.name,
            caller=self.caller,
            input=parsed,
            received_us=self.received_us,
            deadline_us=self.received_us + timeout_us(headers, task),
            stream=stream,
            model=model,
            version=version,
            sequence=sequence or sequence_step(headers, task),
            priority=authorized_priority(self.caller, priority(headers)),
            ordering_key=ordering_key(headers),
            idempotency_key=key,
            fingerprint=self._fingerprint(parsed) if key else "",
            cache_control=headers.get("cache-control", ""),
            headers=headers,
            input_bytes=len(self.body),
            session=session(headers),
            trace=self.trace,
        )
        self.walked = True
        return request

    def _fingerprint(self, parsed: Any) -> str:
        """Of method, path and body; of what a form says, as a form sent again has other borders."""
        asked = self.request
        body = canonical(parsed) if media_type(self.headers) == "multipart/form-data" else None
        return digest(asked.method, asked.url.path, asked.url.query, self.body if body is None else body)

    def refused(self, error: GatewayError) -> None:
        """Write the record of a refusal, unless the pipeline has written one."""
        if self.walked:
            return
        pipeline = self.api.pipeline
        record = RequestRecord(
            id=self.id,
            task=self.task.name if self.task else "",
            tenant=self.caller.tenant,
            key_id=self.caller.key_id,
            total_us=pipeline.clock() - self.received_us,
            error=error,
            trace=self.trace,
        )
        pipeline.observer.refused(record)


Handler = Callable[[Visit], Awaitable[Response]]


class Endpoint:
    """A handler with the door around it."""

    def __init__(self, handler: Handler, api: Api, form: ErrorForm) -> None:
        self._handler = handler
        self._api = api
        self._form = form

    async def serve(self, exchange: Exchange) -> None:
        """Serve one request."""
        api, headers, scope = self._api, exchange.headers, exchange.scope
        visit = Visit(
            api=api,
            scope=scope,
            headers=headers,
            id=request_id(headers),
            received_us=api.pipeline.clock(),
            caller=NOBODY,
            trace=api.traced(headers, scope),
        )
        try:
            visit.caller = await api.keys.authenticate(shown_key(scope, headers), headers.get("origin"))
            if scope["method"] == "POST":
                api.shedding.begun += 1
                if api.shedding.is_behind:
                    api.shedding.check(visit.caller, headers, is_taken=exchange.is_taken)
                visit.body = await read_body(exchange, api.body)
        except GatewayError as error:
            response = self._refuse(visit, error)
            if not await drain(exchange, api.body):
                response.headers["connection"] = "close"  # or the rest would be read for ever
            exchange.reply(response)
            return
        exchange.cancel_when_left()
        try:
            await self._answer(visit, exchange)
        except asyncio.CancelledError:
            worker = asyncio.current_task()
            if not exchange.has_left or (worker is not None and worker.uncancel() > 0):
                raise
            self._refuse(visit, ClientClosed("the caller left"))

    async def _answer(self, visit: Visit, exchange: Exchange) -> None:
        try:
            response = await self._handler(visit)
            response.headers["x-request-id"] = visit.id
        except GatewayError as error:
            response = self._refuse(visit, error)
        except Exception as unforeseen:  # noqa: BLE001 - the request boundary: never a stack trace to a caller
            _log.exception("handler failed", extra={"request_id": visit.id})
            fault = InternalError("the gateway failed on this request")
            fault.__cause__ = unforeseen
            response = self._refuse(visit, fault)
        await response.give(exchange)

    def _refuse(self, visit: Visit, error: GatewayError) -> Response:
        """The error in this path's form; its record too."""
        visit.refused(error)
        response = self._form(error)
        response.headers["x-request-id"] = visit.id
        return response


def request_id(headers: Headers) -> str:
    """The caller's own id where it is safe to repeat in logs and headers, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else os.urandom(16).hex()


def request_id_line(headers: Mapping[bytes, bytes]) -> bytes:
    """The same as a header's line, of a head that is not decoded."""
    given = headers.get(b"x-request-id")
    if given is None or not _SAFE_BYTES.fullmatch(given):
        given = os.urandom(16).hex().encode()
    return b"x-request-id: %b\r\n" % given
