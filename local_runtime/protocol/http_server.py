"""uvicorn around the HTTP application: started and stopped by calls, on a socket bound before."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Generator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from local_runtime.protocol.oip_http import RUNNING, HttpApp

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75  # longer than the 60 s of common load balancers, so that they close first


class _Http(HttpToolsProtocol):
    """HTTP/1.1 that ends what runs for a connection when the connection ends."""

    def connection_made(self, transport: Any) -> None:
        """Nothing runs yet."""
        self._running: set[asyncio.Task[Any]] = set()
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        """Show the application where to say what runs."""
        super().on_message_begin()
        self.scope[RUNNING] = self._running  # type: ignore[literal-required]  # ASGI allows keys of one's own

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits for the answers any more."""
        running = tuple(self._running)
        self._running.clear()
        for task in running:
            task.cancel()
        super().connection_lost(exc)


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, stopped by a call instead of by signals of its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop_asked = asyncio.Event()

    async def main_loop(self) -> None:
        """The original wakes up ten times a second, for a date header and a request limit that are not used here."""
        await self.stop_asked.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals belong to the program."""
        yield


class HttpServer:
    """A running server. `port` is the one that was bound."""

    def __init__(self, server: _Uvicorn, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self._server = server
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))

    async def stop(self, *, grace_s: float) -> None:
        """Accept nothing more, close idle connections, finish requests for at most `grace_s`, then cut them off."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.stop_asked.set()
        await self._serving


def start_http(app: HttpApp, *, host: str, port: int) -> HttpServer:
    """A running server. Raises OSError naming the address if it cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), backlog=BACKLOG, family=family)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from error
    config = uvicorn.Config(
        app,
        http=_Http,
        ws="none",
        interface="asgi3",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        date_header=False,
        proxy_headers=False,  # who the client is matters to nobody here
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    return HttpServer(_Uvicorn(config), listener)
