"""One HTTP/1.1 connection to an upstream, on asyncio and httptools: a request out, its answer in.

Requests ask for `identity`; an answer that is compressed with gzip or deflate all the same is decoded. Trailers are
not read, redirects not followed, and nothing is pipelined.
"""

import asyncio
import math
import zlib
from collections import deque
from enum import Enum
from typing import Final, cast

import httptools

MAX_HEAD_BYTES: Final = 64 * 1024  # also of chunk extensions or trailers in a row
PAUSE_BYTES: Final = 256 * 1024  # unread body at which the upstream is made to wait; one network read may add to it
PART_BYTES: Final = 64 * 1024  # of a body, at once: of the smallest events six thousand
_AUTO_ZLIB: Final = 47  # zlib's window bits for "gzip or zlib, find out"


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
        self._text = text

    def again(self) -> "HttpError":
        """The same to be raised, whose traceback nobody keeps: with it, frames and all they have would be a cycle."""
        return HttpError(self.trouble, self._text)


class _Answer:
    """One response as far as it has come."""

    status = 0
    buffered = 0
    is_behind = False  # the last part was not all that had come
    body_bytes = 0
    framing_bytes = 0  # since the last part of the body came
    has_head = False
    ends_with_connection = False
    is_reusable = False
    inflate: "zlib._Decompress | None" = None
    unreadable: HttpError | None = None  # the head is good, the body is of no use

    def __init__(self, *, is_whole: bool = False) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.chunks: deque[bytes] = deque()
        self.is_whole = is_whole


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
        self._deadline = math.inf
        self._begin_by = math.inf
        self._idle_s = 0.0  # 0: no such bound
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
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
        answer = self._answer = _Answer()
        self._deadline = deadline
        self._begin_by = math.inf if begin_by is None else begin_by
        self._idle_s = 0.0
        self._watch()
        self._transport.write(request)
        while not answer.has_head:
            await self._more()

    def limit_silence(self, idle_s: float) -> None:
        """The answer has begun: from here on, that much time without a byte ends the exchange.

        Only while someone waits to read: what a slow reader leaves lying is no silence.
        """
        self._begin_by = math.inf
        if not self._answer.is_whole:  # else it came with its head
            self._idle_s, self._heard_at = idle_s, self._loop.time()
            self._watch()

    async def read(self) -> bytes | None:
        """What has come of the body since the last read; None at its end. Raises `HttpError` if it is cut.

        At most `PART_BYTES`, and of a body that comes faster than it is read the others get their turn after each.
        """
        answer = self._answer
        if answer.unreadable is not None:
            raise answer.unreadable.again()
        if answer.is_behind:
            await asyncio.sleep(0)
        while True:
            if answer.inflate is not None:
                part = self._inflated(answer.inflate)
                if part:
                    return part
            elif answer.chunks:
                return self._raw()
            if answer.is_whole:
                if answer.inflate is not None and not answer.inflate.eof:
                    raise HttpError(Trouble.CUT, "the compressed body ends early")
                return None
            await self._more()

    async def read_all(self, max_bytes: int) -> bytes:
        """The whole body; `HttpError` TOO_LARGE if it is over `max_bytes`."""
        answer = self._answer
        if answer.is_whole and len(answer.chunks) == 1 and answer.inflate is None and answer.buffered <= max_bytes:
            return answer.chunks.popleft()  # it came with its head
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
        self._deadline = self._begin_by = math.inf
        self._idle_s = 0.0
        answer = self._answer
        if answer.is_whole and answer.is_reusable and not self.is_closed and self._error is None:
            self._resume()
            return True
        self.abort()
        return False

    def abort(self) -> None:
        """Close without waiting for anything."""
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: HttpError) -> None:
        """End the exchange with this error, unless its answer is whole already."""
        if not self._answer.is_whole and self._error is None:
            self._error = error
        self.abort()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

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
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.is_reusable = False
            self.fail(HttpError(Trouble.GARBLED, f"not a valid HTTP answer: {error}"))
            return
        if answer.body_bytes > body_bytes or answer.is_whole:
            answer.framing_bytes = 0
        else:
            answer.framing_bytes += len(data)
            if answer.framing_bytes > MAX_HEAD_BYTES:
                text = f"a head, or what frames the body, is over {MAX_HEAD_BYTES} bytes"
                self.fail(HttpError(Trouble.TOO_LARGE, text))
        if answer.buffered > PAUSE_BYTES and not self._is_paused and self._transport is not None:
            self._transport.pause_reading()
            self._is_paused = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

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
        del self._parser  # which holds us

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
        headers = answer.headers
        answer.ends_with_connection = b"content-length" not in headers and b"transfer-encoding" not in headers
        if b"content-encoding" not in headers:
            return
        encoding = headers[b"content-encoding"].strip().lower()
        if encoding in (b"gzip", b"x-gzip", b"deflate"):
            answer.inflate = zlib.decompressobj(_AUTO_ZLIB)
        elif encoding not in (b"identity", b""):
            text = "the body is in an encoding that was not asked for"
            answer.unreadable = HttpError(Trouble.GARBLED, text)

    def on_body(self, part: bytes) -> None:
        """A part of the body."""
        answer = self._answer
        if not answer.is_whole:
            size = len(part)
            answer.chunks.append(part)
            answer.buffered += size
            answer.body_bytes += size

    def on_message_complete(self) -> None:
        """The answer is whole; an interim one makes room for the real one."""
        if self._answer.has_head:
            self._answer.is_whole = True
        else:
            self._answer.headers.clear()

    # --- inside -----------------------------------------------------------------------------------

    def _inflated(self, inflate: "zlib._Decompress") -> bytes:
        """A part of what is buffered, decoded; empty if nothing is."""
        answer = self._answer
        raw = inflate.unconsumed_tail or (answer.chunks and self._raw())
        if not raw:
            return b""
        try:  # bounded, so that a small body cannot unfold into all of the memory
            part = inflate.decompress(raw, PART_BYTES)
        except zlib.error as error:
            raise HttpError(Trouble.GARBLED, f"the body is not what its encoding says: {error}") from error
        if inflate.unused_data:
            raise HttpError(Trouble.GARBLED, "the body goes on after its compressed end")
        answer.is_behind = bool(answer.chunks or inflate.unconsumed_tail)
        return part

    def _raw(self) -> bytes:
        """The first bytes of what is buffered, which it then is no more."""
        answer = self._answer
        chunk = answer.chunks.popleft()
        if answer.buffered > PART_BYTES or answer.chunks:
            chunk = _cut(chunk, answer.chunks)
        answer.buffered -= len(chunk)
        answer.is_behind = answer.buffered > 0
        if self._is_paused and answer.buffered <= PAUSE_BYTES:
            self._resume()
        return chunk

    def _resume(self) -> None:
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._is_paused = False

    def _more(self) -> asyncio.Future[None]:
        """It is done when something has come. Raises what has ended the exchange."""
        if self._error is not None:
            raise self._error.again()
        self._waiter = self._loop.create_future()
        return self._waiter

    def _watch(self) -> None:
        """See to it that somebody looks at the clock when the first of the bounds is reached.

        The timer of a bound that has moved on stays: it looks for the next one when it fires.
        """
        at = self._bound()
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._look), at

    def _bound(self) -> float:
        """When the first of the bounds is reached; never, between exchanges."""
        silent_at = self._heard_at + self._idle_s if self._idle_s else math.inf
        return min(self._deadline, self._begin_by, silent_at)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self._idle_s and self._heard_at + self._idle_s <= now and (self._waiter is None or self._waiter.done()):
            self._heard_at = now  # nobody waits to read
        at = self._bound()
        if at == math.inf:
            return
        if at > now:
            self._timer, self._timer_at = self._loop.call_at(at, self._look), at
        elif at == self._deadline:
            self.fail(HttpError(Trouble.TIMED_OUT, "no whole answer within the time of the call"))
        else:
            self.fail(HttpError(Trouble.SILENT, "nothing came within the endpoint's own limit"))


def _cut(chunk: bytes, others: deque[bytes]) -> bytes:
    """As much of `chunk`, and of what follows it, as makes a part; the rest goes back."""
    if len(chunk) > PART_BYTES:
        others.appendleft(chunk[PART_BYTES:])
        return chunk[:PART_BYTES]
    chunks = [chunk]
    size = len(chunk)
    while others and size + len(others[0]) <= PART_BYTES:
        chunks.append(others.popleft())
        size += len(chunks[-1])
    return b"".join(chunks)
