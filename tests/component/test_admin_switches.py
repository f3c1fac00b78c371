"""The paths about switches, over a real Redis and workers that follow it."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import httpx
import pytest

from gateway.admin.app import create_admin_app
from gateway.admin.plane import Plane
from gateway.admin_ports import AuditEntry
from gateway.core.rules import RuleSet, check_targets, parse_rules
from gateway.stores import redis_rules
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.redis_rules import RedisRuleSource
from tests.kit.admin_plane import bearing, problem
from tests.kit.wait import until_async

pytest_plugins = ["tests.kit.redis"]

TOKEN = "admin-secret"  # noqa: S105 - made up here
KNOWN = {"backends": ("triton", "local"), "tasks": ("embed", "chat")}
SEED = RuleSet(revision=0, rules=parse_rules([{"name": "all", "split": [{"backend": "triton", "model": "m"}]}]))
BLOCK = {"action": "block", "scope": {"tenant": "t"}, "reason": "too many", "ttl_s": 60}
DRAIN = {"action": "drain", "scope": {"replica": "triton@10.0.0.1:8001"}, "reason": "new disk", "ttl_s": 600}


class Audit:
    """An `AuditLog` on a list."""

    def __init__(self) -> None:
        self.entries: list[AuditEntry] = []

    async def add(self, entry: AuditEntry) -> None:
        self.entries.append(entry)


@pytest.fixture(autouse=True)
def eager(monkeypatch) -> None:
    """Workers look, and report, often."""
    monkeypatch.setattr(redis_rules, "POLL_S", 0.02)
    monkeypatch.setattr(redis_rules, "REPORT_S", 0.0)


@pytest.fixture
def store(redis_client, redis_prefix) -> RedisRuleStore:
    return RedisRuleStore(redis_client, redis_prefix, timeout_s=5)


@pytest.fixture
async def workers(redis_client, redis_prefix):
    made = [RedisRuleSource(redis_client, redis_prefix, SEED, lambda _: None, f"w{n}") for n in (1, 2)]
    for worker in made:
        await worker.start()
    yield made
    for worker in made:
        await worker.close()


@pytest.fixture
def audit() -> Audit:
    return Audit()


@pytest.fixture
async def admin(store, audit):
    def check(rules: Sequence[Any]) -> None:
        check_targets(rules, **KNOWN)

    app = create_admin_app(Plane(rules=store, check=check, tasks=KNOWN["tasks"], audit=audit), TOKEN)
    async with bearing(app, TOKEN) as client:
        yield client


async def added(admin: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await admin.post("/switches", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_switch_is_in_force_on_all_workers_when_it_is_answered(admin, workers):
    switch = await added(admin, BLOCK)
    assert (switch["applied"]["workers"], switch["applied"]["of"]) == (2, 2)
    assert [[one.id for one in worker.current().switches.items] for worker in workers] == [[switch["id"]]] * 2
    created, expires = (datetime.fromisoformat(switch[name]) for name in ("created_at", "expires_at"))
    assert (expires - created).total_seconds() == 60
    assert switch["expires_at"].endswith("Z")
    assert 58 <= switch["remaining_s"] <= 60
    shown = {name: switch[name] for name in ("action", "scope", "value", "reason", "owner")}
    assert shown == {
        "action": "block",
        "scope": {"tenant": "t"},
        "value": "",
        "reason": "too many",
        "owner": "admin",
    }
    ended = await admin.delete(f"/switches/{switch['id']}")
    assert (ended.status_code, ended.json()["id"], ended.json()["applied"]["workers"]) == (200, switch["id"], 2)
    assert [worker.current().switches.items for worker in workers] == [(), ()]
    problem(await admin.delete(f"/switches/{switch['id']}"), 404, "unknown_switch")


async def test_they_are_listed_the_newest_first(admin):
    assert (await admin.get("/switches")).json() == {"revision": 0, "items": [], "next": None}
    first = await added(admin, BLOCK)
    second = await added(admin, {**BLOCK, "action": "force_backend", "scope": {"everything": True}, "value": "local"})
    assert (second["scope"], second["value"]) == ({"everything": True}, "local")
    told = (await admin.get("/switches")).json()
    assert (told["revision"], [one["id"] for one in told["items"]]) == (2, [second["id"], first["id"]])
    assert [(one["in_flight"], one["is_drained"]) for one in told["items"]] == [(None, None)] * 2


async def test_a_drain_tells_what_is_in_flight_until_nothing_is(admin, workers):
    drain = await added(admin, DRAIN)
    other = await added(admin, BLOCK)

    async def listed() -> tuple[int | None, bool | None]:
        items = {one["id"]: one for one in (await admin.get("/switches")).json()["items"]}
        assert items[other["id"]]["in_flight"] is None
        return items[drain["id"]]["in_flight"], items[drain["id"]]["is_drained"]

    async def becomes(*wanted: Any) -> None:
        async def is_so() -> bool:
            return await listed() == wanted

        await until_async(is_so)

    assert await listed() == (None, None)  # nobody has counted yet
    workers[0].report = lambda: {"drains": {drain["id"]: 3}}
    await becomes(3, False)
    workers[0].report = lambda: {"drains": {drain["id"]: 0}}
    await becomes(0, False)  # the other one has not counted
    workers[1].report = lambda: {"drains": {drain["id"]: 2}}
    await becomes(2, False)
    workers[1].report = lambda: {"drains": {drain["id"]: 0}}
    await becomes(0, True)


@pytest.mark.parametrize(
    ("more", "pointer", "words"),
    [
        ({"scope": {}}, "#/scope", "give one of"),
        ({"scope": {"tenant": "t", "task": "embed"}}, "#/scope", "give one of"),
        ({"scope": {"planet": "mars"}}, "#/scope", "give one of"),
        ({"scope": {"everything": False}}, "#/scope/everything", "must be true"),
        ({"scope": {"tenant": ""}}, "#/scope/tenant", "must be a name"),
        ({"scope": {"tenant": 7}}, "#/scope/tenant", "must be a name"),
        ({"scope": {"replica": "a b"}}, "#/scope/replica", "must be a name"),
        ({"scope": {"key": "k" * 201}}, "#/scope/key", "must be a name"),
        ({"scope": {"task": "embd"}}, "#/scope/task", "unknown task 'embd' (did you mean 'embed'?)"),
        ({"scope": {"backend": "trton"}}, "#/scope/backend", "unknown backend 'trton' (did you mean 'triton'?)"),
        ({"action": "freeze"}, "#/scope", "`freeze` is for one of everything"),
        ({"action": "force_fallback", "scope": {"backend": "triton"}}, "#/scope", "`force_fallback` is for one of"),
        ({"action": "force_backend"}, "#/value", "needs the name of a backend"),
        ({"action": "force_backend", "value": "mars"}, "#/value", "unknown backend 'mars'"),
        ({"value": "triton"}, "#/value", "takes none"),
        ({"action": "explode"}, "#/action", ""),
        ({"reason": ""}, "#/reason", ""),
        ({"reason": "r" * 501}, "#/reason", ""),
        ({"ttl_s": 0}, "#/ttl_s", ""),
        ({"ttl_s": 604_801}, "#/ttl_s", ""),
        ({"more": 1}, "#/more", ""),
    ],
)
async def test_what_is_no_switch_is_refused_by_its_field(admin, more, pointer, words):
    told = problem(await admin.post("/switches", json={**BLOCK, **more}), 422, "invalid_input")
    assert told["errors"][0]["pointer"] == pointer
    assert words in told["detail"]
    assert (await admin.get("/switches")).json()["revision"] == 0


@pytest.mark.parametrize("missing", ["action", "scope", "reason", "ttl_s"])
async def test_a_switch_says_what_for_why_and_how_long(admin, missing):
    body = {name: value for name, value in BLOCK.items() if name != missing}
    problem(await admin.post("/switches", json=body), 422, "invalid_input")


@pytest.mark.parametrize(
    "scope",
    [
        {"everything": True},
        {"tenant": "t"},
        {"key": "k1"},
        {"task": "embed"},
        {"model": "m:2"},
        {"backend": "triton"},
        {"replica": "triton@[::1]:8001"},
    ],
)
async def test_every_scope_can_be_blocked(admin, scope):
    assert (await added(admin, {**BLOCK, "scope": scope}))["scope"] == scope


async def test_a_hundred_are_the_most(admin):
    for n in range(100):
        await added(admin, {**BLOCK, "scope": {"tenant": f"t{n}"}})
    problem(await admin.post("/switches", json=BLOCK), 409, "too_many_switches")


async def test_switches_are_told_to_the_audit_log(admin, audit):
    switch = await added(admin, DRAIN)
    await admin.delete(f"/switches/{switch['id']}", headers={"x-change-reason": "the disk is in"})
    await admin.delete("/switches/none")
    begun, ended, unknown = audit.entries
    assert (begun.action, begun.target, begun.reason) == ("switch.add", switch["id"], "new disk")
    assert begun.after["scope"] == "replica triton@10.0.0.1:8001"
    assert (ended.action, ended.target, ended.reason) == ("switch.end", switch["id"], "the disk is in")
    assert ended.before["action"] == "drain"
    assert (unknown.action, unknown.outcome) == ("switch.end", "unknown_switch")


async def test_a_server_that_no_worker_has_is_told(admin, store, workers):
    async def added(name: str) -> list[str]:
        answer = await admin.post("/switches", json={**DRAIN, "scope": {"replica": name}})
        assert answer.status_code == 201, answer.text
        return answer.json()["warnings"]

    assert await added("triton@10.0.0.1:8001") == []  # of what is not told nothing can be said
    for worker in workers:
        worker.report = lambda: {"at_ms": 1, "replicas": {"triton": ["10.0.0.1:8001", "10.0.0.2:8001"], "local": []}}

    async def told() -> bool:
        return all(one.report for one in await store.workers())

    await until_async(told)
    there = "there are: triton@10.0.0.1:8001, triton@10.0.0.2:8001"
    assert await added("triton@10.0.0.9:8001") == [f"no worker knows a server 'triton@10.0.0.9:8001' now; {there}"]
    assert await added("triton@10.0.0.2:8001") == []
    assert await added("10.0.0.2:8001") == []
