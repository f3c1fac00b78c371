"""WebSockets: uvicorn's, with the bounds that it lacks."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame

from gateway.http.asgi import DRAINING

WRITE_TIMEOUT_S: Final = 60.0  # a peer that takes nothing for so long is let go
PING_S: Final = 20.0  # between pings on a WebSocket, and until a pong: uvicorn's own, below usual proxies' idle times
MAX_FRAGMENTS: Final = 64 * 1024  # of one message: empty ones add nothing to its size, which is bounded besides
WEBSOCKET_READ: Final = 4 * 1024  # bytes parsed at once: some 700 of the smallest frames, each worth 0.1 ms


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

    def handle_cont(self, event: Frame) -> None:
        """A further part of a message."""
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        else:
            self._refuse(CloseCode.POLICY_VIOLATION)

    def send_receive_event_to_app(self) -> None:
        """A whole message. Text that is none ends the connection; the original writes a traceback into our log."""
        if self.curr_msg_data_type == "text":
            self.frames = [b"".join(self.frames)]
            try:
                self.frames[0].decode()
            except UnicodeDecodeError:
                self._refuse(CloseCode.INVALID_DATA)
                return
        super().send_receive_event_to_app()

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

    def _refuse(self, code: CloseCode) -> None:
        """The peer is told why, and the application that it has left."""
        self.frames = []
        if not self.close_sent:
            self.conn.send_close(code)
            self.handle_parser_exception()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def websockets(app: ASGIApp, state: ServerState, *, max_message_bytes: int) -> Callable[[], WebSocket]:
    """What makes the protocol of a connection that has become a WebSocket of `app`."""
    config = uvicorn.Config(
        app,
        interface="asgi3",
        ws=WebSocket,
        ws_max_size=max_message_bytes,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        ws_per_message_deflate=False,  # audio hardly shrinks, and each socket would hold some 300 KiB for it
        lifespan="off",
        log_config=None,
        proxy_headers=False,  # nothing here believes what a header says of the peer
    )
    return lambda: WebSocket(config=config, server_state=state, app_state={})
