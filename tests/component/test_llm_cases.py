"""The cases of streaming, cost and hostile input, as a caller of the whole data plane meets them."""

import asyncio
import gzip
import json
import logging

import pytest
from prometheus_client import CollectorRegistry

from gateway.core.rules import RuleSet, parse_rules
from gateway.telemetry.metrics import Metrics
from tests.kit.app import KEY, LIMITED_KEY
from tests.kit.llm_plane import CHAT, TASK, Endpoint, chat_rule, llm_plane, stream_of
from tests.kit.relayed import (
    asked,
    broken_off,
    chunks,
    payloads,
    refusal,
    said,
    script,
    served_by,
    text_of,
)
from tests.kit.upstream import (
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


def split_up(body: bytes, *, into_chunks: bool) -> list:
    """One byte at a time, each in a chunk of the transfer coding's own or not."""
    return [
        step
        for at in range(len(body))
        for step in (chunk(body[at : at + 1]) if into_chunks else body[at : at + 1], Pause(0.0005))
    ]


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
        (400, NO | {"code": "bad_top_p"}, (400, "bad_top_p", None)),
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


@both
async def test_nothing_is_generated_for_nobody(stream, caplog):  # ST-08
    up = Upstream([sse_head(), *THREE, *RUNNING_AWAY] if stream else [HOLD])
    with caplog.at_level(logging.WARNING):
        async with llm_plane(up) as gw:
            if stream:
                async with gw.http.stream("POST", CHAT, json=asked(stream=True)) as answer:
                    lines = answer.aiter_lines()
                    read = [line async for line, _ in zip_async(lines, range(6))]  # three events
                assert sum(line.startswith("data: ") for line in read) == 3
            else:
                asking = asyncio.create_task(gw.post(CHAT, asked(stream=False)))
                await up.request()
                asking.cancel()
            await asyncio.wait_for((await up.request()).left.wait(), 2)
            await until(lambda: gw.seen.records)
            assert gw.seen.records[0].code == "client_closed"
            assert (gw.seen.in_flight, gw.loads, dict(gw.board.all())) == (0, {}, {})
    assert not caplog.records


async def zip_async(items, counted):
    """As `zip`, without asking for one too many."""
    for number in counted:
        yield await anext(items), number


@pytest.mark.parametrize("wish", [{"include_usage": True}, {"include_usage": False}, None])
@pytest.mark.parametrize("is_null_before", [False, True], ids=["plain", "usage is null in every chunk"])
async def test_usage_is_shown_to_those_who_asked_and_counted_for_all(wish, is_null_before):  # ST-10
    words = [delta("a"), delta("", finish="stop")]
    if is_null_before:
        words = [word | {"usage": None} for word in words]
    up = Upstream(stream_of(*words, usage_chunk(7, 5)))
    async with llm_plane(up) as gw:
        answer = await gw.post(CHAT, asked(stream=True, **({"stream_options": wish} if wish else {})))
    shown = [part for part in chunks(answer) if part.get("usage")]
    if wish == {"include_usage": True}:
        assert chunks(answer) == [*words, usage_chunk(7, 5)]
        assert [part["choices"] for part in shown] == [[]]
    else:
        assert chunks(answer) == words
    assert up.requests[0].json()["stream_options"]["include_usage"] is True
    used = gw.seen.records[0].usage
    assert (used.input_tokens, used.output_tokens, used.is_estimated) == (7, 5, False)


async def test_usage_of_a_whole_answer_is_shown_and_counted():  # ST-10
    async with llm_plane(Upstream(script(stream=False, prompt=7, made=5))) as gw:
        answer = await gw.post(CHAT, asked(stream=False))
    assert answer.json()["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    assert gw.seen.records[0].usage.output_tokens == 5


def call_piece(call_id: str | None, arguments: str, **more) -> dict:
    begun = {"id": call_id, "type": "function"} if call_id else {}
    named = {"name": f"tool_{call_id}"} if call_id else {}
    return {**begun, "function": {**named, "arguments": arguments}, **more}


def calls_delta(*calls: dict, finish: str | None = None) -> dict:
    return delta("") | {"choices": [{"index": 0, "delta": {"tool_calls": list(calls)}, "finish_reason": finish}]}


INTERLEAVED = [call_piece("x", '{"a"', index=0), call_piece("y", '{"b"', index=1)]
INTERLEAVED += [call_piece(None, ": 1}", index=0), call_piece(None, ": 2}", index=1)]
UNNUMBERED = [call_piece("x", '{"a"'), call_piece(None, ": 1}"), call_piece("y", '{"b"'), call_piece(None, ": 2}")]


@pytest.mark.parametrize("pieces", [INTERLEAVED, UNNUMBERED], ids=["interleaved", "no index"])
async def test_pieces_of_two_tool_calls_stay_apart(pieces):  # ST-12
    end = delta("", finish="tool_calls")
    async with llm_plane(Upstream(stream_of(*map(calls_delta, pieces), end))) as gw:
        answer = await gw.post(CHAT, asked(stream=True))
    found: dict[int, dict[str, str]] = {}
    for part in chunks(answer)[:-1]:
        for call in part["choices"][0]["delta"]["tool_calls"]:
            joined = found.setdefault(call["index"], {"id": "", "arguments": ""})
            joined["id"] += call.get("id", "")
            joined["arguments"] += call["function"]["arguments"]
    assert {at: (call["id"], json.loads(call["arguments"])) for at, call in found.items()} == {
        0: ("x", {"a": 1}),
        1: ("y", {"b": 2}),
    }
    assert chunks(answer)[-1]["choices"][0]["finish_reason"] == "tool_calls"
    if pieces is INTERLEAVED:  # nothing was to be mended: not a byte is changed
        assert payloads(answer)[0] == json.dumps(calls_delta(pieces[0]))


async def test_two_tool_calls_of_a_whole_answer_stay_as_they_are():  # ST-12
    calls = [call_piece("x", '{"a": 1}'), call_piece("y", '{"b": 2}')]
    body = completion() | {"choices": [{"index": 0, "message": {"role": "assistant", "tool_calls": calls}}]}
    async with llm_plane(Upstream(json_reply(200, body))) as gw:
        answer = await gw.post(CHAT, asked(stream=False))
    assert answer.content == json.dumps(body).encode()


# --- metrics and cost --------------------------------------------------------------------------------------


async def test_callers_requests_are_counted_once_and_attempts_apart():  # MT-02
    failed, good = error_reply(500, NO), script(stream=False)
    up1 = Upstream(*[good] * 10, *[failed] * 5, *[script(stream=True)] * 4, failed, failed, failed)
    up2 = Upstream(*[failed] * 7, script("other", stream=False))
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    limited = {"authorization": f"Bearer {LIMITED_KEY}"}  # it may ask three times
    async with llm_plane(up1, up2) as gw:
        for who in [limited] * 5 + [{}] * 12:  # 3 and 7 good ones, 2 refused, 5 failed
            await gw.post(CHAT, asked(stream=False), **who)
        for _ in range(4):
            await gw.post(CHAT, asked(stream=True))
        for _ in range(3):
            await gw.post(CHAT, asked(stream=False), authorization="Bearer no")
        gw.rules.replace(RuleSet(revision=8, rules=parse_rules([chat_rule(2, retries=2)])))
        last = await gw.post(CHAT, asked(stream=False))
    for record in gw.seen.records:
        metrics.began(record.task)
        metrics.ended(record)
    for record in gw.seen.at_the_door:
        metrics.refused(record)
    assert (text_of(last), served_by(last)) == ("other", ("up2", 6))
    assert counted(registry, "gateway_requests_total", "code") == {
        "ok": 15,
        "backend_error": 5,
        "unauthorized": 3,
        "rate_limited": 2,
    }
    assert counted(registry, "gateway_failed_attempts_total", "task") == {TASK: 5 * 2 + 5}
    assert counted(registry, "gateway_attempts_total", "outcome") == {"ok": 15, "failed": 5 * 2 + 5}
    assert counted(registry, "gateway_limited_total", "kind") == {"requests": 2}


def counted(registry: CollectorRegistry, name: str, label: str) -> dict[str, float]:
    """A counter, by one of its labels."""
    found: dict[str, float] = {}
    for sample in (s for family in registry.collect() for s in family.samples if s.name == name):
        found[sample.labels[label]] = found.get(sample.labels[label], 0) + sample.value
    return found


PRICES = {
    "model-1": {"input": 1_000, "cached_input": 100, "output": 2_000}
}  # 1, 0.1 and 2 thousandths of a dollar each


@both
@pytest.mark.parametrize(
    ("cached", "dollars"),
    [
        ({"cached_tokens": 900}, 0.21),
        (None, 1.02),
        ({}, 1.02),
        ({"cached_tokens": 2000}, 0.12),
        ({"cached_tokens": -5}, 1.02),
    ],
    ids=["cached", "not told", "empty", "more than all", "negative"],
)
async def test_cached_tokens_are_a_part_of_the_input(cached, dollars, stream):  # MT-03
    usage = {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010}
    usage |= {} if cached is None else {"prompt_tokens_details": cached}
    last = usage_chunk() | {"usage": usage}
    whole = json_reply(200, completion() | {"usage": usage})
    async with llm_plane(Upstream(stream_of(delta("a"), last) if stream else whole), prices=PRICES) as gw:
        wish = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await gw.post(CHAT, asked(stream=stream, **wish))
        quiet = await gw.post(CHAT, asked(stream=stream))
    shown = (chunks(answer)[-1] if stream else answer.json())["usage"]
    assert shown == {**usage, "cost_usd": dollars}
    assert answer.headers.get("x-gateway-cost-usd") == (None if stream else str(dollars))
    assert [record.usage.cost_nano_usd for record in gw.seen.records] == [round(dollars * 10**9)] * 2
    assert ("cost_usd" in quiet.text) is not stream  # a stream shows usage to those alone who asked


# --- hostile input and odd upstreams -----------------------------------------------------------------------


@both
async def test_no_field_of_a_body_leads_anywhere(stream):  # SC-03
    async with Upstream(json_reply(200, {})) as trap:
        ways = {
            "api_base": trap.base_url,
            "base_url": trap.base_url,
            "api_key": "stolen",
            "extra_headers": {"x-a": "b"},
        }
        images = [trap.base_url + "/a.png", "http://169.254.169.254/latest/meta-data"]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        fields = {**ways, "metadata": ways, "extra_body": ways, "messages": [{"role": "user", "content": content}]}
        up = Upstream(script(stream=stream))
        async with llm_plane(Endpoint(upstreams=(up,), api_key="ours")) as gw:
            answer = await gw.post(
                CHAT, asked(stream=stream, **fields), **{"x-a": "b", "host": f"127.0.0.1:{trap.port}"}
            )
        assert trap.connections == 0
    (seen,) = up.requests
    assert text_of(answer) == "hi"
    assert seen.header("host") == f"127.0.0.1:{up.port}"
    assert (seen.header("authorization"), seen.header("x-a")) == ("Bearer ours", None)
    assert {name: seen.json()[name] for name in fields} == fields  # words for the endpoint, not for us


ODD = {"Set-Cookie": "a=b", "Server": "odd/1", "X-Foo": "1", "Connection": "x-foo", "X-Gateway-Backend": "faked"}
BROTLI = reply(200, b"\x0b\x02", headers={"Content-Encoding": "br"})
OURS = {"content-type", "content-length", "date", "x-request-id"}
OURS_STREAMED = {"content-type", "transfer-encoding", "date", "x-request-id", "cache-control", "x-accel-buffering"}


@both
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_no_header_and_no_framing_of_an_upstream_reaches_the_caller(encoding, stream):  # SC-11
    body = json.dumps(completion("x" * 1000)).encode()
    if stream:
        body = b"".join(b"data: %b\n\n" % part for part in (json.dumps(delta("x" * 1000)).encode(), b"[DONE]"))
    packed = gzip.compress(body, mtime=0) if encoding == "gzip" else body
    kind = "text/event-stream" if stream else "application/json"
    up = Upstream(reply(200, packed, content_type=kind, headers={**ODD, "Content-Encoding": encoding}))
    async with llm_plane(up) as gw:
        answer = await gw.post(CHAT, asked(stream=stream), connection="authorization")
    assert answer.content == body
    assert up.requests[0].header("authorization") is None  # the caller's key stays here
    assert KEY not in repr(up.requests[0].headers)
    shown = {name for name in answer.headers if not name.startswith(("x-gateway-", "x-ratelimit-", "ratelimit"))}
    assert shown == (OURS_STREAMED if stream else OURS)
    assert served_by(answer) == ("up1", 1)


@both
@pytest.mark.parametrize(
    "bad",
    [
        BROTLI,
        [head(200, [("Content-Length", "2"), ("Transfer-Encoding", "chunked")]) + b"{}", HOLD],
        [head(200, [("Content-Length", "2"), ("Content-Length", "3")]) + b"{}", HOLD],
    ],
    ids=["br", "two framings", "two lengths"],
)
async def test_what_cannot_be_read_for_sure_is_no_answer(bad, stream):  # SC-11
    up1, up2 = Upstream(bad, script("next", stream=stream)), Upstream(script("other", stream=stream))
    async with llm_plane(up1, up2) as gw:
        first = await gw.post(CHAT, asked(stream=stream))
        second = await gw.post(CHAT, asked(stream=stream))
    assert (text_of(first), served_by(first)) == ("other", ("up2", 2))
    assert (text_of(second), served_by(second)) == ("next", ("up1", 1))
    assert up1.connections == (1 if bad is BROTLI else 2)  # what was said ambiguously ends its connection
