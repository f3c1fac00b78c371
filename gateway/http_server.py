"""The HTTP server of every process of ours: uvicorn, with the bounds that it lacks, stopped by an event."""

import asyncio
import contextlib
import json
import os
import re
import socket
from collections.abc import Generator
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.settings import ConfigError

BACKLOG: Final = 2048
MAX_HEAD_BYTES: Final = 64 * 1024  # request line and headers; nginx takes 32 KiB, httptools any size, in quadratic time
HEAD_TIMEOUT_S: Final = 30.0  # from a connection's (or a request's) first moment to the end of its head
LINGER_S: Final = 1.0
KEEP_ALIVE_S: Final = 75  # longer than the 60 s of common load balancers, so that they close first
_END_OF_HEAD: Final = re.compile(rb"\r?\n\r?\n")
_H2C: Final = re.compile(rb"(?im)^upgrade:[^\r\n]*\bh2c\b[^\r\n]*\r?\n")


class Http(HttpToolsProtocol):
    """HTTP/1.1 whose heads are bounded in size and time, and which stays HTTP/1.1 when asked for h2c.

    A head is held back until it is whole. The offer to go on in HTTP/2 (RFC 7540, 3.2) may be ignored, and has to be:
    the parser would take the body that follows for another protocol's.
    """

    def connection_made(self, transport: Any) -> None:
        """A connection has as long for its first request as each request has for its head."""
        super().connection_made(transport)
        self._head = bytearray()
        self._is_in_head = True
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on whole heads, and everything that is no head."""
        if self._is_refused:
            return
        if not self._is_in_head:
            super().data_received(data)
            return
        self._unset_keepalive_if_required()
        self._start_head_timer()
        before = len(self._head)
        self._head += data
        end = _END_OF_HEAD.search(self._head, max(0, before - 3))
        if end is None:
            if len(self._head) > MAX_HEAD_BYTES:
                self._refuse_head()
            return
        head, rest = bytes(self._head[: end.end()]), bytes(self._head[end.end() :])
        self._head.clear()
        super().data_received(_H2C.sub(b"", head) + rest)

    def on_headers_complete(self) -> None:
        """What follows is a body, or the next request."""
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What follows is a head."""
        self._is_in_head = True
        super().on_message_complete()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_expired)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_expired(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _refuse_head(self) -> None:
        problem = {
            "type": "about:blank",
            "title": "Request header fields too large",
            "status": 431,
            "detail": f"request line and headers may have {MAX_HEAD_BYTES} bytes",
            "code": "malformed_request",
        }
        body = json.dumps(problem).encode()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/problem+json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.write_eof()
        # What is still on its way is thrown away for a moment: to close upon it would reset the connection at once.
        self._is_refused = True
        self.loop.call_later(LINGER_S, self.transport.close)


class Server(uvicorn.Server):
    """uvicorn's server, stopped by an event of ours instead of by signals of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The original would raise the signal again at its end, before we have let go of what we hold."""
        yield


async def serve_app(
    app: FastAPI | Starlette, sockets: list[socket.socket], stop: asyncio.Event, *, drain_s: float
) -> None:
    """Serve until `stop`, then finish what is in flight for at most `drain_s`."""
    config = uvicorn.Config(
        app,
        http=Http,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = Server(config)
    serving = asyncio.create_task(server.serve(sockets=sockets))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        stopping.cancel()
        await serving


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` with one clear line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), backlog=BACKLOG, family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from error
