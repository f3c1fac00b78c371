"""Workers that follow the rules and switches of a real Redis, and the store that they are changed in."""

from typing import Any

import pytest

from gateway.core.rules import RuleSet
from gateway.stores import redis_rules
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.redis_rules import RedisRuleSource
from gateway.stores.redis_script import connect
from tests.kit.rule_workers import BOUND_S, SEED, validate


@pytest.fixture
async def started():
    """Makes workers that are closed at the end."""
    workers, clients = [], []

    async def start(
        url: str, prefix: str, worker_id: str = "w1", *, seed: RuleSet = SEED, report: Any = None
    ) -> RedisRuleSource:
        clients.append(connect(url))
        workers.append(RedisRuleSource(clients[-1], prefix, seed, validate, worker_id))
        if report is not None:
            workers[-1].report = report
        await workers[-1].start()
        return workers[-1]

    yield start
    for worker in workers:
        await worker.close()
    for client in clients:
        await client.aclose()


@pytest.fixture
def store(redis_client, redis_prefix) -> RedisRuleStore:
    return RedisRuleStore(redis_client, redis_prefix, timeout_s=BOUND_S)


@pytest.fixture
def eager(monkeypatch) -> None:
    """Workers look often."""
    monkeypatch.setattr(redis_rules, "POLL_S", 0.02)
