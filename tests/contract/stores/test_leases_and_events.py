"""Leases and events, in a real Redis and without one."""

import pytest

from gateway.core.errors import RulesUnavailable
from gateway.stores import leases, redis_events
from gateway.stores.leases import MemoryLeases, RedisLeases
from gateway.stores.redis_events import KEPT, RedisEvents
from gateway.stores.redis_script import connect
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until_async

pytest_plugins = ["tests.kit.redis"]


class Clock:
    now_us = 0

    def __call__(self):
        return self.now_us


@pytest.fixture(params=["redis", "memory"])
def two(request, redis_client, redis_prefix):
    """The leases as two workers see them."""
    if request.param == "redis":
        return RedisLeases(redis_client, redis_prefix), RedisLeases(redis_client, redis_prefix)
    one = MemoryLeases(Clock())
    return one, one


async def test_the_first_has_it_and_leaves_a_word(two):
    one, other = two
    assert await one.take("a", 30)
    assert not await other.take("a", 30)
    assert await other.take("b", 30)
    assert await other.word("a") == ""
    await one.keep("a", 30, word="done")
    assert await other.word("a") == "done"
    assert not await other.take("a", 30)
    assert await other.word("never") == ""


async def test_a_lease_ends(redis_client, redis_prefix):
    one = RedisLeases(redis_client, redis_prefix)
    assert await one.take("a", 0.02)
    await until_async(lambda: one.take("a", 30))
    assert 29_000 < await redis_client.pttl(f"{redis_prefix}lease:a") <= 30_000


async def test_a_lease_of_one_process_ends():
    clock = Clock()
    one = MemoryLeases(clock)
    await one.take("a", 1)
    await one.keep("a", 2, word="w")
    clock.now_us = 1_999_999
    assert not await one.take("a", 1)
    clock.now_us = 2_000_000
    assert await one.word("a") == ""
    assert await one.take("b", 1)
    assert list(one._held) == ["b"]
    assert await one.take("a", 1)


async def test_the_newest_events_are_kept(redis_client, redis_prefix):
    events = RedisEvents(redis_client, redis_prefix)
    assert await events.read() == []
    for number in range(KEPT + 5):
        await events.add({"number": number})
    found = await events.read()
    assert [event["number"] for event in found] == list(range(KEPT + 4, 4, -1))
    assert [event["number"] for event in await events.read(2)] == [KEPT + 4, KEPT + 3]


@pytest.mark.parametrize("is_hung", [True, False])
async def test_without_redis_nobody_gets_a_lease(is_hung, redis_server, redis_prefix, monkeypatch, caplog):
    for module in (leases, redis_events):
        monkeypatch.setattr(module, "TIMEOUT_S", 0.1)
    async with RedisSwitch(redis_server.port) as switch:
        client = connect(switch.url)
        one, events = RedisLeases(client, redis_prefix), RedisEvents(client, redis_prefix)
        assert await one.take("mine", 30)
        if is_hung:
            switch.pause()
        else:
            await switch.refuse()
        assert not await one.take("a", 30)
        await one.keep("mine", 30, word="x")
        assert await one.word("mine") == ""
        await events.add({"number": 1})
        assert "an event could not be written down" in caplog.messages
        with pytest.raises(RulesUnavailable):
            await events.read()
        await client.aclose()
