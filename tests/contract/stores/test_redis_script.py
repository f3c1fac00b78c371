"""What all stores share: a subscription that notices when it is deaf, and a client that comes back without a storm."""

import asyncio

import pytest

from gateway.stores import redis_script
from gateway.stores.redis_script import UNREACHABLE, connect, listen
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
