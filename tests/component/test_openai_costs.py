"""What an answer cost, in its header and its body; where it has no price, the upstream's very bytes."""

import json

import pytest

from gateway.api.headers import usd
from gateway.backends.scripted import ScriptedBackend
from gateway.core.types import Delta, Message, Usage
from tests.kit.app import running
from tests.kit.llm_plane import ASK, ASK_COMPLETION, ASK_RESPONSE, CHAT, COMPLETIONS, RESPONSES, TASK

ASKED = {CHAT: ASK, COMPLETIONS: ASK_COMPLETION, RESPONSES: ASK_RESPONSE}
TOLD = Usage(input_tokens=3, output_tokens=2, cost_nano_usd=40_070)
WHOLE = b'{ "choices": [{"message": {"role": "assistant", "content": "x"}}], "usage": {"prompt_tokens": 3} }'


@pytest.mark.parametrize(
    ("nano", "text"),
    [(0, "0"), (1, "0.000000001"), (40_070, "0.00004007"), (1_500_000_000, "1.5"), (120 * 10**9, "120")],
)
def test_dollars_are_plain_decimals(nano, text):
    assert usd(nano) == text


@pytest.mark.parametrize("path", ASKED)
async def test_a_whole_answer_tells_its_cost(path):
    async with running([ScriptedBackend("llm", [Message(body=WHOLE, usage=TOLD)])]) as gw:
        answer = await gw.post(path, ASKED[path])
    assert answer.headers["x-gateway-cost-usd"] == "0.00004007"
    assert answer.json()["usage"] == {"prompt_tokens": 3, "cost_usd": 0.00004007}
    assert b'"cost_usd":0.00004007' in answer.content
    assert answer.json()["choices"] == json.loads(WHOLE)["choices"]


@pytest.mark.parametrize("path", ASKED)
async def test_without_a_price_nothing_is_touched(path):
    usage = Usage(input_tokens=3, output_tokens=2)
    async with running([ScriptedBackend("llm", [Message(body=WHOLE, usage=usage)])]) as gw:
        answer = await gw.post(path, ASKED[path])
    assert answer.content == WHOLE
    assert "x-gateway-cost-usd" not in answer.headers


@pytest.mark.parametrize(("path", "given"), [(CHAT, "prompt_tokens"), (RESPONSES, "input_tokens")])
async def test_our_own_count_is_told_and_marked_where_the_upstream_told_none(path, given):
    usage = Usage(input_tokens=3, output_tokens=2, is_estimated=True, cost_nano_usd=10)
    async with running([ScriptedBackend("llm", [Message(body=b'{"usage": null}', usage=usage)])]) as gw:
        told = (await gw.post(path, ASKED[path])).json()["usage"]
    assert (told[given], told["total_tokens"], told["estimated"], told["cost_usd"]) == (3, 5, True, 1e-08)


@pytest.mark.parametrize("path", ASKED)
async def test_the_streamed_event_that_tells_usage_tells_the_cost(path):
    plain = b'{ "x": 1 }'
    told = b'{"choices": [], "usage": {"prompt_tokens": 3}}'
    if path == RESPONSES:
        told = b'{"type": "response.completed", "response": {"usage": {"input_tokens": 3}}}'
    script = [Delta(data=plain), Delta(data=told, usage=TOLD)]
    async with running([ScriptedBackend("llm", script)]) as gw:
        answer = await gw.post(path, {**ASKED[path], "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
    assert lines[0].encode() == plain
    last = json.loads(lines[1])
    assert (last.get("response") or last)["usage"]["cost_usd"] == 0.00004007


async def test_an_event_that_shows_no_usage_is_left_alone():
    async with running([ScriptedBackend("llm", [Delta(data=b'{ "choices": [] }', usage=TOLD)])]) as gw:
        answer = await gw.post(CHAT, {**ASK, "stream": True})
    assert answer.text.startswith('data: { "choices": [] }\n\n')


async def test_a_task_answer_tells_all_that_is_known():
    usage = Usage(
        input_tokens=30,
        output_tokens=20,
        cached_tokens=10,
        reasoning_tokens=5,
        is_estimated=True,
        estimated_scores=True,
        cost_nano_usd=40_070,
    )
    async with running([ScriptedBackend("llm", [Message(body=WHOLE, usage=usage)])]) as gw:
        answer = await gw.post(f"/v1/tasks/{TASK}", {"input": {"messages": ASK["messages"]}})
    assert answer.json()["usage"] == {
        "input_tokens": 30,
        "output_tokens": 20,
        "cached_tokens": 10,
        "reasoning_tokens": 5,
        "cost_usd": 0.00004007,
        "estimated": True,
        "estimated_scores": True,
    }
    assert answer.headers["x-gateway-cost-usd"] == "0.00004007"
