"""A body that comes in chunks, each with its size in front (RFC 9112, 7.1). Pure.

Not left to llhttp, since that does not tell where a body ends and the next request begins.
"""

import enum
import re
from http import HTTPStatus
from typing import Final

from local_runtime.protocol.http_exchange import HttpError, too_large

_MAX_LINE_BYTES: Final = 8 * 1024
# Sizes, extensions and trailers mean nothing here; their bytes are bounded so that nobody can send nothing for ever. A
# client that sends single bytes, each with its size and two line ends, stays within.
_FREE_OVERHEAD_BYTES: Final = 64 * 1024
_OVERHEAD_PER_BYTE: Final = 8
_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,15})(?:[ \t]*;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_TRAILER_LINE: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00-\x08\x0a-\x1f\x7f]*")
_LINE_END: Final = b"\r\n"


class _Line(enum.Enum):
    """What the next line must be."""

    SIZE = enum.auto()
    END_OF_CHUNK = enum.auto()
    TRAILER = enum.auto()


class ChunkedBody:
    """Takes the bytes of one body as they come, cut anywhere. Chunk extensions and trailers are dropped."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._overhead = 0
        self._chunk_left = 0
        self._held = b""  # of a line that is not whole yet
        self._awaits = _Line.SIZE
        self.is_whole = False

    def take(self, data: bytes, at: int) -> int:
        """Take what belongs to the body from `data`, which goes on at `at`; where it ends, once it is whole.

        Raises HttpError: 400 for what is no chunk, 413 for a body beyond `max_bytes`, as soon as it is announced.
        """
        while at < len(data) and not self.is_whole:
            if self._chunk_left:
                part = data[at : at + self._chunk_left]
                self._parts.append(part)
                self._chunk_left -= len(part)
                at += len(part)
            else:
                at = self._take_line(data, at)
        return at

    def content(self) -> bytes:
        """What has come so far."""
        return b"".join(self._parts)

    def _take_line(self, data: bytes, at: int) -> int:
        is_whole = (end := data.find(b"\n", at) + 1) > 0
        if not is_whole:
            end = len(data)
        self._overhead += end - at
        line = self._held + data[at:end]
        if len(line) > _MAX_LINE_BYTES or self._overhead > _FREE_OVERHEAD_BYTES + _OVERHEAD_PER_BYTE * self._size:
            raise _malformed()
        self._held = b"" if is_whole else line
        if is_whole:
            if not line.endswith(_LINE_END):
                raise _malformed()
            self._understand(line.removesuffix(_LINE_END))
        return end

    def _understand(self, line: bytes) -> None:
        if self._awaits is _Line.SIZE:
            self._chunk_left = self._chunk_size(line)
            self._awaits = _Line.END_OF_CHUNK if self._chunk_left else _Line.TRAILER
        elif self._awaits is _Line.END_OF_CHUNK:
            if line:
                raise _malformed()
            self._awaits = _Line.SIZE
        elif not line:
            self.is_whole = True
        elif _TRAILER_LINE.fullmatch(line) is None:
            raise _malformed()

    def _chunk_size(self, line: bytes) -> int:
        found = _SIZE_LINE.fullmatch(line)
        if found is None:
            raise _malformed()
        size = int(found[1], 16)
        self._size += size
        if self._size > self._max_bytes:
            raise too_large(self._max_bytes)
        return size


def _malformed() -> HttpError:
    return HttpError(HTTPStatus.BAD_REQUEST, "malformed HTTP request: the body is not in chunks")
