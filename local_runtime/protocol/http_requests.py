"""Requests out of the bytes of one connection, cut anywhere. Pure.

A head is held back until it is whole; a body is taken as it comes. Both are bounded.
"""

from http import HTTPStatus
from typing import Final

import msgspec

from local_runtime.protocol.http_chunks import ChunkedBody
from local_runtime.protocol.http_exchange import HttpError, too_large
from local_runtime.protocol.http_head import Head, parse_head

MAX_HEAD_BYTES: Final = 64 * 1024
_END_OF_HEAD: Final = b"\r\n\r\n"
_BARE_ENDS: Final = (b"\n\n", b"\n\r\n")  # of a head whose lines end in a bare LF
_LINE_ENDS: Final = (b"\r", b"\n")


class Request(msgspec.Struct, frozen=True):
    """A request that has come as a whole."""

    head: Head
    body: bytes


class RequestReader:
    """Cuts what a client sends into requests.

    Args:
        max_body_bytes: a larger body is refused, by its length where that is announced.
    """

    def __init__(self, *, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._held = b""  # received; taken up to `_at`, so that no request costs a copy of those behind it
        self._at = 0
        self._searched = 0  # up to here, there is no end of a head
        self._last: tuple[bytes, Head] | None = None  # clients repeat themselves
        self._head: Head | None = None  # of the request whose body is awaited
        self._left = 0
        self._parts: list[bytes] = []
        self._chunks: ChunkedBody | None = None
        self._owes_continue = False

    @property
    def held_bytes(self) -> int:
        """How much was received and not taken yet."""
        return len(self._held) - self._at

    @property
    def awaits_body(self) -> bool:
        """A head has come and its body has not."""
        return self._head is not None

    @property
    def is_in_head(self) -> bool:
        """Part of a head has come (once `take` has nothing more to give)."""
        return self.held_bytes > 0 and self._head is None

    def owes_continue(self) -> bool:
        """Whether the client waits to be told that its body is wanted; it is asked once."""
        owes, self._owes_continue = self._owes_continue, False
        return owes

    def put(self, data: bytes) -> None:
        """More bytes have come."""
        self._held = self._held[self._at :] + data if self.held_bytes else data
        self._searched = max(0, self._searched - self._at)
        self._at = 0

    def drop(self) -> None:
        """Forget what has come of a request that is not whole."""
        self._held = b""
        self._at = self._searched = 0
        self._head = self._chunks = None
        self._parts.clear()
        self._owes_continue = False

    def take(self) -> Request | None:
        """The next request, if it is whole. Raises HttpError where the bytes cannot be read on."""
        while self._at < len(self._held):
            head = self._head
            if head is None:
                head = self._take_head(self._held)
                if head is None:
                    return None
                if not head.content_length and not head.is_chunked:
                    return Request(head, b"")
                self._await_body(head)
            else:
                self._owes_continue = False
                body = self._take_body(self._held) if self._chunks is None else self._take_chunks(self._chunks)
                if body is not None:
                    self._head = self._chunks = None
                    return Request(head, body)
        return None

    def _take_head(self, data: bytes) -> Head | None:
        while data.startswith(_LINE_ENDS, self._at):
            self._at += 1  # empty lines before a request are nothing (RFC 9112, 2.2)
        start = max(self._at, self._searched - len(_END_OF_HEAD))
        end = data.find(_END_OF_HEAD, start) + len(_END_OF_HEAD)
        if end < len(_END_OF_HEAD):
            _check_partial(data, self._at, start)
            self._searched = len(data)
            return None
        if end - self._at > MAX_HEAD_BYTES:
            raise _head_too_large()
        raw = data[self._at : end]
        if self._last is None or self._last[0] != raw:
            self._last = (raw, parse_head(raw))
        self._at = end
        return self._last[1]

    def _await_body(self, head: Head) -> None:
        if head.content_length > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        self._head = head
        self._left = head.content_length
        self._chunks = ChunkedBody(max_bytes=self._max_body_bytes) if head.is_chunked else None
        self._owes_continue = head.expects_continue

    def _take_body(self, data: bytes) -> bytes | None:
        body = data[self._at : self._at + self._left]
        self._at += len(body)
        self._left -= len(body)
        if self._left:
            self._parts.append(body)
            return None
        if self._parts:
            body = b"".join((*self._parts, body))
            self._parts.clear()
        return body

    def _take_chunks(self, chunks: ChunkedBody) -> bytes | None:
        self._at = chunks.take(self._held, self._at)
        return chunks.content() if chunks.is_whole else None


def _check_partial(data: bytes, at: int, start: int) -> None:
    """What can be said of a head that begins at `at` and is not whole; what is before `start` was looked at.

    What is no HTTP at all, like TLS, might never be whole.
    """
    if len(data) - at > MAX_HEAD_BYTES:
        raise _head_too_large()
    if (at < len(data) and not data[at : at + 1].isupper()) or any(data.find(end, start) >= 0 for end in _BARE_ENDS):
        raise HttpError(HTTPStatus.BAD_REQUEST, "malformed HTTP request")


def _head_too_large() -> HttpError:
    return HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's head is too large")
