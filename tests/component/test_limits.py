"""Limits through the whole data plane: what each way in which a request can go takes of them, and gives back."""

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from gateway.backends.llm.backend import Limits
from gateway.backends.scripted import ScriptedBackend, ScriptedServer, Step, Told
from gateway.core.errors import Fault, FaultKind
from gateway.core.models import ModelFacts, TensorFacts
from gateway.core.types import Caller, Limit, Message, Usage
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.tasks.tensor import TensorTask
from tests.kit.app import DEFAULT_RULES, KEY, LIMITED_KEY, Harness, embedding, running, scores
from tests.kit.limited import DAY, NOW, SECOND, concurrent, requests, tokens, usd
from tests.kit.llm_plane import CHAT, Endpoint, chat_rule, llm_plane
from tests.kit.relayed import asked, script, text_of
from tests.kit.upstream import HOLD, RST, Pause, Upstream, delta, error_reply, event, json_reply, sse_head
from tests.kit.wait import until

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
OWN, COLLEAGUE, STRANGER = "secret-own", "secret-colleague", "secret-stranger"
PER_TOKEN = 1000  # nano-dollars: one dollar for a million
PROMPT = 5  # what `hi` is taken for
RESERVED = PROMPT + 20
ALL_KINDS = (requests(100, "day"), tokens(1000, "day"), usd(1000 * PER_TOKEN), concurrent(2))
EMBED = ("/v1/tasks/text-embedding", {"input": {"text": "a"}})
FACTS = {name: ModelFacts(name=name, inputs={"X": TensorFacts(datatype="FP32", shape=(1,))}) for name in "mn"}


class Clock:
    """Unix time that stands still."""

    now_us = NOW

    def __call__(self) -> int:
        return self.now_us


@dataclass(frozen=True, slots=True)
class Used:
    """What is taken of a caller's `ALL_KINDS` at a moment."""

    requests: int = 0
    tokens: int = 0
    nano_usd: int = 0
    places: int = 0


@dataclass
class Scene:
    """A gateway whose callers have limits, and the clock that these go by."""

    gw: Harness
    clock: Clock

    @property
    def used(self) -> Used:
        book = self.gw.pipeline.admissions._book
        own = book._owners.get("here")
        if own is None:
            return Used()
        assert bool(own.open) is (self.gw.seen.in_flight > 0)
        tats = {
            kind: sum(tat_us - self.clock.now_us for key, tat_us in own.tats_us.items() if f":{kind}:" in key)
            for kind in ("requests", "tokens")
        }
        return Used(
            requests=tats["requests"] * 100 // DAY,
            tokens=tats["tokens"] * 1000 // DAY,
            nano_usd=sum(spent for spent, _ in own.spent.values()),
            places=sum(own.places.values()),
        )

    async def chat(self, *, key: str = OWN, stream: bool = False, **fields: Any) -> httpx.Response:
        body = asked(stream=stream, **{"max_tokens": 20, **fields})
        return await self.gw.post(CHAT, body, authorization=f"Bearer {key}")

    async def chats(self, number: int, **fields: Any) -> list[int]:
        """The statuses of so many at once."""
        return [one.status_code for one in await asyncio.gather(*(self.chat(**fields) for _ in range(number)))]

    async def embed(self, *, key: str = OWN, **headers: str) -> httpx.Response:
        return await self.gw.post(*EMBED, authorization=f"Bearer {key}", **headers)

    async def begin(self, up: Upstream, **fields: Any) -> asyncio.Task[httpx.Response]:
        """Send one that stays at its endpoint."""
        before = len(up.requests)
        task = asyncio.create_task(self.chat(**fields))
        await up.request(before)
        return task


def callers(limits: Sequence[Limit]) -> dict[str, Caller]:
    names = {OWN: ("own", "acme"), COLLEAGUE: ("colleague", "acme"), STRANGER: ("stranger", "other")}
    return {key: Caller(key_id=key_id, tenant=tenant, limits=tuple(limits)) for key, (key_id, tenant) in names.items()}


@asynccontextmanager
async def llm_scene(*endpoints: Upstream | Endpoint, limits: Sequence[Limit] = ALL_KINDS, **options: Any):
    clock = Clock()
    prices = {f"model-{number}": {"input": 1, "output": 1} for number in (1, 2)} | {"dear": {"input": 0, "output": 9}}
    async with llm_plane(
        *endpoints, more_callers=callers(limits), admissions=MemoryAdmissions(clock), prices=prices, **options
    ) as gw:
        yield Scene(gw, clock)


@asynccontextmanager
async def scene(
    *limits: Limit, script: Sequence[Step] = (embedding(),), more_rules: Sequence[Mapping[str, Any]] = ()
) -> AsyncIterator[Scene]:
    """Over scripted backends: `llm` answers with a usage of 60 tokens, `triton` plays the script."""
    clock = Clock()
    llm = ScriptedBackend("llm", [Message(body=b"{}", usage=Usage(input_tokens=20, output_tokens=40))])
    triton = ScriptedServer("triton", script, told=Told(facts=FACTS))
    async with running(
        [triton, llm],
        rules=[
            *more_rules,
            *DEFAULT_RULES,
            {"name": "any", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]},
        ],
        more_tasks={"tensor": TensorTask()},
        more_callers=callers(limits),
        admissions=MemoryAdmissions(clock),
        prices={"smollm2": {"input": 1, "output": 1}},
    ) as gw:
        yield Scene(gw, clock)


# --- each kind of limit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "passed"),
    [
        (requests(3, "day"), 3),
        (requests(10, "day", burst=2), 2),
        (tokens(60, "day"), 1),  # 25 were reserved and 60 used: by reservations alone a second one would pass
        (usd(60 * PER_TOKEN, "day"), 1),
        (usd(145 * PER_TOKEN, "day"), 3),
    ],
    ids=str,
)
async def test_one_after_another_until_it_is_used_up(limit, passed):
    async with scene(limit) as at:
        statuses = [(await at.chat()).status_code for _ in range(5)]
        at.clock.now_us += DAY
        again = (await at.chat()).status_code
    assert statuses == [200] * passed + [429] * (5 - passed)
    assert again == 200


@both
async def test_what_is_reserved_is_settled_to_what_was_used(stream):
    up = Upstream([Pause(0.05), *script(stream=stream, prompt=20, made=40)])
    async with llm_scene(up) as at:
        task = await at.begin(up, stream=stream)
        assert at.used == Used(1, RESERVED, RESERVED * PER_TOKEN, 1)
        answer = await task
        assert text_of(answer) == "hi"
        await until(lambda: not at.gw.seen.in_flight)
        assert at.used == Used(1, 60, 60 * PER_TOKEN, 0)
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - RESERVED)


@both
async def test_so_many_at_once_and_no_more(stream):
    up = Upstream([Pause(0.05), *script(stream=stream)])
    async with llm_scene(up, limits=[concurrent(2)]) as at:
        assert sorted(await at.chats(6, stream=stream)) == [200, 200, 429, 429, 429, 429]
        await until(lambda: not at.gw.seen.in_flight)
        assert at.used == Used()
        assert sorted(await at.chats(2, stream=stream)) == [200, 200]


@pytest.mark.parametrize("limit", [tokens(100, "day"), usd(100 * PER_TOKEN)], ids=["tokens", "money"])
async def test_work_admitted_at_once_stays_within_the_limit_and_what_was_not_reserved(limit):
    """Case RL-01: 20 at once, each reserves 25 and will use 60."""
    up = Upstream([Pause(0.2), *script(stream=False, prompt=20, made=40)])
    async with llm_scene(up, limits=[limit]) as at:
        assert sorted(await at.chats(20)) == [200] * 4 + [429] * 16
        assert len(up.requests) == 4
        assert (await at.chat()).status_code == 429  # 240 were used: it is in debt
        at.clock.now_us += 31 * DAY
        assert (await at.chat()).status_code == 200


async def test_remaining_falls_to_nothing_and_a_request_after_retry_after_passes():
    """Case RL-06."""
    async with scene() as at:
        told = [await at.embed(key=LIMITED_KEY) for _ in range(6)]
        assert [one.headers["x-ratelimit-remaining-requests"] for one in told] == ["2", "1", "0", "0", "0", "0"]
        assert [one.status_code for one in told] == [200] * 3 + [429] * 3
        refused = told[-1]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
        assert "3 requests per minute" in refused.json()["detail"]
        at.clock.now_us += int(refused.headers["retry-after"]) * SECOND - 1
        assert (await at.embed(key=LIMITED_KEY)).status_code == 429
        at.clock.now_us += 1
        assert (await at.embed(key=LIMITED_KEY)).status_code == 200


async def test_a_request_that_no_waiting_helps_is_told_so():
    async with scene(tokens(1000, "day"), usd(100 * PER_TOKEN)) as at:
        hopeless = await at.chat(max_tokens=2000)
        assert hopeless.status_code == 429
        assert hopeless.headers["x-should-retry"] == "false"
        assert "more than it ever gives" in hopeless.json()["error"]["message"]
        spent = await at.chat(max_tokens=90)
        assert spent.status_code == 200
        money = await at.chat(max_tokens=90)
        assert money.status_code == 429
        assert money.headers["x-should-retry"] == "false"
        assert "USD per month" in money.json()["error"]["message"]
        assert at.used.tokens == 60


async def test_without_a_bound_of_its_own_an_answer_is_expected_to_be_of_the_usual_length():
    up = Upstream([Pause(0.05), *script(stream=False)])
    async with llm_scene(up) as at:
        task = await at.begin(up, max_tokens=None)
        assert at.used.tokens == PROMPT + 338
        await task


@pytest.mark.parametrize(("fallback", "reserves_one"), [("local", True), ("llm", False)])
async def test_what_no_llm_may_answer_reserves_one_token(fallback, reserves_one):
    images = {
        "name": "pictures",
        "match": {"task": "image-classification"},
        "split": [{"backend": "triton", "model": "m"}],
        "fallback": [{"backend": fallback, "model": "smollm2"}],
    }
    async with scene(tokens(2000, "day"), script=[scores(0.1, 0.2, 0.7)], more_rules=[images]) as at:
        body = {"input": {"image": base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()}}
        answer = await at.gw.post("/v1/tasks/image-classification", body, authorization=f"Bearer {OWN}")
    assert answer.status_code == 200, answer.text
    assert (answer.headers["x-ratelimit-remaining-tokens"] == "1999") is reserves_one


async def test_a_used_up_limit_lets_nothing_pass_that_it_counts_not_even_what_takes_little():
    async with scene(tokens(60, "day")) as at:
        assert (await at.chat()).status_code == 200
        assert (await at.embed()).status_code == 429


# --- which requests a limit counts -----------------------------------------------------------------


async def test_a_limit_of_a_task_counts_that_task_alone():
    async with scene(requests(1, "day", task="general_llm")) as at:
        assert [(await at.chat()).status_code for _ in range(2)] == [200, 429]
        assert (await at.embed()).status_code == 200


async def test_a_limit_of_a_model_counts_those_that_name_it():
    async with scene(requests(1, "day", model="m")) as at:
        body = {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [1]}]}
        asked_for = [
            (await at.gw.post(f"/v2/models/{name}/infer", body, authorization=f"Bearer {OWN}")).status_code
            for name in ("m", "m", "n", "n")
        ]
        assert asked_for == [200, 429, 200, 200]
        assert (await at.embed()).status_code == 200


async def test_a_limit_of_a_priority_counts_that_priority_alone():
    async with scene(requests(1, "day", priority="batch")) as at:
        assert [(await at.embed(**{"x-priority": "batch"})).status_code for _ in range(2)] == [200, 429]
        assert (await at.embed()).status_code == 200


@pytest.mark.parametrize(
    ("shared_by", "statuses"), [("key", [200, 200, 200]), ("tenant", [200, 429, 200]), ("all", [200, 429, 429])]
)
async def test_who_shares_a_limit(shared_by, statuses):
    async with scene(requests(1, "day", shared_by=shared_by)) as at:
        told = [(await at.embed(key=key)).status_code for key in (OWN, COLLEAGUE, STRANGER)]
        assert told == statuses
        assert (await at.embed(key=KEY)).status_code == 200


async def test_several_windows_hold_at_once():
    async with scene(requests(2, "second"), requests(3, "day")) as at:
        statuses = [(await at.embed()).status_code for _ in range(3)]
        at.clock.now_us += SECOND
        statuses += [(await at.embed()).status_code for _ in range(2)]
        assert statuses == [200, 200, 429, 200, 429]


# --- what a failed request takes -------------------------------------------------------------------

REFUSED = error_reply(400, {"message": "no", "type": "invalid_request_error"})
FAILED = json_reply(500, {"error": {"message": "broken"}})
ENDS = {  # how it ends: the endpoint's script, the status
    "refused by the endpoint": (REFUSED, 400),
    "failed there": (FAILED, 502),
    "full": (error_reply(429, {"message": "slow down"}), 429),
    "reset before the answer": ([RST], 502),
    "garbage": (json_reply(200, [1]), 502),
    "late": ([HOLD], 504),
}


@both
@pytest.mark.parametrize(("answer", "status"), ENDS.values(), ids=list(ENDS))
async def test_what_failed_costs_one_request_alone(answer, status, stream):
    endpoint = Endpoint(upstreams=(Upstream(answer),), limits=Limits(first_token_us=50_000))
    async with llm_scene(endpoint, timeout_us=200_000, attempt_timeout_us=100_000) as at:
        told = await at.chat(stream=stream)
        assert told.status_code == status
        assert at.used == Used(requests=1)


async def test_what_no_endpoint_ever_had_costs_one_request_alone():
    async with llm_scene(Endpoint(base_urls=["http://127.0.0.1:1/v1"])) as at:
        assert (await at.chat()).status_code == 502
        assert at.used == Used(requests=1)


@both
async def test_what_was_answered_elsewhere_costs_what_was_used_there(stream):
    up = Upstream(script(stream=stream, prompt=7, made=8))
    async with llm_scene(Upstream(FAILED), up) as at:
        assert text_of(await at.chat(stream=stream)) == "hi"
        await until(lambda: not at.gw.seen.in_flight)
        assert at.used == Used(1, 15, 15 * PER_TOKEN, 0)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"model": "general_llm", "messages": "none"}, 422),
        (CHAT, {"model": "nobody's", "messages": []}, 404),
        ("/v1/infer", {"task": "unknown", "input": {}}, 404),
        ("/v1/tasks/text-embedding", {"input": {"txt": "a"}}, 422),
    ],
)
async def test_what_is_refused_at_the_door_costs_nothing(path, body, status):
    async with llm_scene(Upstream(FAILED)) as at:
        assert (await at.gw.post(path, body, authorization=f"Bearer {OWN}")).status_code == status
        assert at.used == Used()


@both
async def test_a_caller_who_leaves_pays_for_what_was_made_until_then(stream):
    said = [sse_head(), *(event(delta(f"w{n} ")) for n in range(6)), HOLD]
    up = Upstream(said if stream else [HOLD])
    async with llm_scene(up) as at:
        body = asked(stream=stream, max_tokens=20)
        if stream:
            async with at.gw.http.stream("POST", CHAT, json=body, headers={"authorization": f"Bearer {OWN}"}) as told:
                lines = told.aiter_lines()
                for _ in range(11):
                    await anext(lines)
        else:
            task = await at.begin(up)
            task.cancel()
        await until(lambda: at.gw.seen.records)
        made = 6 if stream else 0
        assert at.used == Used(1, PROMPT + made, (PROMPT + made) * PER_TOKEN, 0)


@both
async def test_an_answer_that_breaks_off_costs_what_had_come(stream):
    if stream:
        up = Upstream([sse_head(), *(event(delta(f"w{n} ")) for n in range(4)), Pause(0.05), RST])
        cost = PROMPT + 4
    else:
        up, cost = Upstream([b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"a', RST]), 0
    async with llm_scene(up) as at:
        await at.chat(stream=stream)
        await until(lambda: not at.gw.seen.in_flight)
        assert at.used == Used(1, cost, cost * PER_TOKEN, 0)


async def test_places_come_back_whichever_way_requests_end():
    """Case RL-03: two of each kind of failure, with two places; then both are free."""
    up = Upstream([HOLD], [HOLD], [RST], [RST], script(stream=False))
    async with llm_scene(up, limits=[concurrent(2)], timeout_us=300_000, attempt_timeout_us=100_000) as at:
        assert all(status >= 500 for status in await at.chats(2))
        assert await at.chats(2, model="unknown") == [404, 404]
        assert await at.chats(2, messages="none") == [422, 422]
        assert all(status >= 500 for status in await at.chats(2))
        assert at.used == Used()
        at.gw.board._breakers.clear()
        assert (await at.chat()).status_code == 200
        assert at.used == Used()


async def test_money_is_kept_for_the_dearest_place_that_a_rule_may_choose():
    up = Upstream([Pause(0.05), *script(stream=False)])
    split = [{"backend": "up1", "model": "model-1"}, {"backend": "up1", "model": "dear"}]
    async with llm_scene(up, rules=[chat_rule(split=split)]) as at:
        task = await at.begin(up)
        assert at.used.nano_usd == 20 * 9 * PER_TOKEN
        await task
        assert at.used.nano_usd == 5 * PER_TOKEN


async def test_a_used_up_budget_lets_nothing_pass_that_may_be_answered_at_a_price():
    free_first = [chat_rule(2, split=[{"backend": "up1", "model": "free"}])]
    up2 = Upstream(script(stream=False, prompt=900, made=200))
    async with llm_scene(Upstream(FAILED), up2, rules=free_first, limits=[usd(1000 * PER_TOKEN)]) as at:
        assert (await at.chat()).status_code == 200
        assert at.used.nano_usd == 1100 * PER_TOKEN
        assert (await at.chat()).status_code == 429


async def test_a_used_up_budget_lets_pass_what_has_no_price():
    async with scene(usd(50 * PER_TOKEN)) as at:
        assert (await at.chat()).status_code == 200
        assert (await at.chat()).status_code == 429
        assert (await at.embed()).status_code == 200


async def test_a_fault_of_the_gateway_gives_everything_back():
    async with scene(*ALL_KINDS, script=[Fault(kind=FaultKind.BROKEN, message="no")]) as at:
        assert (await at.embed()).status_code == 502
        assert at.used == Used(requests=1)
