"""Waiting for something that another task or process does, with a bound."""

import asyncio
from collections.abc import Awaitable, Callable


async def until(true: Callable[[], object], *, timeout_s: float = 5.0) -> None:
    """Return as soon as `true()` is; TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 - what is waited for has no event of ours
            await asyncio.sleep(0.005)


async def until_async(true: Callable[[], Awaitable[object]], *, timeout_s: float = 5.0) -> None:
    """The same for something that must be asked."""
    async with asyncio.timeout(timeout_s):
        while not await true():  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.01)
