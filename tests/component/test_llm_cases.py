"""The streaming, fallback and cost cases, as a caller of the whole data plane meets them."""

import asyncio
import gzip
import json
import logging

import httpx
import pytest
from prometheus_client import CollectorRegistry

from gateway.telemetry.metrics import Metrics
from tests.kit.app import KEY, LIMITED_KEY
from tests.kit.llm_plane import ALIAS, CHAT, TASK, Endpoint, chat_rule, llm_plane, stream_of
from tests.kit.relayed import (
    asked,
    broken_off,
    chunks,
    is_stream,
    payloads,
    refusal,
    said,
    script,
    served_by,
    text_of,
)
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
from tests.kit.wait import until

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
NO = {"message": "no", "type": "t", "param": None, "code": None}
RUNNING_AWAY = [step for number in range(100) for step in (event(delta(f"w{number} ")), Pause(0.2))]  # for 20 s
REFUSALS = {
    400: {"message": "'top_p' must be at most 1", "type": "invalid_request_error", "param": "top_p", "code": "bad_top_p"},
    422: {"message": "tools[0]: no name", "type": "invalid_request_error", "param": "tools", "code": None},
}


def split_up(body: bytes, *, into_chunks: bool) -> list:
    """One byte at a time, each in a chunk of the transfer coding's own or not."""
    return [step for at in range(len(body)) for step in (chunk(body[at : at + 1]) if into_chunks else body[at : at + 1], Pause(0.0005))]


# --- streaming ---------------------------------------------------------------------------------------------


@both
async def test_characters_cut_anywhere_arrive_whole(stream):  # ST-01
    text = "数🙂é"
    if stream:
        told = f"data: {json.dumps(delta(text), ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode()
        steps = [sse_head(), *split_up(told, into_chunks=True), LAST_CHUNK]
    else:
        told = json.dumps(completion(text), ensure_ascii=False).encode()
        steps = [head(200, {"Content-Type": "application/json", "Content-Length": str(len(told))})]
        steps += split_up(told, into_chunks=False)
    async with llm_plane(Upstream(steps)) as gw:
        answer = await gw.post(CHAT, asked(stream=stream))
    assert answer.content == told
    assert text_of(answer) == text


FOUR = [delta("a"), delta("b"), delta("c"), delta("", finish="stop")]
PLAIN = [f"data: {json.dumps(one)}\n\n".encode() for one in FOUR] + [b"data: [DONE]\n\n"]


@pytest.mark.parametrize(
    "parts",
    [
        PLAIN,
        [part.replace(b"data: ", b"data:") for part in PLAIN],
        [piece for part in PLAIN for piece in (part.replace(b"\n", b"\r\n")[:-3], b"\r", b"\n")],
        [part.replace(b', "choices"', b',\ndata: "choices"') for part in PLAIN],
        [b": ping\n\nevent: message\nid: 7\n" + part for part in PLAIN],
        [b"".join(PLAIN)],
    ],
    ids=["plain", "no space", "cut CRLF", "two data lines", "comments, names and ids", "all at once"],
)
async def test_every_legal_spelling_of_events_is_the_same_stream(parts):  # ST-02
    steps = [step for part in parts for step in (chunk(part), Pause(0.0005))]
    async with llm_plane(Upstream([sse_head(), *steps, LAST_CHUNK])) as gw:
        answer = await gw.post(CHAT, asked(stream=True))
    assert chunks(answer) == FOUR
    assert gw.seen.records[0].code == "ok"


@both
@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        (429, NO, (429, "queue_full", "7")),
        (400, REFUSALS[400], (400, "bad_top_p", None)),
        (503, NO, (429, "queue_full", "7")),  # full is full, whichever word the endpoint has for it
    ],
)
async def test_a_refusal_has_its_status_and_no_stream_begins(status, error, told, stream):  # ST-04
    async with llm_plane(Upstream(error_reply(status, error, {"Retry-After": "7"}))) as gw:
        answer = await gw.post(CHAT, asked(stream=stream))
    assert refusal(answer) == told
    assert gw.seen.records[0].code == ("invalid_input" if status == 400 else "queue_full")


ROLE = event({**delta(""), "choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
THREE = [event(delta(text)) for text in "abc"]


@pytest.mark.parametrize("cut", [RST, FIN])
@pytest.mark.parametrize(("before", "text"), [(THREE, "abc"), ([ROLE], ""), ([*THREE, chunk(b"data: {")], "abc")])
async def test_a_broken_stream_never_looks_finished(before, text, cut):  # ST-06
    up1, up2 = Upstream([sse_head(), *before, Pause(0.02), cut]), Upstream(script(stream=True))
    async with llm_plane(up1, up2) as gw:
        answer = await gw.post(CHAT, asked(stream=True))
    parts, error = broken_off(answer)
    assert said(parts) == text
    assert error["code"] == "backend_error"
    assert not up2.requests
    assert served_by(answer) == ("up1", 1)
    (record,) = gw.seen.records
    assert (record.code, record.usage.is_estimated) == ("backend_error", True)
    assert sum(breaker.failures for breaker in gw.board.all().values()) == 1


@pytest.mark.parametrize("cut", [RST, FIN])
@pytest.mark.parametrize("framing", [{"Content-Length": "999"}, {"Transfer-Encoding": "chunked"}])
@pytest.mark.parametrize("has_second", [False, True])
async def test_a_broken_whole_answer_is_none(framing, cut, has_second):  # ST-06
    part = json.dumps(completion("ab"))[:60].encode()
    sent = chunk(part) if "Transfer-Encoding" in framing else part
    up1 = Upstream([head(200, framing | {"Content-Type": "application/json"}), sent, Pause(0.02), cut])
    async with llm_plane(up1, *([Upstream(script("other", stream=False))] if has_second else [])) as gw:
        answer = await gw.post(CHAT, asked(stream=False))
    if has_second:
        assert (text_of(answer), served_by(answer)) == ("other", ("up2", 2))
    else:
        assert refusal(answer) == (502, "backend_error", None)
    assert [fault.kind.value for fault in gw.seen.records[0].faults] == ["broken"]
