"""HTTP/1.1 on one connection: requests in, answers out, one after the other. Bounded in bytes and in time.

A few lines longer than others: what a connection waits for, and its end, are one story.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

import httptools
from uvicorn.server import ServerState

from gateway.http import heads
from gateway.http.application import Application
from gateway.http.chunks import Chunks
from gateway.http.exchange import Exchange, Ready, Response
from gateway.http.websocket import WebSocket

MAX_UNREAD_BYTES: Final = 64 * 1024  # of a body, before nothing more is read of it
HEAD_TIMEOUT_S: Final = 30.0  # from a connection's (or a request's) first moment to the end of its head
MOST_THROWN_AWAY: Final = 1024 * 1024  # of the body of a request that is turned away by its head
LINGER_S: Final = 1.0
KEEP_ALIVE_S: Final = 75.0  # longer than the 60 s of common load balancers, so that they close first
WRITE_TIMEOUT_S: Final = 60.0  # a peer that takes nothing for so long is let go
Upgrade: TypeAlias = Callable[[], WebSocket]

_log = logging.getLogger(__name__)


class State(ServerState):
    """What all connections of a server share."""

    date_line: bytes = b""
    is_stopping = False

    def tell_date(self, date: str) -> None:
        """In the answers from now on."""
        self.default_headers = [(b"date", date.encode())]  # of handshakes of WebSockets
        self.date_line = f"date: {date}\r\n".encode()


class Connection(asyncio.Protocol):
    """One caller's. Its heads are bounded in size and time, and it stays HTTP/1.1 whatever it is offered.

    What comes is cut into heads and bodies before the parser sees it. A head is held back until it is whole. An offer
    to go on in another protocol (h2c, TLS) is taken out of it: it may be ignored (RFC 9110, 7.8), and has to be, since
    the parser would take the body that follows for that protocol's. One offer is taken: a GET without a body that
    wants to be a WebSocket, where the application has some.

    Args:
        app: answers requests; each is a task, one at a time, but for those that are turned away.
        upgrade: makes the protocol of a WebSocket; None where there are none.
    """

    def __init__(self, app: Application, state: State, upgrade: Upgrade | None) -> None:
        self.state = state
        self.is_writable = True
        self._app = app
        self._overload = app.overload
        self._upgrade = upgrade
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        # What follows a request after which the connection closes is never answered, and no fault of that request.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._head = bytearray()
        self._is_in_head = True
        self._body_left = 0
        self._chunks: Chunks | None = None  # of a body whose length was not told
        self._reading: Exchange | None = None  # whose body comes
        self._current: Exchange | None = None  # that is answered
        self._waiting: deque[Exchange] = deque()  # behind it
        self._away: tuple[Ready, bytes] | None = None  # what the one whose body comes is turned away with
        self._is_refused = self._is_upgrading = self._is_stopping = self._is_reading_paused = False
        self._room: asyncio.Event | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0

    # --- what the event loop calls ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A connection has as long for its first request as each request has for its head."""
        self._transport = cast("asyncio.Transport", transport)
        self.write: Callable[[bytes], None] = self._transport.write
        self._server = _address(transport.get_extra_info("sockname"))
        self._client = _address(transport.get_extra_info("peername"))
        connections: set[Any] = self.state.connections
        connections.add(self)
        self._start_head_timer()
        if self.state.is_stopping:
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the event loop's signature
        """Nothing is waited for any more, and whoever works for the caller is told."""
        connections: set[Any] = self.state.connections
        connections.discard(self)
        for timer in (self._head_timer, self._idle_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._let_write()
        unanswered = [*((self._current,) if self._current else ()), *self._waiting]
        self._current = self._reading = None
        self._waiting.clear()
        for exchange in unanswered:
            exchange.left()
        del self._parser  # which holds us

    def pause_writing(self) -> None:
        """The caller takes nothing: it has a bounded time to go on, and no further request is begun."""
        self.is_writable, self._room = False, asyncio.Event()
        self._write_timer = self._loop.call_later(WRITE_TIMEOUT_S, self._transport.abort)

    def resume_writing(self) -> None:
        """It goes on."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._let_write()
        if self._current is None:
            self._go_on()

    def data_received(self, data: bytes) -> None:
        """Cut what comes into heads and bodies."""
        while data and not self._is_refused and not self._transport.is_closing():
            if self._is_in_head:
                data = self._take_head(data)
            elif self._away is None and self._is_answered():
                self._linger()  # a body that nobody wants, after the answer
            elif self._chunks is not None:
                data = self._take_chunks(data, self._chunks)
            else:
                body, data = data[: self._body_left], data[self._body_left :]
                self._body_left -= len(body)
                self._feed(body)
        if self._away is not None:
            self._start_head_timer()  # what is left of its body has as long as a head

    def _take_chunks(self, data: bytes, chunks: Chunks) -> bytes:
        """Feed what is of a chunked body to the parser; what follows it."""
        try:
            size = chunks.size(data)
        except ValueError:
            self._refuse_malformed()
            return b""
        self._feed(data[:size])
        if self._is_in_head != chunks.is_over and not (self._is_refused or self._transport.is_closing()):
            self._refuse_malformed()  # nobody knows where the next request would begin
        return data[size:]

    # --- heads ------------------------------------------------------------------------------------------------

    def _take_head(self, data: bytes) -> bytes:
        """Feed a whole head to the parser; what follows it."""
        before = len(self._head)
        if before:
            self._head += data
        else:
            data = data.lstrip(b"\r\n")  # empty lines before a request are nothing (RFC 9112, 2.2)
        if not data:
            return b""
        came = self._head or data
        size = heads.end_of_head(came, max(0, before - 3))
        if (size or len(came)) > heads.MAX_BYTES:
            self._refuse_head(heads.too_large())
            return b""
        if size is None:
            if not before:
                self._head += data
            if self._is_answered():
                self._start_head_timer()
            return b""
        if before:
            data = bytes(came)
            self._head.clear()
        head, rest = data[:size], data[size:]
        if b"upgrade:" in head.lower():
            return self._take_offer(head, rest)
        self._feed(head)
        return rest

    def _take_offer(self, head: bytes, rest: bytes) -> bytes:
        """Feed a head that offers another protocol, as far as it is listened to; what follows it."""
        if self._upgrade is not None and heads.wants_websocket(head) and self._is_answered():
            self._is_upgrading = True
            self._feed(head)
            self._is_upgrading = False
            return self._after_offer(rest)
        self._feed(heads.without_offers(head))
        return rest

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self._is_refused:
                self._refuse_malformed()
        except httptools.HttpParserUpgrade:
            if self._is_upgrading:
                self._hand_over()

    def _hand_over(self) -> None:
        """The connection is a WebSocket's from now on."""
        if self._upgrade is None:  # pragma: no cover - then nothing is upgrading
            return
        for timer in (self._head_timer, self._idle_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        connections: set[Any] = self.state.connections
        connections.discard(self)
        heir = self._upgrade()
        heir.connection_made(self._transport)
        if not self.is_writable:  # the answers before it are still on their way
            heir.pause_writing()
        lines = [b"GET %b HTTP/1.1\r\n" % self._url, *[b"%b: %b\r\n" % field for field in self._fields], b"\r\n"]
        heir.data_received(b"".join(lines))
        self._transport.set_protocol(heir)

    def _after_offer(self, rest: bytes) -> bytes:
        """What follows the head is the new protocol's, if it has the connection by now."""
        heir: Any = self._transport.get_protocol()
        if heir is self:
            return rest
        if rest and not self._transport.is_closing():
            heir.data_received(rest)
        return b""

    # --- what the parser calls --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """What comes now is of a new request, and not of the trailers of the one before."""
        self._url, self._fields = b"", []

    def on_url(self, url: bytes) -> None:
        """Part of what is asked for."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; trailers are left out."""
        if self._reading is None:
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """What follows is a body, or the next request."""
        if self._is_upgrading and self._parser.should_upgrade():
            return
        fields, self._fields = self._fields, []
        first = dict(reversed(fields))  # of those that are there more than once
        self._is_in_head = False
        self._chunks = Chunks() if b"transfer-encoding" in first else None
        if self._chunks is not None and heads.is_coded_twice(fields):
            self._refuse_head(heads.unknown_coding())
            return
        self._body_left = int(first.get(b"content-length", 0))
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        away = self._overload.is_behind and self._turned_away(first)
        if away is not False and away is not True:
            self._away = away
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in first.items()}
        scope = heads.described(self._parser, self._url, fields, server=self._server, client=self._client)
        keeps_alive = scope["http_version"] != "1.0" and not self._is_stopping and self._parser.should_keep_alive()
        self._reading = exchange = Exchange(self, scope, headers, keeps_alive=keeps_alive)
        if away:
            exchange.is_taken = True
        if self._current is None and self.is_writable and not self._waiting:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)
            self._pause_reading()

    def _turned_away(self, headers: dict[bytes, bytes]) -> tuple[Ready, bytes] | bool:
        """What is told to a request once its body has come, which is thrown away; else as `Application` has it."""
        if self._current or self._waiting or self._chunks or self._body_left > MOST_THROWN_AWAY or not self.is_writable:
            return False
        return self._app.turned_away(self._parser.get_method(), self._url, headers)

    def _turn_away(self, answer: Ready, lines: bytes) -> None:
        self._away = None
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self.write(answer.whole(self.state.date_line + lines))
        if self._is_stopping or self._parser.get_http_version() == "1.0" or not self._parser.should_keep_alive():
            self._transport.close()
        self._go_on()

    def on_body(self, part: bytes) -> None:
        """Part of a body."""
        exchange = self._reading
        if exchange is None or exchange.is_over:
            return
        exchange.came(part)
        if exchange.unread > MAX_UNREAD_BYTES:
            self._pause_reading()

    def on_message_complete(self) -> None:
        """What follows is a head."""
        self._is_in_head = True
        exchange, self._reading = self._reading, None
        if exchange is not None:
            exchange.ended()
        elif self._away is not None:
            self._turn_away(*self._away)

    # --- answers ----------------------------------------------------------------------------------------------

    def _begin(self, exchange: Exchange) -> None:
        self._current = exchange
        exchange.task = task = self._loop.create_task(self._run(exchange))
        self.state.tasks.add(task)

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._app.serve(exchange)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 - the server's boundary: nothing goes on above it
            _log.exception("the application failed on a request")
        if not exchange.is_over:
            self._give_up(exchange)
        if exchange.task is not None:
            self.state.tasks.discard(exchange.task)

    def _give_up(self, exchange: Exchange) -> None:
        """No answer, or no end of it, will come any more."""
        if exchange.has_begun:
            self._transport.close()
        else:
            exchange.reply(_failed())

    async def writable(self) -> None:
        """Wait until the caller takes what is written, or has left."""
        if self._room is not None:
            await self._room.wait()

    def answered(self, exchange: Exchange) -> None:
        """The next one has its turn."""
        self._current = None
        if exchange.keeps_alive:
            self._go_on()
        else:
            self._transport.close()

    def _go_on(self) -> None:
        if self._transport.is_closing():
            return
        if self._waiting and self.is_writable:
            self._begin(self._waiting.popleft())
        if not self._waiting:
            self.read_on()
            if self._head:  # begun during the answer
                self._start_head_timer()
            self._idle_since = self._loop.time()
            if self._idle_timer is None:
                self._idle_timer = self._loop.call_later(KEEP_ALIVE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        """Close what was idle for so long. One timer goes on through many requests: none is made for each."""
        self._idle_timer = None
        if not self._is_answered() or self._head:
            return  # it begins again with the answer's end
        left_s = self._idle_since + KEEP_ALIVE_S - self._loop.time()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._close_if_idle)
        else:
            self._transport.close()

    def _is_answered(self) -> bool:
        """Whether no request of this connection waits for its answer."""
        return self._current is None and not self._waiting

    # --- flow -------------------------------------------------------------------------------------------------

    def read_on(self) -> None:
        """Read what comes, unless there is enough of it."""
        if self._is_reading_paused and not self._waiting and not self._transport.is_closing():
            self._is_reading_paused = False
            self._transport.resume_reading()

    def _pause_reading(self) -> None:
        if not self._is_reading_paused and not self._transport.is_closing():
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _let_write(self) -> None:
        self.is_writable = True
        if self._room is not None:
            self._room.set()
            self._room = None

    # --- the end ----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close when what has come is answered."""
        self._is_stopping = True
        last = self._waiting[-1] if self._waiting else self._current
        if last is not None:
            last.keeps_alive = False
        elif self._head_timer is not None:  # its first request, or the rest of a head, may be on its way
            self._loop.call_later(LINGER_S, self._close_if_unasked)
        elif self._away is None:
            self._transport.close()

    def _close_if_unasked(self) -> None:
        if self._is_answered() and self._away is None:
            self._transport.close()

    def _take_no_more(self) -> None:
        """What came behind requests is none: they are answered, and then the connection closes."""
        self._is_refused = True
        self.shutdown()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(HEAD_TIMEOUT_S, self._head_expired)

    def _head_expired(self) -> None:
        self._head_timer = None
        if self._is_answered():
            self._transport.close()

    def _refuse_malformed(self) -> None:
        """400, where there is a place for it: not in the middle of an answer, nor in the place of another request's."""
        current = self._current
        if self._is_answered() or (current is not None and current is self._reading and not current.has_begun):
            self._transport.write(heads.MALFORMED)
            self._transport.close()
        elif self._reading is not current:
            if self._reading is not None:
                self._waiting.pop()  # the newest, whose body is broken
            self._take_no_more()
        else:
            self._transport.abort()

    def _refuse_head(self, answer: bytes) -> None:
        if not self._is_answered():
            self._take_no_more()
            return
        self._transport.write(answer)
        self._transport.write_eof()
        self._linger()

    def _linger(self) -> None:
        """Throw away what is still on its way, for a moment: closing upon it would reset the connection at once."""
        self._is_refused = True
        self._loop.call_later(LINGER_S, self._transport.close)


def _failed() -> Response:
    headers = {"content-type": "text/plain; charset=utf-8", "connection": "close"}
    return Response(b"Internal Server Error", status_code=500, headers=headers)


def _address(told: Any) -> tuple[str, int] | None:
    """Host and port; None for other kinds of sockets."""
    return (str(told[0]), int(told[1])) if isinstance(told, tuple) else None
