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
    400: {
        "message": "'top_p' must be at most 1",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": "bad_top_p",
    },
    422: {"message": "tools[0]: no name", "type": "invalid_request_error", "param": "tools", "code": None},
}


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


# --- fallback, retry, breaker ------------------------------------------------------------------------------

TOO_LONG = {"message": "maximum context length is 8192 tokens", "type": "invalid_request_error", "param": "messages"}


@both
async def test_bad_input_of_one_caller_takes_nothing_from_another(stream):  # FB-01
    up = Upstream(*[error_reply(400, TOO_LONG)] * 20, script(stream=stream))
    async with llm_plane(up) as gw:
        for _ in range(20):
            answer = await gw.post(CHAT, asked(stream=stream))
            assert refusal(answer)[:2] == (400, "context_length_exceeded")
        assert dict(gw.board.all()) == {}
        good = await gw.post(CHAT, asked(stream=stream), authorization=f"Bearer {LIMITED_KEY}")
    assert (text_of(good), served_by(good)) == ("hi", ("up1", 1))
    assert len(up.requests) == 21


NOBODY = Endpoint(base_urls=["http://127.0.0.1:1/v1"])
NO_NAME = Endpoint(base_urls=["http://name.invalid/v1"])


@both
@pytest.mark.parametrize(
    ("make", "status", "code"),
    [
        (lambda: NOBODY, 502, "backend_error"),
        (lambda: NO_NAME, 502, "backend_error"),
        (lambda: Upstream([FIN]), 502, "backend_error"),
        (lambda: Upstream([RST]), 502, "backend_error"),
        (lambda: Upstream([HOLD]), 504, "deadline_exceeded"),
    ],
    ids=["refused", "no such name", "closed", "reset", "silent"],
)
async def test_an_endpoint_that_is_not_there_is_its_own_kind_of_error(make, status, code, stream):  # FB-02
    async with llm_plane(make(), timeout_us=300_000, attempt_timeout_us=200_000) as gw:
        answer = await gw.post(CHAT, asked(stream=stream))
    assert refusal(answer) == (status, code, None)
    assert gw.seen.records[0].code == code
    (breaker,) = gw.board.all().values()
    assert breaker.failures == 1


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SEES = [{"role": "user", "content": [{"type": "text", "text": "see 数🙂"}, IMAGE]}]


@both
async def test_each_candidate_has_its_own_fields_and_key(stream):  # FB-05
    up1, up2 = Upstream(error_reply(503, NO)), Upstream(script(stream=stream))
    one = Endpoint(upstreams=(up1,), api_key="key-one", headers={"x-org": "one"})
    two = Endpoint(upstreams=(up2,), api_key="key-two")
    given = {"messages": SEES, "max_tokens": 500, "temperature": 0.5}
    rule = chat_rule(
        split=[{"backend": "up1", "model": "model-1", "parameters": {"max_tokens": 7, "temperature": None, "seed": 1}}],
        fallback=[{"backend": "up2", "model": "model-2"}],
    )
    async with llm_plane(one, two, rules=[rule]) as gw:
        for _ in range(3):
            answer = await gw.post(CHAT, asked(stream=stream, **given))
            assert (text_of(answer), served_by(answer)) == ("hi", ("up2", 2))
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for seen in up1.requests:
        assert seen.json() == {"messages": SEES, "max_tokens": 7, "seed": 1, "model": "model-1", **streamed}
    for seen in up2.requests:
        assert seen.json() == {**given, "model": "model-2", **streamed}
        assert seen.header("authorization") == "Bearer key-two"
        assert "key-one" not in repr(seen.headers) + repr(seen.body)
        assert KEY not in repr(seen.headers)
        assert seen.header("x-org") is None
    assert (len(up1.requests), len(up2.requests)) == (3, 3)


@both
@pytest.mark.parametrize("fault", ["503", "reset", "error first"])
async def test_the_next_candidate_answers_in_the_form_that_was_asked_for(fault, stream):  # FB-07
    first = {
        "503": error_reply(503, NO),
        "reset": [RST],
        "error first": [sse_head(), event({"error": NO}), LAST_CHUNK] if stream else json_reply(200, {"error": NO}),
    }[fault]
    up1, up2 = Upstream(first), Upstream(script("other", stream=stream))
    async with llm_plane(up1, up2) as gw:
        answer = await gw.post(CHAT, asked(stream=stream))
    assert is_stream(answer) is stream
    assert (text_of(answer), served_by(answer)) == ("other", ("up2", 2))
    assert answer.headers["x-gateway-model"] == "model-2"
    assert (len(up1.requests), len(up2.requests)) == (1, 1)
    assert len(gw.seen.records[0].faults) == 1


TWO_RULES = [
    {"name": "other", "match": {"task": TASK, "model": ALIAS}, "split": [{"backend": "up2", "model": "model-2"}]},
    chat_rule(),
]


@both
async def test_an_endpoint_that_never_answers_holds_up_nobody_else(stream):  # FB-10
    up1, up2 = Upstream([HOLD]), Upstream(script("other", stream=stream))
    many = httpx.Limits(max_connections=None)
    plane = llm_plane(up1, up2, rules=TWO_RULES, timeout_us=60_000_000, attempt_timeout_us=60_000_000)
    async with plane as gw, httpx.AsyncClient(headers=gw.http.headers, limits=many, trust_env=False) as client:

        def ask(**fields) -> asyncio.Task:
            return asyncio.create_task(client.post(gw.url + CHAT, json=asked(stream=stream, **fields), timeout=60))

        stuck = [ask() for _ in range(200)]
        await up1.request(199)
        answers = await asyncio.gather(*(ask(model=ALIAS) for _ in range(50)))
        health = await gw.http.get("/health")
        assert not any(one.done() for one in stuck)
        for one in stuck:
            one.cancel()
        await until(lambda: not gw.loads)
    assert [(text_of(answer), served_by(answer)) for answer in answers] == [("other", ("up2", 1))] * 50
    assert health.status_code == 200


@both
async def test_calls_to_an_endpoint_that_never_answers_end_at_their_limit(stream):  # FB-10
    async with llm_plane(Upstream([HOLD]), attempt_timeout_us=60_000_000) as gw:
        calls = (gw.post(CHAT, asked(stream=stream), **{"x-timeout-ms": "200"}) for _ in range(20))
        answers = await asyncio.gather(*calls)
        assert (gw.loads, dict(gw.board.all())) == ({}, {})  # the callers gave it too little time to be blamed
    assert [refusal(answer) for answer in answers] == [(504, "deadline_exceeded", None)] * 20


@both
async def test_calls_to_an_endpoint_that_never_answers_go_to_the_next(stream):  # FB-10
    up1, up2 = Upstream([HOLD]), Upstream(script("other", stream=stream))
    async with llm_plane(up1, up2, attempt_timeout_us=200_000) as gw:
        answers = await asyncio.gather(*(gw.post(CHAT, asked(stream=stream)) for _ in range(20)))
        assert gw.loads == {}
        assert len(gw.board.all()) == 1
    assert [(text_of(answer), served_by(answer)[0]) for answer in answers] == [("other", "up2")] * 20


@both
@pytest.mark.parametrize("status", REFUSALS)
async def test_a_refusal_of_the_input_is_told_once_in_its_own_words(status, stream):  # FB-12
    up1, up2 = Upstream(error_reply(status, REFUSALS[status])), Upstream(script(stream=stream))
    async with llm_plane(up1, up2, rules=[chat_rule(2, retries=2)]) as gw:
        answer = await gw.post(CHAT, asked(stream=stream))
        assert dict(gw.board.all()) == {}
    told = answer.json()["error"]
    assert answer.status_code == status
    assert (told["message"], told["param"]) == (REFUSALS[status]["message"], REFUSALS[status]["param"])
    assert told["code"] == REFUSALS[status]["code"] or told["code"] == "invalid_input"
    assert (len(up1.requests), len(up2.requests)) == (1, 0)


NO_MODEL = {
    "message": "The model `x` does not exist",
    "type": "invalid_request_error",
    "param": None,
    "code": "model_not_found",
}


@both
async def test_an_unknown_model_is_the_callers_mistake_only_where_the_caller_named_it(stream):  # FB-12
    up = Upstream(error_reply(404, NO_MODEL))
    sent_on = {"name": "any", "match": {"task": TASK, "model": ALIAS}, "split": [{"backend": "up1", "model": "*"}]}
    async with llm_plane(up, rules=[sent_on, chat_rule()]) as gw:
        named = await gw.post(CHAT, asked(stream=stream, model=ALIAS))
        assert dict(gw.board.all()) == {}
        ours = await gw.post(CHAT, asked(stream=stream))
        assert len(gw.board.all()) == 1
    assert refusal(named) == (404, "model_not_found", None)
    assert refusal(ours)[0] == 503
    assert len(up.requests) == 2


@both
@pytest.mark.parametrize(
    "bad",
    [
        reply(500, b"<html>oops</html>", content_type="text/html"),
        reply(200, b""),
        reply(200, b"null"),
        reply(200, b"<html>hello</html>", content_type="text/html"),
        reply(200, b"", content_type="text/event-stream"),
    ],
    ids=["500 page", "empty", "null", "page", "empty stream"],
)
async def test_what_is_no_answer_is_a_502(bad, stream):  # FB-12
    async with llm_plane(Upstream(bad)) as gw:
        answer = await gw.post(CHAT, asked(stream=stream))
    assert refusal(answer)[0] == 502
    assert "html" not in answer.text
    assert gw.seen.records[0].code == "backend_error"
