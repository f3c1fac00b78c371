"""vLLM beside llama.cpp: requests go where less is to do, and where somebody lives."""

import asyncio
import json

from tests.kit.serving import KEY, Serving
from tests.kit.wait import until_async
from tests.vllm.busy import GONE_S, LONG, busy, work
from tests.vllm.door import CHAT, DONE, Door, door, text_of
from tests.vllm.metrics import metric
from tests.vllm.server import NAME, SLOTS, VllmServer

SHORT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8, "temperature": 0}
REQUESTS = 6


async def queue(gateway: Serving, backend: str) -> float:
    """What the gateway last read of an engine's queue: the requests that wait in it."""
    return await metric(gateway.ops_url, "gateway_engine_requests", backend=backend, state="waiting")


async def answered_by(through: Door) -> set[str]:
    """The backends that answer some requests, one after the other."""
    found = set()
    for _ in range(REQUESTS):
        response = await through.whole(CHAT, **SHORT)
        assert response.status_code == 200, response.text
        found.add(response.headers["x-gateway-backend"])
    return found


async def test_requests_go_to_the_engine_that_says_it_has_less_to_do(
    vllm: VllmServer, llama_url: str, gateway: Serving, straight: Door
):
    # The load comes from others: the gateway itself has sent nothing that is still on its way.
    async def vllm_has_a_queue() -> bool:
        return await queue(gateway, "vllm") == SLOTS

    async def llama_alone_has_a_queue() -> bool:
        return await queue(gateway, "llama") > 0 == await queue(gateway, "vllm")

    async with door(gateway.url, "least_loaded", key=KEY) as through, door(llama_url, NAME) as llama:
        async with busy(vllm, straight, 2 * SLOTS):
            await until_async(vllm_has_a_queue, timeout_s=GONE_S)
            assert await answered_by(through) == {"llama"}
        async with work(llama, 2 * SLOTS):
            await until_async(llama_alone_has_a_queue, timeout_s=GONE_S)
            assert await answered_by(through) == {"vllm"}


async def test_a_stream_that_vllm_breaks_off_ends_with_an_error_and_no_done(vllm: VllmServer, gateway: Serving):
    async with door(gateway.url, "first_vllm", key=KEY) as through:
        async with through.stream(CHAT, **LONG) as (response, events):
            assert response.headers["x-gateway-backend"] == "vllm"
            seen = [await anext(events) for _ in range(3)]
            vllm.kill()
            rest = [event async for event in events]
        assert text_of(seen)
        assert DONE not in rest
        assert rest[-1]["error"]["code"], rest[-1]
        assert [event for event in rest[:-1] if "error" in event] == []
        after = await through.whole(CHAT, **SHORT)
        assert (after.status_code, after.headers["x-gateway-backend"]) == (200, "llama"), after.text


async def test_llama_answers_what_a_killed_vllm_had_not_begun(vllm: VllmServer, gateway: Serving, straight: Door):
    async def two_more_wait() -> bool:
        return await vllm.waiting() == 2

    async with door(gateway.url, "first_vllm", key=KEY) as through:
        async with busy(vllm, straight, SLOTS):
            streamed = asyncio.create_task(through.whole(CHAT, **SHORT, stream=True))
            whole = asyncio.create_task(through.whole(CHAT, **SHORT))
            await until_async(two_more_wait, timeout_s=GONE_S)
            vllm.kill()
            answers = await asyncio.gather(streamed, whole)
        for answer in answers:
            assert (answer.status_code, answer.headers["x-gateway-backend"]) == (200, "llama"), answer.text
            assert answer.headers["x-gateway-attempts"] == "2"
        events = [line.removeprefix("data: ") for line in answers[0].text.splitlines() if line]
        assert events[-1] == DONE
        assert text_of([json.loads(event) for event in events[:-1]])
        assert answers[1].json()["choices"][0]["message"]["content"]


async def test_vllm_answers_again_when_it_is_back(vllm: VllmServer, gateway: Serving):
    async with door(gateway.url, "first_vllm", key=KEY) as through:

        async def answers(backend: str) -> bool:
            response = await through.whole(CHAT, **SHORT)
            assert response.status_code == 200, response.text
            return response.headers["x-gateway-backend"] == backend

        assert await answers("vllm")
        await asyncio.to_thread(vllm.kill)
        assert await answers("llama")
        await asyncio.to_thread(vllm.start)
        await until_async(lambda: answers("vllm"), timeout_s=GONE_S)
