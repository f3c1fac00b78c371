"""The load of one run: callers in this process, who ask a server for one row each."""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from gateway.tuning.report import OK, Tally
from gateway.tuning.sweep.settings import Load
from gateway.tuning.traffic import TrafficClass, arrivals

LEAST_ANSWERS = 32  # that a run waits for at least: slow models are not judged by a handful
ROUNDS = 4  # answers to each caller, at least; batches are whole, and so the first and the last count wrong by one
LONGEST = 4.0  # times its length a run may last for that
SLOWEST_S = 60.0  # or at most so long, until each caller has had one answer
LEAD_IN = 0.3  # of its length: before it, not counted
FAILED_PAUSE_S = 0.01  # of a waiting caller: what refuses at once must not be all that this process does
MOST_OPEN = 4096  # requests in flight of an open load; what is due beyond fails as `too_many`


class AskFailed(Exception):
    """A request came to nothing. `code` is a word to count it by, the text says why."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


Ask = Callable[[], Awaitable[None]]
"""One request of one row; returns with the right answer. Raises AskFailed."""
_One = Callable[[float], Coroutine[Any, Any, None]]  # one request that is due then, counted


@dataclass(slots=True, kw_only=True)
class Offered:
    """A load that was offered: what was counted, over how long, and why the last request failed that did."""

    tally: Tally
    seconds: float = 0.0
    failure: str = ""


@dataclass(slots=True, kw_only=True)
class Times:
    """When a run's counted part begins and ends, told to whoever reads the server's counters then."""

    on_begin: Callable[[], Awaitable[None]]
    on_end: Callable[[], Awaitable[None]]
    began: float = field(default_factory=time.perf_counter)

    def now(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.began


async def offer(ask: Ask, load: Load, *, seconds: float, slo_ms: float, seed: int, times: Times) -> Offered:
    """Offer the load for a lead-in and then for `seconds`, or for longer where answers are few.

    Of waiting callers all requests count that begin in the counted part, to their ends. Requests of a rate count from
    when they were due, however late they could be sent. What `times` raises is raised.
    """
    lead_in_s = LEAD_IN * seconds
    tally = Tally(name=str(load), slo_ms=slo_ms, rows=1, from_s=math.inf, until_s=math.inf)
    offered = Offered(tally=tally)

    async def one(due_s: float) -> None:
        tally.due(due_s)
        code = OK
        try:
            await ask()
        except AskFailed as failed:
            code, offered.failure = failed.code, str(failed)
        tally.ended(due_s, times.now(), code)
        if code != OK and not load.rate:
            await asyncio.sleep(FAILED_PAUSE_S)

    try:
        if load.rate:
            tally.from_s, tally.until_s = lead_in_s, lead_in_s + seconds
            await _open(one, load, tally=tally, seed=seed, times=times)
            offered.seconds = seconds
        else:
            offered.seconds = await _closed(one, load, tally=tally, lead_in_s=lead_in_s, seconds=seconds, times=times)
    except ExceptionGroup as failures:  # a task group's, around what `times` raised
        raise failures.exceptions[0] from failures
    return offered


async def _closed(
    one: _One,
    load: Load,
    *,
    tally: Tally,
    lead_in_s: float,
    seconds: float,
    times: Times,
) -> float:
    """Returns how long the counted part was."""
    ends = asyncio.Event()

    async def caller() -> None:
        while not ends.is_set():
            await one(times.now())

    async def clock() -> float:
        await asyncio.sleep(lead_in_s)
        await times.on_begin()
        tally.from_s = times.now()
        until = tally.from_s + seconds
        while True:
            await asyncio.sleep(max(0.01, min(until - times.now(), seconds / 10)))
            if not _lasts(times.now() - tally.from_s, tally.codes.total(), seconds=seconds, load=load):
                break
        tally.until_s = times.now()
        ends.set()
        await times.on_end()
        return tally.until_s - tally.from_s

    async with asyncio.TaskGroup() as tasks:
        timed = tasks.create_task(clock())
        for _ in range(load.concurrency):
            tasks.create_task(caller())
    return timed.result()


def _lasts(passed_s: float, answers: int, *, seconds: float, load: Load) -> bool:
    """Whether the counted part goes on."""
    if passed_s < seconds:
        return True
    if answers < load.concurrency:
        return passed_s < max(SLOWEST_S, LONGEST * seconds)
    return answers < max(LEAST_ANSWERS, ROUNDS * load.concurrency) and passed_s < LONGEST * seconds


async def _open(one: _One, load: Load, *, tally: Tally, seed: int, times: Times) -> None:
    traffic = TrafficClass(rate=load.rate)
    in_flight: set[asyncio.Task[None]] = set()
    has_begun = False
    async with asyncio.TaskGroup() as tasks:
        for due_s in arrivals(traffic, random.Random(seed), duration_s=tally.until_s):
            if not has_begun and due_s >= tally.from_s:
                has_begun = True
                await times.on_begin()
            if (early := due_s - times.now()) > 0:
                await asyncio.sleep(early)
            if len(in_flight) >= MOST_OPEN:
                tally.due(due_s)
                tally.ended(due_s, times.now(), "too_many")
                continue
            task = tasks.create_task(one(due_s))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
        if not has_begun:
            await times.on_begin()
        if (left := tally.until_s - times.now()) > 0:
            await asyncio.sleep(left)
        await times.on_end()
