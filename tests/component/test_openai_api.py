"""The OpenAI-compatible paths over scripted backends, seen by the official client where it has a say."""

import asyncio
import base64
import contextlib
import json
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest

from gateway.api.event_stream import EventStream, StreamForm
from gateway.backends.scripted import Pause, ScriptedBackend
from gateway.core.breaker import COOL_DOWN_US
from gateway.core.errors import Fault, FaultKind
from gateway.core.types import Delta, Message, Metered, Place, Usage
from gateway.http.exchange import Exchange
from tests.kit.app import KEY, embedding, running
from tests.kit.wait import until

SMOLLM2 = Place(backend="llm", model="smollm2")
CHAT = "/v1/chat/completions"
ASK = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}]}
WHOLE = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'
)


def chunk(text: str) -> Delta:
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return Delta(data=json.dumps({**body, "choices": [{"index": 0, "delta": {"content": text}}]}).encode())


def client(gw) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key=KEY, max_retries=0)


async def test_a_whole_answer_passes_byte_for_byte():
    usage = Usage(input_tokens=3, output_tokens=1)
    async with running([ScriptedBackend("llm", [Message(body=WHOLE, usage=usage)])]) as gw:
        answer = await gw.post(CHAT, {**ASK, "unheard_of": {"x": 1}, "seed": 7})
        async with client(gw) as sdk:
            parsed = await sdk.chat.completions.create(**ASK)
    assert answer.content == WHOLE
    assert answer.headers["x-gateway-backend"] == "llm"
    assert answer.headers["x-gateway-model"] == "smollm2"
    sent = gw.backends["llm"].calls[0].call
    assert sent.payload.body == {**ASK, "unheard_of": {"x": 1}, "seed": 7}
    assert sent.model == "smollm2"
    assert parsed.choices[0].message.content == "hello"
    assert gw.seen.records[0].usage == usage


async def test_a_stream_comes_as_it_is_made():
    go_on = asyncio.Event()
    async with running([ScriptedBackend("llm", [chunk("one"), go_on, chunk("two")])]) as gw, client(gw) as sdk:
        stream = await sdk.chat.completions.create(**ASK, stream=True)
        chunks = aiter(stream)
        first = await anext(chunks)
        assert first.choices[0].delta.content == "one"  # received while the second is not made yet
        go_on.set()
        rest = [c.choices[0].delta.content async for c in chunks]
    assert rest == ["two"]
    assert gw.seen.records[0].code == "ok"
    assert gw.seen.records[0].stream


async def test_a_stream_is_framed_and_ended_as_openai_does():
    events = [chunk("数🙂é"), Delta(data=b'{"a": 1}'), Metered(usage=Usage(output_tokens=9))]
    async with running([ScriptedBackend("llm", events)]) as gw:
        answer = await gw.post(CHAT, {**ASK, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-gateway-backend"] == "llm"
    assert "content-length" not in answer.headers
    assert answer.content == b"data: " + events[0].data + b'\n\ndata: {"a": 1}\n\ndata: [DONE]\n\n'
    assert gw.seen.records[0].usage.output_tokens == 9


async def test_a_broken_stream_ends_with_an_error_event_and_no_done():
    broke = Fault(kind=FaultKind.BROKEN, message="cut")
    llm2 = ScriptedBackend("llm2", [chunk("other")])
    async with running([ScriptedBackend("llm", [chunk("one"), broke]), llm2]) as gw:
        answer = await gw.post(CHAT, {**ASK, "stream": True})
        async with client(gw) as sdk:
            stream = await sdk.chat.completions.create(**ASK, stream=True)
            with pytest.raises(openai.APIError):
                _ = [c async for c in stream]
    assert b"[DONE]" not in answer.content
    last = json.loads(answer.content.strip().rpartition(b"data: ")[2])
    assert last["error"]["code"] == "backend_error"
    assert not llm2.calls  # nothing goes to a second endpoint once a token has left
    assert gw.seen.records[0].code == "backend_error"


async def test_a_stream_may_last_longer_than_an_attempt_may_take_to_begin():
    slow = [chunk("a"), Pause(us=150_000), chunk("b"), Pause(us=150_000), chunk("c")]
    llm, llm2 = ScriptedBackend("llm", slow), ScriptedBackend("llm2", [chunk("other")])
    async with running([llm, llm2], attempt_timeout_us=100_000) as gw:
        for _ in range(4):
            answer = await gw.post(CHAT, {**ASK, "stream": True})
            assert answer.content.count(b"data: ") == 4
    assert answer.content.endswith(b"[DONE]\n\n")
    assert gw.board.of(SMOLLM2).failures == 0
    assert not llm2.calls


async def test_a_stall_in_a_stream_is_the_backends_fault_a_short_deadline_is_not():
    stalled = [chunk("a"), Pause(us=10_000_000)]
    async with running([ScriptedBackend("llm", stalled)], attempt_timeout_us=100_000) as gw:
        short = await gw.post(CHAT, {**ASK, "stream": True}, **{"x-timeout-ms": "60"})
        assert gw.board.of(SMOLLM2).failures == 0
        long = await gw.post(CHAT, {**ASK, "stream": True}, **{"x-timeout-ms": "200"})
    assert gw.board.of(SMOLLM2).failures == 1
    for answer in (short, long):
        assert b"[DONE]" not in answer.content
        assert b"backend_error" in answer.content


@pytest.mark.parametrize("script", [[], [Metered(usage=Usage(output_tokens=1))]])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_end_without_an_answer_is_a_502(script, stream):
    async with running([ScriptedBackend("llm", script)]) as gw:
        answer = await gw.post(CHAT, {**ASK, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "backend_error")


async def test_a_trial_that_begins_to_answer_lets_the_others_in_at_once():
    never = asyncio.Event()
    down = Fault(kind=FaultKind.BROKEN, message="x")
    llm = ScriptedBackend("llm", [down], [down], [down], [chunk("a"), never], [chunk("b")])
    async with running([llm]) as gw:
        for _ in range(3):
            await gw.post(CHAT, {**ASK, "stream": True})
        gw.board.failed(
            SMOLLM2, now_us=-COOL_DOWN_US, fault=Fault(kind=FaultKind.BROKEN, message="broken")
        )  # as if that were a while ago
        async with gw.http.stream("POST", CHAT, json={**ASK, "stream": True}) as trial:
            await anext(trial.aiter_raw())
            other = await gw.post(CHAT, {**ASK, "stream": True})
        assert b"[DONE]" in other.content


async def test_a_fallback_that_is_half_open_takes_one_trial_at_a_time():
    failed = Fault(kind=FaultKind.FAILED, message="x")
    go_on = asyncio.Event()
    llm = ScriptedBackend("llm", [failed])
    llm2 = ScriptedBackend("llm2", [go_on, Message(body=WHOLE)])
    async with running([llm, llm2]) as gw:
        for _ in range(3):
            gw.board.failed(
                Place(backend="llm2", model="other"),
                now_us=-2 * COOL_DOWN_US,
                fault=Fault(kind=FaultKind.BROKEN, message="broken"),
            )
        asking = [asyncio.create_task(gw.post(CHAT, ASK)) for _ in range(10)]
        await until(lambda: sum(task.done() for task in asking) == 9)
        go_on.set()
        statuses = sorted([(await task).status_code for task in asking])
    assert statuses[0] == 200
    assert set(statuses[1:]) <= {502, 503}
    assert len(llm2.calls) == 1


async def test_usage_alone_is_no_beginning():
    slow = [Metered(usage=Usage(input_tokens=1)), Pause(us=10_000_000)]
    llm, llm2 = ScriptedBackend("llm", slow), ScriptedBackend("llm2", [chunk("other")])
    async with running([llm, llm2], attempt_timeout_us=50_000) as gw:
        answer = await gw.post(CHAT, {**ASK, "stream": True})
    assert answer.headers["x-gateway-backend"] == "llm2"


async def test_one_callers_bad_input_does_not_take_the_backend_from_others():
    failed = Fault(kind=FaultKind.FAILED, message="status 500: cannot take this")
    llm = ScriptedBackend("llm", *[[failed]] * 10, [Message(body=WHOLE)])
    async with running([llm]) as gw:
        for _ in range(10):
            assert (await gw.post(CHAT, ASK)).status_code == 502
        assert (await gw.post(CHAT, ASK)).status_code == 200


async def test_a_reader_that_stops_reading_is_cut_off():
    finished = []

    async def events():
        try:
            while True:
                yield chunk("x" * 1000)
        finally:
            finished.append(True)

    class Full:
        """A connection whose peer takes nothing."""

        is_writable = False
        state = SimpleNamespace(date_line=b"")

        def write(self, data):
            pass

        async def writable(self):
            await asyncio.Event().wait()

    form = StreamForm(media_type="text/event-stream", written=lambda event: event.data, failed=lambda _: b"")
    stream = EventStream(events(), form, headers={}, timeout_s=0.05, is_ready=lambda: True)
    await stream.give(Exchange(Full(), {"method": "POST", "http_version": "1.1"}, {}, keeps_alive=True))
    assert finished


async def test_before_the_first_token_the_next_candidate_answers():
    down = Fault(kind=FaultKind.UNAVAILABLE, message="reset")
    async with running([ScriptedBackend("llm", [down]), ScriptedBackend("llm2", [chunk("other")])]) as gw:
        answer = await gw.post(CHAT, {**ASK, "stream": True})
    assert answer.headers["x-gateway-backend"] == "llm2"
    assert answer.headers["x-gateway-attempts"] == "2"
    assert b"other" in answer.content


@pytest.mark.parametrize(
    ("fault", "status", "error"),
    [
        (Fault(kind=FaultKind.OVERLOADED, message="x", retry_after_us=7_000_000), 429, openai.RateLimitError),
        (Fault(kind=FaultKind.UNAVAILABLE, message="x"), 503, openai.InternalServerError),
        (
            Fault(kind=FaultKind.REFUSED_INPUT, message="too long", field="messages", code="context_length_exceeded"),
            422,
            openai.UnprocessableEntityError,
        ),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_event_has_its_own_status(fault, status, error, stream):
    async with running([ScriptedBackend("llm", [fault])]) as gw, client(gw) as sdk:
        answer = await gw.post(CHAT, {**ASK, "stream": stream})
        with pytest.raises(error) as raised:
            await sdk.chat.completions.create(**ASK, stream=stream)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert raised.value.request_id
    if fault.retry_after_us:
        assert answer.headers["retry-after"] == "7"
    if fault.code:
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "messages"


async def test_a_client_that_leaves_a_stream_ends_it_at_the_backend():
    never = asyncio.Event()
    llm = ScriptedBackend("llm", [chunk("one"), never])
    async with running([llm]) as gw:
        async with gw.http.stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
            await anext(answer.aiter_raw())
        await until(lambda: llm.calls[0].is_closed_early and gw.seen.records)
    assert gw.seen.records[0].code == "client_closed"
    assert gw.seen.in_flight == 0
    assert gw.board.of(SMOLLM2).failures == 0


async def test_a_client_that_leaves_before_the_answer_ends_it_at_the_backend():
    never = asyncio.Event()
    llm = ScriptedBackend("llm", [never])
    async with running([llm]) as gw:
        for stream in (True, False):
            with contextlib.suppress(httpx.ReadTimeout):
                await gw.http.post(CHAT, json={**ASK, "stream": stream}, timeout=0.1)
        await until(lambda: all(c.is_closed_early for c in llm.calls) and len(gw.seen.records) == 2)
    assert [r.code for r in gw.seen.records] == ["client_closed", "client_closed"]


async def test_models_are_listed_and_found():
    async with running([ScriptedBackend("llm", [Message(body=WHOLE)])]) as gw, client(gw) as sdk:
        names = {m.id async for m in await sdk.models.list()}
        one = await sdk.models.retrieve("org/smollm2")
        with pytest.raises(openai.NotFoundError):
            await sdk.models.retrieve("nope")
    assert names == {"text-embedding", "image-classification", "general_llm", "minilm", "org/smollm2"}
    assert one.id == "org/smollm2"


async def test_embeddings_in_both_encodings():
    async with running([ScriptedBackend("triton", [embedding(2)])]) as gw, client(gw) as sdk:
        plain = await gw.post("/v1/embeddings", {"model": "minilm", "input": ["a", "b"]})
        parsed = await sdk.embeddings.create(model="minilm", input=["a", "b"])
        coded = await gw.post("/v1/embeddings", {"model": "minilm", "input": ["a", "b"], "encoding_format": "base64"})
    assert plain.json()["data"][1] == {"object": "embedding", "index": 1, "embedding": [1.0, 0.0, 0.0, 0.0]}
    assert plain.json()["model"] == "minilm"
    assert plain.json()["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert parsed.data[0].embedding == [1.0, 0.0, 0.0, 0.0]
    raw = base64.b64decode(coded.json()["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == [1.0, 0.0, 0.0, 0.0]


async def test_no_key_in_the_openai_form():
    async with running([ScriptedBackend("llm", [Message(body=WHOLE)])]) as gw:
        answer = await gw.http.post(CHAT, json=ASK, headers={"authorization": "Bearer no"})
        unknown = await gw.http.get("/v1/embeddings")
        async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="wrong", max_retries=0) as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.models.list()
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert unknown.json()["error"]["code"] == "method_not_allowed"
