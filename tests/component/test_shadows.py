"""Shadows: copies of answered requests, which callers never wait for, pay for, or hear of."""

import asyncio
import contextlib
import json
import random
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from gateway.backends.scripted import Pause, ScriptedBackend
from gateway.core.attempts import CONSEQUENCES
from gateway.core.breaker import FAILURES_TO_OPEN
from gateway.core.errors import Fault, FaultKind, GatewayError, RateLimited
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.shadows.comparison import AGREED_COSINE
from gateway.core.shadows.shadow_reports import Pair
from gateway.core.switches import Scope, Switch, Switches
from gateway.core.types import (
    Answer,
    BackendCall,
    Caller,
    Delta,
    Finished,
    Limit,
    Message,
    Place,
    SequenceStep,
    Started,
    TensorPayload,
    Usage,
)
from gateway.core.watching.figures import Series
from gateway.reports import report
from gateway.shadowing import MAX_KEPT_BYTES, MOST_AT_ONCE, MOST_KEPT
from gateway.tasks.chat import ChatInput
from gateway.tasks.speech_activity import SpeechActivity
from gateway.tasks.tensor import TensorInput, TensorTask
from gateway.wiring import monotonic_us
from tests.kit.app import embedding
from tests.kit.shadowed import RULE, Shadowed, request, shadowed
from tests.kit.timelines import chunks
from tests.kit.wait import until

AWAY = Fault(kind=FaultKind.UNREACHABLE, message="away")
FAILED = Fault(kind=FaultKind.FAILED, message="failed")
OTHER = embedding(EMBEDDING=np.array([[0.0, 1.0, 0.0, 0.0]], np.float32))


def real(*script: object) -> ScriptedBackend:
    return ScriptedBackend("triton", script or [embedding()])


def shadow(*scripts: list[object]) -> ScriptedBackend:
    return ScriptedBackend("shadow", *(scripts or ([embedding()],)))


def body(text: str) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": {"content": text}}]}).encode()


def rule(**changes: object) -> dict[str, object]:
    return {**RULE, **changes}


def chat(*, stream: bool = False, **fields: object):
    asked = {"messages": [{"role": "user", "content": "hello"}], **fields}
    return request("general_llm", ChatInput(body=asked, stream=stream), stream=stream)


CHAT = rule(
    split=[{"backend": "llm", "model": "m"}],
    shadow={"backend": "llm2", "model": "s"},
)


# --- what is sent, and what it is held against ---------------------------------------------------------


async def test_a_copy_of_an_answered_request_is_sent_and_compared():
    copies = shadow()
    async with shadowed(real(), copies) as plane:
        started, answer, finished = await plane.ask(request(ordering_key="o", idempotency_key="i", priority="batch"))
        assert isinstance(started, Started)
        assert isinstance(answer, Answer)
        assert isinstance(finished, Finished)
        result = await plane.result()
        call = copies.calls[0].call
        assert (call.model, call.version, call.sequence, call.request_id) == ("s", "", None, "r1-shadow")
        assert (result.rule, result.pair) == ("nlu/en", Pair("text-embedding", "triton/m", "shadow/s"))
        assert (result.request_id, result.outcome) == ("r1", "answered")
        assert result.comparison.agreed
        assert plane.told.compared == [(Series("text-embedding", "nlu/en", "triton", "m", ""), True)]
        assert len(plane.seen.records) == 1


async def test_answers_that_differ_do_not_agree():
    async with shadowed(real(), shadow([OTHER])) as plane:
        await plane.ask()
        comparison = (await plane.result()).comparison
        assert (comparison.agreed, comparison.what) == (False, "embedding")
        assert comparison.similarity < AGREED_COSINE
        assert [agreed for _, agreed in plane.told.compared] == [False]


async def test_nothing_is_compared_where_the_rule_says_so():
    rules = [rule(shadow={"backend": "shadow", "model": "s", "compare": False})]
    async with shadowed(real(), shadow(), rules=rules) as plane:
        await plane.ask()
        assert (await plane.result()).comparison is None
        assert plane.told.compared == []


@pytest.mark.parametrize("text", ["a b c", "a b d"])
async def test_streams_are_copied_as_streams(text):
    def stream(words: str):
        chunks = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
        return [Delta(data=json.dumps(chunk).encode()) for chunk in chunks]

    llm, copies = ScriptedBackend("llm", stream("a b c")), ScriptedBackend("llm2", stream(text))
    async with shadowed(llm, copies, rules=[CHAT]) as plane:
        events = await plane.ask(chat(stream=True))
        assert [event.data for event in events[1:-1]] == [event.data for event in stream("a b c")]
        comparison = (await plane.result()).comparison
        assert (comparison.what, comparison.agreed) == ("text", text == "a b c")
        assert copies.calls[0].call.payload.stream


async def test_a_long_answer_is_not_kept_but_its_copy_is_sent():
    long = [Delta(data=b'{"choices": []}' + b" " * 2**18)] * 5
    assert sum(len(event.data) for event in long) > MAX_KEPT_BYTES
    llm, copies = ScriptedBackend("llm", long), ScriptedBackend("llm2", long)
    async with shadowed(llm, copies, rules=[CHAT]) as plane:
        assert len(await plane.ask(chat(stream=True))) == len(long) + 2
        result = await plane.result()
        assert (result.outcome, result.comparison) == ("answered", None)
        assert copies.calls[0].is_finished


async def test_an_answer_of_the_shadow_that_is_too_long_is_not_compared():
    llm = ScriptedBackend("llm", [Message(body=body("a"))])
    copies = ScriptedBackend("llm2", [Message(body=body("a" * MAX_KEPT_BYTES))])
    async with shadowed(llm, copies, rules=[CHAT]) as plane:
        await plane.ask(chat())
        assert (await plane.result()).comparison is None


async def test_so_many_answers_are_kept_at_once_and_of_others_copies_are_sent():
    async with shadowed(real(), shadow()) as plane:
        rules, plan = plane.pipeline.rules.current().rules, plane.pipeline.plan(request())
        watched = [plane.shadows.watch(request(), rules[0], plan, on=plane.pipeline) for _ in range(MOST_KEPT)]
        await plane.ask()
        assert (await plane.result()).comparison is None
        watched[0].ended(route=None, plan=None, timing=None, usage=None, error=None)
        await plane.ask()
        assert (await plane.result(2)).comparison.agreed
        await plane.ask()
        assert (await plane.result(3)).comparison.agreed


async def test_costs_are_in_the_result_and_not_in_the_usage():
    usage = Usage(input_tokens=10, output_tokens=10)
    llm = ScriptedBackend("llm", [Message(body=body("a"), usage=usage)])
    copies = ScriptedBackend("llm2", [Message(body=body("a"), usage=usage)])
    prices = {"llm/m": {"input": 1, "output": 1}, "llm2/s": {"input": 2, "output": 3}}
    async with shadowed(llm, copies, rules=[CHAT], prices=prices) as plane:
        *_, finished = await plane.ask(chat())
        result = await plane.result()
        assert (result.real_nano_usd, result.shadow_nano_usd) == (20_000, 50_000)
        assert finished.usage.cost_nano_usd == plane.seen.records[0].usage.cost_nano_usd == 20_000


@pytest.mark.parametrize(
    ("model", "named", "sent"),
    [
        ({"model": "s", "version": "2"}, ("m", "7"), ("s", "2")),
        ({"model": "s"}, ("m", "7"), ("s", "")),
        ({"model": "*"}, ("m", "7"), ("m", "7")),
        ({"model": "*", "version": "2"}, ("m", "7"), ("m", "2")),
    ],
)
async def test_the_model_of_a_shadow(model, named, sent):
    rules = [rule(split=[{"backend": "triton", "model": "*"}], shadow={"backend": "shadow", **model})]
    asked = TensorInput(model=named[0], version=named[1], payload=TensorPayload(inputs=()))
    copies = shadow()
    async with shadowed(real(), copies, rules=rules, more_tasks={"tensor": TensorTask()}) as plane:
        await plane.ask(request("tensor", asked, model=named[0], version=named[1]))
        result = await plane.result()
        assert (copies.calls[0].call.model, copies.calls[0].call.version) == sent
        assert (result.comparison.what, result.comparison.agreed) == ("tensors", True)


async def test_of_several_replicas_the_one_with_the_least_to_do_has_the_copy():
    copies, go_on = shadow(), asyncio.Event()
    copies.replica_names = ("a", "b")
    copies.scripts = [[go_on, embedding()]]
    async with shadowed(real(), copies) as plane:
        for _ in range(4):
            await plane.ask()
            await until(lambda: len(copies.calls) == plane.shadows.in_flight)
        assert sorted(entry.call.replica for entry in copies.calls) == ["a", "a", "b", "b"]
        assert sorted(copy.place.replica for copy in plane.shadows.at_servers()) == ["a", "a", "b", "b"]
        go_on.set()
        assert (await plane.result(4)).pair.shadow == "shadow/s"


# --- which requests are copied -------------------------------------------------------------------------


async def test_the_percentage_is_honoured():
    draws = [0.0, 0.2499, 0.25, 0.9, 0.1, 0.99]
    rules = [rule(shadow={"backend": "shadow", "model": "s", "percent": 25})]
    copies = shadow()
    async with shadowed(real(), copies, rules=rules, draw=lambda: draws[0]) as plane:
        for number in range(len(draws)):
            await plane.ask(request(id=f"r{number}"))
            await plane.idle()
            draws.append(draws.pop(0))
        assert [entry.call.request_id for entry in copies.calls] == ["r0-shadow", "r1-shadow", "r4-shadow"]


async def test_a_request_that_fails_is_not_copied():
    copies = shadow()
    async with shadowed(real(AWAY), copies) as plane:
        with pytest.raises(GatewayError):
            await plane.ask()
        assert (copies.calls, plane.shadows.in_flight, plane.told.results) == ([], 0, [])


async def test_a_request_whose_stream_breaks_is_not_copied():
    llm = ScriptedBackend("llm", [Delta(data=b"{}"), AWAY])
    async with shadowed(llm, ScriptedBackend("llm2", []), rules=[CHAT]) as plane:
        with pytest.raises(GatewayError):
            await plane.ask(chat(stream=True))
        assert (plane.shadows.in_flight, plane.told.results) == (0, [])


async def test_a_request_whose_caller_leaves_is_not_copied():
    llm = ScriptedBackend("llm", [Delta(data=b"{}"), Delta(data=b"{}")])
    async with shadowed(llm, ScriptedBackend("llm2", []), rules=[CHAT]) as plane:
        async with aclosing(plane.pipeline.handle(chat(stream=True))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        assert (plane.shadows.in_flight, plane.told.results) == (0, [])


async def test_an_answer_that_is_given_again_is_not_copied():
    copies = shadow()
    async with shadowed(real(), copies, rules=[rule(cache={"ttl_s": 60})]) as plane:
        await plane.ask()
        await plane.result()
        await plane.ask()
        await plane.idle()
        assert len(copies.calls) == 1


async def test_steps_of_sequences_are_not_copied():
    copies = shadow()
    step = SequenceStep(id=7, is_start=True, is_end=True)
    async with shadowed(real(), copies, more_tasks={"speech": SpeechActivity()}) as plane:
        plan = plane.pipeline.plan(request())
        rules = plane.pipeline.rules.current().rules
        assert plane.shadows.watch(request(sequence=step), rules[0], plan, on=plane.pipeline) is None
        assert plane.shadows.watch(request("speech"), rules[0], plan, on=plane.pipeline) is None
        assert plane.shadows.watch(request(), rules[0], plan, on=plane.pipeline) is not None


async def test_a_rule_without_a_shadow_has_no_copies():
    copies, rules = shadow(), [{name: value for name, value in RULE.items() if name != "shadow"}]
    async with shadowed(real(), copies, rules=rules) as plane:
        await plane.ask()
        assert (copies.calls, plane.shadows.in_flight) == ([], 0)


# --- what a shadow may never do --------------------------------------------------------------------------


async def test_a_shadow_that_hangs_delays_nobody_and_so_many_hang_at_most():
    copies = shadow([asyncio.Event()])
    async with shadowed(real(), copies) as plane:
        for _ in range(2 * MOST_AT_ONCE):
            events = await plane.ask()
            assert isinstance(events[-1], Finished)
        await until(lambda: len(copies.calls) == MOST_AT_ONCE)
        assert plane.shadows.in_flight == MOST_AT_ONCE
        assert plane.told.outcomes == ["skipped"] * MOST_AT_ONCE
        assert plane.shadows.skipped == MOST_AT_ONCE


async def test_a_shadow_has_the_time_of_its_task():
    async with shadowed(real(), shadow([Pause(us=60_000_000)]), timeout_us=30_000) as plane:
        await plane.ask()
        assert ((await plane.result()).outcome, plane.told.outcomes) == ("failed", ["timeout"])


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.SKIPPED])
async def test_a_shadow_that_fails_is_counted_and_nobody_else_hears_of_it(kind):
    fault = Fault(kind=kind, message="no", retry_after_us=1_000_000, is_server=kind is FaultKind.UNREACHABLE)
    async with shadowed(real(), shadow([fault])) as plane:
        for number in range(FAILURES_TO_OPEN):
            events = await plane.ask()
            assert isinstance(events[-1], Finished)
            await plane.result(number + 1)
        assert plane.told.outcomes[0] == kind.value
        assert plane.pipeline.board.all() == {}
        assert plane.pipeline.why_not(Place(backend="shadow", model="s")) is None
        assert [record.code for record in plane.seen.records] == ["ok"] * FAILURES_TO_OPEN
        assert plane.told.compared == []


async def test_a_shadow_that_is_down_is_left_alone():
    copies = shadow([AWAY])
    async with shadowed(real(), copies) as plane:
        assert CONSEQUENCES[AWAY.kind].blames_backend
        for number in range(FAILURES_TO_OPEN + 2):
            await plane.ask()
            await plane.result(number + 1)
        assert plane.told.outcomes == [AWAY.kind.value] * FAILURES_TO_OPEN + ["skipped"] * 2
        assert len(copies.calls) == FAILURES_TO_OPEN


async def test_an_answer_against_the_contract_is_a_failure_of_the_shadow():
    async with shadowed(real(), shadow([embedding(rows=2)], [embedding(tokens=10_000)])) as plane:
        await plane.ask()
        await plane.result()
        await plane.ask()
        await plane.result(2)
        assert plane.told.outcomes == ["broken", "invalid_input"]


async def test_a_backend_that_cannot_be_asked_the_task_is_a_failure_of_the_shadow():
    copies = ScriptedBackend("llm2", [])
    async with shadowed(ScriptedBackend("triton", [embedding()]), copies, rules=[rule(
        match={"task": "tensor"}, split=[{"backend": "triton", "model": "*"}], shadow={"backend": "llm2", "model": "s"},
    )], more_tasks={"tensor": TensorTask()}) as plane:  # fmt: skip
        asked = TensorInput(model="m", version="", payload=TensorPayload(inputs=()))
        await plane.ask(request("tensor", asked, model="m"))
        await plane.result()
        assert (plane.told.outcomes, copies.calls) == (["unsupported"], [])


class Broken(ScriptedBackend):
    """One that fails as no backend may."""

    async def infer(self, call: BackendCall, *, timeout_us: int):
        raise RuntimeError("unforeseen")
        yield


async def test_a_fault_that_is_not_foreseen_is_logged_and_is_nobodys(caplog):
    async with shadowed(real(), Broken("shadow", [])) as plane:
        events = await plane.ask()
        assert isinstance(events[-1], Finished)
        await plane.result()
        assert plane.told.outcomes == ["internal"]
        assert "shadow_broke" in caplog.text
        await until(lambda: not plane.loads)


async def test_copies_take_of_no_limit():
    limits = (Limit(kind="requests", amount=2, per="hour", burst=2), Limit(kind="concurrent", amount=1))
    caller = Caller(key_id="k", tenant="t", limits=limits)
    copies = shadow([asyncio.Event()])
    async with shadowed(real(), copies) as plane:
        for _ in range(2):
            await plane.ask(request(caller=caller))
        await until(lambda: len(copies.calls) == 2)
        with pytest.raises(RateLimited):
            await plane.ask(request(caller=caller))
        assert plane.shadows.in_flight == 2


# --- real requests come first ---------------------------------------------------------------------------


async def test_no_copy_is_sent_to_a_full_server():
    busy = asyncio.Event()
    other = rule(name="other", match={"task": "image-classification"}, split=[{"backend": "shadow", "model": "s"}])
    del other["shadow"]
    copies = shadow([busy, embedding()])
    async with shadowed(real(), copies, rules=[other, RULE], max_in_flight=1) as plane:
        holds = asyncio.create_task(plane.pipeline.gates["shadow"].enter(
            "", tenant="t", priority="interactive", within_us=1_000_000, work=lambda: 1
        ))  # fmt: skip
        await holds
        await plane.ask()
        assert (plane.told.outcomes, copies.calls, plane.shadows.skipped) == (["skipped"], [], 1)
        plane.pipeline.gates["shadow"].leave("")
        busy.set()
        await plane.ask()
        assert (await plane.result(2)).outcome == "answered"


async def test_of_copies_at_once_only_those_go_that_find_room():
    copies, go_on = shadow(), asyncio.Event()
    copies.scripts = [[go_on, embedding()]]
    async with shadowed(real(), copies, max_in_flight=2) as plane:
        await plane.ask()
        await plane.ask()  # both before the first copy has begun
        await plane.ask()
        await until(lambda: len(copies.calls) == 2)
        assert plane.told.outcomes == ["skipped"]
        go_on.set()
        await plane.result(3)
        assert plane.told.outcomes == ["skipped", "answered", "answered"]


async def test_a_copy_gives_its_place_up_to_a_real_request():
    copies = shadow([asyncio.Event()], [embedding()])
    direct = {"name": "direct", "match": {"tenant": "other"}, "split": [{"backend": "shadow", "model": "s"}]}
    async with shadowed(real(), copies, rules=[direct, RULE], max_in_flight=1) as plane:
        await plane.ask()
        await until(lambda: len(copies.calls) == 1)
        caller = Caller(key_id="k", tenant="other")
        started, *_, finished = await plane.ask(request(caller=caller))
        assert (started.route.backend, started.route.attempts) == ("shadow", 1)
        assert isinstance(finished, Finished)
        assert copies.calls[0].is_closed_early
        assert (plane.told.outcomes, plane.shadows.skipped) == (["skipped"], 1)
        assert plane.pipeline.board.all() == {}


async def test_one_real_request_takes_one_place():
    copies, go_on = shadow(), asyncio.Event()
    copies.scripts = [[go_on, embedding()]]
    direct = {"name": "direct", "match": {"tenant": "other"}, "split": [{"backend": "shadow", "model": "s"}]}
    async with shadowed(real(), copies, rules=[direct, RULE], max_in_flight=3) as plane:
        for number in range(3):
            await plane.ask()
            await until(lambda wanted=number + 1: len(copies.calls) == wanted)
        caller = Caller(key_id="k", tenant="other")
        asked = [asyncio.create_task(plane.ask(request(caller=caller))) for _ in range(2)]
        await until(lambda: len(copies.calls) == 5)
        assert plane.shadows.in_flight == 1
        go_on.set()
        await asyncio.gather(*asked)
        await plane.result(3)
        assert plane.told.outcomes == ["skipped", "skipped", "answered"]


async def test_no_copy_is_sent_where_a_breaker_is_open():
    copies = shadow()
    async with shadowed(real(), copies) as plane:
        for _ in range(FAILURES_TO_OPEN):
            plane.pipeline.board.failed(Place(backend="shadow", model="s"), now_us=monotonic_us(), fault=AWAY)
        await plane.ask()
        assert (plane.told.outcomes, copies.calls) == (["skipped"], [])


@pytest.mark.parametrize("action", ["block", "drain"])
async def test_no_copy_is_sent_where_a_switch_says_so(action):
    copies = shadow()
    scope = Scope(kind="backend", name="shadow")
    switch = Switch(id="x", action=action, scope=scope, reason="", owner="", created_ms=0, expires_ms=2**60)
    async with shadowed(real(), copies) as plane:
        rules = RuleSet(revision=8, rules=parse_rules([RULE]), switches=Switches(revision=1, items=(switch,)))
        plane.rules.replace(rules)
        await plane.ask()
        assert (plane.told.outcomes, copies.calls) == (["skipped"], [])


def switched(plane: Shadowed, scope: Scope) -> None:
    drain = Switch(id="x", action="drain", scope=scope, reason="", owner="", created_ms=0, expires_ms=2**60)
    switches = Switches(revision=1, items=(drain,))
    plane.rules.replace(RuleSet(revision=8, rules=parse_rules([RULE]), switches=switches))


@pytest.mark.parametrize("scope", [Scope(kind="everything"), Scope(kind="tenant", name="t")])
async def test_of_what_a_switch_refuses_no_copy_is_sent(scope):
    """The request itself was under way when it was set."""
    held, copies = asyncio.Event(), shadow()
    async with shadowed(real(held, embedding()), copies) as plane:
        asking = asyncio.create_task(plane.ask())
        await until(lambda: plane.loads)
        switched(plane, scope)
        held.set()
        assert len(await asking) == 3
        assert (plane.told.outcomes, copies.calls) == (["skipped"], [])


@pytest.mark.parametrize("kind", ["everything", "tenant", "task", "backend"])
async def test_a_drain_waits_for_copies_too(kind):
    names = {"everything": "", "tenant": "t", "task": "text-embedding", "backend": "shadow"}
    held = asyncio.Event()
    async with shadowed(real(), shadow([held, embedding()])) as plane:
        await plane.ask()
        await until(lambda: list(plane.shadows.at_servers()))
        switched(plane, Scope(kind=kind, name=names[kind]))
        assert report(plane.pipeline)["drains"] == {"x": 1}
        held.set()
        await plane.idle()
        assert report(plane.pipeline)["drains"] == {"x": 0}


async def test_a_backend_that_is_not_there_is_skipped():
    async with shadowed(real(), rules=[rule(shadow={"backend": "gone", "model": "s"})]) as plane:
        await plane.ask()
        assert (await plane.result()).pair.shadow == "gone/s"
        assert plane.told.outcomes == ["skipped"]


# --- the end ---------------------------------------------------------------------------------------------


async def test_close_takes_back_what_is_under_way():
    copies = shadow([asyncio.Event()])
    async with shadowed(real(), copies) as plane:
        for _ in range(3):
            await plane.ask()
        await until(lambda: len(copies.calls) == 3)
        await plane.shadows.close()
        assert all(entry.is_closed_early for entry in copies.calls)
        assert (plane.shadows.in_flight, plane.loads, plane.told.results) == (0, {}, [])
        await plane.ask()
        assert (plane.shadows.in_flight, len(copies.calls)) == (0, 3)


async def once(plane: Shadowed, chance: random.Random, number: int, *, stream: bool) -> None:
    asked = replace(
        chat(stream=stream),
        id=str(number),
        deadline_us=monotonic_us() + chance.choice([2_000, 30_000]),
        priority=chance.choice(["interactive", "batch"]),
    )
    leaves_after = chance.choice([1, 2, 100, 100, 100])
    with contextlib.suppress(GatewayError):
        async with aclosing(plane.pipeline.handle(asked)) as events:
            async for _ in events:
                leaves_after -= 1
                if not leaves_after:
                    return


@pytest.mark.parametrize("chunk", chunks(10))
async def test_whatever_becomes_of_requests_and_copies_all_is_given_back(chunk):
    chance = random.Random(chunk)  # noqa: S311 - chance of a test
    names = ("llm", "llm2")
    backends = [ScriptedBackend(name, []) for name in names]

    def script(*, stream: bool) -> list[object]:
        wait, fault = Pause(us=chance.choice([0, 0, 300, 1000, 60_000_000])), chance.choice([AWAY, FAILED, FAILED])
        answer = [Delta(data=b'{"choices":[]}'), Delta(data=b"{}")] if stream else [Message(body=body("a"))]
        return chance.choice([[wait, *answer], answer, answer, answer, [wait, fault], [*answer[:1], wait, fault]])

    def rules() -> tuple[object, ...]:
        split = [{"backend": name, "model": "m"} for name in chance.sample(names, 2)]
        copied = {"backend": chance.choice(names), "model": "m", "percent": chance.choice([30, 100])}
        return parse_rules([{"name": "r", "match": {"task": "*"}, "split": split, "shadow": copied}])

    async with shadowed(*backends, rules=[CHAT], max_in_flight=4, draw=chance.random, timeout_us=50_000) as plane:
        asked = []
        for number in range(150):
            stream = chance.random() < 0.5
            for backend in backends:
                backend.scripts = [script(stream=stream)]
            if chance.random() < 0.1:
                plane.rules.replace(RuleSet(revision=1, rules=rules()))
            asked.append(asyncio.ensure_future(once(plane, chance, number, stream=stream)))
            if chance.random() < 0.2:
                chance.choice(asked).cancel()
            await asyncio.sleep(chance.choice([0, 0, 0.002]))
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}
        if chance.random() < 0.5:
            await plane.idle()
            told = [result.request_id for result in plane.told.results]
            assert len(told) == len(set(told))
        await plane.shadows.close()
        assert (plane.loads, plane.seen.in_flight, plane.shadows.in_flight) == ({}, 0, 0)
        assert plane.told.results
