"""What rules and switches make of requests, through the whole data plane."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gateway.backends.scripted import Pause, ScriptedBackend
from gateway.core.errors import Fault, FaultKind
from gateway.core.rules import parse_rules
from gateway.core.switches import Scope, Switch, Switches
from gateway.reports import report
from tests.kit.app import OTHER_KEY, Harness, embedding, running
from tests.kit.wait import until

EMBED = ("/v1/tasks/text-embedding", {"input": {"text": "a"}})
FAR_MS = 2**50


def target(backend: str, **more: Any) -> dict[str, Any]:
    return {"backend": backend, "model": "m", **more}


def rule(name: str, split: Sequence[Mapping[str, Any]] = (target("triton"),), **more: Any) -> dict[str, Any]:
    return {"name": name, "match": {"task": "text-embedding"}, "split": list(split), **more}


def switch(action: str, kind: str = "everything", name: str = "", **more: Any) -> Switch:
    told: dict[str, Any] = {"id": "s", "reason": "r", "owner": "o", "created_ms": 0, "expires_ms": FAR_MS, **more}
    return Switch(action=action, scope=Scope(kind=kind, name=name), **told)


def put(gw: Harness, *switches: Switch) -> None:
    gw.rules.replace(replace(gw.rules.current(), switches=Switches(revision=1, items=switches)))


@asynccontextmanager
async def plane(*rules: Mapping[str, Any], hold: asyncio.Event | None = None, **options: Any) -> AsyncIterator[Harness]:
    """`hold`: Triton answers when it is set."""
    triton = ScriptedBackend("triton", (hold, embedding()) if hold else (embedding(),))
    local = ScriptedBackend("local", (embedding(),))
    async with running([triton, local], rules=rules, **options) as gw:
        yield gw


async def route(gw: Harness, **headers: str) -> str:
    answer = await gw.post(*EMBED, **headers)
    assert answer.status_code == 200, answer.text
    return f"{answer.headers['x-gateway-rule']} {answer.headers['x-gateway-backend']}"


# --- rules --------------------------------------------------------------------------------------------


async def test_a_rule_may_ask_for_a_header():
    beta = rule("beta", [target("local")])
    beta["match"]["headers"] = {"x-beta": "1"}
    async with plane(beta, rule("rest")) as gw:
        assert await route(gw) == "rest triton"
        assert await route(gw, **{"X-Beta": "1"}) == "beta local"


async def test_a_rule_may_ask_for_a_priority_a_key_and_a_size():
    batch, mine, small = (rule(name, [target("local")]) for name in ("batch", "mine", "small"))
    batch["match"]["priority"] = "batch"
    mine["match"]["key"] = "other"
    small["match"]["max_input_bytes"] = 10
    async with plane(batch, mine, small, rule("rest")) as gw:
        assert await route(gw, **{"x-priority": "batch"}) == "batch local"
        assert await route(gw, authorization=f"Bearer {OTHER_KEY}") == "mine local"
        assert await route(gw) == "rest triton"


async def test_a_rule_may_ask_for_a_time():
    minute = int(time.time() // 60) % 1440
    soon = {"from": (minute + 30) % 1440, "to": (minute + 60) % 1440}
    later, now = rule("later", [target("local")]), rule("now", [target("local")])
    later["match"]["times"] = [soon]
    now["match"]["times"] = [{"from": (minute - 30) % 1440, "to": (minute + 30) % 1440}]
    async with plane(later, now, rule("rest")) as gw:
        assert await route(gw) == "now local"


async def test_a_session_stays_on_its_side():
    both = rule("both", [target("triton"), target("local")], sticky_by="session")
    draws = iter(i / 7 % 1 for i in range(10_000))
    async with plane(both, draw=lambda: next(draws)) as gw:
        sides = {name: {await route(gw, **{"x-session-id": name}) for _ in range(6)} for name in "abcdefgh"}
        assert all(len(of_one) == 1 for of_one in sides.values())
        assert len({str(of_one) for of_one in sides.values()}) == 2
        assert len({await route(gw) for _ in range(20)}) == 2  # without one, chance decides


async def test_a_session_that_is_no_name_is_refused():
    async with plane(rule("r")) as gw:
        answer = await gw.post(*EMBED, **{"x-session-id": "s" * 129})
        assert answer.status_code == 400
        assert "x-session-id" in answer.text


async def test_a_rule_shortens_the_time_of_its_requests():
    hold = asyncio.Event()
    async with plane(rule("r", timeout_ms=50), hold=hold) as gw:
        answer = await gw.post(*EMBED)
        assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")


async def test_a_rule_sets_the_time_of_an_attempt():
    hold = asyncio.Event()
    slow = rule("r", attempt_timeout_ms=50, fallback=[target("local")])
    async with plane(slow, hold=hold, attempt_timeout_us=4_000_000) as gw:
        assert await route(gw) == "r local"


async def test_a_rules_limit_counts_its_requests_alone():
    limited = rule("limited", limits=[{"requests": 2, "per": "minute"}])
    limited["match"]["tenant"] = "t1"
    async with plane(limited, rule("rest", [target("local")])) as gw:
        statuses = [(await gw.post(*EMBED)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        refused = await gw.post(*EMBED)
        assert "limited" in refused.json()["detail"]
        assert await route(gw, authorization=f"Bearer {OTHER_KEY}") == "rest local"


@pytest.mark.parametrize(("shared_by", "others"), [("all", 429), ("tenant", 200), ("key", 200)])
async def test_who_shares_a_rules_limit(shared_by: str, others: int):
    async with plane(rule("r", limits=[{"requests": 1, "per": "minute", "shared_by": shared_by}])) as gw:
        assert (await gw.post(*EMBED)).status_code == 200
        assert (await gw.post(*EMBED)).status_code == 429
        other = await gw.post(*EMBED, authorization=f"Bearer {OTHER_KEY}")
        assert other.status_code == others


async def test_who_waited_for_its_turn_has_the_time_that_the_rule_of_now_gives():
    hold = asyncio.Event()
    slow = ScriptedBackend("local", (Pause(us=700_000), embedding()))
    old = rule("old", timeout_ms=500, attempt_timeout_ms=499)
    async with running([ScriptedBackend("triton", (hold, embedding())), slow], rules=[old]) as gw:
        first = asyncio.create_task(gw.post(*EMBED, **{"x-ordering-key": "o"}))
        await until(lambda: gw.backends["triton"].calls)
        second = asyncio.create_task(gw.post(*EMBED, **{"x-ordering-key": "o"}))
        await until(lambda: gw.seen.in_flight == 2)
        gw.rules.replace(replace(gw.rules.current(), revision=8, rules=parse_rules([rule("new", [target("local")])])))
        hold.set()
        assert (await first).status_code == 200
        assert (await second).status_code == 200


async def test_who_waited_for_its_turn_goes_by_the_rules_of_now():
    hold = asyncio.Event()
    async with plane(rule("old"), hold=hold) as gw:
        first = asyncio.create_task(gw.post(*EMBED, **{"x-ordering-key": "o"}))
        await until(lambda: gw.backends["triton"].calls)
        second = asyncio.create_task(gw.post(*EMBED, **{"x-ordering-key": "o"}))
        await until(lambda: gw.seen.in_flight == 2)
        new = parse_rules([rule("new", [target("local")])])
        gw.rules.replace(replace(gw.rules.current(), revision=8, rules=new))
        hold.set()
        assert (await first).headers["x-gateway-rule"] == "old"
        assert (await second).headers["x-gateway-rule"] == "new"


# --- switches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "is_hit"),
    [
        ("everything", "", True),
        ("tenant", "t1", True),
        ("tenant", "t9", False),
        ("key", "one", True),
        ("task", "text-embedding", True),
        ("task", "general_llm", False),
    ],
)
@pytest.mark.parametrize("action", ["block", "drain"])
async def test_requests_that_are_switched_off_are_refused_and_cost_nothing(
    action: str, kind: str, name: str, *, is_hit: bool
):
    async with plane(rule("r", limits=[{"requests": 1, "per": "minute"}])) as gw:
        put(gw, switch(action, kind, name))
        answer = await gw.post(*EMBED)
        assert answer.status_code == (503 if is_hit else 200)
        if is_hit:
            assert answer.json()["code"] == "blocked"
            assert answer.headers["retry-after"] == "30"
            assert gw.seen.records[-1].refused_by
            put(gw)
            assert await route(gw) == "r triton"  # its one request is still there


async def test_a_place_that_is_switched_off_is_left_out_with_its_reason():
    async with plane(rule("r", fallback=[target("local")])) as gw:
        put(gw, switch("drain", "backend", "triton"))
        assert await route(gw) == "r local"
        (reason,) = gw.seen.records[-1].reasons
        assert reason == "triton/m: closed by switch s (drain backend triton)"
        put(gw, switch("block", "model", "m"))
        assert (await gw.post(*EMBED)).status_code == 503


async def test_a_switch_ends_by_itself():
    async with plane(rule("r")) as gw:
        put(gw, switch("block", expires_ms=int(time.time() * 1000) - 1))
        assert await route(gw) == "r triton"


async def test_a_backend_can_be_forced_whatever_its_weight():
    async with plane(rule("r", [target("triton"), target("local", weight=0)])) as gw:
        assert await route(gw) == "r triton"
        put(gw, switch("force_backend", "task", "text-embedding", value="local"))
        assert await route(gw) == "r local"
        plan = gw.seen.records[-1].plan
        assert plan is not None
        assert plan.forced is not None
        put(gw, switch("force_backend", value="nowhere"))
        assert (await gw.post(*EMBED)).json()["code"] == "no_healthy_backend"


async def test_the_fallback_can_be_forced():
    async with plane(rule("r", fallback=[target("local")])) as gw:
        put(gw, switch("force_fallback", "tenant", "t1"))
        assert await route(gw) == "r local"
        assert await route(gw, authorization=f"Bearer {OTHER_KEY}") == "r triton"


async def test_a_freeze_stops_no_request():
    async with plane(rule("r")) as gw:
        put(gw, switch("freeze"))
        assert await route(gw) == "r triton"


async def test_who_waits_for_its_turn_hears_of_a_switch():
    hold = asyncio.Event()
    async with plane(rule("r"), hold=hold) as gw:
        first = asyncio.create_task(gw.post(*EMBED, **{"x-ordering-key": "o"}))
        await until(lambda: gw.backends["triton"].calls)
        second = asyncio.create_task(gw.post(*EMBED, **{"x-ordering-key": "o"}))
        await until(lambda: gw.seen.in_flight == 2)
        put(gw, switch("block"))
        hold.set()
        assert (await first).status_code == 200
        assert (await second).json()["code"] == "blocked"


async def test_no_further_attempt_is_made_of_what_is_switched_off_meanwhile():
    hold = asyncio.Event()
    fault = Fault(kind=FaultKind.UNAVAILABLE, message="away")
    triton = ScriptedBackend("triton", (hold, fault))
    rules = [rule("r", fallback=[target("local")])]
    async with running([triton, ScriptedBackend("local", (embedding(),))], rules=rules) as gw:
        asked = asyncio.create_task(gw.post(*EMBED))
        await until(lambda: triton.calls)
        put(gw, switch("block"))
        hold.set()
        assert (await asked).json()["code"] == "blocked"
        assert not gw.backends["local"].calls


# --- what a worker tells ------------------------------------------------------------------------------


async def test_a_drain_counts_down_what_is_under_way():
    hold = asyncio.Event()
    async with plane(rule("r"), hold=hold) as gw:
        asked = [asyncio.create_task(gw.post(*EMBED)) for _ in range(3)]
        await until(lambda: len(gw.backends["triton"].calls) == 3)
        put(gw, switch("drain", "backend", "triton", id="d"), switch("block", "tenant", "t9", id="b"))
        told = report(gw.pipeline)
        assert told["drains"] == {"d": 3}
        assert told["in_flight"] == [["triton", "m", "", "", 3]]
        assert told["tasks"] == {"text-embedding": 3}
        hold.set()
        await asyncio.gather(*asked)
        assert report(gw.pipeline)["drains"] == {"d": 0}
        assert not gw.pipeline.under_way


@pytest.mark.parametrize(
    ("one", "status"),
    [
        (switch("drain", "backend", "triton"), 200),
        (switch("block", "tenant", "t1"), 503),
        (switch("drain", "everything"), 503),
    ],
)
async def test_what_waits_for_a_server_is_not_sent_there_any_more(one: Switch, status: int):
    """What is drained counts what was sent: nothing may be added to it."""
    hold = asyncio.Event()
    async with plane(rule("r", fallback=[target("local")]), hold=hold, max_in_flight=1) as gw:
        first = asyncio.create_task(gw.post(*EMBED))
        await until(lambda: gw.backends["triton"].calls)
        second = asyncio.create_task(gw.post(*EMBED))
        await until(lambda: gw.loads == {"triton": 2})
        put(gw, one)
        hold.set()
        assert (await first).status_code == 200
        answer = await second
        assert answer.status_code == status
        assert len(gw.backends["triton"].calls) == 1
        assert len(gw.backends["local"].calls) == (status == 200)
        assert not gw.loads
        if status != 200:
            assert answer.json()["code"] == "blocked"


async def test_an_answer_that_is_kept_is_not_given_while_its_caller_is_blocked():
    async with plane(rule("r")) as gw:
        headers = {"idempotency-key": "k"}
        assert (await gw.post(*EMBED, **headers)).status_code == 200
        put(gw, switch("block", "tenant", "t1"))
        assert (await gw.post(*EMBED, **headers)).json()["code"] == "blocked"
        put(gw)
        again = await gw.post(*EMBED, **headers)
        assert (again.status_code, len(gw.backends["triton"].calls)) == (200, 1)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_nothing_stays_under_way(seed: int):
    """Callers that leave, places that fail and are slow, hedges, orders, stored answers, and switches meanwhile."""
    chance = random.Random(seed)  # noqa: S311 - the same each time

    def scripts(name: str) -> ScriptedBackend:
        slow, bad = Pause(us=3000), Fault(kind=FaultKind.UNAVAILABLE, message="away")
        steps = [[embedding()], [slow, embedding()], [bad], [slow, bad]]
        return ScriptedBackend(name, *(chance.choice(steps) for _ in range(400)))

    hedged = rule("r", hedge=True, retries=2, fallback=[target("local")], limits=[{"concurrent": 1000}])
    switches = [
        switch("drain", "backend", "triton"),
        switch("block", "tenant", "t1"),
        switch("force_fallback"),
        switch("drain", "everything"),
    ]

    async def ask(gw: Harness, number: int) -> None:
        headers = {}
        if chance.random() < 0.3:
            headers["x-ordering-key"] = f"o{number % 3}"
        if chance.random() < 0.3:
            headers["idempotency-key"] = f"k{number % 7}"
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(chance.choice([0.001, 0.005, 5])):
                await gw.post(*EMBED, **headers)

    async with running([scripts("triton"), scripts("local")], rules=[hedged], max_in_flight=4) as gw:
        for _ in range(10):
            put(gw, *chance.sample(switches, chance.choice([0, 0, 1, 2])))
            await asyncio.gather(*(ask(gw, number) for number in range(30)))
        put(gw, switch("drain", "everything"))
        await until(lambda: not gw.pipeline.under_way)
        assert report(gw.pipeline)["drains"] == {"s": 0}
        assert report(gw.pipeline)["in_flight"] == []
        assert not gw.loads
        assert gw.seen.in_flight == 0
        assert {record.error.code if record.error else "" for record in gw.seen.records} >= {"", "blocked"}
