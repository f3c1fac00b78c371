"""Who is served where a server is full: tenants by work, interactive before batch; through the door."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest

from gateway.backends.scripted import ScriptedBackend
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.tensors import to_numpy
from gateway.core.types import BackendCall, BackendEvent, Message, OpenAIPayload, Usage
from tests.kit.app import KEY, LIMITED_KEY, OTHER_KEY, Harness, embedding, running
from tests.kit.wait import until

CHAT, EMBED = "/v1/chat/completions", "/v1/tasks/text-embedding"
HELD = "the first"


class Busy(ScriptedBackend):
    """A server that holds one request until it is told to go on, and notes what it has served: whose, and how much."""

    def __init__(self, name: str, *, really: dict[str, int] | None = None, fails: str = "") -> None:
        super().__init__(name, [])
        self._fails = fails
        self.go_on = asyncio.Event()
        self.served: list[tuple[str, int]] = []
        self._really = really or {}

    async def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """An answer of as many tokens or rows as were asked for, or `really` were; or none to one that `fails`."""
        if isinstance(call.payload, OpenAIPayload):
            who, most = call.payload.body["messages"][0]["content"], call.payload.body["max_tokens"]
        else:
            rows = to_numpy(call.payload.inputs[0])
            who, most = rows.flat[0].decode(), len(rows)
        if who == HELD:
            await self.go_on.wait()
        work = self._really.get(who, most)
        self.served.append((who, work))
        if who == self._fails:
            raise BackendError(Fault(kind=FaultKind.FAILED, message="it has failed"))
        if isinstance(call.payload, OpenAIPayload):
            yield Message(body=b'{"choices": []}', usage=Usage(input_tokens=0, output_tokens=work))
        else:
            yield embedding(work)

    def lead(self, requests: int) -> list[int]:
        """How much more `heavy` had been served than `light`, after each of the first `requests`."""
        return list(
            itertools.accumulate({"heavy": work, "light": -work}.get(who, 0) for who, work in self.served[:requests])
        )


def chat(who: str, tokens: int = 1) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "general_llm", "messages": [{"role": "user", "content": who}], "max_tokens": tokens}


def texts(who: str, count: int = 1) -> tuple[str, dict[str, Any]]:
    return EMBED, {"input": {"text": [who] * count}}


async def sent(
    gw: Harness, asked: tuple[str, dict[str, Any]], *, key: str = KEY, priority: str = "interactive"
) -> "asyncio.Task[httpx.Response]":
    """A request that waits, or has put another out, or was refused, by the time that this returns."""
    path, body = asked
    headers = {"authorization": f"Bearer {key}", "x-priority": priority}
    known, waiting = len(gw.seen.records), _waiting(gw)
    answer = asyncio.ensure_future(gw.http.post(path, json=body, headers=headers))
    await until(lambda: _waiting(gw) > waiting or len(gw.seen.records) > known)
    return answer


def _waiting(gw: Harness) -> int:
    return sum(sum(gate.waiting().values()) for gate in gw.pipeline.gates.values())


async def held(gw: Harness, asked: tuple[str, dict[str, Any]], places: int = 1) -> list["asyncio.Task[httpx.Response]"]:
    """Requests that fill the server."""
    path, body = asked
    answers = [asyncio.ensure_future(gw.http.post(path, json=body)) for _ in range(places)]
    await until(lambda: sum(gw.loads.values()) == places)
    return answers


async def ended(backend: Busy, answers: Sequence["asyncio.Task[httpx.Response]"]) -> list[int]:
    backend.go_on.set()
    return [answer.status_code for answer in await asyncio.gather(*answers)]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("name", "asked", "sizes"), [("llm", chat, (400, 100)), ("triton", texts, (4, 1))], ids=["tokens", "items"]
)
async def test_tenants_share_a_full_server_by_work(name: str, asked: Any, sizes: tuple[int, int], max_in_flight: int):
    server = Busy(name)
    async with running([server], max_in_flight=max_in_flight, attempt_timeout_us=5_000_000) as gw:
        answers = await held(gw, asked(HELD), max_in_flight)
        for _ in range(10):
            answers.append(await sent(gw, asked("heavy", sizes[0])))
        for _ in range(20):
            answers.append(await sent(gw, asked("light", sizes[1]), key=OTHER_KEY))
        assert await ended(server, answers) == [200] * len(answers)
    both_waited = max_in_flight + 20  # the light one had twenty, of a quarter each: five large ones go meanwhile
    assert max(map(abs, server.lead(both_waited))) <= sizes[0]
    assert [who for who, _ in server.served[:both_waited]].count("heavy") == pytest.approx(4, abs=max_in_flight)


async def test_tenants_share_by_the_tokens_that_were_made_where_they_ask_for_more():
    server = Busy("llm", really={"heavy": 40, "light": 10})
    async with running([server], max_in_flight=1, attempt_timeout_us=5_000_000) as gw:
        answers = await held(gw, chat(HELD))
        for _ in range(10):
            answers.append(await sent(gw, chat("heavy", 50)))
        for _ in range(20):
            answers.append(await sent(gw, chat("light", 5000), key=OTHER_KEY))
        assert await ended(server, answers) == [200] * 31
    assert max(map(abs, server.lead(21))) <= 100  # by what they asked for, it would be ten heavy ones first: 400


async def test_who_fails_has_had_what_was_expected_of_it():
    server = Busy("llm", fails="heavy")
    async with running([server], max_in_flight=1, attempt_timeout_us=5_000_000) as gw:
        answers = await held(gw, chat(HELD))
        for _ in range(5):
            answers.append(await sent(gw, chat("heavy", 400)))
        for _ in range(10):
            answers.append(await sent(gw, chat("light", 100), key=OTHER_KEY))
        assert await ended(server, answers) == [200] + [502] * 5 + [200] * 10
    assert max(map(abs, server.lead(11))) <= 420  # its prompt was expected to be some tokens, too


async def test_batch_is_shed_first_and_told_when_to_come_back():
    server = Busy("llm")
    async with running([server], max_in_flight=1, max_queue_size=2, attempt_timeout_us=5_000_000) as gw:
        answers = await held(gw, chat(HELD))
        batch = [await sent(gw, chat(f"batch {i}"), priority="batch") for i in range(3)]
        interactive = [await sent(gw, chat(f"person {i}"), key=key) for i, key in enumerate((KEY, OTHER_KEY, KEY))]
        refused = [*reversed(batch), interactive[2]]
        for answer in refused:
            response = await answer
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert int(response.headers["retry-after"]) >= 1
        assert await ended(server, [*answers, *interactive[:2]]) == [200] * 3
        assert gw.loads == {}
    assert [who for who, _ in server.served] == [HELD, "person 0", "person 1"]


async def test_a_flood_leaves_others_their_places():
    server = Busy("llm")
    async with running([server], max_in_flight=1, max_queue_size=4, attempt_timeout_us=5_000_000) as gw:
        answers = await held(gw, chat(HELD))
        flood = [await sent(gw, chat(f"flood {i}")) for i in range(6)]
        others = [await sent(gw, chat(f"other {i}", 1000), key=OTHER_KEY) for i in range(2)]
        assert [(await refused).status_code for refused in flood[2:]] == [429] * 4
        assert not any(waits.done() for waits in flood[:2])
        assert await ended(server, [*answers, *flood[:2], *others]) == [200] * 5
    assert [who for who, _ in server.served] == [HELD, "flood 0", "other 0", "flood 1", "other 1"]


async def test_what_a_full_server_refuses_again_takes_nothing_of_a_limit():
    server = Busy("llm")
    async with running([server], max_in_flight=1, max_queue_size=0, attempt_timeout_us=5_000_000) as gw:
        answers = await held(gw, chat(HELD))
        met = [await (await sent(gw, chat("again"), key=LIMITED_KEY)) for _ in range(5)]
        assert [(one.status_code, one.json()["error"]["code"]) for one in met] == [(429, "queue_full")] * 5
        assert all(int(one.headers["retry-after"]) >= 1 for one in met)
        assert [one.headers.get("x-ratelimit-remaining-requests") for one in met] == ["2", None, None, None, None]
        records = [one for one in gw.seen.records if one.tenant == "t2"]
        assert len(records) == 5
        assert {(one.code, one.faults[-1].place.backend, one.reasons) for one in records} == {
            ("queue_full", "llm", records[0].reasons)
        }
        assert await ended(server, answers) == [200]
        later = [await (await sent(gw, chat("later"), key=LIMITED_KEY)) for _ in range(3)]
        assert [one.status_code for one in later] == [200, 200, 429]
        assert later[2].json()["error"]["code"] == "rate_limited"
        assert gw.loads == {}
        assert not gw.pipeline.full
