"""HTTP/1.1 on one connection: requests in, answers out, one after the other.

A protocol of our own, because a general server's cost per request (a task, two queues, a dozen calls) is more than a
small model's. One request is answered at a time and the one behind it is read meanwhile; what a client sends beyond
that waits in its own socket.
"""

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, TypeAlias, cast

from local_runtime.protocol.http_exchange import HttpError, Reply, error_reply
from local_runtime.protocol.http_head import Head
from local_runtime.protocol.http_requests import Request, RequestReader

HEAD_TIMEOUT_S: Final = 30.0  # from a head's first byte to its last
BODY_TIMEOUT_S: Final = 60.0  # without a byte of a body that was announced
KEEP_ALIVE_S: Final = 75.0  # longer than the 60 s of common load balancers, so that they close first
WRITE_TIMEOUT_S: Final = 60.0  # a peer that takes nothing of its answer for so long is let go
# A refused peer may still be sending: closing at once would tear the answer away from it. So long in all, and so long
# without a word.
LINGER_S: Final = 30.0
LINGER_SILENT_S: Final = 2.0
BACKLOG_BYTES: Final = 64 * 1024  # received beyond the request that is answered and the one behind it
_TURNS: Final = 64  # requests begun one after the other, some 10 us each where they are answered at once
_PROBE_S: Final = 0.01  # a peer on this machine refuses at once; others are looked at again by `check`
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES: Final = MappingProxyType(
    {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
)
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
)


class Exchange:
    """One request, complete, and the place for its answer: one `reply`, or a stream of `event`s up to `end`."""

    __slots__ = ("_connection", "body", "head", "is_streaming", "task")

    def __init__(self, connection: "HttpConnection", request: Request) -> None:
        self._connection = connection
        self.head = request.head
        self.body = request.body
        self.is_streaming = False
        self.task: asyncio.Task[None] | None = None

    def reply(self, reply: Reply) -> None:
        """The whole answer. Nothing happens if the client has left."""
        connection = self._connection
        connection.answer(self, _encoded(reply, self.head, is_last=connection.is_last))

    async def event(self, data: bytes) -> None:
        """One server-sent event; waits while the client does not take what was sent before."""
        if not self.is_streaming:
            self._begin_stream()
        event = b"data: %b\n\n" % data
        self._connection.write(self, event if self.head.is_http10 else b"%x\r\n%b\r\n" % (len(event), event))
        await self._connection.writable()

    def end(self) -> None:
        """The stream is complete."""
        if not self.is_streaming:
            self._begin_stream()
        self._connection.answer(self, b"" if self.head.is_http10 else b"0\r\n\r\n")

    def abort(self) -> None:
        """The answer, or the rest of it, will not come: the client sees that by the connection's end."""
        self._connection.give_up(self)

    def left(self) -> None:
        """The client has left: whatever runs for it ends."""
        if self.task is not None:
            self.task.cancel()

    def _begin_stream(self) -> None:
        self.is_streaming = True
        connection = self._connection
        framing = b"transfer-encoding: chunked\r\n"
        if self.head.is_http10:  # it knows no chunks: the end of the connection is the end of the stream
            connection.close_after(self)
            framing = b""
        if connection.is_last:
            framing += b"connection: close\r\n"
        connection.write(self, b"%b%b\r\n" % (_STREAM_HEAD, framing))


Serve: TypeAlias = Callable[[Exchange], None]


class HttpConnection(asyncio.Protocol):
    """One client's connection.

    Args:
        serve: called with each request when it is complete and those before it are answered; must not raise.
        connections: those that are open; this one adds and removes itself.
        max_body_bytes: a larger body is refused with 413.
    """

    def __init__(self, serve: Serve, connections: "set[HttpConnection]", *, max_body_bytes: int) -> None:
        self._serve = serve
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(max_body_bytes=max_body_bytes)
        self._current: Exchange | None = None
        self._next: Request | None = None
        self._refusal: Reply | None = None
        self._is_going_on = False
        self._is_stopping = False
        self._is_deaf = False  # whatever else comes is dropped
        self._has_dropped = False
        self._has_client_ended = False
        self._is_reading_paused = False
        self._writable: asyncio.Event | None = None
        self._active_at = self._unsent_since = self._loop.time()
        self._unsent = 0
        self._head_since: float | None = None
        self._lingers_since: float | None = None

    # --- what the event loop calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is here."""
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the event loop's signature
        """The client has left, or was let go."""
        self._connections.discard(self)
        self._turn_deaf()
        current, self._current, self._next = self._current, None, None
        if self._writable is not None:
            self._writable.set()
        if current is not None:
            current.left()

    def pause_writing(self) -> None:
        """The client takes nothing: no further request is begun."""
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        """It goes on."""
        if self._writable is not None:
            self._writable.set()
            self._writable = None
        self._go_on()

    def data_received(self, data: bytes) -> None:
        """Part of a request, or of several."""
        self._active_at = self._loop.time()
        if self._is_deaf:
            self._has_dropped = True
            return
        self._reader.put(data)
        self._go_on()

    def eof_received(self) -> bool:
        """The client has closed its side: it has left, or it only says that this was all and waits for its answer.

        What it sends tells nothing about which; only one that has left refuses what it is sent. An interim answer costs
        the other kind nothing (RFC 9110, 15.2).
        """
        self._has_client_ended = True
        self._turn_deaf()
        current = self._current
        if current is None:
            return self._next is not None
        if not current.is_streaming and not current.head.is_http10:
            self._transport.write(_CONTINUE)
        self._loop.call_later(_PROBE_S, self._let_go_if_left)
        return True

    # --- requests ----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take and begin what can be."""
        if self._is_going_on:
            return  # a request was answered at once: the loop below has the next
        self._is_going_on = True
        reader = self._reader
        turns = _TURNS
        try:
            while (request := self._next or reader.take()) is not None:
                if not request.head.keeps_alive:
                    self._turn_deaf()
                if self._current is not None or self._writable is not None:
                    self._next = request
                    break
                if not turns:  # all were answered at once: other connections have their turn first
                    self._next = request
                    self._loop.call_soon(self._go_on)
                    break
                turns -= 1
                self._next = None
                if self._transport.is_closing():
                    break  # the client has left in the middle of them
                self._current = Exchange(self, request)
                self._serve(self._current)
        except HttpError as error:
            self._refusal = error_reply(error.status, error.text, error.headers)
            self._turn_deaf()
        self._is_going_on = False
        if self._current is None:
            self._rest()
        is_backlogged = self._next is not None and reader.held_bytes > BACKLOG_BYTES
        if is_backlogged is not self._is_reading_paused:
            self._pause_reading(is_backlogged)

    def _rest(self) -> None:
        """Nothing is being answered: what is there to say, to wait for, or to end?"""
        if self._next is not None:
            return
        if self._reader.owes_continue():
            self._transport.write(_CONTINUE)
        if self._refusal is not None:
            reply, self._refusal = self._refusal, None
            self._has_dropped = True
            self._transport.write(_encoded(reply, None, is_last=True))
        if self._is_deaf or (self._is_stopping and not self._reader.awaits_body):
            self._end()
        elif not self._reader.is_in_head:
            self._head_since = None
        elif self._head_since is None:
            self._head_since = self._loop.time()

    def _pause_reading(self, is_backlogged: bool) -> None:  # noqa: FBT001 - the state that is to be
        self._is_reading_paused = is_backlogged
        if is_backlogged:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _turn_deaf(self) -> None:
        self._is_deaf = True
        self._has_dropped = self._has_dropped or self._reader.held_bytes > 0
        self._reader.drop()

    # --- answers -------------------------------------------------------------------------------------

    @property
    def is_last(self) -> bool:
        """Whether nothing follows the answer to the current request."""
        if self._next is not None or self._refusal is not None:
            return False
        return self._is_deaf or (self._is_stopping and not self._reader.awaits_body and not self._reader.held_bytes)

    def write(self, exchange: Exchange, data: bytes) -> None:
        """Part of the current answer."""
        if exchange is self._current:
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
        self._active_at = self._loop.time()
        self._go_on()

    def close_after(self, exchange: Exchange) -> None:
        """Take no request after this one, whatever has come of them."""
        if exchange is self._current:
            self._next = self._refusal = None
            self._turn_deaf()

    def give_up(self, exchange: Exchange) -> None:
        """Cut the connection off in the middle of an answer."""
        if exchange is self._current:
            self._transport.abort()

    # --- the end -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Close when the requests whose heads have come are answered."""
        self._is_stopping = True
        if self._current is None:
            self._rest()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def check(self, now: float) -> None:
        """Let go of a client that is too slow, or gone without a word. `now` is the event loop's time."""
        if self._is_stuck(now):
            self._transport.abort()
        elif self._lingers_since is not None:
            if now - self._lingers_since > LINGER_S or now - self._active_at > LINGER_SILENT_S:
                self._transport.close()
        elif self._current is not None or self._next is not None:
            self._let_go_if_left()
        elif self._reader.awaits_body:
            if now - self._active_at > BODY_TIMEOUT_S:
                self._time_out("the request's body has stopped coming")
        elif self._head_since is not None:
            if now - self._head_since > HEAD_TIMEOUT_S:
                self._time_out("the request's head takes too long")
        elif now - self._active_at > KEEP_ALIVE_S:
            self._transport.close()

    def _is_stuck(self, now: float) -> bool:
        unsent = self._transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent:
            self._unsent = unsent
            self._unsent_since = now
        return now - self._unsent_since > WRITE_TIMEOUT_S

    def _time_out(self, text: str) -> None:
        self._refusal = error_reply(HTTPStatus.REQUEST_TIMEOUT, text)
        self._turn_deaf()
        self._rest()

    def _let_go_if_left(self) -> None:
        """A client that has left has refused what it was sent since."""
        if self._has_client_ended and not self._transport.is_closing():
            peer: socket.socket = self._transport.get_extra_info("socket")
            if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._transport.abort()

    def _end(self) -> None:
        if self._transport.is_closing():
            return
        if self._has_client_ended or not self._has_dropped:
            self._transport.close()
        elif self._lingers_since is None:
            self._lingers_since = self._active_at = self._loop.time()
            try:
                self._transport.write_eof()
            except OSError:  # the client has just left
                self._transport.abort()


def _encoded(reply: Reply, head: Head | None, *, is_last: bool) -> bytes:
    """An answer as bytes; `head` is that of its request, where there is one."""
    fields = b"".join([b"%b: %b\r\n" % field for field in reply.headers]) if reply.headers else b""
    if is_last:
        fields += b"connection: close\r\n"
    elif head is not None and head.is_http10:
        fields += b"connection: keep-alive\r\n"
    return b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (
        _STATUS_LINES[reply.status],
        reply.content_type,
        len(reply.content),
        fields,
        b"" if head is not None and head.method == b"HEAD" else reply.content,
    )
