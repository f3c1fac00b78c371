"""Work that keeps an engine busy while a test looks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.kit.wait import until_async
from tests.vllm.door import CHAT, Door
from tests.vllm.server import SLOTS, VllmServer

# Both engines make more tokens than a test waits for.
LONG = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 900, "ignore_eos": True}
GONE_S = 60


@contextlib.asynccontextmanager
async def work(door: Door, count: int) -> AsyncIterator[None]:
    """So many long requests are on their way through `door` while the block runs; they are left at its end."""
    tasks = [asyncio.create_task(door.whole(CHAT, **LONG)) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            await cancel(task)


@contextlib.asynccontextmanager
async def busy(vllm: VllmServer, straight: Door, count: int) -> AsyncIterator[None]:
    """vLLM has `count` long requests, that came straight, in its slots and in its queue while the block runs."""

    async def has_them() -> bool:
        return (await vllm.running(), await vllm.waiting()) == (min(count, SLOTS), max(0, count - SLOTS))

    async with work(straight, count):
        await until_async(has_them, timeout_s=GONE_S)
        yield


async def is_idle(vllm: VllmServer) -> bool:
    """Whether vLLM has nothing to do."""
    return await vllm.running() == 0 == await vllm.waiting()


async def cancel(task: asyncio.Task[object]) -> None:
    """End a task, which closes the connection of its request."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
