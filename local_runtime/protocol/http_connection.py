"""HTTP/1.1 on one connection: bounded requests in, answers out, one after the other.

A protocol of our own on the httptools parser, because a general server's cost per request (a task, two queues, a dozen
calls) is more than a small model's. What comes is cut into heads and bodies before the parser sees it. A head is held
back until it is whole, and an offer to go on in another protocol (h2c, websocket) is taken out of it: it may be ignored
(RFC 9110, 7.8), and has to be, since the parser would take the body that follows for that protocol's.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, TypeAlias, cast

import httptools

from local_runtime.protocol.http_exchange import Head, HttpError, Reply, error_reply, set_field, too_large

MAX_HEAD_BYTES: Final = 64 * 1024
HEAD_TIMEOUT_S: Final = 30.0  # from a connection's or a request's first moment to the end of its head
BODY_TIMEOUT_S: Final = 60.0  # without a byte of a body that was announced
KEEP_ALIVE_S: Final = 75.0  # longer than the 60 s of common load balancers, so that they close first
WRITE_TIMEOUT_S: Final = 60.0  # a peer that takes nothing of its answer for so long is let go
_LINGER_S: Final = 1.0  # a refused peer may still be sending: closing at once would tear the answer away from it
_MAX_PIPELINED: Final = 16
_END_OF_HEAD: Final = b"\r\n\r\n"
_UPGRADE: Final = re.compile(rb"(?im)^upgrade:[^\r\n]*\r\n")
_STATUS_LINES: Final = MappingProxyType(
    {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
)
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n"
)


class Exchange:
    """One request, complete, and the place for its answer: one `reply`, or a stream of `event`s up to `end`."""

    __slots__ = ("_connection", "body", "head", "is_streaming", "keeps_alive", "method", "path", "task")

    def __init__(self, connection: "HttpConnection") -> None:
        self._connection = connection
        self.method = b""
        self.path = b""
        self.head = Head()
        self.body = b""
        self.keeps_alive = True
        self.is_streaming = False
        self.task: asyncio.Task[None] | None = None

    def reply(self, reply: Reply) -> None:
        """The whole answer. Nothing happens if the client has left."""
        connection = self._connection
        connection.answer(self, _encoded(reply, self.keeps_alive and not connection.is_last))

    async def event(self, data: bytes) -> None:
        """One server-sent event; waits while the client does not take what was sent before."""
        connection = self._connection
        if not self.is_streaming:
            self.is_streaming = True
            connection.write(_STREAM_HEAD if self.keeps_alive else _STREAM_HEAD + b"connection: close\r\n")
            connection.write(b"\r\n")
        if data:
            text = b"data: %b\n\n" % data
            connection.write(b"%x\r\n%b\r\n" % (len(text), text))
        await connection.writable()

    async def end(self) -> None:
        """The stream is complete."""
        await self.event(b"")
        self._connection.answer(self, b"0\r\n\r\n")

    def left(self) -> None:
        """The client has left: whatever runs for it ends."""
        if self.task is not None:
            self.task.cancel()


Serve: TypeAlias = Callable[[Exchange], None]


class HttpConnection(asyncio.Protocol):
    """One client's connection.

    Args:
        serve: called with each request when it is complete and those before it are answered.
        connections: those that are open; this one adds and removes itself.
        max_body_bytes: a larger body is refused with 413.
    """

    def __init__(self, serve: Serve, connections: "set[HttpConnection]", *, max_body_bytes: int) -> None:
        self._serve = serve
        self._connections = connections
        self._max_body_bytes = max_body_bytes
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._held = b""  # of a head that is not whole yet
        self._body_left: int | None = 0  # 0: a head comes next; None: chunked, only the parser knows
        self._chunks: list[bytes] = []
        self._body_size = 0
        self._incoming: Exchange | None = None
        self._current: Exchange | None = None
        self._pipelined: deque[Exchange] = deque()
        self._is_refused = False
        self._is_stopping = False
        self._writable: asyncio.Event | None = None
        self._heard_at = self._paused_at = self._head_since = self._loop.time()

    # --- what the event loop calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is here."""
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the event loop's signature
        """The client has left, or was let go."""
        self._connections.discard(self)
        if self._writable is not None:
            self._writable.set()
        unanswered = [exchange for exchange in (self._current, *self._pipelined) if exchange is not None]
        self._current = None
        self._pipelined.clear()
        for exchange in unanswered:
            exchange.left()

    def pause_writing(self) -> None:
        """The client takes nothing."""
        self._writable = asyncio.Event()
        self._paused_at = self._loop.time()

    def resume_writing(self) -> None:
        """It goes on."""
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    def data_received(self, data: bytes) -> None:
        """Cut what comes into heads and bodies."""
        self._heard_at = self._loop.time()
        try:
            while data and not self._is_refused:
                left = self._body_left
                if left == 0:
                    data = self._take_head(data)
                elif left is None:
                    self._parser.feed_data(data)
                    return
                elif len(data) <= left:
                    self._body_left = left - len(data)
                    self._parser.feed_data(data)
                    return
                else:
                    self._body_left = 0
                    self._parser.feed_data(data[:left])
                    data = data[left:]
        except HttpError as error:
            self._refuse(error_reply(error.status, error.text, error.headers))
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, HttpError):  # raised in one of the callbacks below
                self._refuse(error_reply(cause.status, cause.text, cause.headers))
            else:
                self._refuse(error_reply(HTTPStatus.BAD_REQUEST, "malformed HTTP request"))

    def _take_head(self, data: bytes) -> bytes:
        """Feed a whole head to the parser; what follows it."""
        if self._held:
            data = self._held + data
            self._held = b""
        else:
            self._head_since = self._heard_at
        end = data.find(_END_OF_HEAD) + len(_END_OF_HEAD)
        if end < len(_END_OF_HEAD):
            if len(data) > MAX_HEAD_BYTES:
                raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's head is too large")
            # Empty lines before a request are nothing (RFC 9112, 2.2).
            self._held = data.lstrip(b"\r\n")
            return b""
        if end > MAX_HEAD_BYTES:
            raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's head is too large")
        head = data[:end]
        if b"pgrade:" in head or b"PGRADE:" in head:
            head = _UPGRADE.sub(b"", head)
        self._parser.feed_data(head)
        return data[end:] if len(data) > end else b""

    # --- what the parser calls -----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._incoming = Exchange(self)

    def on_url(self, url: bytes) -> None:
        """Part of the request's target."""
        if self._incoming is not None:
            self._incoming.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field."""
        if self._incoming is not None:
            set_field(self._incoming.head, name, value)

    def on_headers_complete(self) -> None:
        """A body follows, or the next request."""
        exchange = self._incoming
        if exchange is None:
            return
        head = exchange.head
        exchange.method = self._parser.get_method()
        exchange.keeps_alive = self._parser.should_keep_alive()
        self._body_left = None if head.is_chunked else head.content_length
        self._body_size = 0
        if head.content_length > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        if head.expects_continue and self._current is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, chunk: bytes) -> None:
        """Part of the body."""
        self._body_size += len(chunk)
        if self._body_size > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        self._chunks.append(chunk)

    def on_message_complete(self) -> None:
        """The request is whole: serve it, when those before it are answered."""
        exchange, self._incoming = self._incoming, None
        self._body_left = 0
        if exchange is None:
            return
        chunks = self._chunks
        exchange.body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if self._current is None:
            self._current = exchange
            self._serve(exchange)
            return
        self._pipelined.append(exchange)
        if len(self._pipelined) >= _MAX_PIPELINED:
            self._transport.pause_reading()

    # --- answers -------------------------------------------------------------------------------------

    @property
    def is_last(self) -> bool:
        """Whether the connection is to be closed after the current answer."""
        return self._is_refused or (self._is_stopping and not self._pipelined)

    def write(self, data: bytes) -> None:
        """Part of the current answer."""
        if not self._transport.is_closing():
            self._transport.write(data)

    async def writable(self) -> None:
        """Wait while the client does not take what was sent."""
        if self._writable is not None:
            await self._writable.wait()

    def answer(self, exchange: Exchange, data: bytes) -> None:
        """The last part of an answer: then the next request has its turn."""
        if exchange is not self._current:
            return  # its client has left
        self._transport.write(data)
        self._current = None
        if not exchange.keeps_alive or self._is_refused:
            self._close_slowly()
        elif self._pipelined:
            self._current = self._pipelined.popleft()
            self._transport.resume_reading()
            self._serve(self._current)
        elif self._is_stopping:
            self._transport.close()

    def stop(self) -> None:
        """Close when what was received is answered."""
        self._is_stopping = True
        if self._current is None:
            self._transport.close()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def check(self, now: float) -> None:
        """Let go of a client that is too slow, or gone without a word. `now` is the event loop's time."""
        if self._writable is not None and now - self._paused_at > WRITE_TIMEOUT_S:
            self._transport.abort()
        elif self._current is not None:
            return
        elif self._held:
            if now - self._head_since > HEAD_TIMEOUT_S:
                self._transport.close()
        elif now - self._heard_at > (KEEP_ALIVE_S if self._incoming is None else BODY_TIMEOUT_S):
            self._transport.close()

    def _refuse(self, reply: Reply) -> None:
        """Answer what cannot be read on, and close the connection."""
        self._is_refused = True
        self._incoming = None
        self._held = b""
        self._chunks.clear()
        if self._current is None:
            self._transport.write(_encoded(reply, keeps_alive=False))
            self._close_slowly()

    def _close_slowly(self) -> None:
        self._is_refused = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._loop.call_later(_LINGER_S, self._transport.close)


def _encoded(reply: Reply, keeps_alive: bool) -> bytes:  # noqa: FBT001 - one of two, named by every caller's value
    head = b"%bcontent-type: %b\r\ncontent-length: %d\r\n" % (
        _STATUS_LINES[reply.status],
        reply.content_type,
        len(reply.content),
    )
    for name, value in reply.headers:
        head += b"%b: %b\r\n" % (name, value)
    if not keeps_alive:
        head += b"connection: close\r\n"
    return b"%b\r\n%b" % (head, reply.content)
