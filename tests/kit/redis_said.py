"""A Redis that says what a test wants, for answers that no real one gives at will.

async with said(lambda command: b"-TRYAGAIN x\r\n") as node:
    connect(f"redis://127.0.0.1:{node.port}/0")
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

OK = b"+OK\r\n"
_GREETINGS = {b"HELLO": b"*0\r\n", b"CLIENT": OK}


@dataclass
class SaidNode:
    """Where it listens, and every command that came, by its words."""

    port: int = 0
    heard: list[list[bytes]] = field(default_factory=list)

    def all_slots(self) -> bytes:
        """CLUSTER SLOTS where this one has all of them."""
        return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % self.port


@contextlib.asynccontextmanager
async def said(answer: Callable[[list[bytes]], bytes]) -> AsyncIterator[SaidNode]:
    """`answer` gives RESP for each command but a connection's greetings."""
    node = SaidNode()
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            while line := await reader.readline():
                words = [await _word(reader) for _ in range(int(line[1:]))]
                if words[0] not in _GREETINGS:
                    node.heard.append(words)
                writer.write(_GREETINGS.get(words[0]) or answer(words))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            serving.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    node.port = server.sockets[0].getsockname()[1]
    try:
        yield node
    finally:
        server.close()
        for task in tuple(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _word(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline())[1:])
    return (await reader.readexactly(size + 2))[:-2]
