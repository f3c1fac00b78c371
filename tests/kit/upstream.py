"""UP: a scripted OpenAI-compatible upstream on a raw socket: exact bytes, pauses and cuts, and a log of what came.

Each request takes the next script; the last one repeats. A script is a list of steps:

    bytes           written as they are
    Pause(seconds)  wait (the peer leaving ends the script)
    HOLD            wait until the peer leaves
    FIN             half-close: no more bytes from us
    RST             cut the connection with a reset

A script that runs to its end leaves the connection open for the next request (keep-alive).

    async with Upstream([json_reply(200, {...})], [sse_head(), event("{}"), RST]) as up:
        ... up.base_url, up.requests[0].json(), await up.requests[0].left.wait()
"""

import asyncio
import contextlib
import enum
import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self

from tests.kit.http_requests import Requests

HOST = "127.0.0.1"


class Cut(enum.Enum):
    HOLD = "hold"
    FIN = "fin"
    RST = "rst"


HOLD, FIN, RST = Cut.HOLD, Cut.FIN, Cut.RST


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


Step = bytes | Pause | Cut
Script = Sequence[Step]


# --- bytes to script with --------------------------------------------------------------------------------


def head(status: int, headers: Mapping[str, str] | Sequence[tuple[str, str]] = ()) -> bytes:
    """A status line and header block."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in pairs)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def reply(
    status: int, body: bytes, *, content_type: str = "application/json", headers: Mapping[str, str] | None = None
) -> list[Step]:
    """A whole answer with a length."""
    framing = {"Content-Type": content_type, "Content-Length": str(len(body))}
    return [head(status, framing | dict(headers or {})) + body]


def json_reply(status: int, body: Any, headers: Mapping[str, str] | None = None) -> list[Step]:
    return reply(status, json.dumps(body).encode(), headers=headers)


def error_reply(status: int, error: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> list[Step]:
    return json_reply(status, {"error": dict(error)}, headers)


def sse_head(headers: Mapping[str, str] | None = None) -> bytes:
    """The head of a stream in chunked coding."""
    fixed = {"Content-Type": "text/event-stream; charset=utf-8", "Transfer-Encoding": "chunked"}
    return head(200, fixed | dict(headers or {}))


def chunk(data: bytes) -> bytes:
    """One chunk of the chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def event(data: str | Mapping[str, Any]) -> bytes:
    """One server-sent event in a chunk of its own."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return chunk(f"data: {text}\n\n".encode())


def named(name: str, data: Mapping[str, Any]) -> bytes:
    """One event of the responses API: it has a name, which its data repeat as their type."""
    return chunk(f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode())


DONE = event("[DONE]") + LAST_CHUNK


def delta(text: str, *, finish: str | None = None) -> dict[str, Any]:
    """A chat chunk as servers send it."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}],
    }


def usage_chunk(prompt: int = 3, completion: int = 2) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return delta("") | {"choices": [], "usage": usage}


def completion(text: str = "hi", *, prompt: int = 3, completion_tokens: int = 2) -> dict[str, Any]:
    """A whole chat answer."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
        },
    }


# --- the server ------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Seen:
    """One request as it came. `left` is set when its peer closes (or resets) the connection."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    connection: int
    left: asyncio.Event = field(default_factory=asyncio.Event)
    left_at: float | None = None
    """`time.monotonic()` of the leaving."""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def json(self) -> Any:
        return json.loads(self.body)


class Upstream:
    """Serves scripts on an ephemeral loopback port for as long as the context is open."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts: list[Script] = list(scripts)
        self.requests: list[Seen] = []
        self.connections = 0
        self.live: set[_Connection] = set()
        self.port = 0
        self._arrived = asyncio.Condition()
        self._server: asyncio.Server | None = None

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self.live):
            await connection.stop()
        await self._server.wait_closed()

    async def request(self, number: int = 0) -> Seen:
        """Wait for the request with this number (from 0)."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) > number)
        return self.requests[number]

    def script_for(self, seen: Seen) -> Script:
        self.requests.append(seen)
        return self.scripts[min(len(self.requests), len(self.scripts)) - 1]

    @property
    def unsent(self) -> int:
        """Bytes that a script has written and that no peer takes: they wait in this process."""
        return sum(connection.unsent for connection in self.live)

    async def tell(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()


class _Connection(Requests):
    def __init__(self, upstream: Upstream) -> None:
        super().__init__()
        self._upstream = upstream
        self._seen: list[Seen] = []
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._number = 0

    @property
    def unsent(self) -> int:
        return 0 if self.transport is None else int(self.transport.get_write_buffer_size())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._number = self._upstream.connections
        self._upstream.connections += 1
        self._upstream.live.add(self)

    def asked(self, head: bytes, body: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = tuple((name, value.strip()) for name, _, value in (line.partition(":") for line in lines))
        seen = Seen(method, path, headers, body, self._number)
        self._seen.append(seen)
        self._task = asyncio.ensure_future(self._play(self._upstream.script_for(seen)))

    async def _play(self, script: Script) -> None:
        await self._upstream.tell()
        for step in script:
            if self._gone.is_set():
                return
            await self._step(step)

    async def _step(self, step: Step) -> None:
        match step:
            case bytes():
                self.transport.write(step)
            case Pause(seconds):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), seconds)
            case Cut.HOLD:
                await self._gone.wait()
            case Cut.FIN:
                self.transport.write_eof()
            case Cut.RST:
                sock = self.transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.transport.abort()

    def eof_received(self) -> bool:
        self._leave()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._upstream.live.discard(self)

    def _leave(self) -> None:
        self._gone.set()
        for seen in self._seen:
            if seen.left_at is None:
                seen.left_at = time.monotonic()
                seen.left.set()

    async def stop(self) -> None:
        self._gone.set()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self.transport is not None:
            self.transport.abort()
