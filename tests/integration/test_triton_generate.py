"""Triton's generate extension behind the OpenAI surface: a real Triton, and a model with vLLM's inputs and outputs.

The model says the user's words back, one a piece; what it does otherwise is in its prompt.
"""

import asyncio
import time

import httpx
import openai
import pytest

from gateway.backends.llm.backend import LLMBackend
from gateway.backends.llm.chat_templates import load
from gateway.backends.llm.triton_generate_codec import TritonGenerateCodec
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import BackendCall, Delta, OpenAIPayload, Place
from tests.kit.servers import running
from tests.kit.serving import KEY, serving
from tests.kit.wait import until

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true }%s
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }%s ]
"""
# What releases before 24.12 lack: they take these for parameters, and say nothing of them.
TOLD_IN = "".join(
    f',\n  {{ name: "return_{name}" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}'
    for name in ("finish_reason", "num_input_tokens", "num_output_tokens")
)
TOLD_OUT = """,
  { name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] },
  { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ -1 ] }"""

MODEL = """
import json
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb_utils

LEFT = pathlib.Path(__file__).parent / "left"


def given(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()[0]


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.answer(request, sender)
            except Exception as error:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def answer(self, request, sender):
        prompt = given(request, "text_input").decode()
        asked = json.loads(given(request, "sampling_parameters"))
        if not given(request, "exclude_input_in_output"):
            raise ValueError("the prompt would come back")
        if "too long" in prompt:
            raise ValueError("The prompt is longer than the model takes. `max_model_len` is 8")
        user = prompt.rpartition("<|im_start|>user")[2].partition("<|im_end|>")[0].strip() or prompt
        words = [word + " " for word in user.split()][: asked["max_tokens"]]
        finish = "length" if len(words) == asked["max_tokens"] else "stop"
        if not given(request, "stream"):
            return sender.send(self.piece(request, "".join(words), finish, len(words)))
        for i, word in enumerate(words):
            sender.send(self.piece(request, word, finish if i == len(words) - 1 else "None", 1))
            if word == "die ":
                raise RuntimeError("the engine died")
            while word == "forever ":
                if sender.is_cancelled():
                    LEFT.touch()
                    return
                time.sleep(0.01)

    def piece(self, request, text, finish, count):
        outputs = {"text_output": np.array([text.encode()], np.object_)}
        if given(request, "return_finish_reason"):
            outputs["finish_reason"] = np.array([finish.encode()], np.object_)
            outputs["num_input_tokens"] = np.array([7], np.uint32)
            outputs["num_output_tokens"] = np.array([count], np.uint32)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    with running("triton", tmp_path_factory.mktemp("triton")) as server:
        for name, told in (("new", (TOLD_IN, TOLD_OUT)), ("old", ("", ""))):
            server.add_model(name, config=CONFIG % told, model=MODEL)
            httpx.post(f"http://{server.http}/v2/repository/models/{name}/load", timeout=60).raise_for_status()
        yield server


@pytest.fixture
async def backend(triton):
    codec = TritonGenerateCodec(engine="vllm", template=load("chatml"), now_us=lambda: time.time_ns() // 1000)
    made = LLMBackend("triton", codec=codec, base_urls=[f"http://{triton.http}"])
    yield made
    await made.close()


@pytest.fixture
async def client(triton, tmp_path):
    sections = {
        "backends": {"triton": {"kind": "triton_generate", "base_url": f"http://{triton.http}"}},
        "tasks": {"general_llm": {"contract": "chat", "timeout_ms": 30_000}},
        "rules": [{"name": "llm", "split": [{"backend": "triton", "model": "new"}]}],
    }
    async with (
        serving(tmp_path, "", **sections) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as made,
    ):
        yield made


def chat(text, **fields):
    return {"model": "general_llm", "messages": [{"role": "user", "content": text}], **fields}


def asked(backend, text, *, model="new", stream=True, **fields):
    payload = OpenAIPayload(body=chat(text, **fields), stream=stream)
    call = BackendCall(request_id="r", model=model, version="", payload=payload)
    return backend.infer(call, timeout_us=30_000_000)


async def test_whole_and_streamed_through_the_gateway(client):
    whole = await client.chat.completions.create(**chat("one two three"))
    assert whole.choices[0].message.content == "one two three "
    assert (whole.choices[0].finish_reason, whole.model) == ("stop", "new")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 3)
    stream = await client.chat.completions.create(
        **chat("one two three", max_tokens=2), stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert [c.choices[0].delta.content for c in chunks] == ["", "one ", "two ", None]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (7, 2)
    completion = await client.completions.create(model="general_llm", prompt="as it is", max_tokens=2)
    assert completion.choices[0].text == "as it "


async def test_an_error_in_the_middle_ends_the_stream_with_an_error(client):
    stream = await client.chat.completions.create(**chat("first die"), stream=True)
    said = []

    async def read():
        async for chunk in stream:
            said.append(chunk.choices[0].delta.content)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(openai.APIError):
        await read()
    assert said == ["", "first ", "die "]
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as plain:
        answer = await plain.post(f"{client.base_url}chat/completions", json=chat("first die", stream=True))
    assert (answer.status_code, "[DONE]" in answer.text) == (200, False)
    assert '"error"' in answer.text.strip().splitlines()[-1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_is_too_long(client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**chat("too long"), stream=stream)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_model_that_triton_does_not_have(backend, stream):
    with pytest.raises(BackendError) as caught:
        _ = [event async for event in asked(backend, "hi", model="nope", stream=stream)]
    assert caught.value.fault.kind is FaultKind.UNKNOWN_MODEL


async def test_an_older_release_that_tells_its_text_alone(backend):
    (whole,) = [event async for event in asked(backend, "one two", model="old", stream=False)]
    assert b'"one two "' in whole.body
    assert whole.usage.output_tokens is None
    events = [event async for event in asked(backend, "one two three", model="old", max_tokens=2)]
    assert all(isinstance(event, Delta) for event in events)
    assert b'"finish_reason":"length"' in events[-1].data


async def test_who_leaves_ends_the_work_in_the_model(backend, triton):
    left = triton.repository / "new" / "1" / "left"
    events = asked(backend, "so forever")
    async for event in events:
        if b"forever" in event.data:
            break
    assert not left.exists()
    await events.aclose()
    await until(left.exists, timeout_s=10)


async def test_many_streams_at_once_do_not_mix(backend):
    async def answer(i):
        return b"".join([event.data async for event in asked(backend, f"a{i} b{i}") if isinstance(event, Delta)])

    for i, data in enumerate(await asyncio.gather(*(answer(i) for i in range(8)))):
        assert f'"a{i} "'.encode() in data
        assert f'"b{i} "'.encode() in data
        assert data.count(b'"content":"') == 3  # the role's, and two words


async def test_the_probe(backend):
    await backend.probe(Place(backend="triton", model="new"))
