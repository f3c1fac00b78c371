"""Hedged requests: a second copy after a while, and whichever begins first answers ("The Tail at Scale", Dean 2013)."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from gateway.attempt import Attempt
from gateway.core.attempts import CONSEQUENCES
from gateway.core.errors import BackendError, Fault
from gateway.core.types import Part, Parts

_Runner = asyncio.Task[Part | None]


async def first_to_begin(
    first: Attempt,
    second: Callable[[], Attempt | None],
    *,
    after_us: int,
    won: Callable[[Attempt], None],
    lost: Callable[[Fault], None],
) -> Parts:
    """The parts of the attempt that begins first, which `won` is told before; the other is cancelled at that moment.

    `second` is asked for its attempt once `first` has not begun within `after_us`; None: there is none. The fault of
    one that fails while the other may still begin goes to `lost`; where both fail, the last one's `BackendError` is
    raised. So is, at once, one that no other place would lift.
    """
    runners: dict[_Runner, tuple[Attempt, Parts]] = {}

    def start(attempt: Attempt) -> None:
        parts = attempt.answers()
        runners[asyncio.ensure_future(_first_of(parts))] = (attempt, parts)

    winner: tuple[Attempt, Parts] | None = None
    try:
        start(first)
        begun, _ = await asyncio.wait(runners, timeout=after_us / 1e6)
        if not begun and (other := second()) is not None:
            start(other)
        part: Part | None = None
        while winner is None:
            begun, _ = await asyncio.wait(runners, return_when=asyncio.FIRST_COMPLETED)
            for runner in sorted(begun, key=list(runners).index):
                attempt, parts = runners.pop(runner)
                try:
                    part = runner.result()
                except BackendError as failed:
                    if not runners or not CONSEQUENCES[failed.fault.kind].try_next:
                        raise
                    lost(failed.fault)
                else:
                    winner = (attempt, parts)
                    break
        await _stop(runners)
        attempt, parts = winner
        won(attempt)
        while part is not None:
            yield part
            part = await anext(parts, None)
    finally:
        try:
            await _stop(runners)
        finally:
            if winner is not None:
                await winner[1].aclose()


async def _first_of(parts: Parts) -> Part | None:
    return await anext(parts, None)


async def _stop(runners: dict[_Runner, tuple[Attempt, Parts]]) -> None:
    """Cancel what still runs; returns when its place is free again.

    Also where it is cancelled itself meanwhile: one that has begun at that moment would not end by itself.
    """
    async with AsyncExitStack() as closed:
        for runner, (_, parts) in runners.items():
            closed.push_async_callback(parts.aclose)
            runner.cancel()
        stopped = list(runners)
        runners.clear()
        await asyncio.gather(*stopped, return_exceptions=True)
