"""Chats that stream: many at the same time, each an event every 10 ms, usage counted by us all the while.

How many events a second go through, how soon the first one comes, and what memory a stream takes. `load core` is the
share of the load's core that the upstream and the readers took: near 1 they, and not the gateway, were the limit.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tests.bench.suite.bench import Bench, Failed, Figures, Measure, Row
from tests.bench.suite.goals import OURS, Goal
from tests.bench.suite.readers import LENGTH_S, Readers, first_ms
from tests.bench.suite.routers import BEARER, PATH, router
from tests.bench.suite.servers import (
    HOST,
    Target,
    chat_gateway,
    cpu_s,
    family,
    is_ok,
    process,
    resident_kib,
)
from tests.kit.serving import free_port

BODY = b'{"model":"general_llm","stream":true,"messages":[{"role":"user","content":"hello"}]}'
PEER = "vllm-router"
FEW, MANY, MOST = 200, 400, 800
WARM = 20
SAMPLE_S = 0.1
AT = "{}, {} streams".format
MEMORY = "{}, memory".format
GOALS = (
    Goal(figure="events/s", at="least", bound=30_000, subject=AT(OURS, MANY)),
    Goal(figure="events/s", at="least", bound=0.8, subject=AT(OURS, MANY), against=AT(PEER, MOST)),
    Goal(figure="first p50 ms", at="most", bound=1.5, subject=AT(OURS, FEW), against=AT(PEER, FEW)),
    Goal(figure="first p99 ms", at="most", bound=1.0, subject=AT(OURS, FEW), against=AT(PEER, FEW)),
    Goal(figure="KiB a stream", at="most", bound=80, subject=MEMORY(OURS)),
)


async def measure(bench: Bench) -> None:
    """Throughput and first tokens of all in turns; then memory, of processes that are new in each round."""
    async with AsyncExitStack() as stack:
        upstream, pid = await stack.enter_async_context(_upstream(bench))
        subjects: dict[str, Measure] = {}
        for name in (OURS, PEER):
            target = await stack.enter_async_context(_subject(bench, name, upstream))
            if target is not None:
                counts = (FEW, MANY) if name == OURS else (FEW, MOST)
                subjects |= {AT(name, count): _relayed(bench, target, count, pid) for count in counts}
        ordered = dict(sorted(subjects.items(), key=lambda one: one[0].rpartition(",")[2]))
        await bench.in_turns(ordered, warms_up=not bench.is_quick)
    async with _upstream(bench) as (upstream, _):
        await bench.in_turns(
            {MEMORY(name): _kept(bench, name, upstream) for name in (OURS, PEER) if AT(name, FEW) in subjects},
            warms_up=False,
            rounds=1 if bench.is_quick else 0,
        )


@asynccontextmanager
async def _upstream(bench: Bench) -> AsyncIterator[tuple[str, int]]:
    port = free_port()
    url, command = f"http://{HOST}:{port}", (sys.executable, "-m", "tests.bench.suite.paced", str(port))
    log = bench.folder / "paced.log"
    async with process(command, cores=(bench.load_core,), log=log, ready=lambda: is_ok(url)) as pid:
        yield url, pid


@asynccontextmanager
async def _subject(bench: Bench, name: str, upstream: str) -> AsyncIterator[Target | None]:
    """Ours or the peer's; None, and a note or an error, where the peer cannot run."""
    if name == OURS:
        async with chat_gateway(bench, upstream) as ours:
            yield Target(name=OURS, url=f"{ours.url}{PATH}", body=BODY, headers=BEARER, pid=ours.pid)
        return
    async with AsyncExitStack() as stack:
        target = None
        try:
            target = await stack.enter_async_context(router(bench, name, upstream, BODY))
        except Failed as error:
            bench.failed(f"{name}: {error}")
        yield target


def _relayed(bench: Bench, target: Target, count: int, upstream: int) -> Measure:
    async def run() -> Figures:
        readers = Readers(target, count)
        await readers.start()
        pids = family(target.pid)
        before_s, load_s = cpu_s(pids), cpu_s([os.getpid(), upstream])
        took_s = await readers.count(bench.seconds)
        spent_s, load_s = cpu_s(pids) - before_s, cpu_s([os.getpid(), upstream]) - load_s
        await readers.stop()
        tally = readers.tally
        return {
            "events/s": tally.events / took_s,
            **first_ms(tally.first_s),
            "cpu us an event": spent_s / max(1, tally.events) * 1e6,
            "load core": load_s / took_s,
        }

    return run


def _kept(bench: Bench, name: str, upstream: str) -> Measure:
    """What the process takes with `MANY` streams more than with `WARM`, for each: started anew, it has nothing free."""

    async def run() -> Figures:
        async with _subject(bench, name, upstream) as target:
            if target is None:
                raise Failed("it does not run")
            await _streamed(target, WARM)
            pids = family(target.pid)
            before = resident_kib(pids)
            readers = Readers(target, MANY)
            await readers.start()
            highest = await _highest(pids, LENGTH_S)
            await readers.stop()
            return {"KiB a stream": (highest - before) / MANY, "MiB before": before / 1024}

    return run


async def _streamed(target: Target, count: int) -> None:
    readers = Readers(target, count)
    await readers.start()
    await readers.stop()


async def _highest(pids: list[int], seconds: float) -> float:
    """The largest resident memory within so long, in KiB."""
    until, highest = time.monotonic() + seconds, 0.0
    while time.monotonic() < until:
        highest = max(highest, resident_kib(pids))
        await asyncio.sleep(SAMPLE_S)
    return highest


ROW = Row(name="stream", title="chat streaming, events 10 ms apart", goals=GOALS, measure=measure)
