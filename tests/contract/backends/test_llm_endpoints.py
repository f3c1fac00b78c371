"""Endpoints as configured: their APIs, several equal ones, their own time limits, and what they say of their load."""

import asyncio
import json
import socket
import time

import pytest

from gateway.backends.llm import backend as llm_backend
from gateway.backends.llm.backend import Limits
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import Delta, Deltas, EngineLoad, Message, Metered, Place, Usage, singly
from tests.kit.llm import LONG_US, SHORT_US, call, endpoint, events, fault, some
from tests.kit.upstream import (
    DONE,
    FIN,
    HOLD,
    LAST_CHUNK,
    RST,
    Pause,
    Upstream,
    chunk,
    completion,
    delta,
    error_reply,
    event,
    head,
    json_reply,
    named,
    reply,
    sse_head,
    usage_chunk,
)
from tests.kit.wait import until

RESPONSE = {"object": "response", "status": "completed", "usage": {"input_tokens": 3, "output_tokens": 2}}
COUNTS = Usage(input_tokens=3, output_tokens=2)
METRICS = b"llamacpp:requests_processing 3\nllamacpp:requests_deferred 2\n"
LOAD = EngineLoad(running=3, waiting=2)


# --- APIs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "body", "usage"),
    [
        ("chat/completions", completion(), COUNTS),
        ("completions", {"choices": [{"text": "a"}]}, Usage()),
        ("responses", RESPONSE, COUNTS),
        ("embeddings", {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 4}}, Usage(input_tokens=4)),
    ],
)
async def test_each_api_has_its_path_and_its_answer(api, body, usage):
    async with Upstream(json_reply(200, body)) as up:
        (answer,) = await events(up, api=api, input="x")
    assert answer == Message(body=json.dumps(body).encode(), usage=usage)
    assert up.requests[0].path == f"/v1/{api}"
    assert up.requests[0].json() == {"model": "theirs", "messages": [], "input": "x"}


async def test_an_api_that_it_lacks_is_not_asked_for():
    async with Upstream(json_reply(200, RESPONSE)) as up:
        backend = endpoint(up.base_url, apis=["chat/completions"])
        (found,) = await events(up, backend=backend, api="responses")
        await backend.close()
    assert (found.kind, up.requests) == (FaultKind.UNSUPPORTED, [])


async def test_a_responses_stream_keeps_its_names_and_ends_with_its_own_event():
    script = [named("response.created", {"response": {}}), named("response.output_text.delta", {"delta": "é"})]
    async with Upstream([sse_head(), *script, named("response.completed", {"response": RESPONSE}), LAST_CHUNK]) as up:
        found = await events(up, api="responses", stream=True)
    assert [item.event for item in found] == [b"response.created", b"response.output_text.delta", b"response.completed"]
    assert [item.usage for item in found] == [None, None, COUNTS]
    assert "stream_options" not in up.requests[0].json()


@pytest.mark.parametrize("end", [[LAST_CHUNK], [FIN], [RST], [event("[DONE]"), LAST_CHUNK]])
async def test_a_responses_stream_without_its_end_never_looks_finished(end):  # ST-06
    async with Upstream([sse_head(), named("response.created", {"response": {}}), *end]) as up:
        first, found = await events(up, api="responses", stream=True)
    assert (first.event, found.kind) == (b"response.created", FaultKind.BROKEN)


@pytest.mark.parametrize("name", ["error", "response.failed"])
async def test_a_response_that_fails_before_anything_else_is_a_fault(name):  # FB-07
    error = {"error": {"code": "rate_limit_exceeded", "message": "x"}}
    failed = named(name, error if name == "error" else {"response": error})
    assert (await fault(sse_head(), failed, LAST_CHUNK, api="responses", stream=True)).kind is FaultKind.OVERLOADED


async def test_usage_in_the_last_chunk_of_a_completion_stays_there():
    last = {"choices": [{"text": "", "finish_reason": "stop"}], "usage": usage_chunk()["usage"]}
    async with Upstream([sse_head(), event({"choices": [{"text": "a"}]}), event(last), DONE]) as up:
        found = await events(up, api="completions", stream=True)
    assert found[1:] == [Delta(data=json.dumps(last).encode(), usage=COUNTS)]


# --- the caller's input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
async def test_a_refusal_of_the_input_keeps_status_words_and_code(status, stream):  # FB-12
    error = {"message": "no", "type": "t", "param": "p", "code": "c"}
    found = await fault(*error_reply(status, error), stream=stream)
    assert (found.kind, found.status, found.message, found.field, found.code) == (
        FaultKind.REFUSED_INPUT,
        status,
        "no",
        "p",
        "c",
    )


async def test_a_refusal_whose_body_does_not_come_counts_by_its_status(monkeypatch):
    monkeypatch.setattr(llm_backend, "ERROR_BODY_S", 0.01)
    script = [head(429, {"Content-Length": "9", "Retry-After": "7"}), b"{", HOLD]
    found = await fault(*script)
    assert (found.kind, found.retry_after_us) == (FaultKind.OVERLOADED, 7_000_000)


async def test_no_text_of_the_caller_chooses_where_a_call_goes():  # SC-03
    async with Upstream(json_reply(200, completion())) as up, Upstream(json_reply(200, completion())) as other:
        odd = {"base_url": other.base_url, "api_base": other.base_url, "api_key": "k", "extra_headers": {"x-a": "b"}}
        (answer,) = await events(up, model="a\r\nHost: x", extra_body=odd, **odd)
    assert isinstance(answer, Message)
    assert (up.requests[0].header("x-a"), up.requests[0].header("authorization"), other.requests) == (None, None, [])
    assert up.requests[0].json() == {"model": "a\r\nHost: x", "messages": [], "extra_body": odd} | odd


# --- several equal endpoints, and names of models -----------------------------------------------------------


async def test_replicas_are_named_by_host_and_port_and_the_call_chooses():
    async with Upstream(json_reply(200, completion("1"))) as one, Upstream(json_reply(200, completion("2"))) as two:
        backend = endpoint(one.base_url, two.base_url)
        names = (f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}")
        assert backend.replicas() == names
        for replica in (names[1], names[0], names[1], ""):
            await events(None, backend=backend, replica=replica)
        await backend.probe(Place(backend="llm", model="m", replica=names[1]))
        await backend.close()
    assert (len(one.requests), len(two.requests), two.requests[-1].path) == (2, 3, "/v1/models")


def test_one_endpoint_has_no_replicas_and_ports_follow_the_scheme():
    assert endpoint("http://x/v1").replicas() == ()
    assert endpoint("http://x/v1", "https://x/v1", "http://[::1]:9/v1").replicas() == ("x:80", "x:443", "[::1]:9")


@pytest.mark.parametrize("urls", [(), ("http://x/v1", "http://x:80/v2")])
def test_endpoints_that_cannot_be_told_apart_are_found_at_once(urls):
    with pytest.raises(ValueError, match="endpoint"):
        endpoint(*urls)


async def test_a_model_may_have_another_name_there():
    async with Upstream(json_reply(200, completion())) as up:
        backend = endpoint(up.base_url, models={"gpt": "openai/gpt-4.1"})
        for model in ("gpt", "other"):
            await events(up, backend=backend, model=model)
        await backend.close()
    assert [seen.json()["model"] for seen in up.requests] == ["openai/gpt-4.1", "other"]


async def test_configured_headers_win_over_the_protocols_own():
    async with Upstream(json_reply(200, completion())) as up:
        backend = endpoint(up.base_url, api_key="k", headers={"Authorization": "Basic x", "User-Agent": "me"})
        await events(up, backend=backend)
        await backend.close()
    values = [value for name, value in up.requests[0].headers if name in ("authorization", "user-agent")]
    assert sorted(values) == ["Basic x", "me"]


# --- an endpoint's own limits -----------------------------------------------------------------------------


async def limited(*script, limits, timeout_us=LONG_US, **asked):
    async with Upstream(script) as up:
        backend = endpoint(up.base_url, limits=limits)
        found = await events(up, backend=backend, timeout_us=timeout_us, **asked)
        await asyncio.wait_for(up.requests[0].left.wait(), 1)
        await backend.close()
    return found


@pytest.mark.parametrize("script", [[HOLD], [sse_head(), HOLD], [sse_head(), chunk(b": ping\n\n"), HOLD]])
async def test_a_stream_whose_first_part_is_late(script):
    (found,) = await limited(*script, limits=Limits(first_token_us=SHORT_US), stream=True)
    assert (found.kind, found.is_own_limit) == (FaultKind.TIMEOUT, True)


async def test_the_calls_own_time_is_no_limit_of_the_endpoint():
    (found,) = await limited(HOLD, limits=Limits(first_token_us=LONG_US), timeout_us=SHORT_US, stream=True)
    assert (found.kind, found.is_own_limit) == (FaultKind.TIMEOUT, False)


@pytest.mark.parametrize(
    ("stream", "script"),
    [
        (True, [sse_head(), event(delta("a")), HOLD]),
        (False, [head(200, {"Content-Length": "9"}), b"{", HOLD]),
        (False, [head(200, {"Content-Length": "9"}), HOLD]),
    ],
)
async def test_silence_after_the_beginning(stream, script):
    *_, found = await limited(*script, limits=Limits(idle_us=SHORT_US), stream=stream)
    assert (found.kind, found.is_own_limit) == (FaultKind.TIMEOUT, True)


@pytest.mark.parametrize(
    ("stream", "script"),
    [
        (False, [Pause(0.1), *json_reply(200, completion())]),  # a whole answer takes what it takes
        (True, [Pause(0.1), sse_head(), event(delta("a")), DONE]),  # its first part is another limit's
    ],
)
async def test_silence_before_the_beginning_is_not_limited(stream, script):
    async with Upstream(script) as up:
        backend = endpoint(up.base_url, limits=Limits(idle_us=SHORT_US))
        (answer,) = await events(up, backend=backend, stream=stream)
        await backend.close()
    assert isinstance(answer, Delta if stream else Message)


async def test_a_stream_that_goes_on_may_last_longer_than_its_limits():
    parts = [step for number in range(6) for step in (Pause(0.1), event(delta(str(number))))]
    async with Upstream([sse_head(), *parts, DONE]) as up:
        backend = endpoint(up.base_url, limits=Limits(first_token_us=400_000, idle_us=400_000))
        found = await events(up, backend=backend, stream=True)
        await backend.close()
    assert len(found) == 6
    assert all(isinstance(item, Delta) for item in found)


async def test_a_slow_reader_is_no_silence_of_the_endpoint():
    async with Upstream([sse_head(), event(delta("a")), event(delta("b")), DONE]) as up:
        backend = endpoint(up.base_url, limits=Limits(idle_us=SHORT_US))
        answer = backend.infer(call(stream=True), timeout_us=LONG_US)
        await anext(answer)
        await asyncio.sleep(3 * SHORT_US / 1e6)
        assert len([item async for item in answer]) == 1
        await backend.close()


async def test_an_address_that_does_not_accept_is_one_where_nobody_is():
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for filler in (first, second):  # now its backlog is full: the kernel drops the next SYN
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        backend = endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", limits=Limits(connect_us=SHORT_US))
        (found,) = await events(None, backend=backend)
        await backend.close()
    assert (found.kind, found.is_server) == (FaultKind.UNREACHABLE, True)


# --- backpressure -----------------------------------------------------------------------------------------


async def test_a_slow_reader_makes_the_upstream_wait():
    part = event(delta("x" * 1000))
    many = 40_000
    async with Upstream([sse_head(), part * many, DONE]) as up:
        backend = endpoint(up.base_url)
        answer = backend.infer(call(stream=True), timeout_us=60_000_000)
        first = await some(answer, 1)
        (connection,) = backend._client("")._busy
        await until(lambda: connection._is_paused)
        assert connection._answer.buffered < 1_000_000
        assert up.unsent > len(part) * many // 2
        assert len(first) + len([one async for item in answer for one in singly(item)]) == many
        await backend.close()


async def test_many_events_of_one_read_are_given_together():
    async with Upstream([sse_head(), event(delta("a")) * 100, HOLD]) as up:
        backend = endpoint(up.base_url)
        answer = backend.infer(call(stream=True), timeout_us=LONG_US)
        together = await anext(answer)
        one = Delta(data=json.dumps(delta("a")).encode())
        assert together == Deltas(wire=b"data: %b\n\n" % one.data * 100)
        assert together.each() == [one] * 100
        await answer.aclose()
        await asyncio.wait_for(up.requests[0].left.wait(), 1)
        await backend.close()


# --- what it says of its load --------------------------------------------------------------------------------


async def test_the_load_of_each_replica_is_read_from_the_roots_metrics():
    page = reply(200, METRICS, content_type="text/plain; version=0.0.4")
    async with Upstream(page) as one, Upstream(error_reply(404, {"message": "x"})) as two:
        backend = endpoint(one.base_url, two.base_url)
        names = backend.replicas()
        assert [backend.engine_load(name) for name in names] == [None, None]
        for _ in range(3):
            assert await backend.figures() == ()  # asked as often, but the servers are not
        assert [backend.engine_load(name) for name in names] == [LOAD, None]
        pauses_s = [backend._ask_at[name] - time.monotonic() for name in names]
        assert pauses_s[0] <= llm_backend.METRICS_PAUSE_S < pauses_s[1] <= llm_backend.METRICS_AGAIN_S
        backend._ask_at[names[0]] = time.monotonic()
        await backend.figures()
        await backend.close()
    assert (one.requests[0].method, one.requests[0].path, len(one.requests)) == ("GET", "/metrics", 2)
    assert len(two.requests) == 1


@pytest.mark.parametrize(
    "script",
    [
        error_reply(404, {"message": "x"}),
        reply(200, b"<html>"),
        reply(200, b"x 1\n" * 2_000_000),
        [b"SSH-2.0-x\r\n", HOLD],
    ],
)
async def test_a_server_without_metrics_is_left_alone_for_a_while(script, monkeypatch):
    async with Upstream(script, reply(200, METRICS)) as up:
        backend = endpoint(up.base_url)
        for _ in range(3):
            await backend.figures()
        assert (len(up.requests), backend.engine_load("")) == (1, None)
        backend._ask_at[""] = time.monotonic()
        await backend.figures()
        assert backend.engine_load("") == LOAD
        monkeypatch.setattr(llm_backend, "LOAD_VALID_S", -1.0)
        assert backend.engine_load("") is None
        await backend.close()


async def test_a_server_that_was_away_is_asked_again_at_once():
    async with Upstream([RST], reply(200, METRICS)) as up:
        backend = endpoint(up.base_url)
        await backend.figures()
        assert backend.engine_load("") is None
        await backend.figures()
        assert backend.engine_load("") == LOAD
        await backend.close()


async def test_somebody_elses_api_is_not_asked():
    async with Upstream(reply(200, METRICS)) as up:
        backend = endpoint(up.base_url, is_hosted=True)
        assert (backend.is_probed, await backend.figures()) == (False, ())
        await backend.close()
    assert up.requests == []


# --- metering -----------------------------------------------------------------------------------------------


async def test_usage_that_comes_with_every_chunk_is_told_with_every_one():
    first = delta("a") | {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    last = usage_chunk()
    async with Upstream([sse_head(), event(first), event(last), DONE]) as up:
        found = await events(up, stream=True)
    assert [item.usage for item in found] == [Usage(input_tokens=3, output_tokens=1), COUNTS]
    assert [type(item) for item in found] == [Delta, Metered]


async def test_a_probe_that_finds_a_server_error_tells_it():
    async with Upstream(error_reply(500, {"message": "x"})) as up:
        backend = endpoint(up.base_url)
        with pytest.raises(BackendError) as caught:
            await backend.probe(Place(backend="llm", model="*"))
        await backend.close()
    assert caught.value.fault.kind is FaultKind.FAILED
