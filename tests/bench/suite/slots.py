"""`python -m tests.bench.suite.slots PORT MS`: an LLM server that answers each chat after a fixed time.

How many it has at once is the gateway's to bound. Every other request is answered by an empty object.
"""

import asyncio
import json
import sys
from typing import Final

import uvloop

from tests.kit.http_requests import Requests
from tests.kit.upstream import completion

_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_CHAT: Final = _HEAD % (len(json.dumps(completion("done"))), json.dumps(completion("done")).encode())
_OTHER: Final = _HEAD % (2, b"{}")


class Slot(Requests):
    """One connection, one request at a time."""

    def __init__(self, takes_s: float) -> None:
        super().__init__()
        self._takes_s = takes_s

    def asked(self, head: bytes, body: bytes) -> None:
        """Answered later, if it is a chat."""
        if head.startswith(b"POST"):
            asyncio.get_running_loop().call_later(self._takes_s, self._answer)
        else:
            self.transport.write(_OTHER)

    def _answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_CHAT)


async def serve(port: int, takes_s: float) -> None:
    """Until the process is ended."""
    server = await asyncio.get_running_loop().create_server(lambda: Slot(takes_s), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]) / 1000))
