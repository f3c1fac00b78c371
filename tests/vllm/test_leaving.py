"""A caller that leaves stops the work in vLLM itself, as its own metrics tell."""

import asyncio

import pytest

from tests.kit.serving import Serving
from tests.kit.wait import until_async
from tests.vllm.busy import GONE_S, LONG, busy, cancel, is_idle
from tests.vllm.door import CHAT, Door
from tests.vllm.metrics import metric
from tests.vllm.server import SLOTS, VllmServer


async def nothing_in_flight(gateway: Serving) -> bool:
    return await metric(gateway.ops_url, "gateway_requests_in_flight") == 0


async def test_leaving_in_mid_stream_stops_the_engine(vllm: VllmServer, gateway: Serving, through: Door):
    async with through.stream(CHAT, **LONG) as (response, events):
        assert response.status_code == 200
        for _ in range(3):
            await anext(events)
        assert await vllm.running() == 1
        assert not await nothing_in_flight(gateway)
    await until_async(lambda: is_idle(vllm), timeout_s=GONE_S)
    await until_async(lambda: nothing_in_flight(gateway), timeout_s=GONE_S)
    assert await metric(gateway.ops_url, "gateway_tokens_total", direction="output") >= 2  # what it had got
    assert await metric(gateway.ops_url, "gateway_estimated_usage_total") == 1


async def test_leaving_a_whole_answer_stops_the_engine(vllm: VllmServer, gateway: Serving, through: Door):
    task = asyncio.create_task(through.whole(CHAT, **LONG))

    async def runs() -> bool:
        return await vllm.running() == 1

    await until_async(runs, timeout_s=GONE_S)
    await cancel(task)
    await until_async(lambda: is_idle(vllm), timeout_s=GONE_S)
    await until_async(lambda: nothing_in_flight(gateway), timeout_s=GONE_S)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token_leaves_the_engine_s_queue(
    vllm: VllmServer, gateway: Serving, straight: Door, through: Door, stream: bool
):
    async def waits() -> bool:
        return await vllm.waiting() == 1

    async def waits_no_more() -> bool:
        return await vllm.waiting() == 0

    async with busy(vllm, straight, SLOTS):
        task = asyncio.create_task(through.whole(CHAT, **LONG, stream=stream))
        await until_async(waits, timeout_s=GONE_S)
        await cancel(task)
        await until_async(waits_no_more, timeout_s=GONE_S)
        assert await vllm.running() == SLOTS  # it left, and was not served instead
    await until_async(lambda: nothing_in_flight(gateway), timeout_s=GONE_S)


async def test_the_engine_answers_after_many_left(vllm: VllmServer, through: Door):
    for tokens in range(1, 9):
        async with through.stream(CHAT, **LONG) as (_, events):
            for _ in range(tokens):
                await anext(events)
    await until_async(lambda: is_idle(vllm), timeout_s=GONE_S)
    answer = await through.answer(CHAT, **{**LONG, "max_tokens": 4})
    assert answer["usage"]["completion_tokens"] == 4
