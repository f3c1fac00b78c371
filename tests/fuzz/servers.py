"""Both HTTP servers and the WebSocket, on bytes that no client library would send; in memory, without a socket."""

import asyncio
import logging
import random
import re
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from gateway.http.connection import Connection, State
from gateway.http.exchange import Exchange, Ready, Response
from gateway.http.websocket import websockets
from tests.fuzz.making import cut, mutated
from tests.fuzz.target import Target
from tests.kit import local_http

POST = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
SEEDS = [
    POST,
    b"GET /b?c=d HTTP/1.1\r\nhost: x\r\n\r\n" + POST,
    b"POST /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nt: u\r\n\r\n" + POST,
    b"POST http://x/d HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nhi",
    b"POST /e HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\nhi" + POST,
    b"POST /g HTTP/1.1\r\nhost: x\r\nx-away:\r\ncontent-length: 2\r\n\r\nhi" + POST,
    b"GET /f HTTP/1.0\r\nconnection: keep-alive\r\n\r\n" + POST,
]
PIECES = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\r\n ", b"\xff", b"0\r\n\r\n", b"-1\r\n",
    b"ffffffffffffffff\r\n", b"0x5\r\n", b"5;" + b"a" * 99,
    b"content-length: 5\r\n", b"Content-Length: 0\r\n", b"content-length: +5\r\n", b"content-length : 5\r\n",
    b"content-length: 5, 5\r\n",
    b"transfer-encoding: chunked\r\n", b"Transfer-Encoding: xchunked\r\n", b"transfer-encoding: gzip, chunked\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n",
    b"transfer-encoding: chunked, identity\r\n", b"GET / HTTP/1.1\r\n\r\n", b"HTTP/9.9",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"upgrade: websocket\r\n", b"x-away:\r\n",
]  # fmt: skip
STREAMS = mutated(SEEDS, PIECES)


class Transport(local_http.Transport):
    """Takes what is written; a connection can be handed to another protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol


class Faults(logging.Handler):
    """What the server logs as its own failures, and what the event loop is left with."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)):
            self.found.append(self.format(record))

    def left(self, _: Any, context: dict[str, Any]) -> None:
        self.found.append(str(context))


class App:
    """Tells what it has got; turns away what asks for it, as far as the server lets it."""

    is_behind = True

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.overload = self

    def turned_away(self, method: bytes, url: bytes, headers: Mapping[bytes, bytes]) -> tuple[Ready, bytes] | bool:
        return (AWAY, b"") if b"x-away" in headers and method == b"POST" and url else method == b"POST"

    async def serve(self, exchange: Exchange) -> None:
        body = b""
        while part := await exchange.read():
            body += part
        if exchange.is_whole:
            self.seen.append((exchange.scope["method"], exchange.scope["raw_path"], body))
            exchange.reply(Response(b"%b %d" % (exchange.scope["raw_path"][:20], len(body))))

    async def websocket(self, _scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": str(len(message.get("text") or message.get("bytes") or ""))})


AWAY = Ready(Response(b"away", status_code=429))
LOOP = asyncio.new_event_loop()
FAULTS = Faults()
LOOP.set_exception_handler(FAULTS.left)


def _received(reads: list[bytes]) -> tuple[list[Any], bytes]:
    """The requests that came whole, and all that was written, without the time."""
    FAULTS.found.clear()
    loggers = [logging.getLogger(name) for name in ("gateway.http", "uvicorn.error")]
    for logger in loggers:
        logger.addHandler(FAULTS)
    try:
        answer = LOOP.run_until_complete(_fed(reads))
    finally:
        for logger in loggers:
            logger.removeHandler(FAULTS)
    assert not FAULTS.found, FAULTS.found[0]
    return answer


async def _fed(reads: list[bytes]) -> tuple[list[Any], bytes]:
    app = App()
    upgrade = websockets(app.websocket, State(), max_message_bytes=1000)
    connection, transport = Connection(app, State(), upgrade), Transport()
    transport.set_protocol(connection)
    connection.connection_made(transport)
    for read in reads:
        if not transport.is_closing():
            transport.get_protocol().data_received(read)
    for _ in range(40):
        await asyncio.sleep(0)
    protocol = transport.get_protocol()
    transport.close()
    protocol.connection_lost(None)
    for _ in range(6):
        await asyncio.sleep(0)
    return app.seen, re.sub(rb"date: [^\r]*\r\n", b"", transport.written)


def _same_requests(reads: list[bytes]) -> None:
    whole = _received([b"".join(reads)])
    assert _received(reads) == whole
    bodies = sum(len(body) for _, _, body in whole[0])
    assert bodies <= len(b"".join(reads))


# --- WebSockets -----------------------------------------------------------------------------------

HANDSHAKE = (
    b"GET /s HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@st.composite
def _ws_frames(draw: st.DrawFn) -> bytes:
    """A handshake, and frames of any kind: fragments, controls, wrong masks, lengths that lie."""
    text = draw(st.just(HANDSHAKE) | mutated([HANDSHAKE], PIECES, most=2))
    for _ in range(draw(st.integers(0, 6))):
        payload = draw(
            st.binary(max_size=130)
            | st.sampled_from([b"hi", b"\x03\xe8bye", b"\xff\xfe", b"\xed\xa0\x80", b"x" * 2000])
        )
        first = draw(st.sampled_from([0x81, 0x82, 0x01, 0x00, 0x80, 0x88, 0x89, 0x8A, 0x8F, 0xC1, 0x09, 0x83]))
        size = draw(st.just(len(payload)) | st.sampled_from([0, 125, 126, 65535, 65536, 2**32, 2**63]))
        mask = draw(st.sampled_from([0x80, 0x80, 0x80, 0]))
        if size < 126:
            head = bytes((first, mask | size))
        elif size < 65536:
            head = bytes((first, mask | 126)) + size.to_bytes(2, "big")
        else:
            head = bytes((first, mask | 127)) + size.to_bytes(8, "big")
        text += head + (b"\0\0\0\0" if mask else b"") + payload
    return text


def _websocket(reads: list[bytes]) -> None:
    _, written = _received(reads)
    assert len(written) <= 8192


# --- the local runtime ----------------------------------------------------------------------------


@st.composite
def _local_streams(draw: st.DrawFn) -> bytes:
    chance = random.Random(draw(st.integers(0, 2**32)))  # noqa: S311 - the kit's own mutations, by a number
    return local_http.mutated(chance, chance.choice(local_http.SEEDS)) if draw(st.booleans()) else draw(STREAMS)


def _local_requests(reads: list[bytes]) -> None:
    async def both() -> None:
        assert local_http.received(*reads) == local_http.received(b"".join(reads))

    LOOP.run_until_complete(both())


TARGETS = (
    Target(
        name="http-server",
        about="the same requests and answers however a stream is cut; no failure of its own",
        inputs=cut(STREAMS),
        check=_same_requests,
    ),
    Target(
        name="websocket",
        about="handshakes and frames: no failure of its own, answers bounded",
        inputs=cut(_ws_frames()),
        check=_websocket,
    ),
    Target(
        name="local-http-server",
        about="the same requests and answers however a stream is cut",
        inputs=cut(_local_streams()),
        check=_local_requests,
    ),
)
