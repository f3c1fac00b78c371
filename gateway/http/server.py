"""The HTTP server of every process of ours, stopped by an event."""

import asyncio
import os
import socket
from email.utils import formatdate
from typing import Final

from gateway.http.application import Application
from gateway.http.connection import Connection, State
from gateway.http.websocket import websockets
from gateway.settings import ConfigError
from local_runtime.protocol.accepting import Accepted

BACKLOG: Final = 2048
GRACE_S: Final = 0.05  # after a stop: for requests that were on their way when whoever sends them heard of it
CLOSING_TURNS: Final = 10  # of the event loop, in which what is idle is closed
LOOK_S: Final = 0.05  # between looks whether all is done
CANCELLED_S: Final = 1.0  # for what is cut off after the drain time, to say so
DATE_S: Final = 1.0


async def serve_app(
    app: Application,
    sockets: list[socket.socket],
    stop: asyncio.Event,
    *,
    drain_s: float,
    max_message_bytes: int | None = None,
) -> None:
    """Serve until `stop`, then finish what is in flight for at most `drain_s`.

    `max_message_bytes` bounds a WebSocket's messages; None where the application has no WebSockets.
    """
    loop, state = asyncio.get_running_loop(), State()
    upgrade = None
    if max_message_bytes is not None:
        upgrade = websockets(app.websocket, state, max_message_bytes=max_message_bytes)
    telling = asyncio.create_task(_tell_date(state))

    def connection() -> Connection:
        return Connection(app, state, upgrade)

    servers = [
        await loop.create_server(Accepted(listener, connection), sock=listener, backlog=BACKLOG) for listener in sockets
    ]
    try:
        await stop.wait()
        await asyncio.sleep(GRACE_S)
    finally:
        for server in servers:
            server.close()
        for listener in sockets:
            listener.close()
        await _finish(state, within_s=max(1.0, drain_s))
        telling.cancel()


async def _finish(state: State, *, within_s: float) -> None:
    """Close what is idle, at once, and wait for what is in flight; what takes longer is cancelled."""
    state.is_stopping = True  # for those that are accepted and not made yet
    for connection in list(state.connections):
        connection.shutdown()
    loop = asyncio.get_running_loop()
    until, turns = loop.time() + within_s, CLOSING_TURNS
    while state.connections or state.tasks:
        left_s = until - loop.time()
        if left_s <= 0:
            break
        turns -= 1
        await asyncio.sleep(0 if turns >= 0 else min(LOOK_S, left_s))
    for task in state.tasks:
        task.cancel()
    if state.tasks:
        await asyncio.wait(state.tasks, timeout=CANCELLED_S)


async def _tell_date(state: State) -> None:
    """Keep the date of answers."""
    while True:
        state.tell_date(formatdate(usegmt=True))
        await asyncio.sleep(DATE_S)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` with one clear line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), backlog=BACKLOG, family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from error
    # uvloop does so for each connection, asyncio's own loop only where the socket names TCP: else a stream's parts wait
    # for the acknowledgement of those before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
