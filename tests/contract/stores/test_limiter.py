"""One suite for every `Limiter`: memory and Redis."""

import asyncio

import pytest

from gateway.core.rate_limit import Charge, charges
from gateway.core.types import Caller, Limit, Verdict
from gateway.stores.memory import MemoryLimiter
from gateway.stores.redis_limiter import RedisLimiter
from gateway.stores.redis_script import connect

pytest_plugins = ["tests.kit.redis"]

HOUR = 3_600_000_000


class Never:
    """A local limiter that must not be asked."""

    async def charge(self, charges) -> Verdict:
        raise AssertionError("the local limiter was asked while Redis answers")


@pytest.fixture(params=["memory", "redis", "redis, decoding"])
async def limiter(request, redis_server, redis_prefix):
    if request.param == "memory":
        yield MemoryLimiter(lambda: 1_000_000)
        return
    client = connect(redis_server.url + ("?decode_responses=True" if "decoding" in request.param else ""))
    # A loaded machine may stall a test for longer than a request would wait.
    limiter = RedisLimiter(client, redis_prefix, Never(), timeout_s=10)
    yield limiter
    await limiter.close()
    await client.aclose()


def charge(key: str = "k", *, burst: int = 3, interval_us: int = HOUR, cost: int = 1) -> Charge:
    return Charge(key=key, owner="o", name=f"limit {key}", emission_interval_us=interval_us, burst=burst, cost=cost)


async def test_remaining_falls_2_1_0_and_then_refuses(limiter):
    said = [await limiter.charge([charge()]) for _ in range(6)]
    assert [v.remaining for v in said] == [2, 1, 0, 0, 0, 0]
    assert [v.allowed for v in said] == [True] * 3 + [False] * 3
    assert {v.name for v in said} == {"limit k"}
    assert all(v.limit == 3 and not v.degraded for v in said)
    assert all(0 < v.retry_after_us <= HOUR for v in said[3:])
    assert all(0 < v.reset_us <= 3 * HOUR for v in said)
    assert [v.retry_after_us for v in said[:3]] == [0, 0, 0]


async def test_all_or_none(limiter):
    await limiter.charge([charge("narrow", burst=1)])
    refused = await limiter.charge([charge("wide", burst=9), charge("narrow", burst=1)])
    assert (refused.allowed, refused.name) == (False, "limit narrow")
    wide = await limiter.charge([charge("wide", burst=9)])
    assert wide.remaining == 8  # the refused admission took nothing


async def test_a_counter_charged_twice_in_one_admission(limiter):
    said = await limiter.charge([charge(), charge()])
    assert (said.allowed, said.remaining) == (True, 1)
    assert not (await limiter.charge([charge(), charge()])).allowed
    assert (await limiter.charge([charge()])).remaining == 0


async def test_counters_do_not_touch_each_other(limiter):
    await limiter.charge([charge("a")])
    assert (await limiter.charge([charge("b")])).remaining == 2


async def test_cost(limiter):
    assert (await limiter.charge([charge(burst=10, cost=4)])).remaining == 6
    assert (await limiter.charge([charge(burst=10, cost=0)])).remaining == 6
    assert not (await limiter.charge([charge(burst=10, cost=7)])).allowed


async def test_no_charges_no_limit(limiter):
    said = await limiter.charge([])
    assert (said.allowed, said.limit, said.degraded) == (True, None, False)


async def test_concurrent_charges_never_overrun(limiter):
    said = await asyncio.gather(*(limiter.charge([charge(burst=50)]) for _ in range(400)))
    assert sum(v.allowed for v in said) == 50
    assert sorted((v.remaining for v in said if v.allowed), reverse=True) == list(range(49, -1, -1))


async def test_a_caller_that_leaves_harms_nobody(limiter):
    tasks = [asyncio.ensure_future(limiter.charge([charge(burst=100)])) for _ in range(40)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    said = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(v, Verdict) for v in said[1::2])
    after = await limiter.charge([charge(burst=100)])
    assert 100 - 41 <= after.remaining <= 100 - 21


async def test_a_callers_own_limits(limiter):
    minute = Limit(requests=60, period_us=60_000_000, burst=60)
    day = Limit(requests=2, period_us=24 * HOUR, burst=2)
    taken = charges(Caller(key_id="k1", tenant="t", limits=(minute, day)))
    said = [await limiter.charge(taken) for _ in range(3)]
    assert [v.allowed for v in said] == [True, True, False]
    assert said[-1].name == "2 requests per day"
