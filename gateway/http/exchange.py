"""A request and its answer, as an application sees them."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Final, Protocol

from starlette.types import Scope

Headers = dict[str, str]
"""By name, in small letters; of one that is there more than once, the first."""

_CONTROLS: Final = bytes({*range(32), 127} - {9})  # in no header's value, but a tab (RFC 9110, 5.5)
_PHRASES: Final[Mapping[int, str]] = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES: Final[Mapping[int, bytes]] = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(100, 600)
}
_WITHOUT_BODY: Final = frozenset((204, 304))
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Response:
    """A whole answer: its length is told, and no `headers` need say it. They are its own from now on."""

    __slots__ = ("body", "headers", "status_code")

    def __init__(
        self,
        body: bytes = b"",
        *,
        status_code: int = HTTPStatus.OK,
        headers: Headers | None = None,
        media_type: str | None = None,
    ) -> None:
        self.body = body
        self.status_code = status_code
        self.headers: Headers = {} if headers is None else headers
        if media_type is not None:
            self.headers["content-type"] = media_type

    async def give(self, exchange: "Exchange") -> None:
        """Say it."""
        exchange.reply(self)


class Ready:
    """A whole answer to many requests, in bytes that are made once. Their connections go on."""

    __slots__ = ("_head", "_rest")

    def __init__(self, response: Response) -> None:
        self._head = _lines(response.status_code, response.headers.items())
        self._rest = b"content-length: %d\r\n\r\n%b" % (len(response.body), response.body)

    def whole(self, lines: bytes) -> bytes:
        """With the header lines that are of one request."""
        return self._head + lines + self._rest


class Dated(Protocol):
    """Who knows the time."""

    date_line: bytes  # the header, as a line


class Line(Protocol):
    """The connection of an exchange, as far as that has to do with it."""

    is_writable: bool  # whether the caller takes what is written

    @property
    def state(self) -> Dated:
        """What it shares with others."""
        ...

    @property
    def write(self) -> Callable[[bytes], None]:
        """What takes bytes for the caller."""
        ...

    async def writable(self) -> None:
        """Wait until it does, or has left."""
        ...

    def read_on(self) -> None:
        """What comes can be taken."""
        ...

    def answered(self, exchange: "Exchange") -> None:
        """Its answer is complete."""
        ...


class Exchange:
    """One request and the place for its answer: one `reply`, or `begin`, any number of `write`s and `end`.

    Attributes:
        scope: what is asked, as ASGI describes it.
        headers: the request's.
        is_whole: all of its body has come.
        has_left: the caller is gone; what is still said to it is lost.
        has_begun / is_over: the answer's head was written; all of it was.
        is_taken: it could have been turned away by its head, and was not.
        dress: puts headers of the application's own into every answer's.
        task: what works on it.
    """

    __slots__ = (
        "_expects_continue",
        "_is_cancelled_when_left",
        "_is_chunked",
        "_is_head",
        "_line",
        "_parts",
        "_waiter",
        "dress",
        "has_begun",
        "has_left",
        "headers",
        "is_http10",
        "is_over",
        "is_taken",
        "is_whole",
        "keeps_alive",
        "scope",
        "task",
        "unread",
    )

    def __init__(self, line: Line, scope: Scope, headers: Headers, *, keeps_alive: bool) -> None:
        self._line = line
        self.scope = scope
        self.headers = headers
        self.keeps_alive = keeps_alive
        self.is_http10 = scope["http_version"] == "1.0"
        self.task: asyncio.Task[None] | None = None
        self.dress: Callable[[Headers], None] | None = None
        self.is_whole = self.has_left = self.has_begun = self.is_over = self.is_taken = False
        self.unread = 0
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._expects_continue = "expect" in headers and headers["expect"].lower() == "100-continue"
        self._is_cancelled_when_left = self._is_chunked = False
        self._is_head = scope["method"] == "HEAD"

    # --- the body -----------------------------------------------------------------------------------------

    async def read(self) -> bytes:
        """What has come of the body since the last time, as soon as there is something.

        Empty at its end, and where the caller has left before (`is_whole` tells which).
        """
        self._line.read_on()
        while not (self._parts or self.is_whole or self.has_left):
            if self._expects_continue and not self.has_begun:  # in the middle of an answer it would be a part of that
                self._expects_continue = False
                self._line.write(_CONTINUE)
            await self._woken()
        parts, self._parts, self.unread = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def came(self, part: bytes) -> None:
        """Part of the body is here."""
        self._parts.append(part)
        self.unread += len(part)
        self._wake()

    def ended(self) -> None:
        """All of it is."""
        self.is_whole = True
        self._wake()

    # --- the caller ---------------------------------------------------------------------------------------

    def cancel_when_left(self) -> None:
        """From now on the caller's leaving cancels `task`."""
        self._is_cancelled_when_left = True
        if self.has_left:
            self.left()

    def left(self) -> None:
        """The caller is gone."""
        self.has_left = True
        self._wake()
        if self._is_cancelled_when_left and self.task is not None:
            self.task.cancel()

    async def gone(self) -> None:
        """Wait until the caller has left, or has its answer."""
        while not (self.has_left or self.is_over):
            await self._woken()

    async def _woken(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the answer ---------------------------------------------------------------------------------------

    def reply(self, response: Response) -> None:
        """The whole answer, in one piece. Raises `ValueError` for headers that are none."""
        if self.has_left:
            return
        body, status = response.body, response.status_code
        begun = self._head(status, response.headers)
        length = b"" if status in _WITHOUT_BODY else b"content-length: %d\r\n" % len(body)
        self._line.write(b"%b%b\r\n%b" % (begun, length, b"" if self._is_head else body))
        self._finish()

    def begin(self, status: int, headers: Headers, *, again: Sequence[tuple[str, str]] = ()) -> None:
        """The head of an answer that comes in parts; `again` are headers that are there more than once.

        Raises `ValueError` for headers that are none.
        """
        begun, framing = self._head(status, headers, again), b""
        if not ("content-length" in headers or self._is_head or status in _WITHOUT_BODY or self.is_http10):
            self._is_chunked, framing = True, b"transfer-encoding: chunked\r\n"
        if not self.has_left:
            self._line.write(b"%b%b\r\n" % (begun, framing))

    def write(self, part: bytes) -> bool:
        """Part of the answer; false where the caller takes nothing more for now: then wait until it is `writable`."""
        if part and not (self.has_left or self._is_head):
            self._line.write(b"%x\r\n%b\r\n" % (len(part), part) if self._is_chunked else part)
        return self._line.is_writable

    async def writable(self) -> None:
        """Wait until the caller takes what is written, or has left."""
        await self._line.writable()

    def end(self, part: bytes = b"") -> None:
        """The last part of the answer."""
        if self.has_left:
            return
        if self._is_chunked:
            self._line.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(part), part) if part else b"0\r\n\r\n")
        elif not self._is_head:
            self._line.write(part)
        self._finish()

    def _head(self, status: int, headers: Headers, again: Sequence[tuple[str, str]] = ()) -> bytes:
        """The answer's head but for its framing."""
        if self.has_begun:
            raise RuntimeError("the answer has begun already")
        self.has_begun = True
        if self.dress is not None:
            self.dress(headers)
        if "connection" in headers:
            self.keeps_alive = self.keeps_alive and "close" not in headers["connection"].lower()
        elif not self.keeps_alive:
            headers["connection"] = "close"
        return _lines(status, [*headers.items(), *again]) + self._line.state.date_line

    def _finish(self) -> None:
        self.is_over = True
        self._wake()
        self._line.answered(self)


def _lines(status: int, headers: Iterable[tuple[str, str]]) -> bytes:
    """The status line and those of `headers`. Raises `ValueError` where one of them would bring another along."""
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    text = "".join(lines).encode("latin-1")
    if len(text) - len(text.translate(None, _CONTROLS)) != 2 * len(lines):  # more line ends than lines
        raise ValueError("a header has a control character in it")
    return _STATUS_LINES[status] + text
