"""The fallback cases, as a caller of the whole data plane meets them: which candidate, which status, who is blamed."""

import asyncio

import httpx
import pytest

from tests.kit.app import KEY, LIMITED_KEY
from tests.kit.llm_plane import ALIAS, CHAT, TASK, Endpoint, chat_rule, llm_plane
from tests.kit.relayed import (
    asked,
    is_stream,
    refusal,
    script,
    served_by,
    text_of,
)
from tests.kit.upstream import (
    FIN,
    HOLD,
    LAST_CHUNK,
    RST,
    Upstream,
    error_reply,
    event,
    json_reply,
    reply,
    sse_head,
)
from tests.kit.wait import until

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
NO = {"message": "no", "type": "t", "param": None, "code": None}
REFUSALS = {
    400: {
        "message": "'top_p' must be at most 1",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": "bad_top_p",
    },
    422: {"message": "tools[0]: no name", "type": "invalid_request_error", "param": "tools", "code": None},
}

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
        health = await gw.http.get("/healthz/ready")
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
