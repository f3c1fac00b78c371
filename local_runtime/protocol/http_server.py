"""The HTTP server: a listening socket, its connections, and an end that finishes what was begun."""

import asyncio
import os
import socket
from typing import Final

from local_runtime.protocol.accepting import Accepted
from local_runtime.protocol.http_connection import HttpConnection
from local_runtime.protocol.oip_http import HttpApp

BACKLOG: Final = 2048
_CHECK_EVERY_S: Final = 1.0
_SETTLE_S: Final = 0.01


class HttpServer:
    """A running server. `port` is the one that was bound."""

    def __init__(self, listener: socket.socket, app: HttpApp) -> None:
        self.port: int = listener.getsockname()[1]
        self._connections: set[HttpConnection] = set()
        self._listener = listener
        self._app = app
        self._stopping = asyncio.Event()
        self._serving = asyncio.create_task(self._run())

    async def stop(self, *, grace_s: float) -> None:
        """Accept nothing more, close idle connections, finish requests for at most `grace_s`, then cut them off."""
        self._stopping.set()
        await self._serving
        for connection in tuple(self._connections):
            connection.stop()
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s
        while self._connections and loop.time() < end:
            await asyncio.sleep(0.01)
            self._check(loop.time())
        cut_off = tuple(self._connections)
        for connection in cut_off:
            connection.abort()
        if cut_off:
            await asyncio.sleep(_SETTLE_S)  # what ran for them ends

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        accepted = Accepted(self._listener, self._connection)
        server = await loop.create_server(accepted, sock=self._listener, backlog=BACKLOG)
        try:
            while not self._stopping.is_set():
                try:
                    async with asyncio.timeout(_CHECK_EVERY_S):
                        await self._stopping.wait()
                except TimeoutError:
                    self._check(loop.time())
        finally:
            server.close()

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._app, self._connections, max_body_bytes=self._app.max_input_bytes)

    def _check(self, now: float) -> None:
        """Clients that are too slow are found here, so that requests need no timers."""
        for connection in tuple(self._connections):
            connection.check(now)


def start_http(app: HttpApp, *, host: str, port: int) -> HttpServer:
    """A running server. Raises OSError naming the address if it cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), backlog=BACKLOG, family=family)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from error
    return HttpServer(listener, app)
