"""`/explain` and `/requests`: what would become of a request, what became of one, and the reasons for both."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gateway.admin_ports import Change, WorkerState
from gateway.core.cost import parse_prices
from gateway.core.errors import FaultKind, NoHealthyBackend, UnknownKey
from gateway.core.keys import ApiKey
from gateway.core.rules import parse_rules
from gateway.core.switches import Scope, Switch
from gateway.core.types import Caller, Limit
from gateway.stores.control.requests import RedisRequestLog, RedisRequests
from tests.kit.admin_plane import SECRETS, bearing, whole_app
from tests.kit.control_stores import Rules
from tests.kit.records import SECRET, A, B, answered, fault, plan, request

pytest_plugins = ["tests.kit.redis"]

TRITON = {"backend": "triton", "model": "m", "version": "1"}
LOCAL = {"backend": "local", "model": "m"}
RULES = [
    {"name": "canary", "match": {"headers": {"x-canary": "yes"}}, "split": [LOCAL]},
    {"name": "long", "match": {"task": "chat", "min_input_tokens": 1000}, "split": [LOCAL]},
    {"name": "cheap", "match": {"task": "chat"}, "split": [TRITON, LOCAL], "strategy": "cheapest"},
    {
        "name": "r",
        "match": {"task": "t"},
        "split": [{**TRITON, "weight": 90}, {**LOCAL, "weight": 10}],
        "limits": [{"requests": 100, "per": "minute"}],
        "timeout_ms": 500,
        "cache": {"ttl_s": 5},
    },
]
PER_MINUTE = Limit(kind="requests", amount=60, per="minute", burst=60)
MADE = ApiKey(id="made", tenant="acme", name="n", secrets=(), created_s=1, tasks=("t",))


class Keys:
    """One key that was made at run time."""

    async def get(self, key_id: str) -> ApiKey:
        if key_id != MADE.id:
            raise UnknownKey("there is no such key")
        return MADE


class World:
    """The control plane over a real Redis, and rules and workers that a test sets."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self.rules = Rules(RULES)
        self.requests = RedisRequests(
            redis, prefix, worker_id="w1", matched_headers=lambda: frozenset({"x-canary"}), now_s=time.time
        )
        self.rules.states = [
            _worker("w1", replicas={"triton": ["a", "b"], "local": []}, shut=[["triton", "*", "", "b", "away"]]),
            _worker("w2", at_ms=2, replicas={"local": []}),
        ]
        app = whole_app(
            redis,
            prefix,
            rules=self.rules,
            requests=RedisRequestLog(redis, prefix),
            keys=Keys(),
            tasks=("t", "chat", "u"),
            callers={"old": Caller(key_id="old", tenant="corp", limits=(PER_MINUTE,))},
            key_limits=(PER_MINUTE,),
            llm_tasks=("chat",),
            prices=parse_prices(
                {"prices": {"triton/m": {"input": 1, "output": 1}, "local/m": {"input": 0, "output": 0}}}
            ),
        )
        self.http = bearing(app, SECRETS["viewer"])

    async def explain(self, *, worker: str = "", **asked: Any) -> dict[str, Any]:
        answer = await self.post(request={"task": "t", **asked}, **({"worker": worker} if worker else {}))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def post(self, **body: Any) -> httpx.Response:
        return await self.http.post("/explain", json=body)

    async def log(self, *records: Any) -> None:
        for record in records:
            self.requests.ended(record)
            await self.requests.flush()


def _worker(name: str, *, at_ms: int = 10, revision: int = 1, **report: Any) -> WorkerState:
    told = {"at_ms": at_ms, **report}
    return WorkerState(id=name, pid=1, revision=revision, started=1, state="serving", report=told)


@pytest.fixture
async def world(redis_client: Redis, redis_prefix: str) -> AsyncIterator[World]:
    found = World(redis_client, redis_prefix)
    async with found.http:
        yield found


def reasons(found: dict[str, Any]) -> dict[str, str]:
    return {one["place"]: one["reason"] for one in found["candidates"]}


# --- what would become of a request --------------------------------------------------------------


async def test_a_request_is_explained_whole(world: World) -> None:
    found = await world.explain(key="made")
    assert (found["past"], found["revision"], found["rule"], found["refused"], found["worker"]) == (
        False,
        1,
        "r",
        "",
        "w1",
    )
    assert found["request"] == {"task": "t", "key": "made", "tenant": "acme"}
    assert [(one["rule"], one["matched"]) for one in found["rules"]] == [
        ("canary", False),
        ("long", False),
        ("cheap", False),
        ("r", True),
    ]
    assert found["rules"][0]["why"] == "match.headers.x-canary is 'yes', the request has none"
    assert [(one["place"], one["side"], one["rank"], one["taken"]) for one in found["candidates"]] == [
        ("triton/m:1@a", "split[0]", 1, True),
        ("triton/m:1@b", "split[0]", None, False),
        ("local/m", "split[1]", 2, False),
    ]
    assert reasons(found)["triton/m:1@b"] == "away"
    key_limit, rule_limit = found["limits"]
    assert (key_limit["of"], key_limit["limit"], rule_limit["of"]) == ("key", "60 requests per minute", "rule")
    assert found["policies"]["timeout_ms"] == 500
    assert found["policies"]["cache"]["ttl_s"] == 5
    assert found["headers"]["x-gateway-backend"] == "triton"
    assert found["outcome"] is None


@pytest.mark.parametrize(
    ("asked", "rule", "taken"),
    [
        ({"headers": {"X-Canary": "yes"}}, "canary", "local/m"),
        ({"task": "chat", "input_tokens": 2000}, "long", "local/m"),
        ({"task": "chat", "input_tokens": 10}, "cheap", "local/m"),
        ({"task": "chat"}, "cheap", "local/m"),
        ({"task": "u"}, None, None),
    ],
)
async def test_what_is_known_of_it_decides(world: World, asked: dict[str, Any], rule: str, taken: str) -> None:
    found = await world.explain(**asked)
    assert found["rule"] == rule
    assert next((one["place"] for one in found["candidates"] if one["taken"]), None) == taken
    if rule is None:
        assert found["refused"] == "no enabled rule takes it"


async def test_another_worker_may_see_it_otherwise(world: World) -> None:
    found = await world.explain(worker="w2")
    assert found["worker"] == "w2"
    assert reasons(found)["triton/m:1"].startswith("backend is off")
    assert found["candidates"][1]["taken"]


async def test_without_workers_the_rules_alone_are_told(world: World) -> None:
    world.rules.states = []
    found = await world.explain()
    assert (found["worker"], found["rule"]) == ("", "r")
    assert [one["rank"] for one in found["candidates"]] == [1, 2]


async def test_a_worker_that_is_behind_is_explained_by_what_it_runs(world: World) -> None:
    await world.rules.put(parse_rules([{"name": "new", "split": [LOCAL]}]), expected_revision=1, change=Change(by="me"))
    assert ((await world.explain())["rule"], (await world.explain())["revision"]) == ("r", 1)
    world.rules.states = [_worker("w1", revision=2, replicas={"local": []})]
    assert (await world.explain())["rule"] == "new"
    world.rules.states = [_worker("w1", revision=99, replicas={"local": []})]  # which is not kept
    assert (await world.explain())["revision"] == 2


async def test_switches_are_told(world: World) -> None:
    now_ms = round(time.time() * 1000)
    for i, (action, scope, value) in enumerate(
        [
            ("force_backend", Scope(kind="tenant", name="acme"), "local"),
            ("block", Scope(kind="key", name="old"), ""),
            ("drain", Scope(kind="backend", name="other"), ""),
        ]
    ):
        one = Switch(
            id=f"s{i}",
            action=action,  # type: ignore[arg-type]  # the test's own words
            scope=scope,
            reason="why",
            owner="me",
            created_ms=now_ms,
            expires_ms=now_ms + 60_000,
            value=value,
        )
        await world.rules.add_switch(one)
    forced = await world.explain(tenant="acme")
    assert ([one["id"] for one in forced["switches"]], forced["switches_revision"]) == (["s0"], 3)
    assert forced["switches"][0]["remaining_s"] > 0
    assert reasons(forced)["local/m"] == "taken: sent there by switch s0 (force_backend tenant acme)"
    blocked = await world.explain(key="old")
    assert blocked["refused"] == "refused by switch s1 (block key old)"
    assert not any(one["taken"] for one in blocked["candidates"])
    assert blocked["headers"] == {}
    assert (await world.explain(tenant="other"))["switches"] == []


async def test_a_key_may_not_use_every_task(world: World) -> None:
    found = await world.explain(task="chat", key="made")
    assert found["refused"] == "the key 'made' may not use the task 'chat'"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "give one of `request` and `request_id`"),
        ({"request": {"task": "t"}, "request_id": "r1"}, "give one of `request` and `request_id`"),
        ({"request": {"task": "chart"}}, "chat"),
        ({"request": {"task": "t", "key": "nobody"}}, "there is no key 'nobody'"),
        ({"request": {"task": "t", "key": "old", "tenant": "acme"}}, "the key is of the tenant 'corp'"),
        ({"request": {"task": "t"}, "worker": "w9"}, "no live worker has the id 'w9'"),
        ({"request": {"task": "t", "at": "yesterday"}}, "at"),
        ({"request": {"task": "t", "prompt": "x"}}, "prompt"),
    ],
)
async def test_what_cannot_be_asked(world: World, body: dict[str, Any], said: str) -> None:
    answer = await world.http.post("/explain", json=body)
    assert answer.status_code == 422
    assert said in answer.text


# --- what became of one --------------------------------------------------------------------------


async def test_a_past_request_is_explained_by_what_was_in_force(world: World) -> None:
    refused = ((B, "its circuit is open: timeout"),)
    await world.log(
        answered(
            A,
            plan=plan(A, refusals=refused),
            revision=1,
            request=request(caller=Caller(key_id="old", tenant="corp")),
            tenant="corp",
            key_id="old",
        )
    )
    await world.rules.put(parse_rules([{"name": "new", "split": [LOCAL]}]), expected_revision=1, change=Change())
    answer = await world.post(request_id="r1")
    assert answer.status_code == 200, answer.text
    assert SECRET not in answer.text
    found = answer.json()
    assert (found["past"], found["revision"], found["rule"], found["worker"]) == (True, 1, "r", "w1")
    assert found["rules"][0] == {"rule": "canary", "matched": True, "why": "takes it"}  # by the header that it had
    assert [(one["place"], one["rank"], one["taken"], one["reason"]) for one in found["candidates"]] == [
        ("triton/m:1@a:8001", 1, True, "taken: the only one that could be tried"),
        ("triton/m:1@b:8001", None, False, "its circuit is open: timeout"),
    ]
    assert [one["of"] for one in found["limits"]] == ["key", "rule"]
    assert found["outcome"]["code"] == "ok"
    assert found["headers"]["x-gateway-rule"] == "r"


async def test_a_past_request_that_got_nowhere(world: World) -> None:
    await world.log(
        answered(
            id="gone",
            plan=None,
            route=None,
            error=NoHealthyBackend("none"),
            revision=77,
            key_id="deleted",
            refused_by="switch s1 (block everything)",
        )
    )
    found = (await world.post(request_id="gone")).json()
    assert (found["rules"], found["candidates"], found["headers"]) == ([], [], {})
    assert found["refused"] == "refused by switch s1 (block everything)"
    answer = await world.post(request_id="never")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_request")


# --- the log -------------------------------------------------------------------------------------


async def test_the_log_is_searched(world: World) -> None:
    bad = answered(id="bad", route=None, error=NoHealthyBackend("none"), faults=(fault(FaultKind.FAILED),))
    await world.log(answered(id="a"), bad, answered(id="b", rule="s"), answered(id="c", task="u", tenant="corp"))

    async def ids(**asked: Any) -> list[str]:
        answer = await world.http.get("/requests", params=asked)
        assert answer.status_code == 200, answer.text
        return [one["id"] for one in answer.json()["items"]]

    assert await ids() == ["c", "b", "bad", "a"]
    assert await ids(code="no_healthy_backend") == ["bad"]
    assert await ids(rule="s") == ["b"]
    assert await ids(task="u", tenant="corp") == ["c"]
    assert await ids(backend="triton") == ["c", "b", "a"]
    assert await ids(backend="tri") == []
    first = (await world.http.get("/requests", params={"backend": "triton", "limit": 2})).json()
    assert [one["id"] for one in first["items"]] == ["c", "b"]
    assert await ids(backend="triton", limit=2, cursor=first["next"]) == ["a"]
    plain = (await world.http.get("/requests", params={"limit": 3})).json()
    assert await ids(limit=3, cursor=plain["next"]) == ["a"]


async def test_one_request_is_shown_with_its_reasons(world: World) -> None:
    await world.log(answered(B, id="a", faults=(fault(FaultKind.TIMEOUT, A),)))
    answer = await world.http.get("/requests/a")
    assert answer.status_code == 200
    found = answer.json()
    assert (found["place"], found["planned"]) == ("triton/m:1@b:8001", 2)
    assert found["why"][0].startswith("attempt failed: timeout")
    assert SECRET not in json.dumps(found)
    assert (await world.http.get("/requests/never")).status_code == 404


@pytest.mark.parametrize("asked", [{"cursor": "x"}, {"cursor": "1"}, {"limit": 0}, {"limit": 501}])
async def test_what_is_no_page(world: World, asked: dict[str, Any]) -> None:
    assert (await world.http.get("/requests", params=asked)).status_code == 422
