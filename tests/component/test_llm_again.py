"""What is tried again, elsewhere or twice: places that asked to wait, larger contexts, retries, hedging."""

import asyncio
import contextlib

import pytest

from gateway.core.attempts import RetryBudget
from gateway.core.errors import FaultKind
from gateway.core.types import Place
from gateway.wiring import monotonic_us
from tests.kit.app import Harness
from tests.kit.llm_plane import CHAT, TASK, chat_rule, llm_plane, pool_rule
from tests.kit.relayed import asked, refusal, script, served_by, text_of
from tests.kit.upstream import HOLD, RST, Pause, Upstream, delta, error_reply, event, sse_head
from tests.kit.wait import until

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
FULL = {"message": "full", "type": "t", "param": None, "code": None}
TOO_LONG = {"message": "too long", "type": "invalid_request_error", "param": None, "code": "context_length_exceeded"}
FILTERED = {"message": "no", "type": "invalid_request_error", "param": None, "code": "content_filter"}
UP1 = Place(backend="up1", model="model-1")


def full(seconds: int | None = None):
    return error_reply(429, FULL, {} if seconds is None else {"Retry-After": str(seconds)})


async def backend_of(gw: Harness, *, stream: bool, **fields) -> str:
    return served_by(await gw.post(CHAT, asked(stream=stream, **fields)))[0]


# --- places that asked to wait ----------------------------------------------------------------------


@both
async def test_a_place_that_asks_to_wait_is_left_alone_and_used_again(stream):
    up1, up2 = Upstream(full(600), script("one", stream=stream)), Upstream(script("two", stream=stream))
    async with llm_plane(up1, up2) as gw:
        assert [await backend_of(gw, stream=stream) for _ in range(3)] == ["up2"] * 3
        assert len(up1.requests) == 1
        assert [len(record.faults) for record in gw.seen.records] == [1, 0, 0]  # no attempt is spent on it
        gw.board._cooling.clear()  # the time is over
        assert await backend_of(gw, stream=stream) == "up1"


@both
async def test_when_all_asked_to_wait_the_shortest_wait_is_told(stream):
    up1, up2 = Upstream(full(30)), Upstream(full(7))
    async with llm_plane(up1, up2) as gw:
        assert refusal(await gw.post(CHAT, asked(stream=stream))) == (429, "queue_full", "7")
        status, code, retry_after = refusal(await gw.post(CHAT, asked(stream=stream)))
        assert (status, code) == (429, "queue_full")
        assert 1 <= int(retry_after) <= 7
        assert (len(up1.requests), len(up2.requests)) == (1, 1)


@both
async def test_without_a_time_the_next_request_may_try_again(stream):
    up1, up2 = Upstream(full(), script("one", stream=stream)), Upstream(script("two", stream=stream))
    async with llm_plane(up1, up2) as gw:
        assert [await backend_of(gw, stream=stream) for _ in range(2)] == ["up2", "up1"]


@both
async def test_a_place_whose_health_has_moved_on_is_no_attempt_and_hides_nothing(stream):
    ups = [Upstream([Pause(0.05), *full()]), Upstream(script("two", stream=stream)), Upstream(script(stream=stream))]
    async with llm_plane(*ups) as gw:

        async def ask(*gone):
            asking = asyncio.create_task(gw.post(CHAT, asked(stream=stream)))
            count = len(ups[0].requests)
            await until(lambda: len(ups[0].requests) > count)
            for number in gone:
                gw.board.cool(Place(backend=f"up{number}", model=f"model-{number}"), until_us=monotonic_us() + 10**9)
            return await asking

        answer = await ask(2)
        assert (served_by(answer)[0], answer.headers["x-gateway-attempts"]) == ("up3", "2")
        assert [fault.kind for fault in gw.seen.records[0].faults] == [FaultKind.OVERLOADED, FaultKind.SKIPPED]
        assert refusal(await ask(3))[:2] == (429, "queue_full")


# --- other models, other fields ---------------------------------------------------------------------


@both
async def test_a_prompt_that_is_too_long_goes_to_the_larger_context(stream):
    ups = [
        Upstream(error_reply(400, TOO_LONG)),
        Upstream(script("small", stream=stream)),
        Upstream(script("large", stream=stream)),
    ]
    rule = chat_rule(3)
    for target, tokens in zip((*rule["split"], *rule["fallback"]), (4000, 4000, 32_000), strict=True):
        target["context_tokens"] = tokens
    async with llm_plane(*ups, rules=[rule]) as gw:
        answer = await gw.post(CHAT, asked(stream=stream))
        assert (text_of(answer), served_by(answer)[0]) == ("large", "up3")
        assert [len(up.requests) for up in ups] == [1, 0, 1]
        assert not gw.board.all()


@both
@pytest.mark.parametrize("error", [TOO_LONG, FILTERED], ids=["no larger one", "a content filter"])
async def test_a_refusal_that_no_other_place_would_lift_is_told_at_once(error, stream):
    up1, up2 = Upstream(error_reply(400, error)), Upstream(script(stream=stream))
    async with llm_plane(up1, up2, rules=[chat_rule(2, retries=3)]) as gw:
        status, code, _ = refusal(await gw.post(CHAT, asked(stream=stream)))
        assert (status, code) == (400, error["code"])
        assert (len(up1.requests), len(up2.requests)) == (1, 0)


# --- retries ----------------------------------------------------------------------------------------


@both
async def test_a_rule_may_have_a_place_tried_again(stream):
    up = Upstream([RST], error_reply(500, FULL), script("at last", stream=stream))
    async with llm_plane(up, rules=[chat_rule(1, retries=2)], draw=lambda: 0.0) as gw:
        answer = await gw.post(CHAT, asked(stream=stream))
        assert (text_of(answer), answer.headers["x-gateway-attempts"]) == ("at last", "3")


@both
async def test_without_retries_it_is_not(stream):
    up = Upstream([RST], script(stream=stream))
    async with llm_plane(up, draw=lambda: 0.0) as gw:
        assert refusal(await gw.post(CHAT, asked(stream=stream)))[:2] == (502, "backend_error")
        assert len(up.requests) == 1


@both
async def test_a_pause_that_the_time_does_not_allow_is_not_begun(stream):
    up = Upstream(full(60), script(stream=stream))
    async with llm_plane(up, rules=[chat_rule(1, retries=2)], draw=lambda: 0.0) as gw:
        assert refusal(await gw.post(CHAT, asked(stream=stream))) == (429, "queue_full", "60")


async def test_a_caller_that_leaves_in_a_pause_is_gone():
    up = Upstream(full(4))
    async with llm_plane(up, rules=[chat_rule(1, retries=2)], draw=lambda: 0.0) as gw:
        asking = asyncio.create_task(gw.post(CHAT, asked(stream=False)))
        await up.request(0)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: not gw.seen.in_flight)
        assert gw.seen.records[-1].code == "client_closed"
        assert not gw.loads


@both
async def test_when_the_budget_is_used_up_the_fault_is_told(stream):
    up1, up2 = Upstream(error_reply(500, FULL)), Upstream(script(stream=stream))
    async with llm_plane(up1, up2) as gw:
        assert await backend_of(gw, stream=stream) == "up2"
        budget = gw.pipeline.budgets[TASK]
        while budget.take(monotonic_us()):
            pass
        assert refusal(await gw.post(CHAT, asked(stream=stream)))[:2] == (502, "backend_error")
        assert len(up2.requests) == 1
        gw.pipeline.budgets[TASK] = RetryBudget()
        assert await backend_of(gw, stream=stream) == "up2"


@both
async def test_going_on_from_a_place_that_had_no_work_with_it_takes_nothing_from_the_budget(stream):
    lacks = error_reply(501, {"message": "this does not support images", "type": "t", "param": None, "code": None})
    rule = chat_rule(2)
    rule["split"][0]["context_tokens"], rule["fallback"][0]["context_tokens"] = 1000, 2000
    for turned_away in (lacks, error_reply(400, TOO_LONG)):
        up1, up2 = Upstream(turned_away), Upstream(script(stream=stream))
        async with llm_plane(up1, up2, rules=[rule]) as gw:
            budget = gw.pipeline.budgets[TASK] = RetryBudget()
            while budget.take(monotonic_us()):
                pass
            assert [await backend_of(gw, stream=stream) for _ in range(3)] == ["up2"] * 3


@both
async def test_a_place_whose_queue_here_is_full_passes_all_that_is_too_much_for_it_on(stream):
    up1, up2 = Upstream([HOLD]), Upstream(script(stream=stream))
    async with llm_plane(up1, up2, max_in_flight=1, max_queue_size=0) as gw:
        budget = gw.pipeline.budgets[TASK] = RetryBudget()
        while budget.take(monotonic_us()):
            pass
        holding = asyncio.create_task(gw.post(CHAT, asked(stream=stream)))
        await up1.request(0)
        assert [await backend_of(gw, stream=stream) for _ in range(3)] == ["up2"] * 3
        holding.cancel()
        await asyncio.wait([holding])


# --- hedging ----------------------------------------------------------------------------------------


def usual(gw: Harness, *, us: int, is_stream: bool) -> None:
    """As if answers at `up1`, streamed or whole, had begun after that long, of late."""
    board, now_us = gw.pipeline.loads, monotonic_us()
    for _ in range(20):
        sending = board.sent(UP1, tokens=1, now_us=now_us - us)
        board.began(sending, now_us=now_us, is_stream=is_stream)
        board.ended(sending, now_us=now_us)


@contextlib.asynccontextmanager
async def hedged(*ups, **fields):
    async with llm_plane(*ups, rules=[pool_rule(len(ups), "ordered", hedge=True, fallback=[], **fields)]) as gw:
        for is_stream in (False, True):
            usual(gw, us=20_000, is_stream=is_stream)
        yield gw


@both
async def test_the_second_copy_answers_and_the_first_is_cancelled(stream):
    up1, up2 = Upstream([HOLD]), Upstream(script("two", stream=stream))
    async with hedged(up1, up2) as gw:
        answer = await gw.post(CHAT, asked(stream=stream))
        assert (text_of(answer), served_by(answer)[0]) == ("two", "up2")
        assert answer.headers["x-gateway-attempts"] == "2"
        await up1.requests[0].left.wait()
        await until(lambda: not gw.loads)
        assert not gw.board.all()
        assert gw.seen.records[0].faults == ()


async def test_the_first_may_still_win_and_the_second_is_cancelled():
    up1, up2 = Upstream([sse_head(), HOLD]), Upstream([sse_head(), HOLD])
    async with hedged(up1, up2) as gw:
        asking = asyncio.create_task(gw.post(CHAT, asked(stream=True)))
        await up2.request(0)
        (connection,) = up1.live
        connection.transport.write(b"".join(script("one", stream=True)[1:]))
        answer = await asking
        assert (text_of(answer), served_by(answer)[0]) == ("one", "up1")
        await up2.requests[0].left.wait()
        await until(lambda: not gw.loads)


@both
async def test_the_fault_of_one_copy_is_not_the_callers(stream):
    up1, up2, up3 = Upstream([HOLD]), Upstream(error_reply(503, FULL)), Upstream(script("three", stream=stream))
    async with hedged(up1, up2, up3) as gw:
        asking = asyncio.create_task(gw.post(CHAT, asked(stream=stream)))
        await until(lambda: up2.requests)
        (connection,) = up1.live
        connection.transport.abort()  # both have failed: the third is next
        answer = await asking
        assert (text_of(answer), served_by(answer)[0]) == ("three", "up3")
        assert len(gw.seen.records[0].faults) == 2


@both
async def test_a_refusal_of_one_copy_is_told_at_once_and_no_third_place_is_asked(stream):
    ups = [Upstream([HOLD]), Upstream(error_reply(400, FILTERED)), Upstream(script(stream=stream))]
    async with hedged(*ups) as gw:
        status, code, _ = refusal(await gw.post(CHAT, asked(stream=stream)))
        assert (status, code) == (400, "content_filter")
        await ups[0].requests[0].left.wait()
        assert [len(up.requests) for up in ups] == [1, 1, 0]
        await until(lambda: not gw.loads)


async def test_a_whole_answer_is_not_late_when_a_stream_would_have_begun():
    up1, up2 = Upstream([Pause(0.1), *script("one", stream=False)]), Upstream(script(stream=False))
    async with llm_plane(up1, up2, rules=[pool_rule(2, "ordered", hedge=True, fallback=[])]) as gw:
        usual(gw, us=1_000, is_stream=True)
        assert await backend_of(gw, stream=False) == "up1"
        assert not up2.requests


@both
async def test_batch_requests_are_not_hedged(stream):
    up1, up2 = Upstream([HOLD]), Upstream(script(stream=stream))
    async with hedged(up1, up2) as gw:
        headers = {"x-priority": "batch", "x-timeout-ms": "300"}
        answer = await gw.http.post(CHAT, json=asked(stream=stream), headers=headers)
        assert (answer.status_code, len(up2.requests)) == (504, 0)


@both
async def test_a_caller_that_leaves_ends_both_copies(stream):
    up1, up2 = Upstream([HOLD]), Upstream([HOLD])
    async with hedged(up1, up2) as gw:
        asking = asyncio.create_task(gw.post(CHAT, asked(stream=stream)))
        await up2.request(0)
        asking.cancel()
        await asyncio.wait([asking])
        for up in (up1, up2):
            await up.requests[0].left.wait()
        await until(lambda: not gw.loads and not gw.seen.in_flight)
        assert not gw.board.all()


async def test_what_breaks_after_it_has_begun_is_not_continued_by_the_other():
    up1, up2 = Upstream([HOLD]), Upstream([sse_head(), event(delta("half")), RST])
    async with hedged(up1, up2) as gw:
        answer = await gw.post(CHAT, asked(stream=True))
        assert "[DONE]" not in answer.text
        assert '"code":"backend_error"' in answer.text
        assert (len(up1.requests), len(up2.requests)) == (1, 1)
