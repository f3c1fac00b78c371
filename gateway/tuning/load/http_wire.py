"""HTTP/1.1 for those who ask very often: prebuilt requests over kept connections, on asyncio's protocols and httptools.

A connection carries one exchange at a time. Nothing is asked twice, no redirect is followed, nothing is decompressed.
What is kept of answers is bounded: whoever sends more is cut off.
"""

import asyncio
import ssl
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final, cast

import httptools

from gateway.tuning.load.outcomes import (
    CONNECT_TIMEOUT,
    CONNECTION_CLOSED,
    CONNECTION_FAILED,
    CONNECTION_REFUSED,
    NOT_HTTP,
    TOO_LARGE,
    TRUNCATED,
)

CONNECT_TIMEOUT_S: Final = 5.0
HEAD_BYTES: Final = 256 * 1024  # until the end of an answer's head, interim answers included
ANSWER_BYTES: Final = 64 * 2**20  # of one answer: embeddings of a thousand texts are 3 MiB
HELD_BYTES: Final = 2**30  # of all answers under way to one address
_PART_BYTES: Final = 128  # that a part takes beside its own, in lists: an answer may come byte by byte
_LENGTHS: Final = frozenset({b"content-length", b"transfer-encoding"})
_KEPT: Final = _LENGTHS | {
    b"content-type",
    b"inference-header-content-length",
    b"retry-after",
    b"age",
    b"idempotency-replayed",
}
_FINAL: Final = 200  # statuses below are interim answers


@dataclass(slots=True)
class Answer:
    """What came of one exchange.

    Attributes:
        status: 0 where no head came.
        headers: those that somebody here reads, by their names in small letters.
        parts / at: the body as it was read, and when (`time.monotonic`).
        ended_at: when all of it was there, or it was clear that it will not be.
        trouble: why it is not whole, as an outcome's code; empty where it is.
    """

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    trouble: str = ""

    @property
    def body(self) -> bytes:
        """The whole body."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


class Wire(asyncio.Protocol):
    """One connection of a pool."""

    def __init__(self, pool: "HttpPool") -> None:
        self.is_usable = True
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._has_head = self._is_bounded = self._is_heard = self._has_left = False
        self._taken = 0  # bytes of the answer under way

    async def exchange(self, request: bytes) -> Answer:
        """The answer to a request. Cancelling it closes the connection."""
        assert self._transport is not None  # noqa: S101 - for the type checker: a pool hands out connected wires
        self._answer = Answer()
        self._has_head = self._is_bounded = self._is_heard = False
        self._waiter = self._pool.loop.create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """Close at once."""
        self.is_usable = False
        self._pool.held -= self._taken
        self._taken = 0
        self._answer = self._waiter = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def _is_too_large(self) -> bool:
        most = ANSWER_BYTES if self._has_head else HEAD_BYTES
        return self._taken > most or self._pool.held > HELD_BYTES

    def _take(self, count: int) -> None:
        self._taken += count
        self._pool.held += count

    def _refuse(self, trouble: str) -> None:
        """The answer is none, what has come of it is dropped, and the connection with it."""
        self.is_usable = False
        if self._answer is not None:
            self._answer.parts.clear()
            self._answer.at.clear()
        self._end(trouble)
        self.abort()

    def _end(self, trouble: str = "") -> None:
        answer, waiter = self._answer, self._waiter
        self._pool.held -= self._taken
        self._taken = 0
        self._answer = self._waiter = None
        if answer is None or waiter is None:
            return
        answer.ended_at = time.monotonic()
        answer.trouble = trouble
        if not waiter.done():
            waiter.set_result(answer)

    # --- asyncio's side ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Parse what came; what nobody asked for ends the connection."""
        if self._answer is None:
            self.abort()
            return
        self._is_heard = True
        self._take(len(data))
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse(NOT_HTTP)
        if self._answer is not None and self._is_too_large:
            self._refuse(TOO_LARGE)

    def eof_received(self) -> bool:
        """An answer without a length ends with its connection."""
        self.is_usable = False
        if self._has_head and not self._is_bounded:
            self._end()
        return False

    def connection_lost(self, _: Exception | None) -> None:
        """The end, expected or not."""
        self.is_usable = False
        self._end(TRUNCATED if self._is_heard else CONNECTION_CLOSED)
        self.leave()

    def leave(self) -> None:
        """Make room in the pool, once."""
        if not self._has_left:
            self._has_left = True
            self._pool.left()

    # --- httptools' side --------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        name = name.lower()
        if name in _KEPT and self._answer is not None and not self._has_head:
            self._answer.headers[name] = value

    def on_headers_complete(self) -> None:
        """The head has come."""
        if self._answer is not None and (status := self._parser.get_status_code()) >= _FINAL:
            self._has_head = True
            self._is_bounded = not _LENGTHS.isdisjoint(self._answer.headers)
            self._answer.status = status

    def on_body(self, part: bytes) -> None:
        """A part of the body."""
        if self._answer is not None:
            self._answer.parts.append(part)
            self._answer.at.append(time.monotonic())
            self._take(_PART_BYTES)

    def on_message_complete(self) -> None:
        """The answer is whole, or an interim one is over."""
        if self._answer is None:  # a second answer to one request
            self.is_usable = False
        elif self._has_head:
            self.is_usable = self.is_usable and self._parser.should_keep_alive()
            self._end()
        else:
            self._answer.headers.clear()


class HttpPool:
    """Connections to one address, at most `limit` of them at once; who finds none free waits for one.

    Attributes:
        waited: exchanges that had to.
        opened: connections made so far.
        held: bytes of the answers that are under way.
    """

    def __init__(self, host: str, port: int, *, is_tls: bool = False, limit: int = 1000) -> None:
        self.loop = asyncio.get_running_loop()
        self.waited = 0
        self.opened = 0
        self.held = 0
        self._host, self._port = host, port
        self._tls = ssl.create_default_context() if is_tls else None
        self._limit = limit
        self._count = 0
        self._gone = asyncio.Event()  # the last connection
        self._idle: list[Wire] = []  # the last one used is taken first: the others may grow old and be closed
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def exchange(self, request: bytes) -> Answer:
        """The answer to a request; what kept it from coming is its `trouble`."""
        wire = await self._wire()
        if isinstance(wire, str):
            return Answer(trouble=wire, ended_at=time.monotonic())
        answer = await wire.exchange(request)
        if wire.is_usable:
            self._idle.append(wire)
            self._wake()
        else:
            wire.abort()
        return answer

    async def close(self) -> None:
        """Close what is idle, and see the last connection gone; no exchange may be under way."""
        while self._idle:
            self._idle.pop().abort()
        if self._count:
            await self._gone.wait()

    def left(self) -> None:
        """A connection is gone."""
        self._count -= 1
        if not self._count:
            self._gone.set()
        self._wake()

    async def _wire(self) -> Wire | str:
        """A connection, or why there is none."""
        has_waited = False
        while True:
            while self._idle:
                if (wire := self._idle.pop()).is_usable:
                    return wire
            if self._count < self._limit:
                return await self._connected()
            self.waited += not has_waited
            has_waited = True
            await self._turn()

    async def _turn(self) -> None:
        waiter = self.loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake()  # it was this one's turn, and is the next one's now
            raise

    async def _connected(self) -> Wire | str:
        self._count += 1
        self._gone.clear()
        wire = Wire(self)
        trouble = CONNECTION_FAILED
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self.loop.create_connection(lambda: wire, self._host, self._port, ssl=self._tls)
            trouble = ""
            self.opened += 1
        except TimeoutError:
            trouble = CONNECT_TIMEOUT
        except ConnectionRefusedError:
            trouble = CONNECTION_REFUSED
        except (OSError, UnicodeError):  # the second for what is no host's name
            trouble = CONNECTION_FAILED
        finally:
            if trouble:
                wire.abort()
                wire.leave()
        return trouble or wire

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
