"""A control plane with rollouts over a real Redis, figures that a test makes up, and a clock that it sets."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
from redis.asyncio import Redis

from gateway.admin.rollouts.rollouts import Rollouts
from gateway.admin_ports import Change
from gateway.core.rules import Rule, check_targets, parse_rules
from gateway.core.switches import Scope, Switch
from gateway.stores.control.audit import RedisAuditLog
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.redis_deploys import RedisDeployStore
from tests.kit.rolling import TASK, Clock, MadeFigures

TOKEN = "admin-secret"  # noqa: S105 - made up here
NEW = {"backend": "triton", "model": "m", "version": "2"}
GUARD = {"max_error_ratio": 0.02, "min_requests": 100}


def check(rules) -> None:
    check_targets(rules, backends=("triton", "llm"), tasks=(TASK,))


async def _at_once(_: float) -> None:
    await asyncio.sleep(0)


@dataclass
class World:
    """A control plane, and what a test turns in it."""

    client: Redis
    prefix: str
    clock: Clock
    figures: MadeFigures
    rules: RedisRuleStore
    store: RedisDeployStore
    audit: RedisAuditLog
    rollouts: Rollouts
    admin: httpx.AsyncClient

    def plane(self, rules: RedisRuleStore | None = None) -> Rollouts:
        """Another control plane over the same Redis."""
        return rollouts_of(rules or self.rules, self.store, self.figures, self.audit, self.clock)

    async def seed(self, *fields: dict[str, Any]) -> None:
        await self.put(*parse_rules([_rule(**one) for one in fields or ({},)]))

    async def put(self, *rules: Rule) -> int:
        current = await self.rules.get()
        return await self.rules.put(rules, expected_revision=current.revision, change=Change(by="ann"))

    async def rule(self) -> Rule:
        return (await self.rules.get()).rules[0]

    async def weights(self) -> list[int]:
        return [target.weight for target in (await self.rule()).split]

    async def begin(self, **fields: Any) -> dict[str, Any]:
        answer = await self.admin.post("/rollouts", json={"rule": "r", "target": NEW, "guard": GUARD, **fields})
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def get(self, rollout_id: str) -> dict[str, Any]:
        return (await self.admin.get(f"/rollouts/{rollout_id}")).json()

    async def pass_by(self, seconds: float, *, count: int = 0, failed: int = 0) -> None:
        """Time goes by, requests come to the new version at its end, and everything is looked at."""
        self.clock.forward(seconds)
        if count:
            self.figures.add("triton/m:2", count, failed=failed)
            self.figures.add("triton/m:1", 1000)
        await self.rollouts.tick()

    async def reports(self, **workers: dict[str, Any]) -> None:
        """These workers are there, and say so of their one Triton or of what else is given."""
        for name, report in workers.items():
            told = {"at_ms": 1, "replicas": {"triton": ["a:1"]}, **report}
            said = {
                "pid": 1,
                "revision": 99,
                "started": 1,
                "state": "serving",
                "detail": "",
                "report": json.dumps(told),
            }
            await self.client.hset(f"{self.prefix}{{rules}}:worker:{name}", mapping=said)
            await self.client.sadd(f"{self.prefix}{{rules}}:workers", name)

    async def entries(self) -> list[tuple[str, str]]:
        """Who did what, the oldest first."""
        page, _ = await self.audit.page()
        return [(entry.actor, entry.action) for entry in reversed(page)]

    async def freeze(self) -> Switch:
        now_ms = self.clock()
        switch = Switch(
            id="f",
            action="freeze",
            scope=Scope(kind="everything"),
            reason="a release",
            owner="bob",
            created_ms=now_ms,
            expires_ms=now_ms + 3_600_000,
        )
        await self.rules.add_switch(switch)
        return switch


def _rule(**fields: Any) -> dict[str, Any]:
    split = [{"backend": "triton", "model": "m", "version": "1", "weight": 3}, {"backend": "llm", "model": "m"}]
    return {"name": "r", "match": {"task": TASK}, "split": split, **fields}


def rollouts_of(rules, store, figures, audit, clock) -> Rollouts:
    return Rollouts(rules=rules, check=check, store=store, figures=figures, audit=audit, clock=clock, wait=_at_once)
