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

from tests.kit.tcp_switch import CHUNK, HOST, TcpSwitch


class RedisSwitch(TcpSwitch):
    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._verb = b""
        self._left: int | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    async def restore(self) -> None:
        """Pass everything on again, from the same port."""
        self._left = None
        await super().restore()

    def cut_after(self, commands: int, verb: bytes = b"") -> None:
        """Cut a connection once `commands` (of that verb; default: any) have reached Redis."""
        self._left, self._verb = commands, verb

    async def _there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        buffer = bytearray()
        while chunk := await reader.read(CHUNK):
            await asyncio.sleep(self.delay_s)
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
