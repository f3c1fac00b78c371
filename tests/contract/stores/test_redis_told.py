"""What stores tell of Redis: how long its answers took, and that there was none."""

import time
from collections.abc import AsyncIterator

import pytest

from gateway.core.admissions import Wanted
from gateway.core.rate_limit import counters, takes
from gateway.core.rules import RuleSet
from gateway.core.types import Caller, Limit
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_keys import RedisKeys
from gateway.stores.redis_rules import RedisRuleSource
from gateway.stores.redis_script import connect
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until

pytest_plugins = ["tests.kit.redis"]

LIMIT = Limit(kind="requests", amount=100, per="day", burst=100)


class Heard:
    def __init__(self) -> None:
        self.all: list[tuple[str, float | None]] = []

    def __call__(self, operation: str, took_s: float | None) -> None:
        self.all.append((operation, took_s))

    def answered(self, operation: str) -> bool:
        return any(name == operation and took_s is not None and took_s > 0 for name, took_s in self.all)

    def failed(self, operation: str) -> bool:
        return (operation, None) in self.all


@pytest.fixture
async def switch(redis_server) -> AsyncIterator[RedisSwitch]:
    async with RedisSwitch(redis_server.port) as switch:
        yield switch


async def test_every_operation_is_told_with_its_time_and_its_failures(switch, redis_prefix):
    heard, client = Heard(), connect(switch.url)
    rules = RedisRuleSource(client, redis_prefix, RuleSet(revision=0, rules=()), lambda _: None, "w", observer=heard)
    keys = RedisKeys(client, redis_prefix, (), observer=heard)
    local = MemoryAdmissions(lambda: time.time_ns() // 1000, workers=lambda: 1, is_degraded=True)
    admissions = RedisAdmissions(client, redis_prefix, local, observer=heard)
    counted = counters(Caller(key_id="k", tenant="t", limits=(LIMIT,)), "task", "model", "interactive")
    wanted = Wanted(tenant="t", takes=takes(counted, tokens=0, nano_usd=0), queue_bound=1)
    admissions.start()
    await rules.start()
    await keys.start()
    assert not (await admissions.admit(wanted)).verdict.degraded
    assert all(heard.answered(operation) for operation in ("admit", "rules", "keys"))
    assert not any(heard.failed(operation) for operation in ("admit", "rules", "keys"))
    await switch.refuse()
    assert (await admissions.admit(wanted)).verdict.degraded
    await until(lambda: all(heard.failed(operation) for operation in ("admit", "rules", "keys")))
    heard.all.clear()
    await switch.restore()
    await until(lambda: heard.answered("rules"))
    for one in (admissions, keys, rules):
        await one.close()
    await client.aclose()
