"""Measures how long a server's batches take by their rows, for simulations (`gateway.tuning.curves`)."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway.tuning.curves import LatencyCurve
from gateway.tuning.sweep.callers import AskFailed
from gateway.tuning.sweep.servers import Server
from gateway.tuning.sweep.settings import Setting, SweepError

SAMPLES: Final = 60  # of each size, at most
LEAST_SAMPLES: Final = 5
SIZE_S: Final = 1.0  # for each size, once it has the least samples
LONGEST_S: Final = 20.0
WARM_BATCHES: Final = 3
GATHERED_US: Final = 2_000_000  # a batch is full long before; it leaves then
BUSY_BATCHES: Final = 12  # of each instance, for how they slow each other down


async def measure(
    server: Server,
    *,
    sizes: Iterable[int],
    counts: Iterable[int],
    base: Setting,
    on_step: Callable[[str], None] = lambda _: None,
) -> LatencyCurve:
    """Batches of each size alone, one after the other; then as many at once as there are instances, for each count.

    A batch of n rows is n requests of one row at once, with a max_batch_size of n and a long max_queue_delay: it leaves
    when it is full, put together as the server does it. `base` is the setting in which everything else is taken, and
    whose size is that of the batches that slow each other down. Raises SweepError.
    """
    alone: dict[int, tuple[float, ...]] = {}
    overhead: tuple[float, ...] = ()
    for rows in sorted({1, *sizes}):
        on_step(f"batches of {rows}")
        await server.load(_forced(base, rows, count=1 if _is_count_free(server) else base.count))
        alone[rows], beside = await _alone(server, rows)
        overhead = beside if rows == 1 else overhead
    size = max((rows for rows in alone if rows <= max(1, base.max_batch_size)), default=1)
    slowdown: dict[int, float] = {}
    for count in sorted(set(counts) - {1}):
        on_step(f"{count} instances at once")
        await server.load(replace(_forced(base, size, count=count), delay_us=0))
        factor = await _together(server, size, count=count, alone=alone[size])
        if factor is not None:
            slowdown[count] = factor
    return LatencyCurve(
        model=server.message.name,
        compute_us=alone,
        overhead_us=overhead,
        slowdown={1: 1.0, **slowdown} if slowdown else {},
        source=f"gateway sweep: {server.place}",
    )


def _is_count_free(server: Server) -> bool:
    return len(server.message.instance_group) <= 1


def _forced(base: Setting, rows: int, *, count: int) -> Setting:
    if not base.max_batch_size:
        return replace(base, count=count)
    delay_us = GATHERED_US if rows > 1 else 0
    return Setting(max_batch_size=rows, count=count, delay_us=delay_us)


async def _alone(server: Server, rows: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times of batches of so many rows; and, for one row, what a request took beside waiting and computing. In us."""
    times: list[float] = []
    beside: list[float] = []
    began = time.perf_counter()
    warm = WARM_BATCHES
    while len(times) < SAMPLES:
        passed = time.perf_counter() - began
        if (len(times) >= LEAST_SAMPLES and passed > SIZE_S) or passed > LONGEST_S:
            break
        before, asked = await server.counters(), time.perf_counter()
        await _ask(server, rows)
        took_us = (time.perf_counter() - asked) * 1e6
        done = (await server.counters()).since(before)
        if dict(done.executions) != {rows: 1}:
            continue  # not one batch: a request came late
        if warm:
            warm -= 1
            continue
        times.append(done.compute_us[rows])
        if rows == 1:
            beside.append(max(0.0, took_us - done.compute_us[rows] - done.queue_us))
    if not times:
        raise SweepError(f"{server.message.name}: {rows} requests at once were never one batch")
    return tuple(sorted(times)), tuple(sorted(beside))


async def _together(server: Server, rows: int, *, count: int, alone: Sequence[float]) -> float | None:
    """How many times as long full batches take while all instances have some; None where there were none."""

    async def caller() -> None:
        for _ in range(BUSY_BATCHES):
            await _ask(server, 1)

    async def all_callers() -> None:
        await asyncio.gather(*(caller() for _ in range(2 * count * rows)))  # one batch runs, one waits, of each

    await _ask(server, rows)
    before = await server.counters()
    await all_callers()
    done = (await server.counters()).since(before)
    mean_us = _mean(done.executions, done.compute_us, rows)
    return None if mean_us is None else max(1.0, mean_us / (sum(alone) / len(alone)))


def _mean(executions: Mapping[int, int], compute_us: Mapping[int, float], rows: int) -> float | None:
    return compute_us[rows] / executions[rows] if executions.get(rows) else None


async def _ask(server: Server, rows: int) -> None:
    try:
        await asyncio.gather(*(server.ask() for _ in range(rows)))
    except AskFailed as error:
        raise SweepError(f"{server.message.name}: {rows} requests at once: {error}") from error
