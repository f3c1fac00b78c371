"""Answers that are given again, through the whole data plane: idempotency keys, caches, single flight."""

import asyncio
import contextlib
import json

import httpx
import numpy as np
import openai
import pytest

from gateway.backends.scripted import ScriptedBackend
from gateway.core.answers import Claim, Slot
from gateway.core.errors import Fault, FaultKind, IdempotencyUnavailable
from gateway.core.fingerprints import digest
from gateway.core.tensors import from_numpy
from gateway.core.types import Delta, Message, Tensors, Usage
from gateway.stores.memory_answers import MemoryAnswers
from gateway.stores.redis_answers import RedisAnswers
from gateway.tasks.tensor import TensorTask
from gateway.wiring import monotonic_us
from tests.kit.app import EMBEDDING_KEY, KEY, LIMITED_KEY, embedding, running
from tests.kit.wait import until

EMBED = "/v1/tasks/text-embedding"
CHAT = "/v1/chat/completions"
TEXT = {"input": {"text": "hello"}}
ASK = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}]}
ONCE = {"idempotency-key": '"key-1"'}
NAMES = ("x-gateway-backend", "x-gateway-model", "x-gateway-attempts", "x-gateway-rule")
REFUSED = Fault(kind=FaultKind.REFUSED_INPUT, message="too long")
BROKEN = Fault(kind=FaultKind.BROKEN, message="garbage")


def rules(**policies):
    """One for each task; its only place is the first."""
    return [
        {
            "name": "embeddings",
            "match": {"task": "text-embedding"},
            "split": [{"backend": "triton", "model": "m"}],
            **policies,
        },
        {"name": "chat", "match": {"task": "general_llm"}, "split": [{"backend": "llm", "model": "smol"}], **policies},
    ]


def triton(*scripts):
    return ScriptedBackend("triton", *(scripts or ([embedding()],)))


def said(text="hi"):
    body = {"id": f"up-{text}", "object": "chat.completion", "created": 1, "model": "smol"}
    message = {"role": "assistant", "content": text}
    body["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
    body["usage"] = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return Message(body=json.dumps(body).encode(), usage=Usage(input_tokens=3, output_tokens=2))


def words(*texts):
    for number, text in enumerate(texts):
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        event = {"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "smol", "choices": [choice]}
        usage = Usage(input_tokens=3, output_tokens=number + 1) if number == len(texts) - 1 else None
        yield Delta(data=json.dumps(event).encode(), usage=usage)


class Down:
    """A store that is out of reach."""

    async def claim(self, *_, **__):
        raise IdempotencyUnavailable("out of reach")

    keep = release = renew = claim


class Failing(MemoryAnswers):
    """One that is out of reach when answers are kept."""

    async def keep(self, *_, **__):
        raise IdempotencyUnavailable("out of reach")

    release = keep


def store():
    return MemoryAnswers(monotonic_us, max_bytes=2**26)


def same(one, other):
    assert other.status_code == one.status_code
    assert other.content == one.content
    assert [other.headers.get(name) for name in NAMES] == [one.headers.get(name) for name in NAMES]


# --- an idempotency key --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [(EMBED, TEXT), ("/v1/infer", {"task": "text-embedding", **TEXT}), (CHAT, ASK), (CHAT, {**ASK, "stream": True})],
)
async def test_a_request_sent_again_has_the_same_answer_and_is_done_once(path, body):
    script = list(words("a", "b", "c")) if body.get("stream") else [said()]
    backends = triton(), ScriptedBackend("llm", script)
    async with running(backends, rules=rules(), prices={"llm/smol": {"input": 1, "output": 2}}) as gw:
        first = await gw.post(path, body, **ONCE)
        second = await gw.post(path, body, **ONCE, **{"x-request-id": "again"})
        others = await gw.post(path, body, **{"idempotency-key": "key-2"})
    same(first, second)
    assert first.status_code == others.status_code == 200
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert second.headers["x-request-id"] == "again"
    assert "idempotency-replayed" not in others.headers
    assert sum(len(backend.calls) for backend in backends) == 2
    assert [record.recalled for record in gw.seen.records] == ["", "replayed", ""]
    again = gw.seen.records[1]
    assert (again.route, again.usage, again.error, gw.seen.in_flight) == (None, Usage(), None, 0)


async def test_the_cost_of_an_answer_given_again_is_nothing():
    async with running(
        [ScriptedBackend("llm", [said()])], rules=rules(), prices={"llm/smol": {"input": 1, "output": 2}}
    ) as gw:
        first, second = [await gw.post(CHAT, ASK, **ONCE) for _ in range(2)]
    assert first.headers["x-gateway-cost-usd"] == "0.000007"
    assert second.headers["x-gateway-cost-usd"] == "0"
    assert first.json()["usage"]["cost_usd"] == second.json()["usage"]["cost_usd"] == 0.000007


async def test_the_official_client_is_answered_again_whole_and_streamed():
    llm = ScriptedBackend("llm", [said("one")], list(words("x", "y")), [said("two")])
    async with (
        running([llm], rules=rules()) as gw,
        openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key=KEY, http_client=httpx.AsyncClient(trust_env=False)) as sdk,
    ):
        whole = [await sdk.chat.completions.create(**ASK, extra_headers={"Idempotency-Key": "a"}) for _ in range(2)]
        streams = []
        for _ in range(2):
            chunks = await sdk.chat.completions.create(**ASK, stream=True, extra_headers={"Idempotency-Key": "b"})
            streams.append([chunk async for chunk in chunks])
    assert whole[0] == whole[1]
    assert [chunk.choices[0].delta.content for chunk in streams[1]] == ["x", "y"]
    assert streams[0] == streams[1]
    assert len(llm.calls) == 2


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
async def test_tensors_are_given_again_on_the_protocols_path(accept):
    parts = [
        Tensors(outputs=(from_numpy("Y", np.full(3, number, np.float32)),), version="3", is_final=number == 2)
        for number in range(3)
    ]
    server = ScriptedBackend("triton", parts if "nd" in accept else parts[2:])
    rule = {"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}
    sent = {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [1]}]}
    async with running([server], rules=[rule], more_tasks={"tensor": TensorTask()}) as gw:
        answers = [await gw.post("/v2/models/m/infer", sent, **ONCE, accept=accept) for _ in range(2)]
        other = await gw.post("/v2/models/n/infer", sent, **ONCE)
    same(*answers)
    assert answers[0].status_code == 200
    assert answers[0].content.count(b'"Y"') == len(server.scripts[0])
    assert other.status_code == 422
    assert "this idempotency key was used for another request" in other.json()["error"]
    assert len(server.calls) == 1


@pytest.mark.parametrize("other", [{"input": {"text": "other"}}, {**TEXT, "parameters": {"truncate": True}}])
async def test_another_body_under_the_key_is_refused(other):
    async with running([triton()], rules=rules()) as gw:
        await gw.post(EMBED, TEXT, **ONCE)
        refused = await gw.post(EMBED, other, **ONCE)
        elsewhere = await gw.post("/v1/infer", {"task": "text-embedding", **TEXT}, **ONCE)
    for answer in (refused, elsewhere):
        assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_mismatch")
        assert answer.json()["errors"][0]["field"] == "idempotency-key"


async def test_a_form_sent_again_has_other_borders_and_is_the_same():
    async with running([triton()], rules=rules()) as gw:
        answers = [
            await gw.http.post(EMBED, files={"text": (None, text)}, headers=ONCE)
            for text in ("hello", "hello", "other")
        ]
    same(answers[0], answers[1])
    assert [answer.status_code for answer in answers] == [200, 200, 422]


@pytest.mark.parametrize("key", ["", '""', "x" * 256, "caf\u00e9", "a\tb"])
async def test_a_key_that_is_none_is_refused(key):
    async with running([triton()], rules=rules()) as gw:
        answer = await gw.http.post(EMBED, json=TEXT, headers={"idempotency-key": key.encode("latin-1")})
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_request")
    assert answer.json()["errors"][0]["field"] == "idempotency-key"


async def test_a_key_is_the_same_bare_and_quoted():
    async with running([triton()], rules=rules()) as gw:
        for key in ("a b", '"a b"', r'"a \"b\\"', 'a "b\\'):
            assert (await gw.post(EMBED, TEXT, **{"idempotency-key": key})).status_code == 200
    assert len(gw.backends["triton"].calls) == 2


async def test_tenants_do_not_share_keys():
    async with running([triton()], rules=rules()) as gw:
        await gw.post(EMBED, TEXT, **ONCE)
        other = await gw.post(EMBED, TEXT, **ONCE, authorization=f"Bearer {EMBEDDING_KEY}")
    assert "idempotency-replayed" not in other.headers
    assert len(gw.backends["triton"].calls) == 2


async def test_the_same_while_it_is_under_way_is_refused_or_waits():
    go = asyncio.Event()
    for mode, status in (("refuse", 409), ("wait", 200)):
        go.clear()
        async with running([triton([go, embedding()])], rules=rules(idempotency=mode)) as gw:
            first = asyncio.create_task(gw.post(EMBED, TEXT, **ONCE))
            await until(lambda gw=gw: gw.backends["triton"].calls)
            others = [asyncio.create_task(gw.post(EMBED, TEXT, **ONCE)) for _ in range(5)]
            if mode == "refuse":
                await asyncio.gather(*others)
            else:
                await until(lambda gw=gw: len(gw.seen.began_tasks) == 6)
            mismatch = await gw.post(EMBED, {"input": {"text": "x"}}, **ONCE)
            go.set()
            answer = await first
            for other in others:
                assert (await other).status_code == status
                if status == 200:
                    same(answer, await other)
                else:
                    assert (await other).json()["code"] == "idempotency_in_progress"
                    assert (await other).headers["retry-after"] == "1"
            assert mismatch.status_code == 422
            assert len(gw.backends["triton"].calls) == 1


async def test_who_waits_longer_than_its_time_is_told_that_it_is_under_way():
    go = asyncio.Event()
    async with running([triton([go, embedding()])], rules=rules(idempotency="wait")) as gw:
        first = asyncio.create_task(gw.post(EMBED, TEXT, **ONCE))
        await until(lambda: gw.backends["triton"].calls)
        late = await gw.post(EMBED, TEXT, **ONCE, **{"x-timeout-ms": "30"})
        go.set()
        await first
    assert (late.status_code, late.json()["code"]) == (409, "idempotency_in_progress")


async def test_a_definite_refusal_is_given_again():
    async with running([triton([REFUSED], [embedding()])], rules=rules()) as gw:
        first, second = [await gw.post(EMBED, TEXT, **ONCE) for _ in range(2)]
    assert first.status_code == 422
    same(first, second)
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert len(gw.backends["triton"].calls) == 1
    assert [record.code for record in gw.seen.records] == ["invalid_input"] * 2


async def test_after_a_failure_the_request_is_made_again():
    async with running([triton([BROKEN], [embedding()])], rules=rules()) as gw:
        first, second = [await gw.post(EMBED, TEXT, **ONCE) for _ in range(2)]
    assert (first.status_code, second.status_code) == (502, 200)
    assert "idempotency-replayed" not in second.headers


async def test_a_stream_that_broke_off_is_made_again():
    llm = ScriptedBackend("llm", [*words("a"), BROKEN], list(words("b")))
    async with running([llm], rules=rules()) as gw:
        first, second = [await gw.post(CHAT, {**ASK, "stream": True}, **ONCE) for _ in range(2)]
    assert "[DONE]" not in first.text
    assert "[DONE]" in second.text
    assert '"b"' in second.text


@pytest.mark.parametrize("stream", [False, True])
async def test_after_its_caller_left_the_request_is_made_again(stream):
    never = asyncio.Event()
    llm = ScriptedBackend("llm", [*([*words("a")] if stream else []), never], list(words("b")) if stream else [said()])
    body = {**ASK, "stream": stream}
    async with running([llm], rules=rules()) as gw:
        with contextlib.suppress(httpx.ReadTimeout):
            await gw.http.post(CHAT, json=body, headers=ONCE, timeout=0.2)
        await until(lambda: gw.seen.records)
        assert gw.seen.records[0].code == "client_closed"
        again = await gw.post(CHAT, body, **ONCE)
    assert again.status_code == 200
    assert len(llm.calls) == 2


async def test_a_request_over_a_limit_keeps_nothing_and_frees_its_key():
    who = {"authorization": f"Bearer {LIMITED_KEY}"}
    async with running([triton()], rules=rules()) as gw:
        first = await gw.post(EMBED, TEXT, **who, **ONCE)
        again = [await gw.post(EMBED, TEXT, **who, **ONCE) for _ in range(3)]
        other = [await gw.post(EMBED, TEXT, **who, **{"idempotency-key": "b"}) for _ in range(2)]
    assert [answer.status_code for answer in (first, *again, *other)] == [200, 200, 200, 429, 429, 429]
    assert again[1].headers["x-ratelimit-remaining-requests"] == "0"
    assert "idempotency-replayed" not in again[2].headers
    assert other[1].json()["code"] == "rate_limited"


async def test_the_key_of_a_killed_worker_is_free_when_its_lease_ends():
    answers = store()
    body = json.dumps(TEXT).encode()
    fingerprint = digest("POST", EMBED, "", body)
    slot = Slot(kind="once", owner="t1", name=digest("key-1"))
    await answers.claim(Claim(slot=slot, by="dead", fingerprint=fingerprint), lease_us=300_000)
    async with running([triton()], rules=rules(idempotency="wait"), answers=answers) as gw:
        answer = await gw.http.post(EMBED, content=body, headers={**ONCE, "content-type": "application/json"})
    assert answer.status_code == 200
    assert len(gw.backends["triton"].calls) == 1


async def test_without_the_store_nothing_is_done_under_a_key():
    async with running([triton()], rules=rules(), answers=Down()) as gw:
        refused = await gw.post(EMBED, TEXT, **ONCE)
        without = await gw.post(EMBED, TEXT)
    assert (refused.status_code, refused.json()["code"]) == (503, "idempotency_unavailable")
    assert refused.headers["retry-after"] == "1"
    assert without.status_code == 200
    assert len(gw.backends["triton"].calls) == 1


async def test_an_answer_that_cannot_be_kept_is_given_all_the_same():
    answers = Failing(monotonic_us, max_bytes=2**20)
    async with running([triton()], rules=rules(), answers=answers) as gw:
        assert (await gw.post(EMBED, TEXT, **ONCE)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_over_the_bound_is_given_and_not_kept(stream):
    long = "x" * 600_000
    llm = ScriptedBackend("llm", list(words(long, long)) if stream else [said(long + long)])
    async with running([llm], rules=rules()) as gw:
        answers = [await gw.post(CHAT, {**ASK, "stream": stream}, **ONCE) for _ in range(2)]
    assert all(len(answer.content) > 1_200_000 for answer in answers)
    assert len(llm.calls) == 2


# --- a cache -------------------------------------------------------------------------------------


async def test_a_cache_gives_the_answer_again_and_says_so():
    async with running([triton()], rules=rules(cache={"ttl_s": 60})) as gw:
        first = await gw.post(EMBED, TEXT)
        second = await gw.post(EMBED, TEXT, **{"x-request-id": "two"})
        other = await gw.post(EMBED, {"input": {"text": "x"}})
    assert first.headers["cache-status"] == "gateway; fwd=uri-miss; stored"
    assert "age" not in first.headers
    assert second.headers["cache-status"] in ("gateway; hit; ttl=59", "gateway; hit; ttl=60")
    assert int(second.headers["age"]) <= 1
    assert other.headers["cache-status"] == "gateway; fwd=uri-miss; stored"
    assert second.json() == {**first.json(), "id": "two"}
    assert len(gw.backends["triton"].calls) == 2
    assert [record.recalled for record in gw.seen.records] == ["miss", "hit", "miss"]


async def test_streams_and_whole_answers_are_kept_apart_and_fields_may_be_in_any_order():
    llm = ScriptedBackend("llm", [said()], list(words("a", "b")))
    async with running([llm], rules=rules(cache={"ttl_s": 60})) as gw:
        whole = [await gw.post(CHAT, body) for body in (ASK, {**dict(reversed(ASK.items())), "user": "me"})]
        streamed = [await gw.post(CHAT, {**ASK, "stream": True}) for _ in range(2)]
    same(whole[0], whole[1])
    same(streamed[0], streamed[1])
    assert len(llm.calls) == 2
    assert "hit" in streamed[1].headers["cache-status"]


@pytest.mark.parametrize(
    ("header", "status", "calls"),
    [
        ("no-store", "gateway; fwd=bypass", 2),
        ("no-cache", "gateway; fwd=request; stored", 2),
        ("max-age=0", "gateway; fwd=request; stored", 2),
        ("max-age=1000", "gateway; hit; ttl=", 1),
    ],
)
async def test_what_a_caller_says_of_the_cache_is_obeyed(header, status, calls):
    async with running([triton()], rules=rules(cache={"ttl_s": 60})) as gw:
        await gw.post(EMBED, TEXT)
        await asyncio.sleep(0.002)  # max-age=0 is a length of time
        answer = await gw.post(EMBED, TEXT, **{"cache-control": header})
    assert answer.headers["cache-status"].startswith(status)
    assert len(gw.backends["triton"].calls) == calls


async def test_no_store_keeps_nothing():
    async with running([triton()], rules=rules(cache={"ttl_s": 60})) as gw:
        for _ in range(2):
            await gw.post(EMBED, TEXT, **{"cache-control": "no-store"})
        await gw.post(EMBED, TEXT)
    assert len(gw.backends["triton"].calls) == 3


@pytest.mark.parametrize(("shared_by", "calls"), [("tenant", 2), ("all", 1)])
async def test_tenants_share_answers_only_where_the_rule_says_so(shared_by, calls):
    cache = {"ttl_s": 60, "shared_by": shared_by}
    async with running([triton()], rules=rules(cache=cache)) as gw:
        mine = await gw.post(EMBED, TEXT, **{"x-request-id": "mine"})
        other = await gw.post(EMBED, TEXT, authorization=f"Bearer {EMBEDDING_KEY}")
    assert mine.json()["output"] == other.json()["output"]
    assert other.json()["id"] != "mine"
    assert len(gw.backends["triton"].calls) == calls


async def test_what_is_put_in_order_is_not_cached():
    async with running([triton()], rules=rules(cache={"ttl_s": 60})) as gw:
        answers = [await gw.post(EMBED, TEXT, **{"x-ordering-key": "k"}) for _ in range(2)]
    assert len(gw.backends["triton"].calls) == 2
    assert all("cache-status" not in answer.headers for answer in answers)


async def test_refusals_and_failures_are_not_cached():
    async with running([triton([REFUSED], [BROKEN], [embedding()])], rules=rules(cache={"ttl_s": 60})) as gw:
        statuses = [(await gw.post(EMBED, TEXT)).status_code for _ in range(4)]
    assert statuses == [422, 502, 200, 200]
    assert len(gw.backends["triton"].calls) == 3


async def test_without_the_store_there_is_no_cache():
    async with running([triton()], rules=rules(cache={"ttl_s": 60}), answers=Down()) as gw:
        answers = [await gw.post(EMBED, TEXT) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].headers["cache-status"] == "gateway; fwd=bypass"


async def test_a_hit_takes_a_request_of_the_limits_and_no_turn():
    who = {"authorization": f"Bearer {LIMITED_KEY}"}
    async with running([triton()], rules=rules(cache={"ttl_s": 60})) as gw:
        answers = [await gw.post(EMBED, TEXT, **who) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]


# --- single flight -------------------------------------------------------------------------------


async def test_without_single_flight_the_same_at_the_same_time_is_made_by_each():
    go = asyncio.Event()
    async with running([triton([go, embedding()])], rules=rules(cache={"ttl_s": 60})) as gw:
        asked = [asyncio.create_task(gw.post(EMBED, TEXT)) for _ in range(3)]
        await until(lambda: len(gw.backends["triton"].calls) == 3)
        go.set()
        answers = [await one for one in asked]
    stored = sorted(answer.headers["cache-status"] for answer in answers)
    assert stored == ["gateway; fwd=uri-miss", "gateway; fwd=uri-miss", "gateway; fwd=uri-miss; stored"]


FLIGHT = {"ttl_s": 60, "single_flight": True}


async def test_the_same_at_the_same_time_is_made_once():
    go = asyncio.Event()
    async with running([triton([go, embedding()])], rules=rules(cache=FLIGHT)) as gw:
        asked = [asyncio.create_task(gw.post(EMBED, TEXT)) for _ in range(20)]
        await until(lambda: len(gw.seen.began_tasks) == 20)
        fresh = asyncio.create_task(gw.post(EMBED, TEXT, **{"cache-control": "no-cache"}))
        await until(lambda: len(gw.backends["triton"].calls) == 2)
        go.set()
        answers = [await one for one in asked]
        assert (await fresh).headers["cache-status"] == "gateway; fwd=request"
    assert {answer.status_code for answer in answers} == {200}
    said_of = sorted(answer.headers["cache-status"] for answer in answers)
    assert said_of == ["gateway; fwd=uri-miss; collapsed"] * 19 + ["gateway; fwd=uri-miss; stored"]
    assert len(gw.backends["triton"].calls) == 2
    assert gw.loads == {}


async def test_after_a_failure_one_of_those_who_wait_takes_over():
    go = asyncio.Event()
    async with running([triton([go, BROKEN], [embedding()])], rules=rules(cache=FLIGHT)) as gw:
        asked = [asyncio.create_task(gw.post(EMBED, TEXT)) for _ in range(5)]
        await until(lambda: len(gw.seen.began_tasks) == 5)
        go.set()
        statuses = sorted([(await one).status_code for one in asked])
    assert statuses == [200, 200, 200, 200, 502]
    assert len(gw.backends["triton"].calls) == 2


async def test_after_the_one_left_one_of_those_who_wait_takes_over():
    never = asyncio.Event()
    async with running([triton([never], [embedding()])], rules=rules(cache=FLIGHT)) as gw:
        leader = asyncio.create_task(gw.post(EMBED, TEXT))
        await until(lambda: gw.backends["triton"].calls)
        asked = [asyncio.create_task(gw.post(EMBED, TEXT)) for _ in range(3)]
        await until(lambda: len(gw.seen.began_tasks) == 4)
        leader.cancel()
        assert [(await one).status_code for one in asked] == [200, 200, 200]
    assert len(gw.backends["triton"].calls) == 2


async def test_a_definite_refusal_is_shared_by_those_who_wait():
    go = asyncio.Event()
    async with running([triton([go, REFUSED])], rules=rules(cache=FLIGHT)) as gw:
        asked = [asyncio.create_task(gw.post(EMBED, TEXT)) for _ in range(5)]
        await until(lambda: len(gw.seen.began_tasks) == 5)
        go.set()
        assert {(await one).status_code for one in asked} == {422}
    assert len(gw.backends["triton"].calls) == 1


async def test_who_waits_for_another_keeps_to_its_own_time():
    go = asyncio.Event()
    async with running([triton([go, embedding()])], rules=rules(cache=FLIGHT)) as gw:
        first = asyncio.create_task(gw.post(EMBED, TEXT))
        await until(lambda: gw.backends["triton"].calls)
        late = await gw.post(EMBED, TEXT, **{"x-timeout-ms": "30"})
        go.set()
        assert (await first).status_code == 200
    assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")


async def test_two_workers_make_one_answer(redis_client, redis_prefix):
    go = asyncio.Event()
    stores = [RedisAnswers(redis_client, redis_prefix, max_bytes=2**26, timeout_s=5) for _ in range(2)]
    one, two = triton([go, embedding()]), triton([go, embedding()])
    policy = rules(cache=FLIGHT, idempotency="wait")
    async with (
        running([one], rules=policy, answers=stores[0]) as here,
        running([two], rules=policy, answers=stores[1]) as there,
    ):
        for headers in ({}, ONCE):
            go.clear()
            asked = [asyncio.create_task(gw.post(EMBED, TEXT, **headers)) for gw in (here, there) for _ in range(4)]
            await until(lambda: len(here.seen.began_tasks + there.seen.began_tasks) % 8 == 0 and one.calls + two.calls)
            go.set()
            answers = [await task for task in asked]
            assert {answer.status_code for answer in answers} == {200}
            assert len({answer.json()["output"]["embeddings"][0][0] for answer in answers}) == 1
        assert len({answer.content for answer in answers}) == 1
    assert len(one.calls + two.calls) == 2
    for store_ in stores:
        await store_.close()


# --- leases --------------------------------------------------------------------------------------


async def test_the_lease_of_a_long_request_is_renewed(monkeypatch):
    monkeypatch.setattr("gateway.recall.LEASE_US", 300_000)
    monkeypatch.setattr("gateway.recall.RENEW_US", 10_000)
    go, answers, renewed = asyncio.Event(), store(), []
    renew = answers.renew

    async def counted(claim, *, lease_us):
        await renew(claim, lease_us=lease_us)
        renewed.append(monotonic_us())

    answers.renew = counted
    async with running([triton([go, embedding()])], rules=rules(), answers=answers) as gw:
        first = asyncio.create_task(gw.post(EMBED, TEXT, **ONCE))
        await until(lambda: renewed and renewed[-1] - renewed[0] > 600_000)
        assert (await gw.post(EMBED, TEXT, **ONCE)).status_code == 409
        go.set()
        assert (await first).status_code == 200
        assert (await gw.post(EMBED, TEXT, **ONCE)).headers["idempotency-replayed"] == "true"
