"""The public cases of hostile input (SC-07, SC-09, SC-12, SC-13) at the door of the data plane, path by path."""

import asyncio
import contextlib
import io
import json
import resource
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.api.app import PATHS
from gateway.backends.scripted import ScriptedBackend
from gateway.core.types import Message
from gateway.telemetry.logs import AccessLog
from tests.kit.app import KEY, embedding, running
from tests.kit.llm_plane import ASK, CHAT, llm_plane
from tests.kit.relayed import script
from tests.kit.upstream import Upstream
from tests.kit.wait import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
EMBED, COMPLETIONS, RESPONSES, EMBEDDINGS = (
    "/v1/tasks/text-embedding",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
)
LIMIT = 1_000_000
POSTED = sorted({path.replace("{task}", "text-embedding") for method, path, *_ in PATHS if method == "POST"})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gw():
    backends = [ScriptedBackend("triton", [embedding()]), ScriptedBackend("llm", [Message(body=b"{}")])]
    async with running(backends, max_body_bytes=LIMIT, body_timeout_s=0.5) as one:
        yield one


# --- SC-07: how a body comes ----------------------------------------------------------------------


def head(path: str, framing: str, key: str = KEY) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}", "content-type: application/json")
    return "\r\n".join((*lines, framing, "", "")).encode()


async def exchanged(gw: Any, *parts: bytes) -> bytes:
    """What comes back until the server closes; what is left to send by then is not sent."""
    host, port = gw.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(20):
            found = b""
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(65536):
                    found += piece
            return found
    finally:
        sending.cancel()
        writer.close()


@pytest.mark.parametrize("path", [*POSTED, "/v2/models/m/infer"])
@pytest.mark.parametrize("key", [KEY, "wrong"], ids=["known", "stranger"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
async def test_a_byte_too_many_is_told_before_it_is_kept(gw, path, key, is_chunked):
    """SC-07: to who has no key it is not told at all."""
    body = b"x" * (LIMIT + 1)
    parts = [b"%x\r\n%b\r\n" % (len(body), body), b"0\r\n\r\n"] if is_chunked else [body]
    framing = "transfer-encoding: chunked" if is_chunked else f"content-length: {len(body)}"
    answer = await exchanged(gw, head(path, f"{framing}\r\nconnection: close", key), *parts)
    expected = 401 if key == "wrong" else 413
    assert answer.startswith(b"HTTP/1.1 %d " % expected), answer[:300]
    if expected == 413:
        assert str(LIMIT).encode() in answer


async def test_chunks_of_one_byte_are_one_body(gw):
    """SC-07."""
    body = json.dumps({"input": {"text": "hello"}}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    answer = await exchanged(gw, head(EMBED, "transfer-encoding: chunked\r\nconnection: close") + chunks)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]


async def test_a_length_that_lies(gw):
    """SC-07: what is missing is waited for in vain; what is too much is no request, and ends the connection."""
    body = json.dumps({"input": {"text": "hello"}}).encode()
    late = await exchanged(gw, head(EMBED, f"content-length: {len(body) + 9}"), body)
    assert late.startswith(b"HTTP/1.1 408 "), late[:300]
    early = await exchanged(gw, head(EMBED, f"content-length: {len(body)}"), body + b"more than that\r\n\r\n")
    assert [part[:3] for part in early.split(b"HTTP/1.1 ")[1:]] == [b"200"]


async def test_a_body_of_a_byte_now_and_then_ends(gw):
    """SC-07: the time is that of the whole body; a byte does not begin it anew."""
    host, port = gw.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head(EMBED, "content-length: 5000"))
    answer = asyncio.create_task(reader.read(65536))
    async with asyncio.timeout(20):
        while not answer.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b" ")
                await writer.drain()
            await asyncio.sleep(0.02)
    writer.close()
    assert (await answer).startswith(b"HTTP/1.1 408 ")


async def test_two_hundred_large_bodies_at_once_take_what_they_may(gw):
    """SC-07: of strangers nothing is kept; of callers a body each, and no more than that."""

    async def send(key: str) -> int:
        body = b"x" * (2 * LIMIT)
        answer = await exchanged(gw, head(EMBED, "transfer-encoding: chunked", key), b"%x\r\n" % len(body), body)
        return int(answer[9:12] or b"0")

    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    strangers = await asyncio.gather(*(send("wrong") for _ in range(200)))
    callers = await asyncio.gather(*(send(KEY) for _ in range(200)))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024
    assert set(strangers) <= {401, 0}  # 0: closed, while its caller went on sending
    assert 401 in strangers
    assert set(callers) <= {413, 0}
    assert 413 in callers
    assert grown < 200 * 4 * LIMIT  # the callers' own copies are in it: this process sends them
    assert (await gw.post(EMBED, {"input": {"text": "hello"}})).status_code == 200


# --- SC-09: names that would break a log or a header ----------------------------------------------

IDS = {
    "long": b"x" * 10_000,
    "escape": b"a\x1b[31mb",
    "tab": b"a\tb",
    "line separator": "a\u2028b".encode(),
    "encoded": b"%0d%0aSet-Cookie:x",
    "quote": b'a"b',
}


@pytest.mark.parametrize("given", IDS.values(), ids=IDS)
async def test_an_id_is_replaced_everywhere_or_refused(given):
    """SC-09: one safe id in the answer, at the endpoint and in one line of the log."""
    written = io.StringIO()
    log = AccessLog(written.write)
    upstream = Upstream(script("hi", stream=False))
    async with llm_plane(upstream, observers=[log]) as at:
        raw = [(b"x-request-id", given), (b"traceparent", given), (b"authorization", f"Bearer {KEY}".encode())]
        answer = await at.http.post(CHAT, json=dict(ASK), headers=raw)
        if answer.status_code == 400:  # a control character is no header's
            assert b"\x1b" in given
            assert not upstream.requests
            return
        assert answer.status_code == 200
        own = answer.headers["x-request-id"]
        assert own.isascii()
        assert own.isalnum()
        assert len(own) <= 128
        assert "set-cookie" not in answer.headers
        assert upstream.requests[0].header("x-request-id") == own
        assert given.decode("latin-1") not in (upstream.requests[0].header("traceparent") or "")
        await until(written.getvalue)
    [line] = written.getvalue().splitlines()
    assert json.loads(line)["request_id"] == own


@pytest.mark.parametrize("name", ["a\nb", "a\r\nset-cookie: x", "a\x1b[2Jb", "a\u2028b", 'a"b', "\x00"])
async def test_a_name_in_a_body_is_one_line_of_the_log(name):
    """SC-09."""
    written = io.StringIO()
    async with running([ScriptedBackend("llm", [])], observers=[AccessLog(written.write)]) as at:
        for path, body in ((CHAT, {**ASK, "model": name}), ("/v1/infer", {"task": name, "input": {}})):
            answer = await at.post(path, body)
            assert answer.status_code == 404, answer.content
            assert "set-cookie" not in answer.headers
            answer.json()
        await until(written.getvalue)
    lines = written.getvalue().split("\n")
    assert lines.pop() == ""
    assert [json.loads(line)["code"] for line in lines] == ["model_not_found", "unknown_task"]
    assert all(line.isascii() and line.isprintable() for line in lines)


# --- SC-12: JSON that is none, or that says a thing twice -----------------------------------------

HALF = b"\\ud83d"
CHATS = {
    "content": b'{"model":"general_llm","messages":[{"role":"user","content":"%b"}]}',
    "part": b'{"model":"general_llm","messages":[{"role":"user","content":[{"type":"text","text":"%b"}]}]}',
    "tool": b'{"model":"general_llm","messages":[{"role":"tool","tool_call_id":"a","content":"%b"}]}',
    "model": b'{"model":"%b","messages":[{"role":"user","content":"hi"}]}',
    "name": b'{"model":"general_llm","%b":1,"messages":[{"role":"user","content":"hi"}]}',
}


@pytest.mark.parametrize("where", CHATS)
@pytest.mark.parametrize(
    "text", [HALF, b"\xff\xfe", b"\xed\xa0\xbd", b"a\nb"], ids=["half", "bytes", "surrogate", "newline"]
)
async def test_text_that_is_none_is_a_400_wherever_it_stands(gw, where, text):
    """SC-12."""
    content = CHATS[where] % text
    answer = await gw.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_request")


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbf{}", b'{"n":NaN}', b'{"n":Infinity}', b'{"n":-Infinity}', b'{"a":"' + HALF + b'"}', b"\xff"],
    ids=["mark", "nan", "infinity", "minus infinity", "half", "no text"],
)
async def test_what_is_no_json_is_a_400_on_every_path(gw, path, content):
    """SC-12."""
    answer = await gw.http.post(path, content=content, headers={"content-type": "application/json"})
    found = answer.json()
    assert (answer.status_code, found.get("code") or found["error"]["code"]) == (400, "malformed_request")


async def test_of_names_that_come_twice_the_last_counts(gw):
    """SC-12: as the endpoint behind us has it, which gets the very bytes."""
    twice = b'{"model":"nope","messages":[{"role":"user","content":"hi"}],"model":"general_llm"}'
    last = b'{"model":"general_llm","messages":[{"role":"user","content":"hi"}],"model":"nope"}'
    statuses = [
        (await gw.http.post(CHAT, content=content, headers={"content-type": "application/json"})).status_code
        for content in (twice, last)
    ]
    assert statuses == [200, 404]


# --- SC-13: what clients get wrong ----------------------------------------------------------------

WRONG = ["{}", "[]", "null", '"x"', "5", "true", ""]


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize("content", WRONG, ids=lambda content: content or "nothing")
async def test_no_body_of_another_kind_is_the_servers_fault(gw, path, content):
    """SC-13: 4xx in the form of the path, with the field's name and without Python's words; no endpoint is blamed."""
    answer = await gw.http.post(path, content=content, headers={"content-type": "application/json"})
    if path == "/v1/client-tokens":  # no secret is set here by which tokens could be signed
        assert answer.status_code in (400, 501)
        return
    assert answer.status_code in (400, 422), answer.content
    found = answer.json()
    if path in (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS):
        assert {"message", "type", "param", "code"} <= found["error"].keys()
        assert found["error"]["param"]
    else:
        assert answer.headers["content-type"] == "application/problem+json"
        assert found["errors"][0]["field"]
    assert not any(word in answer.text for word in ("Traceback", "Error(", "<class", "NoneType", "dict", "self"))
    assert gw.board.is_quiet


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/infer", {"task": "nope", "input": {}}),
        ("/v1/tasks/nope", {"input": {}}),
        (CHAT, {**ASK, "model": "nope"}),
        (COMPLETIONS, {"model": "nope", "prompt": "hi"}),
        (RESPONSES, {"model": "nope", "input": "hi"}),
        (EMBEDDINGS, {"model": "nope", "input": "hi"}),
        ("/v2/models/nope/infer", {"inputs": []}),
    ],
)
async def test_what_is_not_there_is_a_404(gw, path, body):
    """SC-13."""
    assert (await gw.post(path, body)).status_code == 404
    assert gw.board.is_quiet


async def test_a_verb_that_a_path_lacks_is_told_which_it_has():
    """SC-13: 405 with what it takes."""
    async with running([ScriptedBackend("triton", [embedding()])]) as at, httpx.AsyncClient(trust_env=False) as http:
        for method, path, *_ in PATHS:
            url = at.url + path.replace("{task}", "text-embedding").replace("{model:path}", "minilm")
            answer = await http.request("PATCH", url, headers={"authorization": f"Bearer {KEY}"})
            assert answer.status_code == 405, path
            assert method in answer.headers["allow"]
