"""Answers that are given in their order: each is read to its end at once, and kept until its turn has come."""

import asyncio
from collections.abc import Coroutine

from gateway.core.types import Part, Parts


async def released(parts: Parts, turn: Coroutine[None, None, None]) -> Parts:
    """`parts`, none of them before `turn` has returned.

    Until then they are read on: a request that waits for those before it keeps none of them from the place that they
    may need. Raises what `turn` raises, and, at once, what `parts` do.
    """
    waiting = asyncio.ensure_future(turn)
    reading: asyncio.Task[Part | None] | None = None
    kept: list[Part] = []
    try:
        while not waiting.done():
            reading = asyncio.ensure_future(_next(parts))
            await asyncio.wait((waiting, reading), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                break
            part, reading = reading.result(), None
            if part is None:
                break
            kept.append(part)
        await waiting
        for part in kept:
            yield part
        kept.clear()
        if reading is not None and (last := await reading) is not None:
            yield last
        async for part in parts:  # ended already: nothing
            yield part
    finally:
        try:
            await _stop(waiting, reading)
        finally:
            await parts.aclose()


async def _next(parts: Parts) -> Part | None:
    return await anext(parts, None)


async def _stop(*tasks: "asyncio.Future[None] | asyncio.Task[Part | None] | None") -> None:
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
