"""A TCP switch before a real server: it passes, pauses, is late, or cuts and refuses, and goes on from the same port.

async with TcpSwitch(server_port) as switch:
    connect(switch.port)
    switch.pause()              # accepts, and says nothing: a network that swallows what it is given
    switch.delay_s = 0.2        # each part of what is said comes so much later, in both directions
    await switch.refuse()       # cuts all connections and takes no new ones
    await switch.restore()
"""

import asyncio
from typing import Self

HOST = "127.0.0.1"
CHUNK = 65536


class TcpSwitch:
    """`port` is its own; what it passes on goes to `target`, which may be another port after a restart."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.port = 0
        self.accepted = 0  # connections taken so far

    async def __aenter__(self) -> Self:
        await self.restore()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    def pause(self) -> None:
        """Pass nothing on, in either direction, until `restore`."""
        self._open.clear()

    async def refuse(self) -> None:
        """Cut what is open and refuse what comes."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def restore(self) -> None:
        """Pass everything on again, at once, from the same port."""
        self._open.set()
        self.delay_s = 0.0
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, HOST, self.port, backlog=1024)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # it came while `refuse` cut what was open
            writer.transport.abort()
            return
        self.accepted += 1
        task = asyncio.ensure_future(self._relay(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also of one that was cut before it began

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both directions of one connection; ends with either."""
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, self.target)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as ways:
                there = ways.create_task(self._there(reader, far_writer))
                back = ways.create_task(self._pass(far_reader, writer))
                there.add_done_callback(lambda _: back.cancel())
                back.add_done_callback(lambda _: there.cancel())
        except* OSError:
            pass  # a peer that left
        finally:
            for each in writers:
                each.close()

    async def _there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """From who connected to the target."""
        await self._pass(reader, writer)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._open.wait()
            writer.write(chunk)
            await writer.drain()
