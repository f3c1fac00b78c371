"""Answers that come in parts: from the pipeline's events to a response that is sent as they come."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from gateway.api.answers import answer_headers
from gateway.api.endpoint import Api
from gateway.core.errors import GatewayError, InternalError, NoHealthyBackend
from gateway.core.types import Event, InferenceRequest, Started
from gateway.http.exchange import Exchange, Response

SLOW_READER_S: Final = 5.0  # past the request's deadline, for what is still on its way to the caller


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamForm:
    """How a stream looks on the wire.

    Attributes:
        written: an event's bytes; None where nothing is sent for it. May raise `GatewayError`.
        failed: the bytes of a failure, which are the last.
        end: the last bytes of a whole answer.
    """

    media_type: str
    written: Callable[[Event], bytes | None]
    failed: Callable[[GatewayError], bytes]
    end: bytes = b""


async def streamed(api: Api, request: InferenceRequest, form: StreamForm) -> Response:
    """The answer to `request`. Raises `GatewayError` for what fails before the answer begins."""
    events = api.pipeline.handle(request)
    # The first event tells the route, or raises: only then is the status line written.
    started = await anext(events)
    if not isinstance(started, Started):
        raise InternalError("the answer had no start")
    left_s = (request.deadline_us - api.pipeline.clock()) / 1e6
    return EventStream(
        events, form, headers=answer_headers(started), timeout_s=left_s + SLOW_READER_S, is_ready=api.is_ready
    )


class EventStream(Response):
    """An answer's events, each sent the moment it comes.

    A failure on the way is told in the stream, which then ends without the form's `end`: a client can always tell a
    whole answer from a broken one. So is a stop of the gateway (`is_ready` turns false) that cannot wait any longer. A
    reader so slow that `timeout_s` runs out is cut off.
    """

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        form: StreamForm,
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        is_ready: Callable[[], bool],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        charset = "; charset=utf-8" if form.media_type.startswith("text/") else ""
        self.headers["content-type"] = form.media_type + charset
        self._events = events
        self._form = form
        self._timeout_s = timeout_s
        self._is_ready = is_ready

    async def give(self, exchange: Exchange) -> None:
        """Send until the end; closing the events cancels the backend's work when the caller left."""
        until = asyncio.get_running_loop().time() + self._timeout_s
        async with aclosing(self._events) as events:
            exchange.begin(self.status_code, self.headers)
            with contextlib.suppress(TimeoutError):
                await self._send_all(events, exchange, until)

    async def _send_all(self, events: AsyncGenerator[Event, None], exchange: Exchange, until: float) -> None:
        last, written = self._form.end, self._form.written
        try:
            async for event in events:
                chunk = written(event)
                if chunk is not None and not exchange.write(chunk):
                    async with asyncio.timeout_at(until):
                        await exchange.writable()
        except GatewayError as error:
            last = self._form.failed(error)
        except asyncio.CancelledError:
            if self._is_ready():
                raise
            last = self._form.failed(NoHealthyBackend("the gateway stops: what was received is incomplete"))
        exchange.end(last)
