"""Figures in a real Redis: what all workers counted, by the second; nothing of a Redis that was away comes late."""

import asyncio
from collections.abc import Mapping

import pytest
from redis.asyncio import Redis

from gateway.core.errors import FaultKind, NoHealthyBackend, RulesUnavailable
from gateway.core.types import NOTHING_USED
from gateway.core.watching.figures import COUNTS, Figures, Series, Tally, percentile_us
from gateway.stores.control import figures as store
from gateway.stores.control.figures import FINE_KEPT_S, FINE_S, KEPT_S, MAX_SECONDS, RedisFigures, RedisFigureSource
from gateway.stores.redis_script import connect
from tests.kit.records import A, B, answered, fault
from tests.kit.redis import RedisServer
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until, until_async

pytest_plugins = ["tests.kit.redis"]

AT = Series("t", "r", "triton", "m", "1")
NOWHERE = Series("t", "r", "", "", "")
SECOND = 1_800_000_000


class Now:
    """The time."""

    def __init__(self) -> None:
        self.s = SECOND + 0.5

    def __call__(self) -> float:
        return self.s


def numbers(figures: Figures) -> Mapping[Series, Mapping[str, int]]:
    return {series: {n: getattr(tally, n) for n in COUNTS if getattr(tally, n)} for series, tally in figures.items()}


async def test_what_all_workers_counted_is_read_by_the_second(redis_client: Redis, redis_prefix: str) -> None:
    now = Now()
    workers = [RedisFigures(redis_client, redis_prefix, now_s=now) for _ in range(3)]
    for worker in workers:
        worker.ended(answered(first_token_us=500))
        worker.ended(answered(B, faults=(fault(FaultKind.BROKEN, A),)))
        worker.compared(AT, agreed=True)
    now.s += 1
    workers[0].ended(answered(error=NoHealthyBackend("none"), route=None, usage=NOTHING_USED))
    workers[0].compared(AT, agreed=False)
    for worker in workers:
        await worker.flush()
        await worker.flush()  # there is nothing left
    found = await RedisFigureSource(redis_client, redis_prefix).read(SECOND - 1, SECOND + 3)
    assert list(found) == [SECOND, SECOND + 1]
    assert numbers(found[SECOND]) == {
        AT: {
            "requests": 6,
            "attempts": 9,
            "failed_attempts": 3,
            "violations": 3,
            "agreed": 3,
            "input_tokens": 60,
            "output_tokens": 120,
            "cost_nano_usd": 18_000,
        },
        NOWHERE: {},
    }
    assert sum(found[SECOND][AT].whole.values()) == sum(found[SECOND][NOWHERE].whole.values()) == 3
    assert 500 <= (percentile_us(found[SECOND][AT].first_token, 0.5) or 0) <= 550
    assert numbers(found[SECOND + 1]) == {NOWHERE: {"requests": 1, "errors": 1}, AT: {"disagreed": 1}}


async def test_seconds_are_kept_for_minutes_and_fives_for_seventy(redis_client: Redis, redis_prefix: str) -> None:
    now = Now()
    worker = RedisFigures(redis_client, redis_prefix, now_s=now)
    for _ in range(5):
        worker.ended(answered())
        now.s += 1
        await worker.flush()
    assert FINE_KEPT_S - 5 <= await redis_client.ttl(f"{redis_prefix}figures:{SECOND}") <= FINE_KEPT_S
    assert KEPT_S - 5 <= await redis_client.ttl(f"{redis_prefix}figures:{SECOND}:5") <= KEPT_S
    assert not await redis_client.exists(f"{redis_prefix}figures:{SECOND + 5}:5")


async def test_what_is_old_is_read_by_fives(redis_client: Redis, redis_prefix: str) -> None:
    """Whatever the pieces that it is read in, nothing is lost or counted twice between fives and seconds."""
    now = Now()
    workers = [RedisFigures(redis_client, redis_prefix, now_s=now) for _ in range(2)]
    length = FINE_S + 60
    for _ in range(length):
        for worker in workers:
            worker.ended(answered())
        now.s += 1
        for worker in workers:
            await worker.flush()
    source = RedisFigureSource(redis_client, redis_prefix, now_s=now)
    found = await source.read(SECOND, SECOND + length)
    assert sorted(found) == [*range(SECOND, SECOND + 60, 5), *range(SECOND + 60, SECOND + length)]
    assert sum(figures[AT].requests for figures in found.values()) == 2 * length
    assert found[SECOND][AT].requests == sum(found[SECOND][AT].whole.values()) == 10
    for middle in (SECOND + 7, SECOND + 62):
        first, second = await source.read(SECOND, middle), await source.read(middle, SECOND + length)
        assert {**first, **second} == found
    assert min(await source.read(SECOND + 1, SECOND + length)) == SECOND + 5  # none that began before


async def test_what_is_left_at_the_end_is_written(redis_client: Redis, redis_prefix: str) -> None:
    now = Now()
    worker = RedisFigures(redis_client, redis_prefix, now_s=now)
    worker.ended(answered())
    await worker.close()
    now.s += 2 * FINE_S
    source = RedisFigureSource(redis_client, redis_prefix, now_s=now)
    assert numbers((await source.read(SECOND, SECOND + 5))[SECOND])[AT]["requests"] == 1


async def test_an_hour_is_read_in_parts(redis_client: Redis, redis_prefix: str) -> None:
    now = Now()
    worker = RedisFigures(redis_client, redis_prefix, now_s=now)
    seconds = [SECOND, SECOND + store.READ_AT_ONCE - 1, SECOND + store.READ_AT_ONCE, SECOND + 3599]
    for second in seconds:
        now.s = second
        worker.ended(answered())
    await worker.flush()
    source = RedisFigureSource(redis_client, redis_prefix)
    assert list(await source.read(SECOND, SECOND + 3600)) == seconds
    assert await source.read(SECOND, SECOND) == {}


async def test_it_is_written_by_itself_and_at_the_end(redis_client: Redis, redis_prefix: str) -> None:
    worker = RedisFigures(redis_client, redis_prefix, now_s=Now())
    source = RedisFigureSource(redis_client, redis_prefix)
    worker.start()
    worker.ended(answered())

    async def is_there() -> object:
        return (await source.read(SECOND, SECOND + 1)).get(SECOND)

    await until_async(is_there)
    worker.ended(answered())
    await worker.close()
    assert numbers((await source.read(SECOND, SECOND + 1))[SECOND])[AT]["requests"] == 2


async def test_a_close_waits_for_what_is_on_its_way(
    redis_server: RedisServer, redis_client: Redis, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "FLUSH_S", 0.001)
    async with RedisSwitch(redis_server.port) as redis:
        client = connect(redis.url)
        worker = RedisFigures(client, redis_prefix, now_s=Now())
        worker.start()
        try:
            redis.pause()
            worker.ended(answered())
            await until(lambda: not worker._seconds)  # taken out, to be written
            closing = asyncio.create_task(worker.close())
            await until(worker._closing.is_set)
            await redis.restore()
            await closing
        finally:
            await client.aclose()
    found = await RedisFigureSource(redis_client, redis_prefix).read(SECOND, SECOND + 1)
    assert numbers(found[SECOND])[AT]["requests"] == 1
    assert worker.lost == 0


async def test_what_redis_does_not_take_is_let_go_and_counted(redis_server: RedisServer, redis_prefix: str) -> None:
    async with RedisSwitch(redis_server.port) as redis:
        client = connect(redis.url)
        worker = RedisFigures(client, redis_prefix, now_s=Now())
        source = RedisFigureSource(client, redis_prefix)
        try:
            await redis.refuse()
            for _ in range(5):
                worker.ended(answered())
            worker.compared(AT, agreed=True)
            await worker.flush()
            assert worker.lost == 5
            with pytest.raises(RulesUnavailable):
                await source.read(SECOND, SECOND + 1)
            await redis.restore()
            worker.ended(answered())
            await worker.flush()
            assert worker.lost == 5
            assert numbers((await source.read(SECOND, SECOND + 1))[SECOND])[AT]["requests"] == 1
        finally:
            await client.aclose()


async def test_a_script_that_redis_has_forgotten_is_sent_again(redis_client: Redis, redis_prefix: str) -> None:
    now = Now()
    worker = RedisFigures(redis_client, redis_prefix, now_s=now)
    await redis_client.script_flush()
    worker.ended(answered())
    now.s += 1
    worker.ended(answered())
    await worker.flush()
    found = await RedisFigureSource(redis_client, redis_prefix).read(SECOND, SECOND + 2)
    assert [numbers(figures)[AT]["requests"] for figures in found.values()] == [1, 1]


async def test_memory_is_bounded(redis_client: Redis, redis_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_SERIES", 3)
    now = Now()
    worker = RedisFigures(redis_client, redis_prefix, now_s=now)
    for i in range(10):
        worker.ended(answered(plan=None, route=None, rule=f"r{i}"))
    await worker.flush()
    found = (await RedisFigureSource(redis_client, redis_prefix).read(SECOND, SECOND + 1))[SECOND]
    assert sorted(tally.requests for tally in found.values()) == [1, 1, 1, 7]
    assert found[Series("", "", "", "", "")].requests == 7
    for _ in range(MAX_SECONDS + 2):
        now.s += 1
        worker.ended(answered())
    assert worker.lost == 2


async def test_fields_of_another_version_are_left_out(redis_client: Redis, redis_prefix: str) -> None:
    name = '["t", "r", "triton", "m", "1"]'
    fields = {name: '{"requests":2,"w50":2,"news":7,"wx":1}', "no series": '{"requests":1}'}
    await redis_client.hset(f"{redis_prefix}figures:{SECOND}", mapping=fields)
    found = await RedisFigureSource(redis_client, redis_prefix).read(SECOND, SECOND + 1)
    assert found == {SECOND: {AT: Tally(requests=2, whole={50: 2})}}


async def test_many_at_once_are_one_round_trip_each(redis_client: Redis, redis_prefix: str) -> None:
    """Workers write at the same time, and nothing is lost between them."""
    workers = [RedisFigures(redis_client, redis_prefix, now_s=Now()) for _ in range(8)]
    for _ in range(4):
        for worker in workers:
            worker.ended(answered())
        await asyncio.gather(*(worker.flush() for worker in workers))
    found = await RedisFigureSource(redis_client, redis_prefix).read(SECOND, SECOND + 1)
    assert found[SECOND][AT].requests == 32
