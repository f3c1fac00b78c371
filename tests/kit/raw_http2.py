"""An HTTP/2 server that does what a test tells it, right or wrong, frame by frame."""

import asyncio
from collections.abc import Callable, Mapping

from gateway.backends.grpc import http2

OK_HEAD = ((b":status", b"200"), (b"content-type", b"application/grpc"))
OK_END = ((b"grpc-status", b"0"),)


def frame(kind, flags=0, stream=0, payload=b""):
    return http2.frame_head(kind, flags, stream, len(payload)) + payload


def headers(stream, *fields, is_last=False):
    flags = http2.END_HEADERS | (http2.END_STREAM if is_last else 0)
    return frame(http2.HEADERS, flags, stream, b"".join(http2.literal(*field) for field in fields))


def message(body):
    return b"\x00" + len(body).to_bytes(4, "big") + body


def answer(stream, body=b"answer"):
    """A whole good answer."""
    whole = frame(http2.DATA, 0, stream, message(body))
    return headers(stream, *OK_HEAD) + whole + headers(stream, *OK_END, is_last=True)


class RawServer:
    """`async with RawServer(reply) as server`: SETTINGS for whoever connects, then `reply(stream)` to each request.

    `seen` has every frame that came, as (kind, flags, stream, payload); `requests` the messages of whole requests.
    """

    def __init__(
        self, reply: Callable[[int], bytes] | None = answer, *, settings: Mapping[int, int] | None = None
    ) -> None:
        self.reply = reply
        self.settings = {} if settings is None else settings
        self.seen = []
        self.requests = {}
        self.connections = []
        self._server = None

    async def __aenter__(self):
        self._server = await asyncio.get_running_loop().create_server(lambda: _Peer(self), "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for connection in self.connections:
            connection.abort()
        await self._server.wait_closed()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next turn

    @property
    def target(self):
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def write(self, data, connection=-1):
        self.connections[connection].write(data)

    def kinds(self, kind):
        return [seen for seen in self.seen if seen[0] == kind]


class _Peer(asyncio.Protocol):
    def __init__(self, server):
        self.server = server
        self.reader = http2.FrameReader(2**20)
        self.left = len(http2.PREFACE)
        self.bodies = {}

    def connection_made(self, transport):
        self.transport = transport
        self.server.connections.append(transport)
        if self.server.settings is not None:
            transport.write(http2.settings_frame(self.server.settings))

    def data_received(self, data):
        skipped = data[: self.left]
        self.left -= len(skipped)
        for kind, flags, stream, payload in self.reader.feed(data[len(skipped) :]):
            self.server.seen.append((kind, flags, stream, bytes(payload)))
            if kind == http2.DATA:
                self.bodies[stream] = self.bodies.get(stream, b"") + bytes(payload)
                if flags & http2.END_STREAM:
                    self.server.requests[stream] = self.bodies.pop(stream)
                    if self.server.reply is not None:
                        self.transport.write(self.server.reply(stream))
