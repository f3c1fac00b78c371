"""`/backends`: each server as a probe finds it, and as the workers see it; LLM endpoints too."""

import time
from typing import Any

from redis.asyncio import Redis

from gateway.admin.models.fleet import Servers
from gateway.admin.models.model_routes import ModelPlane
from gateway.admin_ports import WorkerState
from gateway.core.switches import Scope, Switch
from tests.kit.admin_plane import SECRETS, Gone, bearing, whole_app
from tests.kit.control_stores import Rules
from tests.kit.model_server import ModelServerFake

pytest_plugins = ["tests.kit.redis"]

LOCAL = "it runs inside the data plane"
SERVERS = Servers(
    reachable={"triton": ModelServerFake()},
    unreachable={"local": LOCAL},
    kinds={"triton": "triton", "local": "local", "llm": "openai", "off": "anthropic", "new": "openai"},
    why_off={"off": "KEY is not set", "llm": "OTHER_KEY is not set"},
)


async def backends(redis: Redis, prefix: str, *states: WorkerState, switches: tuple[Switch, ...] = ()) -> Any:
    rules = Rules([{"name": "r", "split": [{"backend": "triton", "model": "m"}]}])
    rules.states = list(states)
    for one in switches:
        await rules.add_switch(one)
    models = ModelPlane(servers=SERVERS, deploys=Gone())  # type: ignore[arg-type]  # nobody asks for deploys here
    async with bearing(whole_app(redis, prefix, rules=rules, models=models), SECRETS["viewer"]) as http:
        answer = await http.get("/backends")
    assert answer.status_code == 200, answer.text
    return {one["backend"]: one for one in answer.json()["items"]}


def worker(name: str, **report: Any) -> WorkerState:
    told = {"at_ms": 1, "replicas": {"triton": ["a", "b"], "local": [], "llm": []}, **report}
    return WorkerState(id=name, pid=1, revision=1, started=1, state="serving", report=told)


def switch(scope: Scope, action: str = "drain") -> Switch:
    now_ms = round(time.time() * 1000)
    fields: dict[str, Any] = {"action": action, "reason": "why", "owner": "me", "created_ms": now_ms}
    return Switch(id=f"{scope.kind}-{action}", scope=scope, expires_ms=now_ms + 60_000, **fields)


async def test_workers_are_added_up(redis_client: Redis, redis_prefix: str) -> None:
    one = worker(
        "w1",
        in_flight=[["triton", "m", "1", "a", 2], ["triton", "n", "", "a", 1], ["llm", "big", "", "", 4]],
        waiting={"triton": 3, "llm": 1},
        shut=[
            ["triton", "m", "1", "a", "open: timeout"],
            ["triton", "*", "", "b", "away"],
            ["llm", "*", "", "", "away"],
        ],
        engines=[["llm", "", 5, 6, 0.5]],
    )
    two = worker("w2", at_ms=2, in_flight=[["triton", "m", "1", "a", 1]], shut=[["triton", "*", "", "b", "away"]])
    found = await backends(redis_client, redis_prefix, one, two)
    assert list(found) == ["triton", "local", "llm", "off", "new"]
    triton, llm = found["triton"], found["llm"]
    servers = {server["replica"]: server for server in triton["replicas"]}
    assert set(servers) == set(SERVERS.reachable["triton"].replicas())
    assert triton["waiting"] == 3
    assert (llm["kind"], llm["reachable"], llm["waiting"]) == ("openai", False, 1)
    assert llm["replicas"] == [
        {
            "replica": "",
            "live": True,  # the other worker sends requests there
            "latency_ms": None,
            "error": "",
            "in_flight": 4,
            "waiting": 1,
            "shut": ["away (1 of 2 workers)"],
            "switches": [],
            "engine": {"running": 5, "waiting": 6, "kv_used": 0.5},
        }
    ]
    local = found["local"]
    assert (local["detail"], local["replicas"][0]["live"], local["replicas"][0]["in_flight"]) == (LOCAL, True, 0)
    assert [one["is_on"] for one in found.values()] == [True, True, True, False, False]
    assert (found["off"]["replicas"], found["off"]["detail"], llm["detail"]) == ([], "KEY is not set", "")
    assert found["new"]["detail"].startswith("no worker has it on")


async def test_what_all_workers_keep_out_is_not_live(redis_client: Redis, redis_prefix: str) -> None:
    shut = [["llm", "*", "", "", "away"], ["local", "m", "2", "", "open"]]
    found = await backends(redis_client, redis_prefix, worker("w1", shut=shut), worker("w2", shut=shut))
    llm, local = found["llm"]["replicas"][0], found["local"]["replicas"][0]
    assert (llm["live"], llm["shut"]) == (False, ["away"])
    assert (local["live"], local["shut"]) == (True, ["m:2: open"])


async def test_switches_that_close_a_server_are_named(redis_client: Redis, redis_prefix: str) -> None:
    replica = SERVERS.reachable["triton"].replicas()[0]
    switches = (
        switch(Scope(kind="replica", name=f"triton@{replica}")),
        switch(Scope(kind="backend", name="llm"), "block"),
        switch(Scope(kind="model", name="m")),
        switch(Scope(kind="everything"), "freeze"),
    )
    found = await backends(redis_client, redis_prefix, worker("w1"), switches=switches)
    assert found["triton"]["replicas"][0]["switches"] == ["replica-drain"]
    assert found["llm"]["replicas"][0]["switches"] == ["backend-block"]
    assert found["local"]["replicas"][0]["switches"] == []


async def test_without_workers_there_is_what_was_probed(redis_client: Redis, redis_prefix: str) -> None:
    found = await backends(redis_client, redis_prefix)
    server = found["triton"]["replicas"][0]
    assert server["live"]
    assert server["latency_ms"] >= 0
    assert (server["in_flight"], server["waiting"], server["shut"]) == (None, None, [])
    assert (found["llm"]["replicas"], found["llm"]["waiting"], found["llm"]["is_on"]) == ([], None, None)
