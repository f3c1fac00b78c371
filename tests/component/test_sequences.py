"""Sequences through the whole data plane, over replicas that keep state and can be lost."""

import asyncio
import random
from dataclasses import replace

import httpx
import pytest

from gateway.backends.scripted import ScriptedBackend
from gateway.core.errors import Fault, FaultKind
from gateway.core.rules import parse_rules
from gateway.core.switches import Scope, Switch, Switches
from gateway.reports import report
from gateway.stores.redis_script import connect
from gateway.stores.redis_sequences import RedisSequenceStore
from tests.kit import stateful
from tests.kit.app import LIMITED_KEY, embedding, running
from tests.kit.redis_switch import RedisSwitch
from tests.kit.stateful import FACTS, StatefulBackend

pytest_plugins = ["tests.kit.redis"]

FALLBACK = [{**stateful.RULES[0], "fallback": [{"backend": "local", "model": "total"}]}]


def gateway(*backends, **options):
    options.setdefault("rules", stateful.RULES)
    draw = random.Random(7).random  # noqa: S311 - chance that is the same each time
    return running(backends, more_tasks=stateful.TASKS, draw=draw, **options)


async def send(gw, sequence: object, number: int, *flags: str, **headers: str) -> httpx.Response:
    sent = {"x-sequence-id": str(sequence), **{f"x-sequence-{flag}": "true" for flag in flags}, **headers}
    return await gw.http.post("/v1/tasks/total", json={"input": {"number": number}}, headers=sent)


async def total(gw, sequence: object, number: int, *flags: str) -> int:
    answer = await send(gw, sequence, number, *flags)
    assert answer.status_code == 200, answer.text
    return answer.json()["output"]["total"]


@pytest.fixture(params=["memory", "redis"])
async def store(request, redis_server, redis_prefix):
    """A store of the gateway's own, or the shared one."""
    if request.param == "memory":
        yield None
        return
    client = connect(redis_server.url)
    yield RedisSequenceStore(client, redis_prefix, timeout_s=5)
    await client.aclose()


async def test_each_sequence_stays_where_it_began_and_is_right(store):
    triton = StatefulBackend("triton", "a", "b", "c")
    async with gateway(triton, sequence_store=store) as gw:
        for step in range(5):
            flags = ("start",) if step == 0 else ("end",) if step == 4 else ()
            answers = await asyncio.gather(*(total(gw, f"s{n}", n, *flags) for n in range(12)))
            assert answers == [n * (step + 1) for n in range(12)]
        refused = await send(gw, "s1", 1)
    assert (refused.status_code, refused.json()["code"]) == (400, "sequence_unknown")
    assert {call.replica for call in triton.calls} == {"a", "b", "c"}
    replicas = {call.sequence.id: set() for call in triton.calls}
    for call in triton.calls:
        replicas[call.sequence.id].add(call.replica)
    assert [len(seen) for seen in replicas.values()] == [1] * 12


async def test_the_callers_number_is_the_servers_and_flags_pass_through():
    triton = StatefulBackend("triton", "a")
    async with gateway(triton) as gw:
        await total(gw, 42, 1, "start")
        await total(gw, 42, 1)
        await total(gw, 42, 1, "end")
        await total(gw, "one-shot", 1, "start", "end")
    assert [(c.sequence.id, c.sequence.is_start, c.sequence.is_end) for c in triton.calls[:3]] == [
        (42, True, False),
        (42, False, False),
        (42, False, True),
    ]
    assert isinstance(triton.calls[3].sequence.id, int)
    # A start may take any version; what follows stays on the one that served it.
    assert [call.version for call in triton.calls[:3]] == ["", "2", "2"]


async def test_equal_ids_of_two_tenants_never_meet(store):
    triton = StatefulBackend("triton", "a")
    other = {"authorization": f"Bearer {LIMITED_KEY}"}
    async with gateway(triton, sequence_store=store) as gw:
        assert (await send(gw, 42, 1, "start")).json()["output"] == {"total": 1}
        assert (await send(gw, 42, 100, **other)).status_code == 400
        assert (await send(gw, 42, 100, "start", **other)).json()["output"] == {"total": 100}
        assert (await send(gw, 42, 1)).json()["output"] == {"total": 2}
        assert (await send(gw, 42, 100, "end", **other)).json()["output"] == {"total": 200}
        assert (await send(gw, 42, 1)).json()["output"] == {"total": 3}
    assert len({call.sequence.id for call in triton.calls}) == 2


async def test_ids_are_cut_to_what_the_model_sees():
    triton = StatefulBackend("triton", facts=replace(FACTS, correlation_bits=32))
    async with gateway(triton) as gw:
        await total(gw, 2**40, 1, "start")
        await total(gw, "text", 1, "start")
        assert await total(gw, 2**40, 1) == 2
    assert all(1 <= call.sequence.id < 2**32 for call in triton.calls)


async def test_a_lost_replica_ends_its_sequences_and_no_others(store):
    triton = StatefulBackend("triton", "a", "b")
    async with gateway(triton, sequence_store=store) as gw:
        for n in range(8):
            await total(gw, n + 1, n, "start")
        homes = {call.sequence.id: call.replica for call in triton.calls}
        assert set(homes.values()) == {"a", "b"}
        gone = homes[1]
        triton.gone.add(gone)
        for _ in range(2):  # the failed request hears it, and so do later ones
            for n in range(8):
                answer = await send(gw, n + 1, n)
                if homes[n + 1] == gone:
                    assert (answer.status_code, answer.json()["code"]) == (410, "sequence_lost")
                else:
                    assert answer.status_code == 200
        triton.restart(gone)
        assert (await send(gw, 1, 5)).status_code == 410  # still, though it would be taken again
        for breaker in list(gw.board.all()):
            gw.board.healed(breaker)
        assert await total(gw, 1, 5, "start") == 5
        assert await total(gw, 1, 5) == 10


async def test_a_lost_sequence_is_tried_nowhere_else():
    triton, local = StatefulBackend("triton"), StatefulBackend("local")
    async with gateway(triton, local, rules=FALLBACK) as gw:
        await total(gw, 1, 1, "start")
        triton.gone.add("")
        assert (await send(gw, 1, 1)).status_code == 410
        assert local.calls == []
        assert await total(gw, 1, 7, "start") == 7  # a new one may begin elsewhere
        assert await total(gw, 1, 1) == 8
        assert len(local.calls) == 2


async def test_a_start_that_fails_over_lives_where_it_was_answered():
    triton = StatefulBackend("triton", "a", "b")
    triton.gone.add("a")
    async with gateway(triton) as gw:
        assert await total(gw, 5, 1, "start") == 1
        assert await total(gw, 5, 1) == 2
    assert [call.replica for call in triton.calls][-2:] == ["b", "b"]


async def test_a_server_that_forgot_a_live_sequence_lost_it():
    triton = StatefulBackend("triton", "a")
    async with gateway(triton) as gw:
        await total(gw, 5, 1, "start")
        triton.restart("a")
        said = [await send(gw, 5, 1) for _ in range(2)]
        assert [answer.json()["code"] for answer in said] == ["sequence_lost"] * 2
    assert len(triton.calls) == 2  # the server was asked once


async def test_silence_longer_than_the_model_waits_is_no_loss():
    triton = StatefulBackend("triton", "a", facts=replace(FACTS, sequence_idle_us=1))
    async with gateway(triton) as gw:
        await total(gw, 43, 1, "start")
        triton.states["a"].clear()  # as Triton does by itself
        answer = await send(gw, 43, 1)
    assert (answer.status_code, answer.json()["code"]) == (400, "sequence_unknown")
    assert answer.json()["detail"] == (
        "inference request for sequence 43 to model 'total' must specify the START flag on the first request of the "
        "sequence"
    )


@pytest.mark.parametrize("kind", [FaultKind.TIMEOUT, FaultKind.OVERLOADED, FaultKind.FAILED, FaultKind.BROKEN])
async def test_the_failure_of_one_request_does_not_end_its_sequence(kind):
    triton = StatefulBackend("triton", "a", "b")
    async with gateway(triton) as gw:
        await total(gw, 5, 1, "start")
        triton.faults.append(Fault(kind=kind, message="x"))
        failed = await send(gw, 5, 1)
        assert failed.status_code >= 429
        assert await total(gw, 5, 1) == 2
    assert len({call.replica for call in triton.calls}) == 1


async def test_a_replica_that_works_badly_is_spared_and_its_sequences_kept():
    triton = StatefulBackend("triton", "a")
    async with gateway(triton) as gw:
        await total(gw, 5, 1, "start")
        triton.faults += [Fault(kind=FaultKind.BROKEN, message="x")] * 3
        for _ in range(3):
            assert (await send(gw, 5, 1)).status_code == 502
        spared = await send(gw, 5, 1)
        assert (spared.status_code, spared.json()["code"]) == (503, "no_healthy_backend")
        for place in list(gw.board.all()):
            gw.board.healed(place)
        assert await total(gw, 5, 1) == 2


async def test_a_live_sequence_stays_when_the_rules_lead_elsewhere():
    triton, local = StatefulBackend("triton"), StatefulBackend("local")
    async with gateway(triton, local) as gw:
        await total(gw, 1, 1, "start")
        elsewhere = [{**stateful.RULES[0], "split": [{"backend": "local", "model": "total"}]}]
        gw.rules.replace(replace(gw.rules.current(), rules=parse_rules(elsewhere)))
        assert await total(gw, 1, 1) == 2
        assert await total(gw, 2, 5, "start") == 5
        gw.rules.replace(replace(gw.rules.current(), rules=()))
        assert await total(gw, 1, 1) == 3
    assert [len(triton.calls), len(local.calls)] == [3, 1]


async def test_a_sequence_started_anew_stays_on_its_replica():
    triton = StatefulBackend("triton", "a", "b", "c")
    async with gateway(triton) as gw:
        await total(gw, 9, 1, "start")
        home = triton.calls[0].replica
        for _ in range(6):
            assert await total(gw, 9, 4, "start") == 4
    assert {call.replica for call in triton.calls} == {home}


async def test_models_without_state_take_the_headers_as_nothing():
    triton = StatefulBackend("triton", "a", "b", facts=replace(FACTS, is_sequence=False))
    async with gateway(triton) as gw:
        assert await total(gw, 1, 5) == 5
        assert await total(gw, 1, 6, "start") == 6


async def test_one_lookup_does_for_a_request(redis_client, redis_prefix):
    triton = StatefulBackend("triton", "a")
    store = RedisSequenceStore(redis_client, redis_prefix, timeout_s=5)
    asked, original = [], store.find

    async def counted(owner, *, for_us):
        asked.append(owner)
        return await original(owner, for_us=for_us)

    store.find = counted
    async with gateway(triton, sequence_store=store) as gw:
        await total(gw, 1, 1, "start")
        for _ in range(3):
            await total(gw, 1, 1)
    assert len(asked) == 4


@pytest.mark.parametrize("fault", ["refuse", "pause"])
async def test_without_redis_sequences_wait_and_the_rest_goes_on(redis_server, redis_prefix, fault):
    triton, local = StatefulBackend("triton", "a"), ScriptedBackend("local", [embedding()])
    rules = [*stateful.RULES, {"name": "rest", "split": [{"backend": "local", "model": "m"}]}]
    async with RedisSwitch(redis_server.port) as switch:
        client = connect(switch.url)
        store = RedisSequenceStore(client, redis_prefix)
        async with gateway(triton, local, rules=rules, sequence_store=store) as gw:
            await total(gw, 1, 1, "start")
            await switch.refuse() if fault == "refuse" else switch.pause()
            refused = await send(gw, 1, 1)
            assert (refused.status_code, refused.json()["code"]) == (503, "sequences_unavailable")
            assert refused.headers["retry-after"] == "1"
            rest = await gw.http.post("/v1/tasks/text-embedding", json={"input": {"text": "a"}})
            assert rest.status_code == 200
            await switch.restore()
            assert await total(gw, 1, 1) == 2
        await client.aclose()


# --- the headers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status", "field"),
    [
        ({"x-sequence-id": "0"}, 400, "x-sequence-id"),
        ({"x-sequence-id": str(2**64)}, 400, "x-sequence-id"),
        ({"x-sequence-id": "a" * 129}, 400, "x-sequence-id"),
        ({"x-sequence-id": ""}, 400, "x-sequence-id"),
        ({"x-sequence-id": "1", "x-sequence-start": "yes"}, 400, "x-sequence-start"),
        ({"x-sequence-id": "1", "x-sequence-end": "2"}, 400, "x-sequence-end"),
        ({"x-sequence-start": "true"}, 422, "x-sequence-id"),
        ({}, 422, "x-sequence-id"),
        ({"x-sequence-id": "1", "x-priority": "urgent"}, 400, "x-priority"),
    ],
)
async def test_bad_headers_are_told_by_name(headers, status, field):
    triton = StatefulBackend("triton")
    async with gateway(triton) as gw:
        answer = await gw.http.post("/v1/tasks/total", json={"input": {"number": 1}}, headers=headers)
    assert answer.status_code == status
    assert answer.json()["errors"][0]["field"] == field
    assert triton.calls == []


async def test_a_task_without_state_takes_no_sequence():
    async with gateway(StatefulBackend("triton")) as gw:
        answer = await gw.post("/v1/tasks/text-embedding", {"input": {"text": "a"}}, **{"x-sequence-id": "1"})
        infer = await gw.post("/v1/infer", {"task": "total", "input": {"number": 1}}, **{"x-sequence-id": "1"})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "x-sequence-id")
    assert infer.json()["code"] == "sequence_unknown"


# --- while something is drained ------------------------------------------------------------------------


def drain(gw, kind: str, name: str = "", action: str = "drain") -> None:
    scope = Scope(kind=kind, name=name)
    one = Switch(id="s", action=action, scope=scope, reason="", owner="", created_ms=0, expires_ms=2**50)
    gw.rules.replace(replace(gw.rules.current(), switches=Switches(revision=1, items=(one,))))


SCOPES = [("everything", ""), ("tenant", "t1"), ("task", "total"), ("backend", "triton"), ("replica", "triton@a")]


@pytest.mark.parametrize(("kind", "name"), SCOPES)
async def test_what_has_begun_goes_on_and_ends_while_it_is_drained(store, kind, name):
    triton = StatefulBackend("triton", "a")
    async with gateway(triton, sequence_store=store) as gw:
        await total(gw, "s", 1, "start")
        drain(gw, kind, name)
        assert (await send(gw, "t", 1, "start")).status_code == 503
        assert [await total(gw, "s", 1), await total(gw, "s", 1, "end")] == [2, 3]
        assert (await send(gw, "s", 1)).status_code in (400, 503)  # it has ended
        assert report(gw.pipeline)["drains"] == {"s": 0}
        assert len(triton.calls) == 3


@pytest.mark.parametrize(("kind", "name"), SCOPES)
async def test_nothing_goes_on_while_it_is_blocked(kind, name):
    triton = StatefulBackend("triton", "a")
    async with gateway(triton) as gw:
        await total(gw, "s", 1, "start")
        drain(gw, kind, name, action="block")
        assert (await send(gw, "s", 1)).status_code == 503
        gw.rules.replace(replace(gw.rules.current(), switches=Switches()))
        assert await total(gw, "s", 1, "end") == 2


@pytest.mark.parametrize(("kind", "name"), SCOPES)
async def test_where_no_state_is_kept_nothing_has_begun(kind, name):
    triton = StatefulBackend("triton", "a", facts=replace(FACTS, is_sequence=False))
    async with gateway(triton) as gw:
        assert await total(gw, "s", 1) == 1
        drain(gw, kind, name)
        assert (await send(gw, "s", 1)).status_code == 503
        assert len(triton.calls) == 1
