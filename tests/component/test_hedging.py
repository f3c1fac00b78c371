"""Random timelines of requests that are sent twice, tried again, given up: nothing is left behind, whatever happens."""

import asyncio
import contextlib
import random
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest

from gateway.backends.scripted import Pause, ScriptedBackend
from gateway.core.errors import BackendError, Fault, FaultKind, GatewayError, InvalidInput
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.types import Caller, Delta, Finished, InferenceRequest, Message, Place, Usage
from gateway.hedging import first_to_begin
from gateway.tasks.chat import ChatInput
from gateway.wiring import monotonic_us
from tests.kit.app import Harness, running
from tests.kit.timelines import chunks

PARTS = 3
BAD_INPUT = Fault(kind=FaultKind.REFUSED_INPUT, message="no", status=400)
AWAY = Fault(kind=FaultKind.UNREACHABLE, message="away")


# --- two attempts alone --------------------------------------------------------------------------------


@dataclass
class Played:
    """An attempt that takes so many turns of the loop before each of its steps, and some to be cancelled."""

    held: Counter[str]
    name: str
    begins_after: int
    end: str
    stops_after: int
    is_closed: bool = field(default=False)

    async def answers(self):
        self.held[self.name] += 1
        try:
            await turns(self.begins_after)
            if self.end == "fails":
                raise BackendError(replace(AWAY, message=self.name))
            if self.end == "is refused":
                raise BackendError(replace(BAD_INPUT, message=self.name))
            if self.end == "is no answer":
                raise InvalidInput("no")
            for number in range(PARTS):
                yield f"{self.name}{number}"
                await turns(1)
                if self.end == "breaks off":
                    raise BackendError(replace(AWAY, message=self.name))
        finally:
            try:
                await turns(self.stops_after)
            finally:
                self.held[self.name] -= 1
                self.is_closed = True


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("chunk", chunks(40))
async def test_one_of_two_answers_and_neither_is_left(chunk):
    chance = random.Random(chunk)  # noqa: S311 - chance of a test
    for _ in range(200):
        await one_timeline(chance)


async def one_timeline(chance: random.Random) -> None:
    held: Counter[str] = Counter()
    ends = ["answers", "answers", "fails", "is refused", "is no answer", "breaks off"]

    def attempt(name: str) -> Played:
        return Played(held, name, chance.randrange(6), chance.choice(ends), chance.choice([0, 0, 1, 3]))

    one, two = attempt("a"), attempt("b")
    has_second, takes = chance.random() < 0.8, chance.choice([1, 2, PARTS, PARTS])
    lost: list[Fault] = []
    won: list[Played] = []
    came: list[str] = []

    async def read() -> None:
        after_us = chance.choice([0, 0, 30])
        second = two if has_second else None
        both = first_to_begin(one, lambda: second, after_us=after_us, won=won.append, lost=lost.append)
        async with aclosing(both) as parts:
            async for found in parts:
                came.append(found)
                assert sum(held.values()) == 1  # the other is gone already
                if len(came) == takes:
                    return

    reader = asyncio.ensure_future(read())
    cancellations = chance.choice([0, 0, 1, 1, 2])
    for _ in range(cancellations):
        await turns(chance.randrange(14))
        reader.cancel()
    (result,) = await asyncio.gather(reader, return_exceptions=True)
    assert not +held, (one, two)
    assert len(won) <= 1
    assert came == [f"{winner.name}{number}" for winner in won for number in range(len(came))]
    assert {winner.name for winner in won} <= {fault.message for fault in lost} ^ {"a", "b"}
    if result is None:
        assert len(came) == min(takes, 1 if won[0].end == "breaks off" else PARTS)
    else:
        assert isinstance(result, BackendError | InvalidInput | asyncio.CancelledError)
    if isinstance(result, BackendError):
        assert result.fault.message not in {fault.message for fault in lost}


# --- the whole plane ------------------------------------------------------------------------------------


ANSWER = b'{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
NAMES = ("llm", "llm2", "llm3")


def script(chance: random.Random, *, stream: bool):
    """What a backend may do with a request."""
    wait = Pause(us=chance.choice([1, 200, 1000, 3000]))
    faults = [
        AWAY,
        Fault(kind=FaultKind.OVERLOADED, message="full", retry_after_us=chance.choice([None, 0, 2000])),
        Fault(kind=FaultKind.CONTEXT_TOO_LONG, message="long", status=400),
        BAD_INPUT,
    ]
    if not stream:
        answer = [Message(body=ANSWER, usage=Usage(input_tokens=1, output_tokens=1))]
    else:
        answer = [Delta(data=b'{"choices":[]}'), wait, Delta(data=b"{}"), wait, Delta(data=b"{}")]
    return chance.choice([[wait, *answer], [wait, *answer], [wait, chance.choice(faults)], [*answer[:1], wait, AWAY]])


def rules(chance: random.Random):
    split = [{"backend": name, "model": "m"} for name in chance.sample(NAMES, chance.randrange(1, 4))]
    strategy = chance.choice(["ordered", "weighted", "least_in_flight", "fastest", "prefix_affinity"])
    hedge, retries = chance.random() < 0.8, chance.choice([0, 0, 1])
    return parse_rules(
        [
            {"name": "r", "match": {"task": "general_llm"}, "split": split, "strategy": strategy}
            | {"hedge": hedge, "retries": retries}
        ]
    )


async def ask(gw: Harness, chance: random.Random) -> None:
    """One request; it may be given up after any part."""
    now_us, stream = monotonic_us(), chance.random() < 0.5
    body = {"model": "general_llm", "messages": [{"role": "user", "content": "x" * chance.randrange(50)}]}
    request = InferenceRequest(
        id=str(chance.random()),
        task="general_llm",
        caller=Caller(key_id="k", tenant="t"),
        input=ChatInput(body=body, stream=stream),
        received_us=now_us,
        deadline_us=now_us + chance.choice([2_000, 100_000, 2_000_000]),
        stream=stream,
        priority=chance.choice(["interactive", "interactive", "batch"]),
    )
    leaves_after = chance.choice([1, 2, 100, 100])
    with contextlib.suppress(GatewayError):
        async with aclosing(gw.pipeline.handle(request)) as events:
            async for event in events:
                leaves_after -= 1
                if not leaves_after or isinstance(event, Finished):
                    return


@pytest.mark.parametrize("chunk", chunks(20))
async def test_whatever_becomes_of_requests_all_is_given_back(chunk):
    chance = random.Random(chunk)  # noqa: S311 - chance of a test
    backends = [ScriptedBackend(name, []) for name in NAMES]
    async with running(backends, max_in_flight=3, max_queue_size=3, draw=chance.random) as gw:
        for name in NAMES:  # that hedging knows what is usual
            place = Place(backend=name, model="m")
            for is_stream in [True, False] * 20:
                sending = gw.pipeline.loads.sent(place, tokens=1, now_us=monotonic_us() - 300)
                gw.pipeline.loads.began(sending, now_us=monotonic_us(), is_stream=is_stream)
                gw.pipeline.loads.ended(sending, now_us=monotonic_us())
        asked = []
        for _ in range(150):
            for backend in backends:
                backend.scripts = [script(chance, stream=chance.random() < 0.5)]
            if chance.random() < 0.1:
                gw.rules.replace(RuleSet(revision=1, rules=rules(chance)))
            if chance.random() < 0.1:
                gw.board.cool(Place(backend=chance.choice(NAMES), model="m"), until_us=monotonic_us() + 3000)
            asked.append(asyncio.ensure_future(ask(gw, chance)))
            if chance.random() < 0.3:
                chance.choice(asked).cancel()
            await asyncio.sleep(chance.choice([0, 0, 0.0005]))
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
        assert (gw.loads, gw.seen.in_flight) == ({}, 0)
        assert {name: (gate._in_flight, gate._lines) for name, gate in gw.pipeline.gates.items()} == {
            name: ({}, {}) for name in (*NAMES,)
        }
        assert all(call.is_finished or call.is_closed_early for backend in backends for call in backend.calls)
        assert not [record for record in gw.seen.records if record.code == "internal_error"]
        assert sum(len(backend.calls) for backend in backends) > 5
