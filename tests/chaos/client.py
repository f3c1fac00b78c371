"""One HTTP request on a connection of its own, told as exactly as a client can tell it.

What came and how it ended is kept apart: a body that was cut is never taken for a whole one. The *rounds* of the event
loop say what came first (`tests.kit.replicas`).
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.history import How
from tests.kit.replicas import HOST, Rounds


@dataclass(slots=True)
class Answer:
    """What came: `how` as in `history.How`, but a stream is looked into by who asked for it."""

    how: How = "cut"
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    first: int = -1
    last: int = -1

    def json(self) -> Any:
        """Of a whole answer."""
        return json.loads(self.body) if self.body else {}

    def events(self) -> list[str]:
        """The data of each whole server-sent event."""
        whole = self.body.decode(errors="replace").split("\n\n")[:-1]
        return [text.removeprefix("data:").strip() for text in whole if text.startswith("data:")]


class _Exchange(asyncio.Protocol):
    def __init__(self, request: bytes, rounds: Rounds) -> None:
        self._request = request
        self._rounds = rounds
        self._raw = bytearray()
        self._head_ends = 0
        self.answer = Answer()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now, answer = self._rounds.see(), self.answer
        answer.first = now if answer.first < 0 else answer.first
        answer.last = now
        self._raw += data
        if not self._head_ends and not self._read_head():
            return
        if self._read_body():
            answer.how = "answered"
            self._end()

    def _read_head(self) -> bool:
        at = self._raw.find(b"\r\n\r\n")
        if at < 0:
            return False
        first, *lines = self._raw[:at].decode("latin-1").split("\r\n")
        self.answer.status = int(first.split(" ")[1])
        self.answer.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        self._head_ends = at + 4
        return True

    def _read_body(self) -> bool:
        """Put together what has come of the body; whether that is all of it."""
        body = bytes(self._raw[self._head_ends :])
        if self.answer.headers.get("transfer-encoding") != "chunked":
            self.answer.body = body
            return len(body) >= int(self.answer.headers.get("content-length", 0))
        whole = bytearray()
        while True:
            size, found, rest = body.partition(b"\r\n")
            length = int(size, 16) if found else -1
            if length < 0 or len(rest) < length + 2:
                self.answer.body = bytes(whole)
                return False
            whole += rest[:length]
            body = rest[length + 2 :]
            if not length:
                self.answer.body = bytes(whole)
                return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def ask(port: int, method: str, path: str, *, key: str, rounds: Rounds, patience_s: float, **more: Any) -> Answer:
    """Ask, and wait for the end. `more` are `body` (a document) and `headers`. Raises nothing."""
    body, headers = more.get("body"), more.get("headers", {})
    request = _request(method, path, key, body, headers)
    try:
        async with asyncio.timeout(patience_s):
            loop = asyncio.get_running_loop()
            transport, exchange = await loop.create_connection(lambda: _Exchange(request, rounds), HOST, port)
            try:
                await exchange.done
            finally:
                transport.abort()
    except OSError as error:
        return Answer(how="silent" if isinstance(error, TimeoutError) else "refused")
    return exchange.answer


def _request(method: str, path: str, key: str, body: Any, headers: Mapping[str, str]) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: gateway", f"authorization: Bearer {key}", "connection: close"]
    lines += [f"content-length: {len(content)}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + content
