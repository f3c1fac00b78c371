"""The HTTP server of every process of ours: uvicorn, with the bounds that it lacks, stopped by an event.

Longer than others: all that departs from uvicorn stands in one place, to be looked through when its version changes.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
from collections.abc import Generator
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gateway.api.endpoint import DEPARTURE, Departure
from gateway.api.stream import DRAINING
from gateway.settings import ConfigError

BACKLOG: Final = 2048
MAX_HEAD_BYTES: Final = 64 * 1024  # request line and headers; nginx takes 32 KiB, httptools any size, in quadratic time
HEAD_TIMEOUT_S: Final = 30.0  # from a connection's (or a request's) first moment to the end of its head
LINGER_S: Final = 1.0
CLOSING_TURNS: Final = 10  # of the event loop, in which what is idle is closed
KEEP_ALIVE_S: Final = 75  # longer than the 60 s of common load balancers, so that they close first
WRITE_TIMEOUT_S: Final = 60.0  # a peer that takes nothing for so long is let go
PING_S: Final = 20.0  # between pings on a WebSocket, and until a pong: uvicorn's own, below usual proxies' idle times
WEBSOCKET_READ: Final = 4 * 1024  # bytes parsed at once: some 700 of the smallest frames, each worth 0.1 ms
_CONTROLS: Final = bytes({*range(32), 127} - {9})  # in no header's value, but a tab (RFC 9110, 5.5)
_FRAMING: Final = frozenset((b"connection", b"transfer-encoding"))
_UPGRADE: Final = re.compile(rb"(?im)^upgrade:[^\r\n]*\r?\n")
_WEBSOCKET: Final = re.compile(rb"(?im)^upgrade:[ \t]*websocket[ \t]*\r?$")
_CONNECTION_UPGRADE: Final = re.compile(rb"(?im)^connection:[^\r\n]*\bupgrade\b")
_BODY: Final = re.compile(rb"(?im)^(content-length|transfer-encoding|expect):")


class Cycle(RequestResponseCycle):
    """A request and its answer. A whole answer of known length is written in one piece, and its head searched as one.

    uvicorn searches each header by itself, and writes twice. Whatever is not usual is left to it.
    """

    _head: bytes | None = None  # held back until the body comes, which is at once

    async def send(self, message: Any) -> None:
        """See ASGI."""
        if self.flow.write_paused or not self._has_sent(message):
            if self._head is not None and not self.disconnected:
                self.transport.write(self._head)
            self._head = None
            await super().send(message)

    def _has_sent(self, message: Any) -> bool:
        """Send what is usual; whether it was."""
        if self.disconnected or not self.keep_alive or self.scope["method"] == "HEAD":
            return False
        if not self.response_started:
            return message["type"] == "http.response.start" and self._has_begun(message)
        body, has_more = message.get("body", b""), message.get("more_body", False)
        if self._head is not None and not has_more and len(body) == self.expected_content_length:
            self.transport.write(self._head + body)
            self._head, self.response_complete = None, True
            self.message_event.set()
            self.on_response()
            return True
        if self.chunked_encoding and body and has_more and not self.response_complete:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return True
        return False

    def _has_begun(self, message: Any) -> bool:
        """Hold the head of an answer of known length; whether it is one."""
        fields = [*self.default_headers, *message["headers"]]
        known = dict(fields)
        length = known.get(b"content-length")
        if length is None or not known.keys().isdisjoint(_FRAMING):
            return False
        head = STATUS_LINE[message["status"]] + b"\r\n".join([b": ".join(field) for field in fields]) + b"\r\n\r\n"
        if len(head) - len(head.translate(None, _CONTROLS)) != 2 * len(fields) + 4:
            return False  # more line ends than lines: uvicorn says where
        self.response_started, self.waiting_for_100_continue = True, False
        self.expected_content_length, self.chunked_encoding, self._head = int(length), False, head
        return True


httptools_impl.RequestResponseCycle = Cycle  # type: ignore[misc]  # uvicorn's protocol makes them by this name


class Http(HttpToolsProtocol):
    """HTTP/1.1 whose heads are bounded in size and time, and which stays HTTP/1.1 whatever it is offered.

    What comes is cut into heads and bodies before the parser sees it. A head is held back until it is whole. An offer
    to go on in another protocol (h2c, TLS) is taken out of it: it may be ignored (RFC 9110, 7.8), and has to be, since
    the parser would take the body that follows for that protocol's. One offer is taken: a GET without a body that
    wants to be a WebSocket, where the application has some.
    """

    def connection_made(self, transport: Any) -> None:
        """A connection has as long for its first request as each request has for its head."""
        super().connection_made(transport)
        self._head = bytearray()
        self._is_in_head = True
        self._body_left: int | None = 0  # None: chunked, only the parser knows
        self._is_refused = False
        self._departures: list[Departure] = []
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more, and whoever works for the peer is told."""
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)
        for departure in self._departures:
            departure.left()

    def pause_writing(self) -> None:
        """The peer takes nothing: it has a bounded time to go on."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It goes on."""
        self._stop_write_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Cut what comes into heads and bodies."""
        while data and not self._is_refused and not self.transport.is_closing():
            if self._is_in_head:
                data = self._take_head(data)
            elif self._is_answered():
                self._linger()  # a body that nobody wants, after the answer
            elif self._body_left is None:
                super().data_received(data)
                return
            else:
                body, data = data[: self._body_left], data[self._body_left :]
                self._body_left -= len(body)
                super().data_received(body)

    def _take_head(self, data: bytes) -> bytes:
        """Feed a whole head to the parser; what follows it."""
        before = len(self._head)
        if before:
            self._head += data
        else:
            data = data.lstrip(b"\r\n")  # empty lines before a request are nothing (RFC 9112, 2.2)
        if not data:
            return b""
        self._unset_keepalive_if_required()
        came = self._head or data
        size = _end_of_head(came, max(0, before - 3))
        if (size or len(came)) > MAX_HEAD_BYTES:
            self._refuse_head()
            return b""
        if size is None:
            if not before:
                self._head += data
            if self._is_answered():
                self._start_head_timer()
            return b""
        head, rest = bytes(came[:size]), bytes(came[size:])
        self._head.clear()
        if self.ws_protocol_class is not None and self._is_answered() and _wants_websocket(head):
            super().data_received(head)
            return self._hand_over(rest)
        super().data_received(_UPGRADE.sub(b"", head) if b"upgrade:" in head.lower() else head)
        return rest

    def _hand_over(self, rest: bytes) -> bytes:
        """What follows the head is the new protocol's, if it has the connection by now."""
        heir: Any = self.transport.get_protocol()
        if heir is self:
            return rest
        self._stop_head_timer()
        if rest and not self.transport.is_closing():
            heir.data_received(rest)
        return b""

    def on_headers_complete(self) -> None:
        """What follows is a body, or the next request."""
        self._is_in_head = False
        self._stop_head_timer()
        fields = dict(self.headers)
        self._body_left = None if b"transfer-encoding" in fields else int(fields.get(b"content-length", b"0"))
        self.scope[DEPARTURE] = departure = Departure()  # type: ignore[typeddict-unknown-key]  # a key of our own
        self._departures = [*(one for one in self._departures if not one.is_over), departure]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What follows is a head."""
        self._is_in_head = True
        if self._departures:
            self._departures[-1].has_asked = True
        super().on_message_complete()

    def _is_answered(self) -> bool:
        """Whether no request of this connection waits for its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_expired)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _head_expired(self) -> None:
        self._head_timer = None
        if self._is_answered():
            self.transport.close()

    def _refuse_head(self) -> None:
        if not self._is_answered():  # in the middle of another request's answer there is no place for a word
            self.transport.abort()
            return
        problem = {
            "type": "about:blank",
            "title": "Request header fields too large",
            "status": 431,
            "detail": f"request line and headers may have {MAX_HEAD_BYTES} bytes",
            "code": "malformed_request",
        }
        body = json.dumps(problem).encode()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/problem+json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.write_eof()
        self._linger()

    def _linger(self) -> None:
        """Throw away what is still on its way, for a moment: closing upon it would reset the connection at once."""
        self._is_refused = True
        self.loop.call_later(LINGER_S, self.transport.close)


class WebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, which tells its application of a stop, and lets go of a peer that takes nothing.

    Reading pauses while the application has a message to take, and while the peer takes nothing itself: messages are
    bounded in size, and what waits here is at most what came in one read. That is parsed in small parts, between which
    others have their turns: a read may hold tens of thousands of frames.
    """

    def connection_made(self, transport: Any) -> None:
        """It begins."""
        self._draining = asyncio.Event()
        self._write_timer: asyncio.TimerHandle | None = None
        self._unparsed = bytearray()
        self._turn: asyncio.Handle | None = None
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_write_timer()
        self._unparsed.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what comes, part by part; the handshake at once."""
        if not self.handshake_initiated:
            super().data_received(data)
            return
        self._unparsed += data
        self._go_on()

    async def receive(self) -> Any:
        """The application's next message; with none left, what waits to be parsed goes on."""
        message = await super().receive()
        self._go_on()
        return message

    async def send(self, message: Any) -> None:
        """The application's word; after its answer to the handshake the first frames can be taken."""
        if self.close_sent:  # by the server itself, for want of a pong, which the application learns only later
            raise ClientDisconnected
        await super().send(message)
        self.handshake_complete |= self.close_sent  # also by a refusal, which the original logs as an error
        self._go_on()

    def _go_on(self) -> None:
        """Parse the next part when it is our turn, or read on, unless there is a reason to wait."""
        if self._unparsed:
            self.transport.pause_reading()  # whoever resumed it: nothing is read on top of what waits
        is_waiting = self.read_paused or self._write_timer is not None or not self.handshake_complete
        if is_waiting or self._turn is not None or self.transport.is_closing():
            return
        if self._unparsed:
            self._turn = self.loop.call_soon(self._parse)
        else:
            self.transport.resume_reading()

    def _parse(self) -> None:
        self._turn = None
        part = bytes(self._unparsed[:WEBSOCKET_READ])
        del self._unparsed[:WEBSOCKET_READ]
        super().data_received(part)
        self._go_on()

    def pause_writing(self) -> None:
        """The peer takes nothing: it has a bounded time to go on."""
        super().pause_writing()
        self.transport.pause_reading()  # or its pings would be answered into our own memory
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It goes on."""
        self._stop_write_timer()
        super().resume_writing()
        self._go_on()

    async def run_asgi(self) -> None:
        """The application can see in its scope when the server stops."""
        ours: Any = {DRAINING: self._draining}
        self.scope["extensions"] = {**(self.scope["extensions"] or {}), **ours}
        await super().run_asgi()

    def shutdown(self) -> None:
        """The server stops: the application finishes, and closes by itself, within the drain time."""
        if self.handshake_complete and not self.close_sent:
            self._draining.set()
        else:
            super().shutdown()

    def keepalive_timeout(self) -> None:
        """No pong came; but while we read nothing it may well lie before our door."""
        if self.read_paused and self.ping_timeout is not None:
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
        else:
            super().keepalive_timeout()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class Server(uvicorn.Server):
    """uvicorn's server, stopped by an event of ours instead of by signals of its own.

    The original waits 0.1 s for its connections even where there is none.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The original would raise the signal again at its end, before we have let go of what we hold."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new, and finish what is in flight: mostly nothing, since idle connections close at once."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for _ in range(CLOSING_TURNS):
            if not (self.server_state.connections or self.server_state.tasks):
                return
            await asyncio.sleep(0)
        await super().shutdown(sockets)


async def serve_app(
    app: ASGIApp,
    sockets: list[socket.socket],
    stop: asyncio.Event,
    *,
    drain_s: float,
    max_message_bytes: int | None = None,
) -> None:
    """Serve until `stop`, then finish what is in flight for at most `drain_s`.

    `max_message_bytes` bounds a WebSocket's messages; None where the application has no WebSockets.
    """
    config = uvicorn.Config(
        app,
        http=Http,
        ws="none" if max_message_bytes is None else WebSocket,
        ws_max_size=max_message_bytes or 0,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        ws_per_message_deflate=False,  # audio hardly shrinks, and each socket would hold some 300 KiB for it
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # nothing here believes what a header says of the peer
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = Server(config)
    serving = asyncio.create_task(server.serve(sockets=sockets))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        stopping.cancel()
        await serving


def _end_of_head(came: bytes | bytearray, start: int) -> int | None:
    """Where the first empty line from `start` on ends; None where there is none. Lines may end without a CR."""
    bare = came.find(b"\n\n", start)
    with_cr = came.find(b"\n\r\n", start, bare + 2 if bare >= 0 else len(came))
    if with_cr >= 0:
        return with_cr + 3
    return bare + 2 if bare >= 0 else None


def _wants_websocket(head: bytes) -> bool:
    """Whether a whole head offers a WebSocket, as RFC 6455 (4.1) has it, and nothing else."""
    return (
        head.startswith(b"GET ")
        and len(_UPGRADE.findall(head)) == 1
        and _WEBSOCKET.search(head) is not None
        and _CONNECTION_UPGRADE.search(head) is not None
        and _BODY.search(head) is None
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` with one clear line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), backlog=BACKLOG, family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from error
    # uvloop does so for each connection, asyncio's own loop only where the socket names TCP: else a stream's parts wait
    # for the acknowledgement of those before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
