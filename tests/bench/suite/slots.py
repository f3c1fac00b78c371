"""`python -m tests.bench.suite.slots PORT MS`: an LLM server that answers each chat after a fixed time.

How many it has at once is the gateway's to bound. Every other request is answered by an empty object.
"""

import asyncio
import json
import re
import sys
from typing import Final

import uvloop

from tests.kit.upstream import completion

_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(\d+)")
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_CHAT: Final = _HEAD % (len(json.dumps(completion("done"))), json.dumps(completion("done")).encode())
_OTHER: Final = _HEAD % (2, b"{}")


class Slot(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, takes_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._takes_s = takes_s
        self._read = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """It begins."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """A part of a request."""
        self._read += data
        end = self._read.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._read[: end + 2])
        size = end + 4 + (int(length[1]) if length else 0)
        if len(self._read) < size:
            return
        is_chat = self._read.startswith(b"POST")
        self._read = self._read[size:]
        if is_chat:
            self._loop.call_later(self._takes_s, self._answer)
        else:
            self._transport.write(_OTHER)

    def _answer(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(_CHAT)


async def serve(port: int, takes_s: float) -> None:
    """Until the process is ended."""
    server = await asyncio.get_running_loop().create_server(lambda: Slot(takes_s), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]) / 1000))
