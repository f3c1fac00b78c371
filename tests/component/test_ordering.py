"""Ordering keys through the whole data plane: who is sent and answered when, and how one makes way for the next."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from gateway.backends.scripted import ScriptedBackend
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.types import Delta, Message, Usage
from tests.kit import stateful
from tests.kit.app import DEFAULT_RULES, KEY, OTHER_KEY, Harness, embedding, running
from tests.kit.llm_plane import CHAT
from tests.kit.stateful import StatefulBackend
from tests.kit.wait import until

modes = pytest.mark.parametrize("mode", ["serial", "release"])
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
EMBED = "/v1/tasks/text-embedding"


class Slow(ScriptedBackend):
    """Answers a chat with its own name once it may; those in `failing` fail then, and `broken` ones after a part."""

    def __init__(self, name: str = "llm") -> None:
        super().__init__(name, [])
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.failing: set[str] = set()
        self.broken: set[str] = set()
        self._go: dict[str, asyncio.Event] = {}

    def go(self, *names: str) -> None:
        for name in names:
            self._event(name).set()

    def _event(self, name: str) -> asyncio.Event:
        return self._go.setdefault(name, asyncio.Event())

    async def infer(self, call, *, timeout_us):
        name = call.payload.body["messages"][0]["content"]
        self.begun.append(name)
        try:
            await self._event(name).wait()
            if name in self.failing:
                raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message="no"))
            if call.payload.stream:
                for piece in (name, "-end"):
                    yield Delta(data=json.dumps({"choices": [{"delta": {"content": piece}}]}).encode())
                    if name in self.broken:
                        raise BackendError(Fault(kind=FaultKind.BROKEN, message="no"))
            else:
                yield Message(body=json.dumps({"said": name}).encode(), usage=Usage(input_tokens=1, output_tokens=1))
        finally:
            self.ended.append(name)


class Scene:
    """The gateway over one or two slow backends, and the order in which its answers came."""

    def __init__(self, gw: Harness, llm: Slow) -> None:
        self.gw = gw
        self.llm = llm
        self.answered: list[str] = []
        self.tasks: dict[str, asyncio.Task[httpx.Response]] = {}

    async def ask(
        self, name: str, *, key: str = "k", stream: bool = False, headers: Mapping[str, str] | None = None
    ) -> asyncio.Task[httpx.Response]:
        """Send one; it has its ticket by now, or was refused."""
        body = {"model": "general_llm", "messages": [{"role": "user", "content": name}], "stream": stream}
        ordered = {"x-ordering-key": key} if key else {}
        began = len(self.gw.seen.began_tasks)
        self.tasks[name] = asyncio.create_task(self._ask(name, body, {**ordered, **(headers or {})}))
        await until(lambda: len(self.gw.seen.began_tasks) > began or self.tasks[name].done())
        return self.tasks[name]

    async def _ask(self, name: str, body: Any, headers: Mapping[str, str]) -> httpx.Response:
        answer = await self.gw.post(CHAT, body, **headers)
        self.answered.append(name)
        return answer

    async def leave(self, name: str) -> None:
        """Its caller leaves."""
        ended = len(self.gw.seen.records)
        self.tasks[name].cancel()
        await until(lambda: len(self.gw.seen.records) > ended)

    async def all(self, *names: str) -> dict[str, int]:
        """The statuses of these, when they have come."""
        async with asyncio.timeout(10):
            return {name: (await self.tasks[name]).status_code for name in names}

    def nothing_is_left(self) -> None:
        book = self.gw.pipeline.admissions._book._owners["here"]
        assert (book.open, book.queues, self.gw.pipeline.admissions._turns) == ({}, {}, {})
        assert (self.gw.loads, self.gw.seen.in_flight) == ({}, 0)


@asynccontextmanager
async def scene(mode: str = "serial", *others: Slow, ordering: Any = None, **options: Any) -> AsyncIterator[Scene]:
    llm = Slow()
    fallback = [{"backend": other.name, "model": "other"} for other in others]
    rule = {**DEFAULT_RULES[2], "fallback": fallback, "ordering": {"mode": mode, **(ordering or {})}}
    async with running([llm, *others], rules=[rule], **options) as gw:
        yield Scene(gw, llm)


# --- the order -------------------------------------------------------------------------------------


@both
async def test_serial_each_is_sent_when_the_one_before_has_ended(stream):
    async with scene("serial") as at:
        for name in "abc":
            await at.ask(name, stream=stream)
        await until(lambda: at.llm.begun == ["a"])
        at.llm.go("c", "b")
        assert at.llm.begun == ["a"]
        at.llm.go("a")
        assert await at.all("a", "b", "c") == {"a": 200, "b": 200, "c": 200}
        assert at.llm.begun == at.llm.ended == ["a", "b", "c"]
        assert at.answered == ["a", "b", "c"]
        at.nothing_is_left()


@both
async def test_release_all_are_sent_at_once_and_answered_in_their_order(stream):
    async with scene("release") as at:
        for name in "abc":
            await at.ask(name, stream=stream)
        await until(lambda: sorted(at.llm.begun) == ["a", "b", "c"])
        at.llm.go("c", "b")
        await until(lambda: sorted(at.llm.ended) == ["b", "c"])
        assert at.answered == []
        at.llm.go("a")
        assert await at.all("a", "b", "c") == {"a": 200, "b": 200, "c": 200}
        assert at.answered == ["a", "b", "c"]
        at.nothing_is_left()
        if stream:
            for name in "abc":
                text = at.tasks[name].result().text
                assert [piece in text for piece in (f'"{name}"', "-end", "[DONE]")] == [True] * 3
        else:
            assert [at.tasks[name].result().json()["said"] for name in "abc"] == ["a", "b", "c"]


@modes
async def test_every_answer_and_every_error_tells_its_ticket(mode):
    async with scene(mode) as at:
        at.llm.go("a", "b", "c")
        at.llm.failing.add("b")
        for name in "abc":
            await at.ask(name)
        assert await at.all("a", "b", "c") == {"a": 200, "b": 503, "c": 200}
        assert [at.tasks[name].result().headers["x-ordering-ticket"] for name in "abc"] == ["1", "2", "3"]


@modes
async def test_other_keys_other_tenants_and_requests_without_a_key_pass_by(mode):
    async with scene(mode) as at:
        at.llm.go("other key", "other tenant", "no key")
        await at.ask("a")
        await at.ask("behind")
        await at.ask("other key", key="k2")
        await at.ask("other tenant", headers={"authorization": f"Bearer {OTHER_KEY}"})
        await at.ask("no key", key="")
        names = ("other key", "other tenant", "no key")
        assert await at.all(*names) == dict.fromkeys(names, 200)
        tickets = [at.tasks[name].result().headers.get("x-ordering-ticket") for name in names]
        assert tickets == ["1", "1", None]
        at.llm.go("a", "behind")
        assert await at.all("a", "behind") == {"a": 200, "behind": 200}


async def test_a_stream_that_has_its_turn_meanwhile_goes_on_as_it_comes():
    async with scene("release") as at:
        await at.ask("a", stream=True)
        await at.ask("b", stream=True)
        at.llm.go("a")
        assert await at.all("a") == {"a": 200}
        at.llm.go("b")
        assert await at.all("b") == {"b": 200}
        assert "-end" in at.tasks["b"].result().text
        at.nothing_is_left()


async def test_those_who_wait_to_be_answered_keep_no_place_at_the_backend():
    """Else the first one, which is tried again behind them, would never get one."""
    async with scene("release", max_in_flight=2, timeout_us=5_000_000) as at:
        await at.ask("first", headers={"x-priority": "batch"})
        await until(lambda: at.llm.begun == ["first"])
        for name in ("b", "c", "d", "e"):
            await at.ask(name, stream=name in "ce")
        at.llm.go("b", "c", "d", "e")
        await until(lambda: len(at.llm.ended) == 4)
        assert at.gw.loads == {"llm": 1}
        assert at.answered == []
        at.llm.go("first")
        names = ("first", "b", "c", "d", "e")
        assert await at.all(*names) == dict.fromkeys(names, 200)
        assert at.answered == list(names)


# --- leaving ---------------------------------------------------------------------------------------


@modes
@both
async def test_a_caller_who_leaves_makes_way_at_once(mode, stream):
    async with scene(mode) as at:
        for name in "abcd":
            await at.ask(name, stream=stream)
        await at.leave("b")
        at.llm.go("c", "d")
        await until(lambda: "a" in at.llm.begun)
        await at.leave("a")
        assert await at.all("c", "d") == {"c": 200, "d": 200}
        assert at.answered == ["c", "d"]
        assert at.tasks["d"].result().headers["x-ordering-ticket"] == "4"
        assert "b" not in at.llm.begun or mode == "release"
        at.nothing_is_left()


@modes
async def test_a_failure_makes_way_for_the_next(mode):
    async with scene(mode) as at:
        at.llm.failing.update("ab")
        at.llm.go("a", "b", "c")
        for name in "abc":
            await at.ask(name)
        assert await at.all("a", "b", "c") == {"a": 503, "b": 503, "c": 200}
        at.nothing_is_left()


@modes
async def test_a_stream_that_breaks_off_makes_way_for_the_next(mode):
    async with scene(mode) as at:
        at.llm.broken.add("a")
        at.llm.go("a", "b")
        for name in "ab":
            await at.ask(name, stream=True)
        assert (await at.all("b")) == {"b": 200}
        at.nothing_is_left()


@modes
@both
async def test_what_falls_back_keeps_its_turn(mode, stream):
    second = Slow("llm2")
    async with scene(mode, second) as at:
        at.llm.failing.add("a")
        second.go("a")
        for name in "ab":
            await at.ask(name, stream=stream)
        at.llm.go("b")
        await until(lambda: "a" in at.llm.begun)
        assert at.answered == []
        at.llm.go("a")
        assert await at.all("a", "b") == {"a": 200, "b": 200}
        assert at.answered == ["a", "b"]
        assert second.begun == ["a"]
        assert at.tasks["a"].result().headers["x-ordering-ticket"] == "1"
        at.nothing_is_left()


async def test_what_breaks_off_before_it_is_released_is_answered_elsewhere():
    """Nothing of it has left: the caller sees one whole answer."""
    second = Slow("llm2")
    async with scene("release", second) as at:
        at.llm.broken.add("b")
        second.go("b")
        await at.ask("a", stream=True)
        await at.ask("b", stream=True)
        at.llm.go("b")
        await until(lambda: second.ended == ["b"])
        at.llm.go("a")
        assert await at.all("a", "b") == {"a": 200, "b": 200}
        text = at.tasks["b"].result().text
        assert (text.count('"b"'), text.count("-end"), "error" in text) == (1, 1, False)


# --- bounds ----------------------------------------------------------------------------------------


@modes
async def test_a_full_queue_refuses_and_has_room_again(mode):
    async with scene(mode, ordering={"max_queue_size": 2}) as at:
        await at.ask("a")
        await at.ask("b")
        refused = await (await at.ask("c"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "ordering_queue_full")
        assert refused.headers["retry-after"] == "1"
        assert "x-ordering-ticket" not in refused.headers
        at.llm.go("a", "b", "d")
        assert await at.all("a", "b") == {"a": 200, "b": 200}
        assert (await (await at.ask("d"))).headers["x-ordering-ticket"] == "3"


@modes
@pytest.mark.parametrize(
    ("ordering", "headers"),
    [({"max_wait_ms": 60}, {}), ({}, {"x-timeout-ms": "60"}), ({"max_wait_ms": 60_000}, {"x-timeout-ms": "60"})],
    ids=["the rule's bound", "the request's time", "the shorter one"],
)
async def test_waiting_is_bounded_and_makes_way(mode, ordering, headers):
    async with scene(mode, ordering=ordering) as at:
        await at.ask("a")
        await until(lambda: at.llm.begun == ["a"])
        at.llm.go("b", "c")
        late = await (await at.ask("b", headers=headers))
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert late.headers["x-ordering-ticket"] == "2"
        assert ("b" in at.llm.begun) is (mode == "release")
        at.llm.go("a")
        assert await at.all("a") == {"a": 200}
        assert (await (await at.ask("c"))).headers["x-ordering-ticket"] == "3"
        at.nothing_is_left()


@pytest.mark.parametrize("key", ["x" * 129, "a\tb", "caf\xe9"])
async def test_a_key_that_is_none_is_refused(key):
    async with scene() as at:
        body = {"model": "general_llm", "messages": [{"role": "user", "content": "a"}]}
        refused = await at.gw.http.post(CHAT, json=body, headers={b"x-ordering-key": key.encode("latin-1")})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "x-ordering-key"
        assert at.llm.begun == []


# --- the body's own field ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fixed"), [("/v1/infer", {"task": "text-embedding"}), (EMBED, {})], ids=["infer", "task"]
)
async def test_a_body_may_say_the_key_too(path, fixed):
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:

        async def ask(field: Any, **headers: str) -> httpx.Response:
            return await gw.post(path, {**fixed, "input": {"text": "a"}, "ordering_key": field}, **headers)

        tickets = [
            (await ask("k")).headers["x-ordering-ticket"],
            (await ask("k", **{"x-ordering-key": "k"})).headers["x-ordering-ticket"],
            (await ask("other")).headers["x-ordering-ticket"],
            (await gw.post(EMBED, {"input": {"text": "a"}}, **{"x-ordering-key": "k"})).headers["x-ordering-ticket"],
        ]
        assert tickets == ["1", "2", "1", "3"]
        wrong = [
            await ask("k", **{"x-ordering-key": "other"}),
            *[await ask(bad) for bad in ("", 5, None, "x" * 129, "é")],
        ]
        assert {one.status_code for one in wrong} == {400}
        assert {one.json()["errors"][0]["field"] for one in wrong} == {"ordering_key"}


# --- what has an order of its own --------------------------------------------------------------------


async def test_steps_of_sequences_and_websockets_go_as_ever():
    triton = StatefulBackend("triton", "a")
    async with running([triton], rules=stateful.RULES, more_tasks=stateful.TASKS) as gw:
        for number, flags in ((1, {"x-sequence-start": "true"}), (2, {}), (3, {"x-sequence-end": "true"})):
            sent = {"x-sequence-id": "7", "x-ordering-key": "k", **flags}
            answer = await gw.post("/v1/tasks/total", {"input": {"number": number}}, **sent)
            assert answer.headers["x-ordering-ticket"] == str(number)
        assert answer.json()["output"]["total"] == 6
        url = gw.url.replace("http://", "ws://") + "/v1/tasks/total/stream"
        headers = {"authorization": f"Bearer {KEY}", "x-ordering-key": "k"}
        async with connect(url, additional_headers=headers, proxy=None) as ws:
            for number in (1, 2, 3):
                await ws.send(number.to_bytes(4, "little"))
            totals = [json.loads(await ws.recv())["output"]["total"] for _ in range(3)]
        assert totals == [1, 3, 6]
