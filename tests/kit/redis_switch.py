"""RD: a TCP switch before a real Redis. It passes, pauses, refuses, or cuts after so many commands.

async with RedisSwitch(server.port) as switch:
    client = connect(switch.url)
    switch.pause()              # accepts, and says nothing
    await switch.refuse()       # cuts all connections and takes no new ones
    await switch.restore()
    switch.cut_after(1, b"EVALSHA")   # Redis runs the command; its answer never arrives
"""

import asyncio
from collections.abc import Iterator
from typing import Self

HOST = "127.0.0.1"
CHUNK = 65536


class RedisSwitch:
    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._verb = b""
        self._left: int | None = None
        self.port = 0
        self.accepted = 0  # connections taken so far

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

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
        """Pass everything on again, from the same port."""
        self._open.set()
        self._left = None
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, HOST, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    def cut_after(self, commands: int, verb: bytes = b"") -> None:
        """Cut a connection once `commands` (of that verb; default: any) have reached Redis."""
        self._left, self._verb = commands, verb

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
            redis_reader, redis_writer = await asyncio.open_connection(HOST, self._target)
            writers.append(redis_writer)
            async with asyncio.TaskGroup() as ways:
                commands = ways.create_task(self._commands(reader, redis_writer))
                replies = ways.create_task(self._replies(redis_reader, writer))
                commands.add_done_callback(lambda _: replies.cancel())
                replies.add_done_callback(lambda _: commands.cancel())
        except* OSError:
            pass  # a peer that left
        finally:
            for each in writers:
                each.close()

    async def _commands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        buffer = bytearray()
        while chunk := await reader.read(CHUNK):
            buffer += chunk
            for verb, command in _commands_in(buffer):
                await self._open.wait()
                counted = self._left is not None and self._verb in (b"", verb)
                if counted and self._left == 1:
                    self._left = None
                    self._open.clear()  # no reply passes
                    writer.write(command)
                    writer.write_eof()  # Redis runs what it has read, then sees the end
                    await writer.drain()
                    self._open.set()
                    return
                if counted:
                    self._left -= 1
                writer.write(command)
                await writer.drain()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK):
            await self._open.wait()
            writer.write(chunk)
            await writer.drain()


def _commands_in(buffer: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Take whole RESP commands off the front of `buffer`: the verb and all its bytes."""
    while (end := _command_end(buffer)) is not None:
        command = bytes(buffer[:end])
        del buffer[:end]
        yield command.split(b"\r\n", 3)[2].upper(), command


def _command_end(buffer: bytearray) -> int | None:
    """Where the first command ends; None while it is not whole."""
    line = buffer.find(b"\r\n")
    if line < 0:
        return None
    at = line + 2
    for _ in range(int(buffer[1:line])):
        line = buffer.find(b"\r\n", at)
        if line < 0:
            return None
        at = line + 2 + int(buffer[at + 1 : line]) + 2
    return at if at <= len(buffer) else None
