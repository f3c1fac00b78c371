"""The order under an ordering key when Redis is killed and starts again, and when a worker process stands still."""

import asyncio
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import pytest
from redis.asyncio import Redis

from gateway.core.admissions import Wanted
from gateway.core.errors import DeadlineExceeded, OrderingUnavailable
from gateway.ports import Admission
from gateway.stores import redis_admissions, redis_steps
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_script import connect
from tests.kit.redis import RedisServer
from tests.kit.replica_runs import at_rest
from tests.kit.wait import until

SECOND_US: Final = 1_000_000
LEASE_US: Final = 60 * SECOND_US  # no test lasts so long
RENEW_US: Final = 100_000
STOPPED_LEASE_US: Final = SECOND_US
PREFIX: Final = "order:"
KEYS: Final = ("serial", "release")
PERSISTENT: Final = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture(autouse=True)
def _tries_again_soon(monkeypatch):
    monkeypatch.setattr(redis_steps, "RETRY_AFTER_S", 0.05)
    monkeypatch.setattr(redis_admissions, "PAUSE_S", 0.05)


@pytest.fixture
def persistent() -> Iterator[RedisServer]:
    with RedisServer(*PERSISTENT) as server:
        yield server


@pytest.fixture
def forgetful() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@asynccontextmanager
async def worker(client: Redis, prefix: str = PREFIX) -> AsyncIterator[RedisAdmissions]:
    local = MemoryAdmissions(lambda: time.time_ns() // 1000, is_degraded=True)
    one = RedisAdmissions(client, prefix, local, timeout_s=1.0, lease_us=LEASE_US, renew_us=RENEW_US)
    one.start()
    try:
        yield one
    finally:
        await one.close()


@asynccontextmanager
async def two_workers(url: str) -> AsyncIterator[tuple[RedisAdmissions, RedisAdmissions]]:
    async with connect(url) as first, connect(url) as second, worker(first) as one, worker(second) as other:
        yield one, other


async def admitted(of: RedisAdmissions, key: str) -> Admission:
    """As soon as Redis answers."""
    while True:
        try:
            return await of.admit(Wanted(tenant="t", ordering_key=key, queue_bound=100))
        except OrderingUnavailable:
            await asyncio.sleep(0.01)


def turn(of: Admission) -> asyncio.Task[None]:
    return asyncio.create_task(of.turn(within_us=30 * SECOND_US))


async def kill_and_start(server: RedisServer) -> None:
    server.stop()
    await asyncio.to_thread(server.start)


# --- Redis restarts -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_down", [True, False], ids=["it ends while Redis is down", "it ends afterwards"])
async def test_who_waits_goes_on_in_order_where_redis_keeps_its_data(persistent, is_down):
    had: list[int] = []

    async def request(admission: Admission) -> None:
        await admission.turn(within_us=30 * SECOND_US)
        had.append(admission.verdict.ticket)
        await asyncio.sleep(0.002)
        admission.settle(tokens=0, nano_usd=0)

    async with two_workers(persistent.url) as workers, connect(persistent.url) as client:
        first, *others = [await admitted(workers[number % 2], "o") for number in range(9)]
        await first.turn(within_us=0)
        waiting = [asyncio.create_task(request(other)) for other in reversed(others)]
        persistent.stop()
        if is_down:
            first.settle(tokens=0, nano_usd=0)
        await asyncio.to_thread(persistent.start)
        assert (await admitted(workers[0], "o")).verdict.ticket == 10  # it has its place behind them, and still counts
        if not is_down:
            assert not had
            assert not first.is_lost
            first.settle(tokens=0, nano_usd=0)
        await asyncio.gather(*waiting)
        assert had == list(range(2, 10))
        await until(lambda: not workers[0]._steps._settlements)
        assert await client.zcard(f"{PREFIX}adm:{{t}}:queue:t:o") == 1


async def test_who_waits_is_told_where_redis_has_lost_its_data(forgetful):
    async with two_workers(forgetful.url) as workers:
        first, *others = [await admitted(workers[number % 2], "o") for number in range(5)]
        await first.turn(within_us=0)
        waiting = [turn(other) for other in others]
        await kill_and_start(forgetful)
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in told] == [OrderingUnavailable] * 4
        await until(lambda: first.is_lost)
        after, behind = await admitted(workers[0], "o"), await admitted(workers[1], "o")
        assert (after.verdict.ticket, behind.verdict.ticket) == (1, 2)
        await after.turn(within_us=0)
        for one in (first, *others):  # whose places are gone already
            one.settle(tokens=0, nano_usd=0)
        with pytest.raises(DeadlineExceeded):
            await behind.turn(within_us=2 * RENEW_US)
        after.settle(tokens=0, nano_usd=0)
        await turn(behind)


@dataclass(slots=True)
class Traffic:
    """Requests without end on two workers: what was admitted, and what had its turn, by ordering key."""

    workers: tuple[RedisAdmissions, RedisAdmissions]
    draw: random.Random
    admitted: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    had: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    running: set[str] = field(default_factory=set)
    is_over: bool = False

    async def lane(self) -> None:
        while not self.is_over:
            key = self.draw.choice(KEYS)
            await self._request(key, await admitted(self.draw.choice(self.workers), key))

    async def _request(self, key: str, admission: Admission) -> None:
        self.admitted[key].append(admission.verdict.ticket)
        if key == "release":  # executed before its turn, which is to be answered
            await self._work()
        await admission.turn(within_us=30 * SECOND_US)
        assert key not in self.running
        self.running.add(key)
        self.had[key].append(admission.verdict.ticket)
        await self._work()
        self.running.remove(key)
        admission.settle(tokens=0, nano_usd=0)

    async def _work(self) -> None:
        await asyncio.sleep(self.draw.random() * 0.003)

    @property
    def count(self) -> int:
        return sum(map(len, self.had.values()))


async def test_traffic_keeps_its_order_over_restarts(persistent):
    async with two_workers(persistent.url) as workers, connect(persistent.url) as client:
        traffic = Traffic(workers, random.Random(0))  # noqa: S311 - keeps no secret
        async with asyncio.TaskGroup() as lanes:
            for _ in range(12):
                lanes.create_task(traffic.lane())
            for _ in range(3):
                so_far = traffic.count
                await until(lambda so_far=so_far: traffic.count >= so_far + 40, timeout_s=20)
                await kill_and_start(persistent)
            so_far = traffic.count
            await until(lambda: traffic.count >= so_far + 40, timeout_s=20)
            traffic.is_over = True
        for key in KEYS:
            assert traffic.had[key] == sorted(set(traffic.admitted[key])), key
            assert len(traffic.had[key]) == len(traffic.admitted[key]), key
        await at_rest(client, PREFIX)


# --- a worker stands still ------------------------------------------------------------------------


@asynccontextmanager
async def other_process(url: str, prefix: str) -> AsyncIterator[Process]:
    """A worker with one admission in a process of its own, which has said its ticket."""
    words = (url, prefix, str(STOPPED_LEASE_US), str(RENEW_US), "o")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kit.order_worker", *words, stdin=PIPE, stdout=PIPE
    )
    try:
        yield process
        await ended(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: Process) -> None:
    """It gives back what it has, and ends."""
    if process.returncode is None:
        async with asyncio.timeout(20):
            await process.communicate(b"")
    assert process.returncode == 0


async def said(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode().strip()


async def asked_to_send(process: Process) -> str:
    assert process.stdin is not None
    process.stdin.write(b"send\n")
    return await said(process)


async def test_one_that_stood_still_with_its_turn_does_not_send(redis_server, redis_client, redis_prefix):
    async with worker(redis_client, redis_prefix) as here, other_process(redis_server.url, redis_prefix) as stopped:
        assert [await said(stopped), await said(stopped)] == ["1", "turn"]
        assert await asked_to_send(stopped) == "sent"
        second, third = await admitted(here, "o"), await admitted(here, "o")
        with pytest.raises(DeadlineExceeded):
            await second.turn(within_us=STOPPED_LEASE_US + 2 * RENEW_US)  # as long as it runs, it keeps its place
        stopped.send_signal(signal.SIGSTOP)
        await turn(second)
        stopped.send_signal(signal.SIGCONT)
        assert await asked_to_send(stopped) == "lost"
        await ended(stopped)  # and gives back what it has no more
        with pytest.raises(DeadlineExceeded):
            await third.turn(within_us=2 * RENEW_US)
        assert not second.is_lost
        second.settle(tokens=0, nano_usd=0)
        await turn(third)
        third.settle(tokens=0, nano_usd=0)
        await at_rest(redis_client, redis_prefix)


async def test_one_that_stood_still_while_it_waited_is_refused(redis_server, redis_client, redis_prefix):
    async with worker(redis_client, redis_prefix) as here:
        first = await admitted(here, "o")
        async with other_process(redis_server.url, redis_prefix) as stopped:
            assert await said(stopped) == "2"
            third = await admitted(here, "o")
            stopped.send_signal(signal.SIGSTOP)
            first.settle(tokens=0, nano_usd=0)  # the turn is the stopped one's, and its message waits in its socket
            await turn(third)
            stopped.send_signal(signal.SIGCONT)
            assert await said(stopped) == OrderingUnavailable.code
            assert await asked_to_send(stopped) == "lost"
        assert not third.is_lost
        third.settle(tokens=0, nano_usd=0)
        await at_rest(redis_client, redis_prefix)
