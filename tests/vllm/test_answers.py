"""What real vLLM answers comes through the gateway unchanged: words, tool calls, token counts, refusals."""

import asyncio
import json
from typing import Any

import pytest

from tests.kit.serving import Serving
from tests.kit.wait import until_async
from tests.vllm.door import CHAT, DONE, RESPONSES, TEXT, Door, text_of
from tests.vllm.metrics import metric
from tests.vllm.server import CONTEXT, SLOTS

STEADY = {"temperature": 0, "seed": 1}
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 40, **STEADY}
PROMPT = {"prompt": "The capital of France is", "max_tokens": 12, **STEADY}
INPUT = {"input": "What is the capital of France?", "max_output_tokens": 40, "temperature": 0}
WITH_USAGE = {"stream_options": {"include_usage": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "strict": True,  # vLLM then holds the model to the parameters' schema
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL_IT = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
OWN = {"id", "created", "created_at", "model", "item_id", "completed_at"}  # of one answer alone


def without_own(value: Any) -> Any:
    """An answer without what differs from one answer to the next of the same words."""
    if isinstance(value, dict):
        return {name: without_own(one) for name, one in value.items() if name not in OWN}
    return [without_own(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("path", "body"), [(CHAT, QUESTION), (TEXT, PROMPT), (RESPONSES, INPUT)])
async def test_a_whole_answer_is_the_engine_s_own(straight: Door, through: Door, path: str, body: dict[str, Any]):
    expected = await straight.answer(path, **body)
    answer = await through.answer(path, **body)
    assert "Paris" in json.dumps(expected)
    usage = answer["usage"]
    assert expected["usage"].items() <= usage.items()  # the gateway may add what it cost
    assert without_own({**answer, "usage": None}) == without_own({**expected, "usage": None})


async def test_a_streamed_chat_has_the_same_words_in_several_events(straight: Door, through: Door):
    expected = await straight.events(CHAT, **QUESTION)
    events = await through.events(CHAT, **QUESTION)
    assert events[-1] == expected[-1] == DONE
    assert "Paris" in text_of(expected)
    assert text_of(events) == text_of(expected)
    assert len(events) > 4
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_streamed_completion_has_the_same_words_in_several_events(straight: Door, through: Door):
    expected = await straight.events(TEXT, **PROMPT)
    events = await through.events(TEXT, **PROMPT)
    assert events[-1] == expected[-1] == DONE

    def words(found: list[Any]) -> str:
        return "".join(event["choices"][0]["text"] for event in found[:-1])

    assert "Paris" in words(expected)
    assert words(events) == words(expected)
    assert len(events) > 4


async def test_a_streamed_response_has_the_same_typed_events(straight: Door, through: Door):
    expected = await straight.events(RESPONSES, **INPUT)
    events = await through.events(RESPONSES, **INPUT)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 4

    def words(found: list[Any]) -> str:
        return "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")

    assert "Paris" in words(expected)
    assert words(events) == words(expected)
    assert expected[-1]["response"]["usage"].items() <= events[-1]["response"]["usage"].items()


@pytest.mark.parametrize(("path", "body"), [(CHAT, QUESTION), (TEXT, PROMPT)])
async def test_streamed_usage_is_told_when_it_is_asked_for(
    straight: Door, through: Door, path: str, body: dict[str, Any]
):
    expected = await straight.events(path, **body, **WITH_USAGE)
    events = await through.events(path, **body, **WITH_USAGE)
    assert expected[-2]["choices"] == events[-2]["choices"] == []
    assert expected[-2]["usage"].items() <= events[-2]["usage"].items()
    whole = await straight.answer(path, **body)
    assert events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}])
async def test_streamed_usage_is_not_told_unasked(through: Door, options: dict[str, Any]):
    events = await through.events(CHAT, **QUESTION, **options)
    assert events[-1] == DONE
    assert [event for event in events[:-1] if event.get("usage") or not event["choices"]] == []


@pytest.mark.parametrize(("path", "body"), [(CHAT, QUESTION), (TEXT, PROMPT)])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_s_own_count_is_metered(
    gateway: Serving, straight: Door, through: Door, path: str, body: dict[str, Any], stream: bool
):
    expected = (await straight.answer(path, **body))["usage"]
    response = await through.whole(path, **body, stream=stream)  # a stream's usage is not asked for
    assert response.status_code == 200, response.text

    async def is_metered() -> bool:
        return await metric(gateway.ops_url, "gateway_tokens_total", direction="output") > 0

    await until_async(is_metered)
    counted = [await metric(gateway.ops_url, "gateway_tokens_total", direction=way) for way in ("input", "output")]
    assert counted == [expected["prompt_tokens"], expected["completion_tokens"]]
    assert await metric(gateway.ops_url, "gateway_estimated_usage_total") == 0


async def test_a_tool_is_called_with_its_schema(straight: Door, through: Door):
    body = {**QUESTION, **CALL_IT, "max_tokens": 80}
    expected = (await straight.answer(CHAT, **body))["choices"][0]["message"]["tool_calls"][0]["function"]
    answer = await through.answer(CHAT, **body)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == expected
    assert call["function"]["name"] == "get_weather"
    assert list(json.loads(call["function"]["arguments"])) == ["city"]


async def test_a_streamed_tool_call_joins_to_the_whole_one(straight: Door, through: Door):
    body = {**QUESTION, **CALL_IT, "max_tokens": 80}
    whole = (await straight.answer(CHAT, **body))["choices"][0]["message"]["tool_calls"][0]["function"]
    events = await through.events(CHAT, **body)
    assert events[-1] == DONE
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    parts = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert len(parts) > 1
    assert "".join(part.get("name") or "" for part in parts) == whole["name"]
    assert "".join(part.get("arguments") or "" for part in parts) == whole["arguments"]


async def test_structured_output_logprobs_and_several_choices_pass(through: Door):
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    answer = await through.answer(CHAT, **QUESTION, response_format=wanted)
    assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Paris", "Rome")
    several = {"max_tokens": 2, "logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 0.5}
    answer = await through.answer(CHAT, **{**QUESTION, **several})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [2, 2]


async def test_a_field_of_vllm_alone_passes(through: Door):
    answer = await through.answer(CHAT, **{**QUESTION, "max_tokens": 24}, min_tokens=24, return_token_ids=True)
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"]) == 24


REFUSED = {
    "a prompt over the context": {"messages": [{"role": "user", "content": "word " * (CONTEXT + 100)}]},
    "a bad value of a parameter of vLLM alone": {"min_p": 7},
    "a tool that is not there": {**CALL_IT, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", REFUSED)
async def test_a_refusal_is_the_engine_s_own(straight: Door, through: Door, case: str, stream: bool):
    body = {**QUESTION, **REFUSED[case], "stream": stream}
    expected, refused = await straight.whole(CHAT, **body), await through.whole(CHAT, **body)
    assert expected.status_code == refused.status_code == 400
    assert expected.json()["error"]["message"] in refused.json()["error"]["message"]


async def test_more_streams_than_slots_all_end_whole(through: Door):
    asked = [
        {"messages": [{"role": "user", "content": f"Tell me of the number {n}."}], "max_tokens": 30, **STEADY}
        for n in range(2 * SLOTS)
    ]
    answers = await asyncio.gather(*(through.events(CHAT, **body, **WITH_USAGE) for body in asked))
    for events in answers:
        assert events[-1] == DONE
        assert 0 < events[-2]["usage"]["completion_tokens"] <= 30
        assert text_of(events)
