"""Connections that come at once are accepted at once."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

MOST_AT_ONCE: Final = 64  # further connections accepted in one turn of the loop; other processes wait for some, too


class Accepted:
    """What a listener's connections are made by: with each that the loop accepts come those that wait behind it.

    uvloop (libuv) accepts one in each of its turns. Where turns are long, the last of many that come at once would wait
    for seconds, and nobody in here would know of it.
    """

    def __init__(self, listener: socket.socket, connection: Callable[[], asyncio.BaseProtocol]) -> None:
        self._listener = listener
        self._connection = connection
        self._taking: set[asyncio.Task[None]] = set()

    def __call__(self) -> asyncio.BaseProtocol:
        """The protocol of the connection that the loop has accepted."""
        loop = asyncio.get_running_loop()
        for _ in range(MOST_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # there are none, or no more descriptors, which the loop itself sees to
                break
            taking = loop.create_task(self._take(accepted))
            self._taking.add(taking)
            taking.add_done_callback(self._taking.discard)
        return self._connection()

    async def _take(self, accepted: socket.socket) -> None:
        accepted.settimeout(0)
        with contextlib.suppress(OSError):  # it has left already
            await asyncio.get_running_loop().connect_accepted_socket(self._connection, accepted)
