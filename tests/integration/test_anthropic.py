"""`AnthropicCodec` against a real server of the Messages API: llama.cpp has it beside OpenAI's."""

from contextlib import aclosing

import orjson
import pytest

from gateway.backends.llm.backend import LLMBackend
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import BackendCall, Delta, Message, Metered, OpenAIPayload, Place
from tests.kit.anthropic import CODEC
from tests.kit.wait import until_async
from tests.vllm.metrics import metric
from tests.vllm.server import llama

ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is the capital of France?"}]
LONG = {"messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": 900}
US = 60_000_000


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with llama(tmp_path_factory.mktemp("llama")) as url:
        yield url


@pytest.fixture
async def backend(url):
    backend = LLMBackend("claude", codec=CODEC, base_urls=[f"{url}/v1"], models={"claude": "smollm2"})
    yield backend
    await backend.close()


def asked(backend, *, stream=False, **body):
    body = {"messages": ASKED, "temperature": 0, "max_tokens": 12, **body}
    payload = OpenAIPayload(body=body, stream=stream)
    return aclosing(
        backend.infer(BackendCall(request_id="r", model="claude", version="", payload=payload), timeout_us=US)
    )


async def events(backend, **body):
    async with asked(backend, **body) as answer:
        return [event async for event in answer]


async def whole(backend, **body):
    (message,) = await events(backend, **body)
    assert isinstance(message, Message)
    return orjson.loads(message.body), message.usage


def said(chunks):
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def test_a_whole_answer(backend):
    answer, usage = await whole(backend)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")
    assert usage.input_tokens > 20
    assert 0 < usage.output_tokens == answer["usage"]["completion_tokens"] <= 12


async def test_a_bound_is_kept(backend):
    answer, usage = await whole(backend, max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert usage.output_tokens == 2


async def test_a_stream_says_what_a_whole_answer_says(backend):
    answer, whole_usage = await whole(backend)
    streamed = await events(backend, stream=True, stream_options={"include_usage": True})
    assert isinstance(streamed[0], Metered)
    chunks = [orjson.loads(event.data) for event in streamed if isinstance(event, Delta)]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert said(chunks) == answer["choices"][0]["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"] == []
    told = streamed[-1].usage
    # What lay in the prefix cache differs between the two; all of the prompt counts in both.
    assert (told.input_tokens, told.output_tokens) == (whole_usage.input_tokens, whole_usage.output_tokens)
    assert told.cached_tokens > 0


async def test_a_round_of_tool_calls_is_understood(backend):
    call = {"id": "c1", "type": "function", "function": {"name": "capital", "arguments": '{"of": "France"}'}}
    parameters = {"type": "object", "properties": {"of": {"type": "string"}}}
    answer, _ = await whole(
        backend,
        messages=[
            *ASKED,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "Paris"},
        ],
        tools=[{"type": "function", "function": {"name": "capital", "parameters": parameters}}],
        tool_choice="none",
    )
    assert answer["choices"][0]["message"]["content"]


async def test_leaving_a_stream_stops_the_server(backend, url):
    async def running(count):
        return await metric(url, "llamacpp:requests_processing") == count

    async with asked(backend, stream=True, **LONG) as answer:
        parts = [await anext(answer) for _ in range(3)]
        assert isinstance(parts[-1], Delta)
        assert await running(1)
    await until_async(lambda: running(0), timeout_s=30)


NO_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("content", "kind"),
    [("a b c " * 6000, FaultKind.CONTEXT_TOO_LONG), ([NO_IMAGE], FaultKind.UNSUPPORTED)],
    ids=["long", "image"],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_server_s_refusals(backend, content, kind, stream):
    with pytest.raises(BackendError) as caught:
        await events(backend, stream=stream, messages=[{"role": "user", "content": content}])
    assert caught.value.fault.kind is kind


async def test_a_probe_finds_it(backend):
    await backend.probe(Place(backend="claude", model="claude"))
