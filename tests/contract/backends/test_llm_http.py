"""The OpenAI adapter against a scripted upstream: every byte, cut and pause is the test's own."""

import asyncio
import gzip
import json
import zlib

import pytest

from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import BackendCall, Delta, Message, Metered, OpenAIPayload, Place, TensorPayload, Usage, singly
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
    reply,
    sse_head,
    usage_chunk,
)


def texts(found):
    events = [one for item in found for one in singly(item)]
    return [json.loads(one.data)["choices"][0]["delta"]["content"] for one in events if one.data]


async def left(seen):
    async with asyncio.timeout(1):
        await seen.left.wait()


# --- what is sent -----------------------------------------------------------------------------------------


async def test_the_request_is_the_callers_with_our_model_and_key():
    async with Upstream(json_reply(200, completion())) as up:
        backend = endpoint(up.base_url, api_key="sk-secret", headers={"X-Org": "a"})
        await events(up, backend=backend, temperature=0.5)
        await backend.close()
    seen = up.requests[0]
    assert (seen.method, seen.path) == ("POST", "/v1/chat/completions")
    assert seen.json() == {"model": "theirs", "messages": [], "temperature": 0.5}
    assert seen.header("authorization") == "Bearer sk-secret"
    assert seen.header("x-org") == "a"
    assert seen.header("x-request-id") == "req-1"
    assert seen.header("accept-encoding") == "identity"
    assert len([name for name, _ in seen.headers if name.lower() == "host"]) == 1


@pytest.mark.parametrize(
    ("url", "headers"),
    [("ftp://x/v1", {}), ("x", {}), ("http://u:p@x/v1", {}), ("http://x/v1?a=1", {}), ("http://x/v1", {"a": "b\r\nc"})],
)
def test_a_bad_configuration_is_found_at_once(url, headers):
    with pytest.raises(ValueError, match=r"."):
        endpoint(url, headers=headers)


async def test_tensors_are_not_for_this_backend():
    backend = endpoint("http://127.0.0.1:1/v1")
    with pytest.raises(BackendError) as caught:
        await anext(backend.infer(call(payload=TensorPayload(inputs=())), timeout_us=LONG_US))
    assert caught.value.fault.kind is FaultKind.UNSUPPORTED
    await backend.close()


# --- whole answers ----------------------------------------------------------------------------------------


async def test_an_answer_passes_as_its_own_bytes():
    async with Upstream(json_reply(200, completion("数🙂é"))) as up:
        (answer,) = await events(up)
    assert answer == Message(
        body=json.dumps(completion("数🙂é")).encode(), usage=Usage(input_tokens=3, output_tokens=2)
    )


@pytest.mark.parametrize("framing", ["chunked", "until close", "interim 100", "one byte at a time"])
async def test_every_framing(framing):
    body = json.dumps(completion()).encode()
    script = {
        "chunked": [
            head(200, {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}),
            chunk(body[:10]),
            Pause(0.005),
            chunk(body[10:]) + LAST_CHUNK,
        ],
        "until close": [head(200, {"Content-Type": "application/json"}), body, FIN],
        "interim 100": [b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n", *reply(200, body)],
        "one byte at a time": [
            step for at in range(len(reply(200, body)[0])) for step in (reply(200, body)[0][at : at + 1], Pause(0))
        ],
    }[framing]
    async with Upstream(script) as up:
        (answer,) = await events(up)
    assert answer.body == body


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate"])
async def test_an_answer_compressed_against_our_wish_is_decoded(encoding):  # SC-11
    body = json.dumps(completion("x" * 3_000_000)).encode()
    packed = zlib.compress(body) if encoding == "deflate" else gzip.compress(body, mtime=0)
    async with Upstream(reply(200, packed, headers={"Content-Encoding": encoding, "Set-Cookie": "a=b"})) as up:
        (answer,) = await events(up)
    assert answer.body == body


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [("br", b"\x0b\x02"), ("zstd", b"x"), ("gzip", b"not gzip"), ("gzip", gzip.compress(b"{" * 500, mtime=0)[:-9])],
)
async def test_an_encoding_that_cannot_be_read_is_no_answer(encoding, packed):  # SC-11
    found = await fault(*reply(200, packed, headers={"Content-Encoding": encoding}))
    assert found.kind is FaultKind.BROKEN


@pytest.mark.parametrize(
    "framing",
    [
        [("Content-Length", "2"), ("Transfer-Encoding", "chunked")],
        [("Content-Length", "2"), ("Content-Length", "3")],
        [("Content-Length", "x")],
    ],
)
async def test_ambiguous_framing_is_refused(framing):  # SC-11
    assert (await fault(head(200, framing) + b"{}", HOLD)).kind is FaultKind.BROKEN


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"<html>", b"{}"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_200_that_is_no_answer_is_broken(body, stream):  # FB-12
    assert (await fault(*reply(200, body, content_type="text/html"), stream=stream)).kind is FaultKind.BROKEN


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, FaultKind.OVERLOADED), (400, FaultKind.REFUSED_INPUT), (503, FaultKind.OVERLOADED), (500, FaultKind.FAILED)],
)
async def test_a_status_is_known_before_any_event(stream, status, kind):  # ST-04
    found = await fault(
        *error_reply(status, {"message": "no", "type": "t", "param": "p", "code": "c"}, {"Retry-After": "7"}),
        stream=stream,
    )
    assert (found.kind, found.code) == (kind, "c")
    if kind is FaultKind.REFUSED_INPUT:
        assert (found.message, found.field, found.retry_after_us) == ("no", "p", None)
    else:
        assert found.retry_after_us == 7_000_000


async def test_a_status_counts_even_where_its_body_is_cut_or_unreadable():
    assert (await fault(head(429, {"Content-Length": "9", "Retry-After": "1"}), b"{", FIN)).kind is FaultKind.OVERLOADED
    odd = reply(503, b"x", headers={"Content-Encoding": "br"})
    assert (await fault(*odd)).kind is FaultKind.OVERLOADED


async def test_redirects_are_not_followed():
    async with Upstream(json_reply(200, completion())) as other:
        target = {"Location": f"{other.base_url}/chat/completions", "Content-Length": "0"}
        assert (await fault(head(307, target))).kind is FaultKind.BROKEN
        assert other.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([FIN], FaultKind.UNREACHABLE),
        ([RST], FaultKind.UNREACHABLE),
        ([b"HTTP/1.1 200"], FaultKind.TIMEOUT),
        ([b"HTTP/1.1 200", FIN], FaultKind.UNREACHABLE),
        ([sse_head(), FIN], FaultKind.UNREACHABLE),
        ([b"SSH-2.0-x\r\n"], FaultKind.BROKEN),
        ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", HOLD], FaultKind.BROKEN),
        ([b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 12_000, HOLD], FaultKind.BROKEN),
        ([HOLD], FaultKind.TIMEOUT),
        ([head(200, {"Content-Length": "9", "Content-Type": "text/event-stream"}), b"{", FIN], FaultKind.BROKEN),
        ([head(200, {"Content-Length": "9", "Content-Type": "text/event-stream"}), b"{", HOLD], FaultKind.TIMEOUT),
        ([sse_head(), b"zz\r\n", HOLD], FaultKind.BROKEN),
        ([sse_head(), b"1;" + b"x" * 100_000, HOLD], FaultKind.BROKEN),
        ([sse_head(), b"0\r\na: " + b"x" * 100_000, HOLD], FaultKind.BROKEN),
        ([b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000, HOLD], FaultKind.BROKEN),
    ],
)
async def test_connections_that_fail_before_an_answer(script, kind, stream):  # FB-02
    found = await fault(*script, stream=stream, timeout_us=SHORT_US)
    assert (found.kind, found.is_server, found.is_own_limit) == (kind, False, False)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://name.invalid/v1", f"http://{'x' * 70}.test/v1"])
async def test_an_upstream_that_is_not_there(url):  # FB-02
    backend = endpoint(url)
    (found,) = await events(None, backend=backend)
    assert (found.kind, found.is_server) == (FaultKind.UNREACHABLE, True)
    with pytest.raises(BackendError) as caught:
        await backend.probe(Place(backend="llm", model="m"))
    assert caught.value.fault.kind is FaultKind.UNREACHABLE
    await backend.close()


async def test_an_upstream_whose_tls_cannot_be_trusted_is_not_there():  # FB-02
    async def speak_plainly(_, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(speak_plainly, "127.0.0.1", 0)
    backend = endpoint(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
    (found,) = await events(None, backend=backend)
    await backend.close()
    server.close()
    assert (found.kind, found.is_server) == (FaultKind.UNREACHABLE, True)
    assert "SSL" in found.message


# --- streams ----------------------------------------------------------------------------------------------


async def test_a_stream_comes_event_by_event():
    go_on = [event(delta("b")), DONE]
    async with Upstream([sse_head(), event(delta("a")), Pause(0.02), *go_on]) as up:
        found = await events(up, stream=True)
    assert texts(found) == ["a", "b"]
    assert up.requests[0].json()["stream_options"] == {"include_usage": True}


async def test_the_first_event_is_there_before_the_second_is_sent():
    async with Upstream([sse_head(), event(delta("a")), HOLD]) as up:
        backend = endpoint(up.base_url)
        answer = backend.infer(call(stream=True), timeout_us=LONG_US)
        assert texts([await anext(answer)]) == ["a"]
        await answer.aclose()
        await backend.close()


async def test_characters_may_be_cut_anywhere():  # ST-01
    stream = f"data: {json.dumps(delta('数🙂é'), ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode()
    script = [sse_head(), *(step for at in range(len(stream)) for step in (chunk(stream[at : at + 1]), Pause(0)))]
    async with Upstream([*script, LAST_CHUNK]) as up:
        found = await events(up, stream=True)
    assert found == [Delta(data=json.dumps(delta("数🙂é"), ensure_ascii=False).encode())]


@pytest.mark.parametrize("spelling", ["no space", "crlf", "two lines"])
async def test_every_spelling_of_events(spelling):  # ST-02
    chunks = [delta(text) for text in "abcd"]
    plain = [json.dumps(item) for item in chunks]
    script = {
        "no space": [chunk(f"data:{text}\n\n".encode()) for text in plain],
        "crlf": [
            piece
            for text in plain
            for piece in (chunk(f"data: {text}\r".encode()), Pause(0), chunk(b"\n\r"), chunk(b"\n"))
        ],
        "two lines": [chunk(f"data: {text[:6]}\ndata: {text[6:]}\n\n".encode()) for text in plain],
    }[spelling]
    async with Upstream([sse_head(), *script, DONE]) as up:
        found = await events(up, stream=True)
    assert [json.loads(item.data) for item in found] == chunks
    assert all(b"\n" not in item.data for item in found)


async def test_our_own_wish_for_usage_stays_with_us():  # ST-10
    script = [sse_head(), event(delta("a", finish="stop")), event(usage_chunk(7, 5)), DONE]
    async with Upstream(script) as up:
        hidden = await events(up, stream=True)
        shown = await events(up, stream=True, stream_options={"include_usage": True})
    counts = Usage(input_tokens=7, output_tokens=5)
    assert hidden[1:] == [Metered(usage=counts)]
    assert shown[1:] == [Delta(data=json.dumps(usage_chunk(7, 5)).encode(), usage=counts)]


@pytest.mark.parametrize(
    ("script", "given", "kind"),
    [
        ([event(delta("a")), event(delta("b")), event(delta("c")), RST], ["a", "b", "c"], FaultKind.BROKEN),
        ([event(delta("a")), event(delta("b")), event(delta("c")), FIN], ["a", "b", "c"], FaultKind.BROKEN),
        ([event(delta("a")), LAST_CHUNK], ["a"], FaultKind.BROKEN),
        ([event(delta("")), FIN], [""], FaultKind.BROKEN),
        ([chunk(b"data: {"), LAST_CHUNK], [], FaultKind.BROKEN),
        ([LAST_CHUNK], [], FaultKind.BROKEN),
        ([event({"error": {"message": "x", "code": 503}})], [], FaultKind.OVERLOADED),
        ([event(delta("a")), event({"error": {"message": "x"}})], ["a"], FaultKind.FAILED),
        ([event(delta("a")), event("oops")], ["a"], FaultKind.BROKEN),
        ([event(delta("a")), HOLD], ["a"], FaultKind.TIMEOUT),
    ],
)
async def test_a_broken_stream_never_looks_finished(script, given, kind):  # ST-06
    async with Upstream([sse_head(), *script]) as up:
        *found, last = await events(up, stream=True, timeout_us=200_000 if kind is not FaultKind.TIMEOUT else SHORT_US)
    assert texts(found) == given
    assert last.kind is kind


async def test_a_whole_json_for_a_stream_is_broken_but_its_error_counts():
    assert (await fault(*json_reply(200, completion()), stream=True)).kind is FaultKind.BROKEN
    found = await fault(*json_reply(200, {"error": {"message": "x", "code": 429}}), stream=True)
    assert found.kind is FaultKind.OVERLOADED


async def test_a_body_cut_after_done_is_still_a_whole_answer():
    async with Upstream([sse_head(), event(delta("a")), event("[DONE]"), FIN]) as up:
        assert texts(await events(up, stream=True)) == ["a"]


# --- leaving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sent", [[], [sse_head()], [head(200, {"Content-Length": "9"}), b"{"]])
async def test_cancelling_a_wait_closes_the_connection(stream, sent):  # ST-08
    async with Upstream([*sent, HOLD]) as up:
        backend = endpoint(up.base_url)
        task = asyncio.create_task(events(up, stream=stream, backend=backend))
        seen = await up.request()
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await left(seen)
        await backend.close()


async def test_closing_a_stream_closes_the_connection():  # ST-08
    async with Upstream([sse_head(), *(event(delta(str(number))) for number in range(3)), HOLD]) as up:
        backend = endpoint(up.base_url)
        answer = backend.infer(call(stream=True), timeout_us=LONG_US)
        assert len(await some(answer, 3)) == 3
        await answer.aclose()
        await left(up.requests[0])
        await backend.close()


async def test_closing_the_backend_ends_calls_in_flight():
    async with Upstream([HOLD]) as up:
        backend = endpoint(up.base_url)
        task = asyncio.create_task(events(up, backend=backend))
        seen = await up.request()
        await backend.close()
        (found,) = await task
        assert found.kind is FaultKind.UNREACHABLE
        await left(seen)


# --- probe ------------------------------------------------------------------------------------------------


async def test_probe():
    loading = error_reply(503, {"message": "Loading model", "type": "unavailable_error", "code": 503})
    async with Upstream(json_reply(200, {"data": []}), loading) as up:
        backend = endpoint(up.base_url + "/", api_key="k")
        await backend.probe(Place(backend="llm", model="m"))
        with pytest.raises(BackendError) as caught:
            await backend.probe(Place(backend="llm", model="m"))
        assert await backend.figures() == ()
        await backend.close()
    assert (up.requests[0].method, up.requests[0].path) == ("GET", "/v1/models")
    assert up.requests[0].header("authorization") == "Bearer k"
    assert caught.value.fault.kind is FaultKind.UNAVAILABLE


@pytest.mark.parametrize("status", [200, 401, 404, 405, 429])
async def test_any_answer_that_is_no_server_error_proves_that_it_is_there(status):
    async with Upstream(error_reply(status, {"message": "x"})) as up:
        backend = endpoint(up.base_url)
        await backend.probe(Place(backend="llm", model="m"))
        await backend.close()


# --- connections that were kept ----------------------------------------------------------------------------


async def test_a_kept_connection_that_the_upstream_gave_up_is_replaced_in_silence():
    whole = json_reply(200, completion())
    async with Upstream(whole, [RST], whole) as up:
        backend = endpoint(up.base_url)
        call = BackendCall(request_id="r", model="m", version="", payload=OpenAIPayload(body={}))
        for _ in range(2):
            assert [type(item) async for item in backend.infer(call, timeout_us=LONG_US)] == [Message]
        await backend.close()
    assert (len(up.requests), up.connections) == (3, 2)


async def test_a_new_connection_is_tried_once():
    async with Upstream([RST], json_reply(200, completion())) as up:
        backend = endpoint(up.base_url)
        call = BackendCall(request_id="r", model="m", version="", payload=OpenAIPayload(body={}))
        with pytest.raises(BackendError) as failed:
            _ = [item async for item in backend.infer(call, timeout_us=LONG_US)]
        await backend.close()
    assert failed.value.fault.kind is FaultKind.UNREACHABLE
    assert len(up.requests) == 1
