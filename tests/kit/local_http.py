"""HTTP of the local runtime on raw bytes and sockets: a server of small answers, and clients that see every byte."""

import asyncio
import contextlib
import random
import re

from local_runtime.protocol.http_connection import Exchange, HttpConnection
from local_runtime.protocol.http_exchange import Reply
from tests.kit.wait import until

MAX_BODY = 100_000
POST = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n"
SLOW = b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nslow"


class Server:
    """Answers /echo at once, /slow when the gate opens, /events with as many events as the body says."""

    def __init__(self) -> None:
        self.connections: set[HttpConnection] = set()
        self.seen: list[Exchange] = []
        self.gate = asyncio.Event()
        self.sent_events = 0
        self.cancelled = 0
        self.port = 0

    def serve(self, exchange: Exchange) -> None:
        self.seen.append(exchange)
        if exchange.head.path in (b"/slow", b"/events", b"/broken"):
            answer = self._slow if exchange.head.path == b"/slow" else self._events
            exchange.task = asyncio.get_running_loop().create_task(answer(exchange))
        else:
            exchange.reply(Reply(content=b"%b %b %b" % (exchange.head.method, exchange.head.path, exchange.body)))

    def connection(self) -> HttpConnection:
        return HttpConnection(self.serve, self.connections, max_body_bytes=MAX_BODY)

    @property
    def only(self) -> HttpConnection:
        (connection,) = self.connections
        return connection

    async def _slow(self, exchange: Exchange) -> None:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        exchange.reply(Reply(content=b"slow " + exchange.body))

    async def _events(self, exchange: Exchange) -> None:
        try:
            for number in range(int(exchange.body or b"0")):
                await exchange.event(b"%d" % number)
                self.sent_events += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if exchange.head.path == b"/broken":
            exchange.abort()
        else:
            exchange.end()


@contextlib.asynccontextmanager
async def serving():
    server = Server()
    listening = await asyncio.get_running_loop().create_server(server.connection, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        server.gate.set()
        listening.close()
        for connection in tuple(server.connections):
            connection.abort()
        await until(lambda: not server.connections)


class Client:
    """A socket, and what comes out of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, has_body: bool = True) -> tuple[int, dict[bytes, bytes], bytes]:
        async with asyncio.timeout(5):
            head = await self.reader.readuntil(b"\r\n\r\n")
            status, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
            fields = dict(line.split(b": ", 1) for line in lines)
            length = int(fields.get(b"content-length", b"0")) if has_body else 0
            return int(status.split()[1]), fields, await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        """Everything up to the end of the connection; fails if there is none."""
        async with asyncio.timeout(5):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def client(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def connected():
    async with serving() as server, client(server) as one:
        yield server, one


class Transport(asyncio.Transport):
    """Takes what is written, and knows whether it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data):
        self.written += data

    def write_eof(self):
        self.is_closed = True

    def close(self):
        self.is_closed = True

    abort = close

    def is_closing(self):
        return self.is_closed

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self):
        pass

    resume_reading = pause_reading


def received(*pieces):
    """What comes of it when the pieces are received one by one: requests, answers, and whether that was the end.

    What exactly the parser dislikes is left out: it may tell sooner or later.
    """
    server = Server()
    connection, transport = server.connection(), Transport()
    connection.connection_made(transport)
    for piece in pieces:
        if not transport.is_closed:
            connection.data_received(piece)
    seen = [(exchange.head.method, exchange.head.path, exchange.body) for exchange in server.seen]
    written = re.sub(
        rb'content-length: \d+\r\n(?=connection: close\r\n\r\n\{"error":"malformed)', b"", transport.written
    )
    written = re.sub(rb'malformed HTTP request[^"]*', b"malformed HTTP request", written)
    return seen, written, transport.is_closed


SEEDS = (
    POST,
    GET,
    CHUNKED + b"2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\nt: u\r\n\r\n",
    b"POST http://x/echo?y HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\nhello",
    b"GET /echo HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\naccept-encoding: gzip\r\n\r\n",
    b"POST /events HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 1\r\n\r\n2",
)
PIECES = (
    b"\r\n",
    b"\n",
    b"\r",
    b":",
    b" ",
    b"\0",
    b"\xff",
    b"0",
    b"-1",
    b"\r\n\r\n",
    b"chunked",
    b"HTTP/1.1",
    b"a" * 99,
)


def mutated(chance: random.Random, text: bytes) -> bytes:
    for _ in range(chance.randint(1, 4)):
        at, end = sorted(chance.choices(range(len(text) + 1), k=2))
        match chance.randrange(5):
            case 0:
                text = text[:at] + chance.choice(PIECES) + text[at:]
            case 1:
                text = text[:at] + text[end:]
            case 2:
                text = text[:at] + text[at:end] * 2 + text[end:]
            case 3:
                text = text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
            case _:
                text = text[:at] + chance.choice(SEEDS)
    return text
