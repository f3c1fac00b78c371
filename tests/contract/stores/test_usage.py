"""The books of usage in a real Redis: exact sums of all workers, nothing lost and nothing counted twice by a cut."""

import asyncio
import json
from datetime import date, timedelta

import pytest

from gateway.admin_ports import UsageRow
from gateway.core.errors import BackendBroke, RulesUnavailable
from gateway.core.types import Route, Usage
from gateway.core.watching.record import RequestRecord
from gateway.stores import redis_usage
from gateway.stores.redis_script import connect
from gateway.stores.redis_usage import KEPT_S, LARGEST, RedisUsage, RedisUsageSource
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until, until_async

pytest_plugins = ["tests.kit.redis"]

DAY = date(2026, 3, 1)
USED = Usage(input_tokens=10, output_tokens=5, cached_tokens=4, reasoning_tokens=2, cost_nano_usd=1_000_000_007)


def record(usage: Usage = USED, *, tenant="acme", model="gpt-4.1", **changes) -> RequestRecord:
    route = Route(backend="openai", model=model, version="", rule="r", attempts=1)
    fields = {"id": "i", "task": "general_llm", "key_id": "k", "total_us": 5, "route": route}
    return RequestRecord(tenant=tenant, usage=usage, **fields | changes)


def row(**counts) -> UsageRow:
    names = {"day": DAY, "tenant": "acme", "task": "general_llm", "backend": "openai", "model": "gpt-4.1"}
    return UsageRow(**names | counts)


def times(n: int) -> UsageRow:
    return row(
        requests=n,
        input_tokens=10 * n,
        output_tokens=5 * n,
        cached_tokens=4 * n,
        reasoning_tokens=2 * n,
        cost_nano_usd=1_000_000_007 * n,
    )


class Days:
    """The day now."""

    def __init__(self) -> None:
        self.now = DAY

    def __call__(self) -> date:
        return self.now


@pytest.fixture
def day():
    return Days()


@pytest.fixture
async def switch(redis_server):
    async with RedisSwitch(redis_server.port) as switch:
        yield switch


@pytest.fixture
async def far(switch, redis_prefix, day):
    """A worker's books behind the switch."""
    client = connect(switch.url)
    yield RedisUsage(client, redis_prefix, today=day)
    await client.aclose()


@pytest.fixture
def books(redis_client, redis_prefix, day):
    return RedisUsage(redis_client, redis_prefix, today=day)


@pytest.fixture
def read(redis_client, redis_prefix):
    async def rows(first=DAY, last=DAY):
        return list(await RedisUsageSource(redis_client, redis_prefix).read(first, last))

    return rows


async def test_every_kind_of_end_is_in_the_books(books, read):
    books.began("general_llm")
    books.ended(record())
    books.ended(record(Usage(input_tokens=7, output_tokens=1, is_estimated=True), error=BackendBroke("broke")))
    books.ended(record(Usage()))  # a tensor task counts no tokens
    books.ended(record(Usage(), model="made up", error=BackendBroke("no such model")))
    books.ended(record(route=None, error=BackendBroke("nobody answered")))
    books.refused(record())
    assert await books.flush()
    assert await read() == [
        row(
            requests=3,
            failed=1,
            input_tokens=17,
            output_tokens=6,
            cached_tokens=4,
            reasoning_tokens=2,
            estimated_requests=1,
            cost_nano_usd=1_000_000_007,
        )
    ]


async def test_workers_add_up_exactly_and_names_are_kept_apart(redis_client, redis_prefix, day, read):
    workers = [RedisUsage(redis_client, redis_prefix, today=day) for _ in range(2)]
    odd = 'a "b",\\ \u2028\n:|'
    for worker in workers:
        for _ in range(3):
            worker.ended(record())
            assert await worker.flush()
        worker.ended(record(model=odd, tenant="b"))
        await worker.close()
    assert await read() == [
        times(6),
        row(tenant="b", model=odd, **{n: 2 * getattr(times(1), n) for n in redis_usage.COUNTS}),
    ]


async def test_days_are_apart_kept_and_forgotten_together(books, read, day, redis_client, redis_prefix):
    books.ended(record())
    day.now += timedelta(days=1)
    books.ended(record())
    books.ended(record())
    assert await books.flush()
    assert await read() == [times(1)]
    assert [r.requests for r in await read(DAY - timedelta(days=3), DAY + timedelta(days=3))] == [1, 2]
    keys = [key async for key in redis_client.scan_iter(f"{redis_prefix}*")]
    assert len(keys) == 4
    for key in keys:
        assert b"usage:{2026-03-0" in key
        assert KEPT_S - 60 < await redis_client.ttl(key) <= KEPT_S


async def test_figures_beyond_sense_spoil_nothing(books, read):
    books.ended(record(Usage(input_tokens=10**30, output_tokens=-5, cost_nano_usd=10**30)))
    assert await books.flush()
    assert await read() == [row(requests=1, input_tokens=LARGEST, cost_nano_usd=LARGEST)]


async def test_a_count_that_is_full_keeps_no_other_out(books, read, redis_client, redis_prefix, caplog):
    field = json.dumps(["acme", "general_llm", "openai", "gpt-4.1", "cost_nano_usd"])
    await redis_client.hset(f"{redis_prefix}usage:{{2026-03-01}}", field, 2**63 - 1)
    books.ended(record())
    assert await books.flush()
    assert "usage_refused" in caplog.messages
    (found,) = await read()
    assert (found.requests, found.cost_nano_usd) == (1, 2**63 - 1)


async def test_an_outage_loses_nothing(far, switch, read, day, caplog):
    far.ended(record())
    await switch.refuse()
    assert not await far.flush()
    far.ended(record())
    day.now += timedelta(days=1)
    far.ended(record())
    assert not await far.flush()
    await switch.restore()
    assert await far.flush()
    assert await read() == [times(2)]
    assert [r.requests for r in await read(DAY, day.now)] == [2, 1]
    assert [m for m in caplog.messages if "written" in m] == ["not_written", "written_again"]


@pytest.mark.parametrize("verb", [b"EVALSHA", b"EVAL"])
async def test_an_answer_that_never_came_is_not_counted_twice(far, switch, read, verb, redis_client, redis_prefix):
    if verb == b"EVAL":
        await redis_client.script_flush()
    else:
        far.ended(record())
        assert await far.flush()
    before = 0 if verb == b"EVAL" else 1
    far.ended(record())
    switch.cut_after(1, verb)  # Redis runs it; the client sends it again by itself
    await far.flush()
    far.ended(record())
    await until_async(far.flush)
    assert await read() == [times(before + 2)]


async def test_a_time_out_after_the_write_is_not_counted_twice(far, switch, read, redis_client, monkeypatch):
    far.ended(record())
    assert await far.flush()
    far.ended(record())
    # Redis has the command and books it; the answer is held back until the worker has given up.
    flush = far._next()
    assert await far._script.run(redis_client, far._keys(DAY), far._arguments(flush)) == [1, 0]
    switch.pause()
    monkeypatch.setattr(redis_usage, "TIMEOUT_S", 0.05)
    assert not await far.flush()
    far.ended(record())
    assert not await far.flush()
    await switch.refuse()
    await switch.restore()
    monkeypatch.undo()
    assert await far.flush()
    assert await read() == [times(3)]


async def test_redis_forgets_its_scripts_and_its_books(books, read, redis_client, redis_prefix):
    books.ended(record())
    assert await books.flush()
    await redis_client.script_flush()
    await redis_client.delete(*[key async for key in redis_client.scan_iter(f"{redis_prefix}*")])
    books.ended(record())
    assert await books.flush()
    assert await read() == [times(1)]


async def test_random_cuts_lose_nothing_and_double_nothing(far, switch, read):
    for n in range(30):
        far.ended(record())
        if n % 3 == 0:
            switch.cut_after(1 + n % 2, b"EVALSHA")
        elif n % 7 == 0:
            await switch.refuse()
        await far.flush()
        await switch.restore()
    await until_async(far.flush)
    assert await read() == [times(30)]


async def test_a_close_in_the_middle_of_a_write_writes_the_rest(far, switch, read, monkeypatch):
    monkeypatch.setattr(far, "_every_s", 0.001)
    far.ended(record())
    far.start()
    switch.pause()
    await until(lambda: far._under_way is not None)
    far.ended(record())
    closing = asyncio.create_task(far.close())
    await until(far._closing.is_set)
    await switch.restore()  # what was on its way may still come to Redis, and comes again
    await closing
    assert await read() == [times(2)]


async def test_what_is_lost_at_the_end_is_told(far, switch, caplog):
    far.ended(record())
    await switch.refuse()
    assert not await far.flush()
    far.ended(record())
    await far.close()
    (line,) = [r for r in caplog.records if r.message == "usage_lost"]
    assert (line.requests, line.cost_nano_usd) == (2, 2_000_000_014)


async def test_it_writes_by_itself_and_survives_a_failure(books, read, monkeypatch, caplog):
    monkeypatch.setattr(books, "_every_s", 0.001)
    run = books._script
    books._script = None
    books.ended(record())
    books.start()
    await until(lambda: "flush_failed" in caplog.messages)
    books._script = run
    await until_async(read)
    assert await read() == [times(1)]
    await books.close()


async def test_a_later_versions_count_is_left_out(books, read, redis_client, redis_prefix):
    books.ended(record())
    assert await books.flush()
    field = json.dumps(["acme", "general_llm", "openai", "gpt-4.1", "moons"])
    await redis_client.hset(f"{redis_prefix}usage:{{2026-03-01}}", field, 3)
    assert await read() == [times(1)]


async def test_a_reader_without_redis_is_told(switch, redis_prefix, monkeypatch):
    monkeypatch.setattr(redis_usage, "READ_TIMEOUT_S", 0.1)
    client = connect(switch.url)
    source = RedisUsageSource(client, redis_prefix)
    switch.pause()
    with pytest.raises(RulesUnavailable):
        await source.read(DAY, DAY)
    await switch.refuse()
    with pytest.raises(RulesUnavailable):
        await source.read(DAY, DAY)
    await client.aclose()
