"""What all stores share: a subscription that notices when it is deaf, and a client that comes back without a storm."""

import asyncio
import time

import pytest

from gateway.stores import redis_script
from gateway.stores.redis_script import UNREACHABLE, Lanes, connect, in_time, listen
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until, until_async


@pytest.fixture
async def switch(redis_server):
    async with RedisSwitch(redis_server.port) as switch:
        yield switch


@pytest.fixture
async def switched(switch):
    client = connect(switch.url)
    yield client
    await client.aclose()


async def test_a_subscription_says_when_it_begins_and_ends_when_it_is_deaf(
    switch, switched, redis_client, redis_prefix, monkeypatch
):
    monkeypatch.setattr(redis_script, "PING_S", 0.02)
    monkeypatch.setattr(redis_script, "DEAF_S", 0.2)
    heard: list[str] = []
    listening = asyncio.create_task(listen(switched, f"{redis_prefix}c", heard.append))
    await until(lambda: heard == [""])
    await redis_client.publish(f"{redis_prefix}c", "a word")
    await until(lambda: heard == ["", "a word"])
    await asyncio.sleep(0.5)  # longer than the silence that ends it: pings keep it
    assert not listening.done()
    switch.pause()
    with pytest.raises(UNREACHABLE):
        await asyncio.wait_for(listening, 10)
    await switch.restore()


async def test_a_subscription_that_was_cut_begins_anew_or_ends(switch, switched, redis_prefix):
    heard: list[str] = []
    listening = asyncio.create_task(listen(switched, f"{redis_prefix}c", heard.append))
    await until(lambda: heard == [""])
    await switch.refuse()
    await switch.restore()
    await until(lambda: listening.done() or heard == ["", ""], timeout_s=10)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def test_many_that_come_back_at_once_share_few_connections(switch, switched):
    async def ask() -> bool:
        try:
            async with asyncio.timeout(0.5):
                await switched.get("a")
        except UNREACHABLE:
            return False
        return True

    assert await ask()
    await switch.refuse()
    assert not any(await asyncio.gather(*(ask() for _ in range(200))))
    before = switch.accepted
    await switch.restore()
    await asyncio.gather(*(ask() for _ in range(200)))
    await until_async(ask)
    assert switch.accepted - before <= 64  # 32 connections, each with one try more


async def test_what_holds_the_loop_up_is_not_taken_for_redis_s_doing(redis_client):
    async def ask() -> bytes | None:
        async with in_time(0.25):
            return await redis_client.get("a")

    await ask()
    asked = asyncio.create_task(ask())
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 - the loop is what is held up
    assert await asked is None


async def test_what_is_not_there_in_time_ends():
    with pytest.raises(TimeoutError):
        async with in_time(0.01):
            await asyncio.Event().wait()


async def test_operations_of_a_busy_worker_wait_for_each_other_as_long_as_redis_answers(redis_client):
    lanes = Lanes(2, 0.25)

    async def ask() -> None:
        async with lanes.one():
            await redis_client.get("a")
        time.sleep(0.005)  # noqa: ASYNC251 - its work: all of them together take longer than any may wait for Redis

    await asyncio.gather(*(ask() for _ in range(100)))


async def test_operations_that_wait_fail_with_the_first_that_fails(switch, switched):
    lanes, begun = Lanes(2, 0.1), 0

    async def ask() -> None:
        nonlocal begun
        async with lanes.one():
            begun += 1
            await switched.get("a")

    await ask()
    switch.pause()
    ended = await asyncio.gather(*(ask() for _ in range(50)), return_exceptions=True)
    assert all(isinstance(one, UNREACHABLE) for one in ended)
    assert begun == 1 + 2  # no other has waited for Redis
    await switch.restore()
    await until_async(lambda: _succeeds(ask))


async def _succeeds(ask) -> bool:
    try:
        await ask()
    except UNREACHABLE:
        return False
    return True
