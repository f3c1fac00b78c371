"""One HTTP/1.1 connection to an upstream, on asyncio and httptools: a request out, its answer in.

Requests ask for `identity`; an answer that is compressed with gzip or deflate all the same is decoded. Trailers are
not read, redirects not followed, and nothing is pipelined.
"""

import asyncio
import zlib
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, cast

import httptools

MAX_HEAD_BYTES: Final = 64 * 1024  # also of chunk extensions or trailers in a row
PAUSE_BYTES: Final = 256 * 1024  # unread body at which the upstream is made to wait; one network read may add to it
PART_BYTES: Final = 64 * 1024  # of a body, at once: of the smallest events six thousand
_AUTO_ZLIB: Final = 47  # zlib's window bits for "gzip or zlib, find out"
_FRAMING = (b"content-length", b"transfer-encoding")


class Trouble(Enum):
    """What can go wrong between two HTTP parties."""

    UNREACHABLE = "unreachable"  # no connection: refused, no such name, not within the connect timeout
    TIMED_OUT = "timed out"  # the call's time is used up
    SILENT = "silent"  # no first part, or no further one, within a limit of the endpoint's own
    HUNG_UP = "hung up"  # the connection ended before any of the answer's body came
    CUT = "cut"  # it ended in the middle of it
    GARBLED = "garbled"  # not HTTP, or an encoding that was not asked for
    TOO_LARGE = "too large"  # over a bound of ours


class HttpError(Exception):
    """The only error that leaves this module."""

    def __init__(self, trouble: Trouble, text: str) -> None:
        super().__init__(f"{trouble.value}: {text}")
        self.trouble = trouble


@dataclass(slots=True)
class _Answer:
    """One response as far as it has come."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    chunks: deque[bytes] = field(default_factory=deque)
    buffered: int = 0
    is_behind: bool = False  # the last part was not all that had come
    body_bytes: int = 0
    framing_bytes: int = 0  # since the last part of the body came
    has_head: bool = False
    is_whole: bool = False
    ends_with_connection: bool = False
    is_reusable: bool = False
    inflate: "zlib._Decompress | None" = None
    unreadable: HttpError | None = None  # the head is good, the body is of no use


class Connection(asyncio.Protocol):
    """One connection; carries one exchange at a time. Its public face is the response of that exchange."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.is_closed = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer = _Answer(is_whole=True)
        self._error: HttpError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._idle_s = 0.0
        self._heard_at = 0.0
        self._is_paused = False

    # --- the face ---------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether any part of the answer's head has come."""
        return self._answer.has_head or self._answer.framing_bytes > 0

    @property
    def status(self) -> int:
        """The status code."""
        return self._answer.status

    def header(self, name: bytes) -> str | None:
        """A header by its lower-case name (the last one, where it comes more than once)."""
        value = self._answer.headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def send(self, request: bytes, deadline: float, *, begin_by: float | None = None) -> None:
        """Write the request and wait for the head of its answer.

        `deadline` (loop time) bounds the whole exchange, `begin_by` the time until `limit_silence` is called.
        """
        assert self._transport is not None  # noqa: S101 - for the type checker: set before anyone has the object
        self._answer = _Answer()
        self._timer = self._loop.call_at(deadline, self._expire)
        if begin_by is not None and begin_by < deadline:
            self._silence = self._loop.call_at(begin_by, self._fall_silent)
        self._transport.write(request)
        while not self._answer.has_head:
            self._raise_error()
            await self._wait()

    def limit_silence(self, idle_s: float) -> None:
        """The answer has begun: from here on, that much time without a byte ends the exchange.

        Only while someone waits to read: what a slow reader leaves lying is no silence.
        """
        if self._silence is not None:
            self._silence.cancel()
        if self._answer.is_whole:  # it came with its head
            return
        self._idle_s, self._heard_at = idle_s, self._loop.time()
        self._silence = self._loop.call_later(idle_s, self._look_for_silence)

    async def read(self) -> bytes | None:
        """What has come of the body since the last read; None at its end. Raises `HttpError` if it is cut.

        At most `PART_BYTES`, and of a body that comes faster than it is read the others get their turn after each.
        """
        answer = self._answer
        if answer.unreadable is not None:
            raise answer.unreadable
        if answer.is_behind:
            await asyncio.sleep(0)
        while True:
            part = self._take()
            if part:
                return part
            if answer.is_whole:
                if answer.inflate is not None and not answer.inflate.eof:
                    raise HttpError(Trouble.CUT, "the compressed body ends early")
                return None
            self._raise_error()
            await self._wait()

    async def read_all(self, max_bytes: int) -> bytes:
        """The whole body; `HttpError` TOO_LARGE if it is over `max_bytes`."""
        parts: list[bytes] = []
        size = 0
        while (part := await self.read()) is not None:
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise HttpError(Trouble.TOO_LARGE, f"the body is over {max_bytes} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def finish(self) -> bool:
        """End the exchange; whether the connection can carry another. If not, it is closed on the spot."""
        for timer in (self._timer, self._silence):
            if timer is not None:
                timer.cancel()
        self._timer = self._silence = None
        answer = self._answer
        if answer.is_whole and answer.is_reusable and not self.is_closed and self._error is None:
            self._resume()
            return True
        self.abort()
        return False

    def abort(self) -> None:
        """Close without waiting for anything."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: HttpError) -> None:
        """End the exchange with this error, unless its answer is whole already."""
        if not self._answer.is_whole and self._error is None:
            self._error = error
        self.abort()
        self._wake()

    # --- asyncio's side ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        answer = self._answer
        if answer.is_whole:  # nothing was asked: whatever this is, it must not be taken for the next answer
            self.abort()
            return
        self._heard_at = self._loop.time()
        body_bytes = answer.body_bytes
        answer.framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.is_reusable = False
            self.fail(HttpError(Trouble.GARBLED, f"not a valid HTTP answer: {error}"))
            return
        if answer.body_bytes > body_bytes or answer.is_whole:
            answer.framing_bytes = 0
        elif answer.framing_bytes > MAX_HEAD_BYTES:
            self.fail(HttpError(Trouble.TOO_LARGE, f"a head, or what frames the body, is over {MAX_HEAD_BYTES} bytes"))
        if answer.buffered > PAUSE_BYTES and not self._is_paused and self._transport is not None:
            self._transport.pause_reading()
            self._is_paused = True
        self._wake()

    def eof_received(self) -> bool:
        """The peer sends no more; the transport closes itself after this."""
        if self._answer.has_head and self._answer.ends_with_connection:
            self._answer.is_whole = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, expected or not."""
        self.is_closed = True
        cause = f" ({exc})" if exc else ""
        if self._answer.body_bytes:
            self.fail(HttpError(Trouble.CUT, f"the connection was closed during the answer{cause}"))
        else:
            self.fail(HttpError(Trouble.HUNG_UP, f"the connection was closed before any answer{cause}"))

    # --- httptools' side --------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A second answer to one request is surplus: the connection cannot be trusted further."""
        if self._answer.is_whole:
            self._answer.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line; trailers are left out."""
        if not self._answer.has_head:
            self._answer.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head has come."""
        answer = self._answer
        status = self._parser.get_status_code()
        if answer.is_whole or status < 200:  # noqa: PLR2004 - 1xx: an interim answer, the real one follows
            return
        answer.status = status
        answer.has_head = True
        answer.is_reusable = self._parser.should_keep_alive()
        answer.ends_with_connection = not any(name in answer.headers for name in _FRAMING)
        encoding = answer.headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding in (b"gzip", b"x-gzip", b"deflate"):
            answer.inflate = zlib.decompressobj(_AUTO_ZLIB)
        elif encoding not in (b"identity", b""):
            text = "the body is in an encoding that was not asked for"
            answer.unreadable = HttpError(Trouble.GARBLED, text)

    def on_body(self, part: bytes) -> None:
        """A part of the body."""
        answer = self._answer
        if not answer.is_whole:
            answer.chunks.append(part)
            answer.buffered += len(part)
            answer.body_bytes += len(part)

    def on_message_complete(self) -> None:
        """The answer is whole; an interim one makes room for the real one."""
        if self._answer.has_head:
            self._answer.is_whole = True
        else:
            self._answer.headers.clear()

    # --- inside -----------------------------------------------------------------------------------

    def _take(self) -> bytes:
        """A part of what is buffered, decoded; empty if nothing is."""
        answer = self._answer
        inflate = answer.inflate
        raw = b"" if inflate is None else inflate.unconsumed_tail
        if not raw and answer.chunks:
            raw = self._raw()
        answer.is_behind = bool(answer.chunks)
        if inflate is None or not raw:
            return raw
        try:  # bounded, so that a small body cannot unfold into all of the memory
            part = inflate.decompress(raw, PART_BYTES)
        except zlib.error as error:
            raise HttpError(Trouble.GARBLED, f"the body is not what its encoding says: {error}") from error
        if inflate.unused_data:
            raise HttpError(Trouble.GARBLED, "the body goes on after its compressed end")
        answer.is_behind = answer.is_behind or bool(inflate.unconsumed_tail)
        return part

    def _raw(self) -> bytes:
        """The first bytes of what is buffered, which it then is no more."""
        answer = self._answer
        chunk = answer.chunks.popleft()
        if len(chunk) > PART_BYTES:
            answer.chunks.appendleft(chunk[PART_BYTES:])
            chunk = chunk[:PART_BYTES]
        elif answer.chunks:
            chunks = [chunk]
            size = len(chunk)
            while answer.chunks and size + len(answer.chunks[0]) <= PART_BYTES:
                chunks.append(answer.chunks.popleft())
                size += len(chunks[-1])
            chunk = b"".join(chunks)
        answer.buffered -= len(chunk)
        if answer.buffered <= PAUSE_BYTES:
            self._resume()
        return chunk

    def _resume(self) -> None:
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._is_paused = False

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _look_for_silence(self) -> None:
        left_s = self._heard_at + self._idle_s - self._loop.time()
        if left_s <= 0 and self._waiter is not None:
            self._fall_silent()
        else:
            self._silence = self._loop.call_later(left_s if left_s > 0 else self._idle_s, self._look_for_silence)

    def _fall_silent(self) -> None:
        self.fail(HttpError(Trouble.SILENT, "nothing came within the endpoint's own limit"))

    def _expire(self) -> None:
        self.fail(HttpError(Trouble.TIMED_OUT, "no whole answer within the time of the call"))
