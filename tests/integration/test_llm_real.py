"""A real LLM server, llama.cpp's, behind the gateway as its own process: answers, leavings, refusals, a sudden end."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from tests.kit.serving import KEY, Serving, free_port, serving
from tests.kit.upstream import Upstream, json_reply
from tests.kit.upstream import completion as scripted
from tests.kit.wait import until_async
from tests.vllm.metrics import metric
from tests.vllm.server import wait_ready

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOTS, CONTEXT = 2, 2048
STEADY: dict[str, Any] = {"temperature": 0, "seed": 1, "extra_body": {"cache_prompt": False}}
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 900}
ENDLESS = {"ignore_eos": True}
GONE_S = 20
CLOSE_WAIT = "08"  # as Linux writes it
STATES = ("running", "waiting")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass
class Llama:
    """llama.cpp's server as a process."""

    url: str
    process: subprocess.Popen[bytes]

    async def load(self) -> tuple[float, float]:
        """Requests in its slots, and in its queue, as its own metrics tell."""
        names = ("llamacpp:requests_processing", "llamacpp:requests_deferred")
        return await metric(self.url, names[0]), await metric(self.url, names[1])

    async def has(self, running: int, waiting: int) -> None:
        """Return when it has so many."""

        async def true() -> bool:
            return await self.load() == (running, waiting)

        await until_async(true, timeout_s=GONE_S)

    def left(self) -> int:
        """Connections whose other side has closed them, and that it still has to close itself."""
        port = f":{int(self.url.rpartition(':')[2]):04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(row[1].endswith(port) and row[3] == CLOSE_WAIT for row in rows)

    @contextlib.asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Strangers, who do not come through the gateway, have it make long answers while the block runs.

        They take streams: this server does not see a caller leave its queue while it gives words to others.
        """
        async with httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False) as http:
            asked = {**LONG, **ENDLESS, "stream": True}
            tasks = [asyncio.create_task(http.post("/v1/chat/completions", json=asked)) for _ in range(SLOTS)]
            try:
                await self.has(SLOTS, 0)
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def llama_server(folder: Path) -> Iterator[Llama]:
    """Started, and ended with the block if it still runs."""
    port, log_file = free_port(), folder / "llama.log"
    options = ("--threads", "1", "--slots", str(SLOTS), "--context", str(CONTEXT))
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.stack.llm_server", "--port", str(port), *options], stdout=log, stderr=log
        )
    try:
        wait_ready(f"http://127.0.0.1:{port}", process, log_file)
        yield Llama(f"http://127.0.0.1:{port}", process)
    finally:
        process.terminate()
        process.wait(GONE_S)


@dataclass
class Plane:
    """A gateway before the server, and a scripted endpoint as the other one."""

    gateway: Serving
    llama: Llama
    spare: Upstream

    def straight(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.llama.url}/v1", api_key="none", max_retries=0)

    def through(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key=KEY, max_retries=0)

    async def figure(self, name: str, **labels: str) -> float:
        """One of the gateway's metrics."""
        return await metric(self.gateway.ops_url, name, **labels)

    async def is_idle(self) -> None:
        """Return when neither the server nor the gateway has a request."""
        await self.llama.has(0, 0)

        async def is_at_rest() -> bool:
            return await self.figure("gateway_requests_in_flight") == 0

        await until_async(is_at_rest, timeout_s=GONE_S)


@contextlib.asynccontextmanager
async def plane_over(folder: Path, llama: Llama) -> AsyncIterator[Plane]:
    async with Upstream(json_reply(200, scripted("from the spare one"))) as spare:
        first, second = {"backend": "llm", "model": "smollm2"}, {"backend": "spare", "model": "m"}
        tasks = {"general_llm": [], "with_spare": [second], "balanced": []}
        rules = [
            {"name": task, "match": {"task": task}, "split": [first], "fallback": others}
            for task, others in tasks.items()
        ]
        rules[-1] |= {"split": [first, second], "strategy": "least_in_flight"}
        apis = ["chat/completions", "completions", "responses"]
        sections = {
            "backends": {
                "llm": {"kind": "openai", "base_url": f"{llama.url}/v1", "apis": apis},
                "spare": {"kind": "openai", "base_url": spare.base_url, "hosted": True},
            },
            "tasks": {task: {"contract": "chat", "timeout_ms": 60_000, "attempt_timeout_ms": 50_000} for task in tasks},
            "rules": rules,
        }
        async with serving(folder, "", **sections) as gateway:
            yield Plane(gateway, llama, spare)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Plane]:
    folder = tmp_path_factory.mktemp("llama")
    with llama_server(folder) as llama:
        async with plane_over(folder, llama) as opened:
            yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(tmp_path: Path) -> AsyncIterator[Plane]:
    """One with a server of its own, to be killed."""
    with llama_server(tmp_path) as llama:
        async with plane_over(tmp_path, llama) as opened:
            yield opened


# --- the same answers as straight ----------------------------------------------------------------------------


async def test_chat_says_word_for_word_what_the_server_says(plane: Plane):
    asked = {**QUESTION, **STEADY, "max_tokens": 24}
    async with plane.straight() as straight, plane.through() as through:
        expected = await straight.chat.completions.create(model="m", **asked)
        whole = await through.chat.completions.create(model="general_llm", **asked)
        stream = await through.chat.completions.create(model="general_llm", stream=True, **asked)
        chunks = [chunk async for chunk in stream]
    assert expected.choices[0].message.content
    assert whole.choices == expected.choices
    assert whole.usage is not None
    assert expected.usage is not None
    assert expected.usage.to_dict().items() <= whole.usage.to_dict().items()
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)  # nobody asked for usage
    assert len(chunks) > 4
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == expected.choices[0].finish_reason


async def test_the_synchronous_client_is_told_usage_when_it_asks(plane: Plane):
    asked: Any = {"model": "general_llm", **QUESTION, **STEADY, "max_tokens": 8}

    def ask() -> tuple[Any, list[Any]]:
        with openai.OpenAI(base_url=f"{plane.gateway.url}/v1", api_key=KEY, max_retries=0) as client:
            told = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
            return client.chat.completions.create(**asked), list(told)

    whole, chunks = await asyncio.to_thread(ask)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content


async def test_completions_are_the_same_streamed_and_whole(plane: Plane):
    asked: Any = {"prompt": "The capital of France is", "max_tokens": 8, **STEADY}
    async with plane.straight() as straight, plane.through() as through:
        expected = await straight.completions.create(model="m", **asked)
        whole = await through.completions.create(model="general_llm", **asked)
        stream = await through.completions.create(model="general_llm", stream=True, **asked)
        chunks = [chunk async for chunk in stream]
    assert "Paris" in expected.choices[0].text
    assert whole.choices == expected.choices
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.choices[0].text


async def test_responses_are_the_same_streamed_and_whole(plane: Plane):
    asked: Any = {"input": "What is the capital of France?", "max_output_tokens": 8, "temperature": 0}
    async with plane.straight() as straight, plane.through() as through:
        expected = await straight.responses.create(model="m", **asked)
        whole = await through.responses.create(model="general_llm", **asked)
        events = [event async for event in await through.responses.create(model="general_llm", stream=True, **asked)]
    assert expected.output_text
    assert whole.output_text == expected.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens > 0
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == expected.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        expected.output_text
    )


async def test_a_schema_is_held_to_streamed_and_whole(plane: Plane):
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    asked: Any = {"model": "general_llm", "response_format": wanted, "max_tokens": 30, **QUESTION, **STEADY}
    async with plane.through() as through:
        whole = await through.chat.completions.create(**asked)
        async with through.chat.completions.stream(**asked) as stream:
            joined = await stream.get_final_completion()
    content = whole.choices[0].message.content or ""
    assert json.loads(content)["city"] in ("Paris", "Rome")
    assert joined.choices[0].message.content == content


# --- callers that leave --------------------------------------------------------------------------------------


async def test_leaving_in_mid_stream_stops_the_server(plane: Plane):
    await plane.is_idle()
    async with plane.through() as through:
        stream = await through.chat.completions.create(model="general_llm", stream=True, extra_body=ENDLESS, **LONG)
        for _ in range(3):
            await anext(aiter(stream))
        assert await plane.llama.load() == (1, 0)
        assert await plane.figure("gateway_requests_in_flight") == 1
        await stream.close()
        await plane.is_idle()


async def test_leaving_before_the_first_word_stops_the_server(plane: Plane):
    await plane.is_idle()
    before = await plane.figure("gateway_tokens_total", direction="output")
    reading: Any = {"messages": [{"role": "user", "content": "word " * 400}]}  # takes seconds
    async with plane.through() as through:
        asking = asyncio.create_task(
            through.chat.completions.create(model="general_llm", stream=True, extra_body=ENDLESS, **reading)
        )

        async def is_there() -> bool:
            return await plane.figure("gateway_requests_in_flight") == 1

        await until_async(is_there, timeout_s=GONE_S)
        asking.cancel()
        await plane.is_idle()
    assert await plane.figure("gateway_tokens_total", direction="output") == before


async def test_leaving_a_whole_answer_stops_the_server(plane: Plane):
    await plane.is_idle()
    asked: Any = {"model": "general_llm", **LONG, "max_tokens": 300, "extra_body": ENDLESS}  # seconds of work

    async def is_left() -> bool:
        return bool(plane.llama.left()) or await plane.llama.load() == (0, 0)

    async with plane.through() as through:
        asking = asyncio.create_task(through.chat.completions.create(**asked))
        await plane.llama.has(1, 0)
        asking.cancel()
        await until_async(is_left, timeout_s=1)
    await plane.is_idle()


# --- refusals, load, a sudden end ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_prompt_over_the_context_is_refused_in_the_server_s_words(plane: Plane, stream: bool):
    asked: Any = {"messages": [{"role": "user", "content": "word " * CONTEXT}], "stream": stream}
    async with plane.straight() as straight, plane.through() as through:
        with pytest.raises(openai.BadRequestError) as expected:
            await straight.chat.completions.create(model="m", **asked)
        with pytest.raises(openai.BadRequestError) as refused:
            await through.chat.completions.create(model="general_llm", **asked)
    words = expected.value.response.json()["error"]["message"]
    assert "context" in words
    assert words in refused.value.response.json()["error"]["message"]


async def test_a_picture_for_a_model_that_cannot_see_is_refused(plane: Plane):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    async with plane.through() as through:
        with pytest.raises(openai.APIStatusError) as refused:
            await through.chat.completions.create(
                model="general_llm",
                messages=[{"role": "user", "content": [picture]}],  # type: ignore[list-item, misc] - the SDK's own types, spelled as a dict
            )
    assert refused.value.status_code == 501
    assert "feature" in refused.value.response.json()["error"]["message"]
    assert await plane.figure("gateway_breaker_open") == 0


async def test_what_others_ask_of_the_server_is_seen_and_avoided(plane: Plane):
    await plane.is_idle()
    async with plane.through() as through, plane.llama.busy():

        async def is_seen() -> bool:
            states = [await plane.figure("gateway_engine_requests", backend="llm", state=state) for state in STATES]
            return states == [SLOTS, 0]

        await until_async(is_seen, timeout_s=GONE_S)
        answers = [await through.chat.completions.create(model="balanced", **QUESTION) for _ in range(4)]
    assert {answer.choices[0].message.content for answer in answers} == {"from the spare one"}
    await plane.is_idle()


async def test_a_server_killed_in_mid_stream_ends_the_stream_with_an_error(mortal: Plane):
    asked = {"model": "with_spare", "stream": True, **LONG, **ENDLESS}
    async with mortal.gateway.http() as http, http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        assert answer.status_code == 200
        lines = (line async for line in answer.aiter_lines() if line)
        first = [await anext(lines) for _ in range(4)]
        mortal.llama.process.send_signal(signal.SIGKILL)
        rest = [line async for line in lines]
    assert all(json.loads(line.removeprefix("data: "))["choices"] for line in first)
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert "data: [DONE]" not in rest
    assert mortal.spare.requests == []  # words had been given out


async def test_a_server_killed_before_the_first_word_is_replaced(mortal: Plane):
    async with mortal.through() as through, mortal.llama.busy():
        asking = asyncio.create_task(through.chat.completions.create(model="with_spare", **LONG))
        await mortal.llama.has(SLOTS, 1)  # it waits in the server's queue
        mortal.llama.process.send_signal(signal.SIGKILL)
        answer = await asking
    assert answer.choices[0].message.content == "from the spare one"
    assert len(mortal.spare.requests) == 1
