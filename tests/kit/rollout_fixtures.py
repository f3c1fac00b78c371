"""The fixture `world`: see `rollout_world`. Use it with `pytest_plugins`, beside `tests.kit.redis`."""

import pytest

from gateway.admin.app import create_admin_app
from gateway.admin.plane import Plane
from gateway.stores.control import rule_store
from gateway.stores.control.audit import RedisAuditLog
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.redis_deploys import ROLLOUTS, RedisDeployStore
from tests.kit.admin_plane import bearing
from tests.kit.rolling import TASK, Clock, MadeFigures
from tests.kit.rollout_world import TOKEN, World, check, rollouts_of


@pytest.fixture
async def world(redis_client, redis_prefix, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rule_store, "_now_ms", clock)
    figures = MadeFigures(clock)
    rules = RedisRuleStore(redis_client, redis_prefix, timeout_s=5)
    store = RedisDeployStore(redis_client, redis_prefix, timeout_s=5, kind=ROLLOUTS)
    audit = RedisAuditLog(redis_client, redis_prefix, timeout_s=5)
    rollouts = rollouts_of(rules, store, figures, audit, clock)
    app = create_admin_app(Plane(rules=rules, check=check, tasks=(TASK,), audit=audit, rollouts=rollouts), TOKEN)
    async with bearing(app, TOKEN) as admin:
        yield World(
            client=redis_client,
            prefix=redis_prefix,
            clock=clock,
            figures=figures,
            rules=rules,
            store=store,
            audit=audit,
            rollouts=rollouts,
            admin=admin,
        )
