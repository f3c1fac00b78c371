"""A chunked body: where it ends."""

from typing import Final

MAX_BYTES: Final = 64 * 1024  # of sizes, extensions and trailers in a row, between which nothing of the body comes
_LINE_END: Final = 2


class Chunks:
    """One body's, as far as it has come.

    The parser does not tell where in a read it found the end, and what follows is a head, which is not the parser's
    yet. It is the parser that decides what is well-formed: here is only counted.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._left = 0  # of a chunk, its line end included
        self._line = b""  # as far as it has come
        self._around = 0  # bytes in a row that are none of the body's
        self._is_behind = False  # the last chunk: trailers, and an empty line

    def size(self, data: bytes) -> int:
        """How much of `data` is of the body. Raises `ValueError` for a size that is none, and for too much around."""
        at, end = 0, len(data)
        while at < end and not self.is_over:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
            else:
                step = data.find(b"\n", at) + 1 - at
                if step <= 0:
                    step = end - at
                self._take(data[at : at + step])
            at += step
        return at

    def _take(self, part: bytes) -> None:
        """A line, or a part of one."""
        self._around += len(part)
        if self._around > MAX_BYTES:
            raise ValueError("too much that is no body")
        self._line += part
        if not part.endswith(b"\n"):
            return
        line, self._line = self._line, b""
        if self._is_behind:
            self.is_over = not line.rstrip(b"\r\n")
            return
        size = int(line.partition(b";")[0], 16)
        if size < 0:
            raise ValueError("no size of a chunk")
        if size:
            self._left, self._around = size + _LINE_END, 0
        else:
            self._is_behind = True
