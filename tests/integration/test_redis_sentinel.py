"""A master that sentinels watch: it is lost under load, and everything goes on with its successor."""

import asyncio
import itertools
import time

import pytest

from gateway.core.admissions import Wanted
from gateway.core.rate_limit import counters
from gateway.core.types import Caller, Limit
from gateway.settings import RedisSettings
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_script import UNREACHABLE, connect, listen
from tests.kit.redis import HOST
from tests.kit.redis_many import MASTER, RedisSentinels, say
from tests.kit.wait import until, until_async

BOUND_S = 20.0  # no test waits for this; a hang would
FULL = 50


@pytest.fixture
def watched():
    with RedisSentinels() as watched:
        yield watched


def wall_us() -> int:
    return time.time_ns() // 1000


def wanted(tenant: str, amount: int = FULL) -> Wanted:
    limit = Limit(kind="requests", amount=amount, per="day", burst=amount)
    caller = Caller(key_id=tenant, tenant=tenant, limits=(limit,))
    return Wanted(tenant=tenant, takes=counters(caller, "t", "m", "interactive"))


async def works(client, prefix: str) -> bool:
    try:
        async with asyncio.timeout(0.5):
            await client.set(f"{prefix}a", "x", px=1000)
    except UNREACHABLE:
        return False
    return True


@pytest.mark.parametrize("how", ["stop", "hang"])
async def test_requests_go_on_while_a_master_is_lost_and_counters_are_kept(watched, redis_prefix, how):
    client = connect(RedisSettings(url=watched.url, prefix=redis_prefix))
    admissions = RedisAdmissions(client, redis_prefix, MemoryAdmissions(wall_us, is_degraded=True))
    admissions.start()
    heard: list[str] = []
    seen: set[bool] = set()
    stopped = asyncio.Event()

    async def follow() -> None:
        while True:
            try:
                await listen(client, f"{redis_prefix}c", heard.append)
            except UNREACHABLE:
                await asyncio.sleep(0.05)

    async def load(n: int) -> int:
        """One after the other; each is admitted, by Redis or by the worker alone."""
        for count in itertools.count():
            if stopped.is_set():
                return count
            async with asyncio.timeout(BOUND_S):  # none is stuck
                admission = await admissions.admit(wanted(f"busy-{n}", 10**6))
            assert admission.verdict.allowed
            admission.settle(tokens=0, nano_usd=0)
            seen.add(admissions.is_degraded)
            await asyncio.sleep(0.002)
        raise AssertionError

    following = asyncio.create_task(follow())
    try:
        assert all([(await admissions.admit(wanted("quiet"))).verdict.allowed for _ in range(30)])
        assert await client.wait(1, 5000) == 1  # the replica has them
        loads = [asyncio.create_task(load(n)) for n in range(4)]
        await until(lambda: "" in heard and seen == {False})
        getattr(watched.master, how)()
        await until(lambda: True in seen, timeout_s=BOUND_S)
        await until(lambda: not admissions.is_degraded, timeout_s=BOUND_S)
        stopped.set()
        assert all(count > 0 for count in await asyncio.gather(*loads))
        allowed = [(await admissions.admit(wanted("quiet"))).verdict.allowed for _ in range(FULL)]
        assert allowed == [True] * 20 + [False] * 30  # nothing was forgotten that had reached the replica
        assert (await RedisRuleStore(client, redis_prefix).get()).revision == 0

        async def is_heard() -> bool:
            await client.publish(f"{redis_prefix}c", "word")
            return "word" in heard

        await until_async(is_heard, timeout_s=BOUND_S)
    finally:
        stopped.set()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await admissions.close()
        await client.aclose()


async def test_a_master_that_was_made_a_replica_is_left(watched, redis_prefix):
    """A fail-over by hand: the old master lives on, and must not be asked any more."""
    client = connect(watched.url)
    assert await works(client, redis_prefix)
    say(watched.sentinels[0], "SENTINEL", "FAILOVER", MASTER)
    await until(lambda: b"role:master" in say(watched.replica, "INFO", "replication"), timeout_s=BOUND_S)
    await until_async(lambda: works(client, redis_prefix), timeout_s=BOUND_S)

    async def is_at_the_new_one() -> bool:
        return await works(client, redis_prefix) and say(watched.replica, "EXISTS", f"{redis_prefix}a") == 1

    await until_async(is_at_the_new_one, timeout_s=BOUND_S)
    await client.aclose()


async def test_one_sentinel_is_enough_and_a_hung_one_keeps_nobody(watched, redis_prefix):
    watched.sentinels[0].hang()
    watched.sentinels[1].stop()
    try:
        client = connect(watched.url)
        async with asyncio.timeout(BOUND_S):
            await client.set(f"{redis_prefix}a", "x", px=1000)
        await client.aclose()
        strange = connect(f"redis+sentinel://{HOST}:{watched.sentinels[2].port}/nobody")
        with pytest.raises(UNREACHABLE, match="nobody"):
            await strange.get("a")
        await strange.aclose()
    finally:
        watched.sentinels[0].resume()


async def test_sentinels_with_a_password(watched, redis_prefix, monkeypatch):
    monkeypatch.setenv("SENTINELS", "their-own")
    for sentinel in watched.sentinels:
        say(sentinel, "ACL", "SETUSER", "default", "resetpass", ">their-own")
    for settings, can in (
        (RedisSettings(url=watched.url, sentinel_password_env="SENTINELS"), True),  # noqa: S106 - a variable's name
        (RedisSettings(url=watched.url), False),
    ):
        client = connect(settings)
        assert await works(client, redis_prefix) is can
        await client.aclose()
