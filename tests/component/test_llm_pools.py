"""Pools of endpoints through the whole data plane: who is chosen, who comes next, and what is tried again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.core.strategies import FREE_LOAD
from gateway.core.types import Place
from gateway.wiring import monotonic_us
from tests.kit.app import Harness
from tests.kit.llm_plane import CHAT, llm_plane, pool_rule
from tests.kit.relayed import asked, refusal, script, served_by, text_of
from tests.kit.upstream import HOLD, Upstream
from tests.kit.wait import until

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
NO = {"message": "no", "type": "t", "param": None, "code": None}
UP1, UP2 = Place(backend="up1", model="model-1"), Place(backend="up2", model="model-2")


def three(*, stream: bool) -> list[Upstream]:
    return [Upstream(script(f"from {number}", stream=stream)) for number in (1, 2, 3)]


async def backend_of(gw: Harness, *, stream: bool, **fields) -> str:
    return served_by(await gw.post(CHAT, asked(stream=stream, **fields)))[0]


@contextlib.asynccontextmanager
async def waiting_at(gw: Harness, up: Upstream, *, stream: bool, **fields) -> AsyncIterator[None]:
    """While in it, one more request is at `up`, which does not answer it."""
    there = len(up.requests)
    asking = asyncio.create_task(gw.post(CHAT, asked(stream=stream, **fields)))
    await up.request(there)
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.wait([asking])


def measured(gw: Harness, place: Place, first_token_us: int, *, times: int = 20) -> None:
    """As if `times` streams had begun there after that long, of late."""
    board, now_us = gw.pipeline.loads, monotonic_us()
    for _ in range(times):
        sending = board.sent(place, tokens=1, now_us=now_us - first_token_us)
        board.began(sending, now_us=now_us, is_stream=True)
        board.ended(sending, now_us=now_us)


# --- strategies --------------------------------------------------------------------------------------------


@both
async def test_least_in_flight_passes_a_busy_endpoint_by(stream):
    ups = [Upstream([HOLD], script(stream=stream)), Upstream(script(stream=stream))]
    async with llm_plane(*ups, rules=[pool_rule(2, "least_in_flight", fallback=[])]) as gw:
        async with waiting_at(gw, ups[0], stream=stream, max_tokens=10):  # equal ones in their order, as the draw is 0
            assert {await backend_of(gw, stream=stream) for _ in range(5)} == {"up2"}
        await until(lambda: not gw.loads)
        assert await backend_of(gw, stream=stream) == "up1"


@both
async def test_least_in_flight_counts_tokens_and_not_only_requests(stream):
    ups = [Upstream([HOLD]), Upstream([HOLD], [HOLD], script(stream=stream))]
    async with (
        llm_plane(*ups, rules=[pool_rule(2, "least_in_flight", fallback=[])]) as gw,
        contextlib.AsyncExitStack() as all_of,
    ):
        await all_of.enter_async_context(waiting_at(gw, ups[0], stream=stream, max_tokens=4000))
        await all_of.enter_async_context(waiting_at(gw, ups[1], stream=stream, max_tokens=10))
        await all_of.enter_async_context(waiting_at(gw, ups[1], stream=stream, max_tokens=10))
        assert await backend_of(gw, stream=stream) == "up2"


@both
async def test_fastest_takes_the_one_that_began_soonest_of_late(stream):
    ups = three(stream=stream)
    async with llm_plane(*ups, rules=[pool_rule(3, "fastest", fallback=[])], draw=lambda: 0.5) as gw:
        for number, us in ((1, 300_000), (2, 100_000), (3, 200_000)):
            measured(gw, Place(backend=f"up{number}", model=f"model-{number}"), us)
        assert await backend_of(gw, stream=stream) == "up2"


async def test_fastest_measures_what_it_does_not_know_with_one_stream():
    ups = three(stream=True)
    async with llm_plane(*ups, rules=[pool_rule(3, "fastest", fallback=[])], draw=lambda: 0.5) as gw:
        seen = [await backend_of(gw, stream=True) for _ in range(3)]
        assert set(seen) == {"up1", "up2", "up3"}
        assert all(gw.pipeline.loads.standing(at, now_us=monotonic_us()).is_measured for at in (UP1, UP2))


@both
async def test_cheapest_goes_by_the_price_of_this_request(stream):
    ups = three(stream=stream)
    prices = {
        "model-1": {"input": 10, "output": 10},
        "model-2": {"input": 1, "output": 50},
        "model-3": {"input": 9, "output": 90},
    }
    async with llm_plane(*ups, rules=[pool_rule(3, "cheapest", fallback=[])], prices=prices) as gw:
        short_question = await backend_of(gw, stream=stream, max_tokens=1000)
        long_question = await backend_of(
            gw, stream=stream, max_tokens=1, messages=[{"role": "user", "content": "word " * 2000}]
        )
    assert (short_question, long_question) == ("up1", "up2")


@both
async def test_cheapest_weighs_servers_paid_by_the_hour_too(stream):
    ups = three(stream=stream)[:2]
    prices = {"model-2": {"input": 1, "output": 1}}
    plane = llm_plane(
        *ups, rules=[pool_rule(2, "cheapest", fallback=[])], prices=prices, usd_per_hour={"up1": 1_000_000.0}
    )
    async with plane as gw:
        first = await backend_of(gw, stream=stream)  # what it costs there is not known yet
        assert gw.seen.records[0].usage.cost_nano_usd > 0
        later = await backend_of(gw, stream=stream)
    assert (first, later) == ("up1", "up2")


@both
async def test_prefix_affinity_keeps_conversations_together(stream):
    ups = three(stream=stream)
    async with llm_plane(*ups, rules=[pool_rule(3, "prefix_affinity", fallback=[])]) as gw:
        places = {}
        for topic in range(12):
            talk = [{"role": "system", "content": f"You know all of {topic}."}, {"role": "user", "content": "Begin."}]
            answers = []
            for turn in range(3):
                answers.append(await backend_of(gw, stream=stream, messages=talk))
                talk = [*talk, {"role": "assistant", "content": "hi"}, {"role": "user", "content": f"And {turn}?"}]
            assert len(set(answers)) == 1
            places[topic] = answers[0]
    assert len(set(places.values())) > 1  # and not all at one


@both
async def test_prefix_affinity_does_not_overload_the_one_that_knows(stream):
    ups = three(stream=stream)
    async with llm_plane(*ups, rules=[pool_rule(3, "prefix_affinity", fallback=[])]) as gw:
        home = await backend_of(gw, stream=stream)
        knows = ups[int(home[-1]) - 1]
        knows.scripts = [[HOLD]]
        async with contextlib.AsyncExitStack() as all_of:
            for _ in range(FREE_LOAD):
                await all_of.enter_async_context(waiting_at(gw, knows, stream=stream))
            assert await backend_of(gw, stream=stream) != home


# --- the gate before an endpoint ---------------------------------------------------------------------------


def marked(up: Upstream) -> list[str]:
    """Who has reached the endpoint so far, in order, by the `user` of their bodies."""
    return [seen.json().get("user") for seen in up.requests]


@both
async def test_interactive_requests_pass_waiting_batch_requests(stream):
    up = Upstream([HOLD], script(stream=stream))
    async with llm_plane(up, max_in_flight=1, timeout_us=60_000_000, attempt_timeout_us=60_000_000) as gw:
        asking = []
        async with waiting_at(gw, up, stream=stream):
            for user, priority in (("b1", "batch"), ("b2", "batch"), ("i1", "interactive"), ("i2", "interactive")):
                request = gw.post(CHAT, asked(stream=stream, user=user), **{"x-priority": priority})
                asking.append(asyncio.create_task(request))
                await until(lambda: gw.loads == {"up1": 1 + len(asking)})
            assert len(up.requests) == 1
        answers = await asyncio.gather(*asking)
    assert marked(up) == [None, "i1", "i2", "b1", "b2"]
    assert [text_of(answer) for answer in answers] == ["hi"] * 4


@both
async def test_a_full_line_refuses_at_once_and_an_interactive_request_puts_out_a_batch_one(stream):
    up = Upstream([HOLD], script(stream=stream))
    limits = {"timeout_us": 60_000_000, "attempt_timeout_us": 60_000_000}
    async with llm_plane(up, max_in_flight=1, max_queue_size=1, **limits) as gw:
        async with waiting_at(gw, up, stream=stream):
            batch = asyncio.create_task(gw.post(CHAT, asked(stream=stream, user="b1"), **{"x-priority": "batch"}))
            await until(lambda: gw.loads == {"up1": 2})
            second = await gw.post(CHAT, asked(stream=stream, user="b2"), **{"x-priority": "batch"})
            interactive = asyncio.create_task(gw.post(CHAT, asked(stream=stream, user="i1")))
            put_out = await batch
        assert text_of(await interactive) == "hi"
        assert dict(gw.board.all()) == {}  # a queue of ours says nothing about the endpoint
    assert refusal(second) == refusal(put_out) == (429, "queue_full", "1")
    assert marked(up) == [None, "i1"]


@both
async def test_a_full_endpoint_gives_its_waiting_requests_to_the_next(stream):
    up1, up2 = Upstream([HOLD]), Upstream(script("other", stream=stream))
    plane = llm_plane(up1, up2, max_in_flight=1, max_queue_size=0, timeout_us=60_000_000)
    async with plane as gw, waiting_at(gw, up1, stream=stream):
        answer = await gw.post(CHAT, asked(stream=stream))
    assert (text_of(answer), served_by(answer)) == ("other", ("up2", 2))


@both
async def test_one_whose_turn_cannot_come_in_time_is_refused_at_once(stream):
    up = Upstream([HOLD])
    async with llm_plane(up, max_in_flight=1, timeout_us=60_000_000, attempt_timeout_us=60_000_000) as gw:
        gate = gw.pipeline.gates["up1"]
        for _ in range(8):  # as if eight requests had each stayed for 40 s
            await gate.enter("", tenant="t", priority="interactive", within_us=1, work=lambda: 1)
            gate.leave("", stayed_us=40_000_000)
        async with waiting_at(gw, up, stream=stream):
            answer = await gw.post(CHAT, asked(stream=stream), **{"x-timeout-ms": "30000"})
    assert refusal(answer) == (429, "queue_full", "40")
    assert len(up.requests) == 1
