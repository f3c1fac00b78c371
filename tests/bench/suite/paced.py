"""`python -m tests.bench.suite.paced PORT`: an LLM server that streams `EVENTS` events, one every `PAUSE_S`.

Raw sockets, so that one core can feed tens of thousands of events a second. An event that is late does not put off the
next one. Every other request is answered by an empty object, which is what health checks of routers are content with.
"""

import asyncio
import sys
from typing import Final

import orjson
import uvloop

from tests.kit.http_requests import Requests
from tests.kit.upstream import DONE, delta, event, sse_head, usage_chunk

EVENTS: Final = 100
PAUSE_S: Final = 0.01
MARK: Final = b'"delta"'  # once in every event that is counted
_HEAD: Final = sse_head()
_EVENT: Final = event(orjson.dumps(delta("word")).decode())
_USAGE: Final = event(orjson.dumps(usage_chunk(3, EVENTS)).decode())
_OTHER: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class Stream(Requests):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._began = 0.0
        self._tells_usage = False
        self._next: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The reader has left."""
        if self._next is not None:
            self._next.cancel()

    def asked(self, head: bytes, body: bytes) -> None:
        """The first event comes at once."""
        if not head.startswith(b"POST") or b"/chat/completions" not in head:
            self.transport.write(_OTHER)
            return
        self._tells_usage = b'"include_usage"' in body
        self._began, self._number = self._loop.time(), 1
        self.transport.write(_HEAD + _EVENT)
        self._wait()

    def _wait(self) -> None:
        self._next = self._loop.call_at(self._began + self._number * PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if self._number == EVENTS:
            self.transport.write((_USAGE if self._tells_usage else b"") + DONE)
            return
        self._number += 1
        self.transport.write(_EVENT)
        self._wait()


async def serve(port: int) -> None:
    """Until the process is ended."""
    server = await asyncio.get_running_loop().create_server(Stream, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
