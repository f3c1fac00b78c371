"""A server's half of HTTP/1.1 on a raw socket, for servers that have to be quick or exact."""

import asyncio
import re
from typing import Any, Final

_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(\d+)")


class Requests(asyncio.Protocol):
    """One connection. `asked` is called with each request once it is whole; the next one waits for its answer."""

    def __init__(self) -> None:
        self._read = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """A part of a request."""
        self._read += data
        head, found, rest = self._read.partition(b"\r\n\r\n")
        if not found:
            return
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if len(rest) >= size:
            self._read = rest[size:]
            self.asked(head, rest[:size])

    def asked(self, head: bytes, body: bytes) -> None:
        """A request: its first line and headers, and its body."""
        raise NotImplementedError
