"""Random timelines of admissions: two workers over one Redis, callers who leave at any turn of the loop, and faults.

Connections are cut before their answers, Redis pauses, refuses or forgets its scripts, and the workers stall. Whatever
comes: no two of one ordering key have their turn at once, none before one with a smaller ticket, and afterwards nothing
is taken. In half of the timelines leases are short, and give back what was lost; in the others they outlive the test,
so that settlements alone must do it, and the money that is counted must be exactly what was used up.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import pytest
from redis.asyncio import Redis

from gateway.core.admissions import Wanted
from gateway.core.errors import GatewayError
from gateway.core.rate_limit import counters, takes
from gateway.core.types import Caller, Limit
from gateway.ports import Admission
from gateway.stores import redis_admissions, redis_steps
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_script import connect
from tests.kit.redis_switch import RedisSwitch
from tests.kit.replica_runs import at_rest
from tests.kit.replicas import Books, books
from tests.kit.wait import until

TOGETHER: Final = 6  # timelines at once: most of one is waiting
CHUNKS: Final = 3
SHORT_US: Final = 300_000
LONG_US: Final = 120_000_000
BEYOND_S: Final = 0.4  # longer than a short lease
LIMITS: Final = (
    Limit(kind="concurrent", amount=6),
    Limit(kind="tokens", amount=10**6, per="day", burst=10**6),
    Limit(kind="usd", amount=10**9, per="month"),
)
TAKES: Final = takes(
    counters(Caller(key_id="k", tenant="t", limits=LIMITS), "t", "m", "interactive"), tokens=100, nano_usd=1000
)


@dataclass(slots=True, eq=False)
class Timeline:
    """What happens, and what is seen of it: who has a turn now, the last ticket of each key, the money used up."""

    draw: random.Random
    switch: RedisSwitch
    direct: Redis
    workers: list[RedisAdmissions]
    having: dict[str, set[Admission]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    used_nano_usd: int = 0
    turns: int = 0
    wrong: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Requests, some of whose callers leave, with a fault now and then; returns when all have ended."""
        running: list[asyncio.Task[None]] = []
        faults = [self._cut, self._pause, self._refuse, self._forget, self._pause_beyond, self._stall]
        for _ in range(self.draw.randrange(60, 120)):
            request = asyncio.create_task(self._request())
            running.append(request)
            if self.draw.random() < 0.4:
                running.append(asyncio.create_task(self._leave(request)))
            if self.draw.random() < 0.3:
                await asyncio.sleep(self.draw.random() * 0.01)
            (fault,) = self.draw.choices([None, *faults], [920, 30, 20, 15, 10, 3, 2])
            if fault is not None:
                await fault()
        await self.switch.restore()
        await asyncio.wait(running)
        self.wrong += [repr(one.exception()) for one in running if not one.cancelled() and one.exception()]

    async def _request(self) -> None:
        key = self.draw.choice(("", "a", "b"))
        wanted = Wanted(tenant="t", takes=TAKES if self.draw.random() < 0.7 else (), ordering_key=key, queue_bound=30)
        used = self.draw.choice((0, 400, 2000))
        try:
            admission = await self.draw.choice(self.workers).admit(wanted)
        except GatewayError:
            return
        if not admission.verdict.allowed:
            return
        try:
            await self._work(admission, key)
        except GatewayError:
            used = 0
        finally:  # also where its caller leaves
            self.having.get(key, set()).discard(admission)
            admission.settle(tokens=0, nano_usd=used)
            if wanted.takes and not admission.verdict.degraded:
                self.used_nano_usd += used

    async def _work(self, admission: Admission, key: str) -> None:
        if key:
            await admission.turn(within_us=self.draw.choice((50_000, 2_000_000)))
            self._has_turn(admission, key)
        for _ in range(self.draw.randrange(4)):
            await asyncio.sleep(self.draw.choice((0, 0, 0.001, 0.01)))

    def _has_turn(self, admission: Admission, key: str) -> None:
        """What no replica may see: two at once, unless the one before knows that it lost its place; or a step back."""
        self.turns += 1
        ticket, before = admission.verdict.ticket, self.last.get(key, 0)
        having = self.having.setdefault(key, set())
        self.wrong += [
            f"{key}: {one.verdict.ticket} still has its turn at {ticket}" for one in having if not one.is_lost
        ]
        if ticket <= before:
            self.wrong.append(f"{key}: {ticket} after {before}")
        self.last[key] = ticket
        having.add(admission)

    async def _leave(self, request: asyncio.Task[None]) -> None:
        for _ in range(self.draw.randrange(12)):
            await asyncio.sleep(0)
        if self.draw.random() < 0.5:
            await asyncio.sleep(self.draw.random() * 0.03)
        request.cancel()

    # --- faults ---

    async def _cut(self) -> None:
        self.switch.cut_after(self.draw.randrange(1, 4), b"EVALSHA")

    async def _pause(self) -> None:
        self.switch.pause()
        await self._end_fault(self.draw.random() * 0.15)

    async def _pause_beyond(self) -> None:
        self.switch.pause()
        await self._end_fault(BEYOND_S)

    async def _refuse(self) -> None:
        await self.switch.refuse()
        await self._end_fault(self.draw.random() * 0.1)

    async def _end_fault(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self.switch.restore()

    async def _forget(self) -> None:
        await self.direct.script_flush()

    async def _stall(self) -> None:
        time.sleep(BEYOND_S)  # noqa: ASYNC251 - the loop is what stalls


@asynccontextmanager
async def timeline(seed: int, port: int, prefix: str, lease_us: int) -> AsyncIterator[Timeline]:
    """Two workers behind one switch, as yet calm."""
    async with AsyncExitStack() as stack:
        switch = await stack.enter_async_context(RedisSwitch(port))
        clients = [await stack.enter_async_context(connect(url)) for url in (switch.url, switch.url)]
        direct = await stack.enter_async_context(connect(f"redis://127.0.0.1:{port}/0"))
        workers = []
        for client in clients:
            local = MemoryAdmissions(lambda: time.time_ns() // 1000, is_degraded=True)
            one = RedisAdmissions(client, prefix, local, timeout_s=0.1, lease_us=lease_us, renew_us=75_000)
            stack.push_async_callback(one.close)
            one.start()
            workers.append(one)
        yield Timeline(random.Random(seed), switch, direct, workers)  # noqa: S311 - keeps no secret


async def played(seed: int, port: int, prefix: str, lease_us: int) -> int:
    """Play one timeline, and check what is left of it; returns how many had their turn."""
    async with timeline(seed, port, prefix, lease_us) as line:
        await line.run()
        assert not line.wrong, (seed, line.wrong)
        told = await rested(line, prefix)
        assert not told.tats_us, (seed, told)
        spent = sum(told.spent.values())
        assert spent == line.used_nano_usd if lease_us == LONG_US else spent <= line.used_nano_usd, (seed, spent, line)
        return line.turns


async def rested(line: Timeline, prefix: str) -> Books:
    """The books once nothing is taken; no worker keeps anything either."""
    for worker in line.workers:
        await until(lambda worker=worker: not (worker._open or worker._steps._settlements or worker._steps._asks))
        assert at_peace(worker._local)
    await at_rest(line.direct, prefix, poke=poke_of(line.workers[0]))
    return await books(line.direct, prefix)


def at_peace(local: MemoryAdmissions) -> bool:
    """Whether a worker that decided alone keeps nothing of it."""
    return not any(own.open or own.places or own.queues for own in local._book._owners.values())


def poke_of(worker: RedisAdmissions) -> Callable[[], Awaitable[None]]:
    """Whoever comes next, and gives back what leases have lost."""

    async def poke() -> None:
        try:
            admission = await worker.admit(Wanted(tenant="t", ordering_key="poke", queue_bound=9))
        except GatewayError:
            return  # it has not found its way back yet
        admission.settle(tokens=0, nano_usd=0)

    return poke


@pytest.mark.parametrize("lease_us", [SHORT_US, LONG_US], ids=["short leases", "long leases"])
@pytest.mark.parametrize("chunk", range(CHUNKS))
async def test_nothing_is_left_and_none_is_out_of_order(redis_server, redis_prefix, monkeypatch, chunk, lease_us):
    monkeypatch.setattr(redis_steps, "RETRY_AFTER_S", 0.05)
    monkeypatch.setattr(redis_admissions, "PAUSE_S", 0.05)
    seeds = range(chunk * TOGETHER, (chunk + 1) * TOGETHER)
    async with asyncio.TaskGroup() as lines:
        running = [
            lines.create_task(played(seed, redis_server.port, f"{redis_prefix}{seed}:", lease_us)) for seed in seeds
        ]
    assert sum(one.result() for one in running) > 10 * TOGETHER, "hardly any had its turn"
