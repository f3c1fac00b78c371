"""The limiter's faults (RL-06, RL-08, RL-09) against a real Redis behind a switch."""

import asyncio
import logging

import pytest

from gateway.core.rate_limit import Charge
from gateway.stores import redis_limiter
from gateway.stores.memory import MemoryLimiter
from gateway.stores.redis_limiter import RedisLimiter
from gateway.stores.redis_script import connect
from tests.kit.redis import RedisServer
from tests.kit.redis_switch import RedisSwitch

pytest_plugins = ["tests.kit.redis"]

HOUR = 3_600_000_000
BOUND_S = 5.0  # no test waits for this; a hang would


def charge(key: str = "k", *, burst: int = 5, interval_us: int = HOUR) -> Charge:
    return Charge(key=key, owner="o", name="n", emission_interval_us=interval_us, burst=burst)


@pytest.fixture
async def switch(redis_server):
    async with RedisSwitch(redis_server.port) as switch:
        yield switch


@pytest.fixture
async def limiter(switch, redis_prefix, monkeypatch):
    monkeypatch.setattr(redis_limiter, "RETRY_AFTER_S", 0.05)
    client = connect(switch.url)
    limiter = RedisLimiter(client, redis_prefix, MemoryLimiter(lambda: 0), timeout_s=0.5)
    yield limiter
    await limiter.close()
    await client.aclose()


async def charged(limiter: RedisLimiter, times: int = 1, **kind: int):
    async with asyncio.timeout(BOUND_S):
        return [await limiter.charge([charge(**kind)]) for _ in range(times)]


async def restored(limiter: RedisLimiter):
    """The first verdict that is Redis's own again."""
    async with asyncio.timeout(BOUND_S):
        while (said := await limiter.charge([charge("probe", burst=100_000)])).degraded:  # noqa: ASYNC110 - it is asked, not told
            await asyncio.sleep(0.01)
    return said


# --- RL-06: a refusal that can be used ------------------------------------------------------------


async def test_a_request_after_retry_after_passes(redis_client, redis_prefix):
    limiter = RedisLimiter(redis_client, redis_prefix, MemoryLimiter(lambda: 0), timeout_s=BOUND_S)
    # All in one round trip: however slow this machine is, no interval passes between them.
    said = await asyncio.gather(*(limiter.charge([charge(burst=3, interval_us=200_000)]) for _ in range(6)))
    assert [v.remaining for v in said] == [2, 1, 0, 0, 0, 0]
    assert [v.allowed for v in said] == [True] * 3 + [False] * 3
    last = said[-1]
    assert 0 < last.retry_after_us <= last.reset_us <= 600_000
    assert last.retry_after_us == last.reset_us - 400_000  # both speak of one instant
    await asyncio.sleep(last.retry_after_us / 1e6)
    (again,) = await charged(limiter, 1, burst=3, interval_us=200_000)
    assert again.allowed


# --- RL-08: no counter without an expiry ----------------------------------------------------------


async def test_a_connection_cut_after_the_first_count_leaves_no_key_without_expiry(
    switch, limiter, redis_client, redis_prefix
):
    switch.cut_after(1, b"EVALSHA")
    await charged(limiter, 1, interval_us=100_000, burst=2)
    await restored(limiter)
    keys = [key async for key in redis_client.scan_iter(f"{redis_prefix}limit:*")]
    assert keys
    for key in keys:
        assert await redis_client.pttl(key) != -1
    await charged(limiter, 4, interval_us=100_000, burst=2)
    await asyncio.sleep(0.4)  # two windows
    (after,) = await charged(limiter, 1, interval_us=100_000, burst=2)
    assert after.allowed
    assert not after.degraded


async def test_a_script_that_redis_forgot_is_loaded_again(limiter, redis_client):
    await charged(limiter)
    await redis_client.script_flush()
    said = await asyncio.gather(*(limiter.charge([charge(burst=50)]) for _ in range(20)))
    assert not any(v.degraded for v in said)
    assert min(v.remaining for v in said) == 50 - 21  # each charged exactly once


# --- RL-09: the store's failure is not the caller's quota -----------------------------------------


@pytest.mark.parametrize("fault", ["refuse", "pause"])
async def test_a_redis_out_of_reach_is_answered_locally_and_comes_back(switch, limiter, caplog, fault):
    caplog.set_level(logging.WARNING)
    (before,) = await charged(limiter, 1, burst=100_000)
    assert not before.degraded

    if fault == "refuse":
        await switch.refuse()
    else:
        switch.pause()
    during = await charged(limiter, 20, burst=100_000)
    assert all(v.degraded and v.allowed for v in during)
    assert [v.remaining for v in during] == [100_000 - n for n in range(1, 21)]  # the local limiter counts
    assert limiter.degraded
    together = await asyncio.gather(*(limiter.charge([charge(burst=100_000)]) for _ in range(50)))
    assert all(v.degraded and v.allowed for v in together)

    await switch.restore()
    assert (await restored(limiter)).allowed
    assert not limiter.degraded
    assert [r.message for r in caplog.records if r.name == redis_limiter.__name__] == [
        "limiter_degraded",
        "limiter_restored",
    ]


async def test_the_local_limit_is_bounded_too(switch, limiter):
    await switch.refuse()
    said = await charged(limiter, 8, burst=5)
    assert [v.allowed for v in said] == [True] * 5 + [False] * 3
    assert all(v.degraded for v in said)


async def test_while_it_is_down_one_charge_at_a_time_tries_it(switch, limiter, monkeypatch):
    await switch.refuse()
    await charged(limiter)
    await switch.restore()
    switch.pause()
    monkeypatch.setattr(redis_limiter, "RETRY_AFTER_S", 60)
    accepted = switch.accepted
    limiter._try_at_s = 0.0
    said = await asyncio.gather(*(limiter.charge([charge(burst=100_000)]) for _ in range(50)))
    assert all(v.degraded for v in said)
    assert switch.accepted - accepted <= 2  # the probe, and the client's one immediate retry


async def test_callers_that_leave_while_it_hangs_leave_nothing_behind(switch, limiter):
    await charged(limiter)
    switch.pause()
    tasks = [asyncio.ensure_future(limiter.charge([charge()])) for _ in range(10)]
    await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await switch.restore()
    await restored(limiter)
    assert limiter._waiting == []


async def test_close_answers_who_waits(switch, redis_prefix):
    client = connect(switch.url)
    limiter = RedisLimiter(client, redis_prefix, MemoryLimiter(lambda: 0), timeout_s=BOUND_S)
    switch.pause()
    task = asyncio.ensure_future(limiter.charge([charge()]))
    await asyncio.sleep(0.02)
    await limiter.close()
    assert (await task).degraded
    await client.aclose()


async def test_a_redis_that_restarts_is_used_again(redis_prefix, monkeypatch):
    monkeypatch.setattr(redis_limiter, "RETRY_AFTER_S", 0.05)
    with RedisServer() as server:
        client = connect(server.url)
        limiter = RedisLimiter(client, redis_prefix, MemoryLimiter(lambda: 0), timeout_s=0.5)
        assert not (await charged(limiter))[0].degraded
        server.stop()
        assert (await charged(limiter))[0].degraded
        await asyncio.to_thread(server.start)
        await restored(limiter)
        await limiter.close()
        await client.aclose()


async def test_a_foreign_value_under_a_counters_name_is_not_quota(limiter, redis_client, redis_prefix):
    await redis_client.set(f"{redis_prefix}limit:{{o}}:k", "garbage", px=60_000)
    (said,) = await charged(limiter)
    assert (said.allowed, said.degraded, said.remaining) == (True, False, 4)
