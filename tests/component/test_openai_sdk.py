"""The official openai client against the whole data plane, over scripted upstreams on raw sockets."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from tests.kit.app import KEY, running
from tests.kit.llm_plane import (
    ALIAS,
    ASK,
    ASK_COMPLETION,
    ASK_RESPONSE,
    CHAT,
    COMPLETIONS,
    RESPONSES,
    chat_rule,
    llm_plane,
    response,
    response_events,
    responses_stream,
    sdk,
    stream_of,
    text_completion,
    text_delta,
)
from tests.kit.upstream import (
    RST,
    Upstream,
    completion,
    delta,
    error_reply,
    event,
    json_reply,
    named,
    sse_head,
    usage_chunk,
)

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def sent(up: Upstream) -> dict:
    """What the upstream got last."""
    return up.requests[-1].json()


class City(BaseModel):
    name: str


# --- what is asked reaches the upstream as it is -----------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        {"n": 2, "seed": 7, "logprobs": True, "top_logprobs": 3, "stop": ["a", "b"], "logit_bias": {"50256": -100}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "see 数🙂"}, IMAGE]}]},
        {"messages": [{"role": "tool", "tool_call_id": "c1", "content": "12"}, {"role": "developer", "content": "x"}]},
        {"temperature": 0.0, "top_p": 1.0, "max_completion_tokens": 5, "user": "u", "metadata": {"api_base": "x"}},
    ],
    ids=["tools", "response_format", "sampling", "images", "roles", "numbers"],
)
async def test_every_field_of_a_chat_passes_untouched(fields):
    up = Upstream(json_reply(200, completion()))
    async with llm_plane(up) as gw, sdk(gw) as client:
        answer = await client.chat.completions.create(**{**ASK, **fields}, extra_body={"unheard_of": {"x": [1, None]}})
    assert answer.choices[0].message.content == "hi"
    assert answer.usage.total_tokens == 5
    assert sent(up) == {**ASK, **fields, "unheard_of": {"x": [1, None]}, "model": "model-1"}
    assert up.requests[0].path == CHAT


async def test_choices_logprobs_and_tool_calls_come_back():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    token = {"token": "a", "logprob": -0.25, "bytes": [97], "top_logprobs": []}
    choices = [
        {"index": 0, "message": message, "finish_reason": "tool_calls"},
        {
            "index": 1,
            "message": {"role": "assistant", "content": "b"},
            "finish_reason": "length",
            "logprobs": {"content": [token]},
        },
    ]
    async with llm_plane(Upstream(json_reply(200, completion() | {"choices": choices}))) as gw, sdk(gw) as client:
        raw = await client.chat.completions.with_raw_response.create(**ASK, n=2, tools=TOOLS)
        answer = raw.parse()
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Ulm"}
    assert answer.choices[1].logprobs.content[0].logprob == -0.25
    assert raw.headers["x-gateway-backend"] == "up1"
    assert raw.headers["x-request-id"] == answer._request_id


async def test_an_answer_in_a_given_form_is_parsed():
    async with llm_plane(Upstream(json_reply(200, completion('{"name": "Ulm"}')))) as gw, sdk(gw) as client:
        answer = await client.chat.completions.parse(**ASK, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Ulm")


async def test_plain_completions_whole_and_streamed():
    pieces = [text_delta("o"), text_delta("ne", finish="stop")]
    up = Upstream(json_reply(200, text_completion("one")), stream_of(*pieces))
    async with llm_plane(up) as gw, sdk(gw) as client:
        whole = await client.completions.create(**ASK_COMPLETION, max_tokens=0, echo=True, logprobs=2)
        stream = await client.completions.create(**{**ASK_COMPLETION, "prompt": [[1, 2], [3]]}, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
    assert (whole.choices[0].text, "".join(texts)) == ("one", "one")
    assert [seen.path for seen in up.requests] == [COMPLETIONS] * 2
    assert up.requests[0].json() == {"model": "model-1", "prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 2}
    assert sent(up)["prompt"] == [[1, 2], [3]]


async def test_responses_whole_and_streamed():
    up = Upstream(json_reply(200, response("one")), responses_stream("o", "ne"), responses_stream("o", "ne"))
    fields = {"instructions": "be brief", "tools": [{"type": "web_search"}], "extra_body": {"unheard_of": 1}}
    async with llm_plane(up) as gw, sdk(gw) as client:
        whole = await client.responses.create(**ASK_RESPONSE, **fields)
        kinds = [one.type async for one in await client.responses.create(**ASK_RESPONSE, stream=True)]
        async with client.responses.stream(**ASK_RESPONSE) as helper:
            final = await helper.get_final_response()
    assert (whole.output_text, final.output_text) == ("one", "one")
    assert (whole.usage.input_tokens, final.usage.output_tokens) == (3, 2)
    assert kinds == [one["type"] for one in response_events("o", "ne")]
    assert {seen.path for seen in up.requests} == {RESPONSES}
    wanted = {"model": "model-1", "input": "hi", "instructions": "be brief", "unheard_of": 1}
    assert up.requests[0].json() == {**wanted, "tools": [{"type": "web_search"}]}


async def test_events_of_the_responses_api_keep_their_names_and_end_without_done():
    async with llm_plane(Upstream(responses_stream("a"))) as gw:
        answer = await gw.post(RESPONSES, {**ASK_RESPONSE, "stream": True})
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    read = [block.split("\n") for block in blocks]
    for lines, one in zip(read, response_events("a"), strict=True):
        assert lines[0] == f"event: {one['type']}"
        assert json.loads(lines[1].removeprefix("data: ")) == one
    assert "[DONE]" not in answer.text


async def test_the_stream_helper_of_chat_joins_the_pieces():
    pieces = [delta("o"), delta("ne"), delta("", finish="stop"), usage_chunk()]
    async with (
        llm_plane(Upstream(stream_of(*pieces))) as gw,
        sdk(gw) as client,
        client.chat.completions.stream(**ASK, stream_options={"include_usage": True}) as stream,
    ):
        deltas = [one.delta async for one in stream if one.type == "content.delta"]
        final = await stream.get_final_completion()
    assert "".join(deltas) == "one"
    assert final.choices[0].message.content == "one"
    assert final.usage.total_tokens == 5


async def test_usage_is_seen_only_by_those_who_asked():
    pieces = [delta("one"), delta("", finish="stop"), usage_chunk()]
    async with llm_plane(Upstream(stream_of(*pieces))) as gw, sdk(gw) as client:
        for options, seen in (({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)):
            stream = await client.chat.completions.create(**ASK, stream=True, stream_options=options)
            chunks = [chunk async for chunk in stream]
            assert sum(chunk.usage is not None for chunk in chunks) == seen
            assert [chunk.choices for chunk in chunks[-1:] if chunk.usage] == [[]] * seen
    assert [record.usage.output_tokens for record in gw.seen.records] == [2, 2, 2]


async def test_the_client_without_asyncio_is_served_alike():
    pieces = [delta("o"), delta("ne", finish="stop")]
    up = Upstream(json_reply(200, completion("one")), stream_of(*pieces), json_reply(200, response("one")))

    def ask(url: str) -> list[str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            whole = client.chat.completions.create(**ASK)
            stream = client.chat.completions.create(**ASK, stream=True)
            joined = "".join(chunk.choices[0].delta.content for chunk in stream)
            return [whole.choices[0].message.content, joined, client.responses.create(**ASK_RESPONSE).output_text]

    async with llm_plane(up) as gw:
        assert await asyncio.to_thread(ask, gw.url) == ["one"] * 3


# --- model names -------------------------------------------------------------------------------------------


async def test_an_alias_can_have_a_rule_of_its_own_and_be_sent_on():
    rules = [chat_rule(name="alias", match={"model": ALIAS}, split=[{"backend": "up1", "model": "*"}]), chat_rule()]
    up = Upstream(json_reply(200, completion()))
    async with llm_plane(up, rules=rules) as gw, sdk(gw) as client:
        by_alias = await client.chat.completions.with_raw_response.create(**{**ASK, "model": ALIAS})
        by_task = await client.chat.completions.with_raw_response.create(**ASK)
    assert [answer.headers["x-gateway-rule"] for answer in (by_alias, by_task)] == ["alias", "chat"]
    assert [seen.json()["model"] for seen in up.requests] == [ALIAS, "model-1"]


async def test_models_are_listed_and_found():
    async with running([]) as gw, sdk(gw) as client:
        names = {model.id async for model in client.models.list()}
        one = await client.models.retrieve(ALIAS)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.models.retrieve("nope")
    assert {"general_llm", ALIAS} <= names
    assert (one.id, one.object, one.owned_by) == (ALIAS, "model", "gateway")
    assert unknown.value.code == "model_not_found"


# --- errors ------------------------------------------------------------------------------------------------

CALLS = {
    CHAT: lambda client, **more: client.chat.completions.create(**ASK, **more),
    COMPLETIONS: lambda client, **more: client.completions.create(**ASK_COMPLETION, **more),
    RESPONSES: lambda client, **more: client.responses.create(**ASK_RESPONSE, **more),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    ("status", "raised"), [(400, openai.BadRequestError), (409, openai.ConflictError), (422, openai.APIStatusError)]
)
async def test_an_upstreams_own_refusal_keeps_its_status_and_words(path, stream, status, raised):
    refusal = {"message": "unknown field 'x'", "type": "invalid_request_error", "param": "x", "code": "bad_x"}
    up, other = Upstream(error_reply(status, refusal)), Upstream(json_reply(200, completion()))
    async with llm_plane(up, other) as gw, sdk(gw) as client:
        with pytest.raises(raised) as refused:
            await CALLS[path](client, stream=stream)
    error = refused.value
    assert (error.status_code, error.code, error.param) == (status, "bad_x", "x")
    assert error.body["message"] == "unknown field 'x'"
    assert error.response.headers["content-type"] == "application/json"
    assert (len(up.requests), len(other.requests)) == (1, 0)


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    ("script", "raised", "status"),
    [
        (error_reply(429, {"message": "full"}, {"Retry-After": "7"}), openai.RateLimitError, 429),
        (error_reply(500, {"message": "oops"}), openai.InternalServerError, 502),
        (json_reply(200, {}), openai.InternalServerError, 502),
    ],
    ids=["full", "failed", "no answer"],
)
async def test_other_failures_have_the_gateways_own_words(path, script, raised, status):
    async with llm_plane(Upstream(script)) as gw, sdk(gw) as client:
        with pytest.raises(raised) as failed:
            await CALLS[path](client)
    assert failed.value.status_code == status
    assert set(failed.value.body) == {"message", "type", "param", "code"}
    assert failed.value.response.headers.get("retry-after") == ("7" if status == 429 else None)


async def test_the_client_comes_again_after_429_and_503_and_not_after_400():
    wait = {"Retry-After-Ms": "1"}
    scripts = [error_reply(429, {"message": "x"}, wait), error_reply(503, {"message": "x"}, wait)]
    refusal = error_reply(400, {"message": "no"})
    up = Upstream(*scripts, json_reply(200, completion()), refusal)
    async with llm_plane(up) as gw, sdk(gw, max_retries=2) as client:
        answer = await client.chat.completions.create(**ASK)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "hi"
    assert len(up.requests) == 4


@pytest.mark.parametrize("path", CALLS)
async def test_a_stream_that_breaks_raises_at_the_client_and_has_no_end(path):
    begun = response_events("a", "b")[:4]
    scripts = {
        CHAT: [event(delta("a"))],
        COMPLETIONS: [event(text_delta("a"))],
        RESPONSES: [named(one["type"], one) for one in begun],
    }
    up, other = Upstream([sse_head(), *scripts[path], RST]), Upstream(json_reply(200, completion()))
    async with llm_plane(up, other) as gw, sdk(gw) as client:
        chunks = aiter(await CALLS[path](client, stream=True))
        for _ in scripts[path]:
            await anext(chunks)
        with pytest.raises(openai.APIError) as broken:
            await anext(chunks)
        asked = {CHAT: ASK, COMPLETIONS: ASK_COMPLETION, RESPONSES: ASK_RESPONSE}[path]
        raw = await gw.post(path, {**asked, "stream": True})
    assert (broken.value.code, broken.value.type) == ("backend_error", "server_error")
    assert "[DONE]" not in raw.text
    assert not other.requests
    if path == RESPONSES:
        name, data = raw.text.strip().rpartition("\n\n")[2].split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == "event: error"
        assert (told["type"], told["code"], told["sequence_number"]) == ("error", "backend_error", len(begun))
