"""The task API over scripted backends."""

import base64

import numpy as np
import pytest

from gateway.backends.scripted import Pause, ScriptedBackend
from gateway.core.errors import Fault, FaultKind
from gateway.core.types import Message, Place
from tests.kit.app import EMBEDDING_KEY, LIMITED_KEY, embedding, running, scores

LONE_SURROGATE = b'{"choices": [{"message": {"role": "assistant", "content": "\\ud83d"}}]}'
EMBED = "/v1/tasks/text-embedding"
IMAGE = "/v1/tasks/image-classification"
TEXT = {"input": {"text": "hello"}}


def fault(kind: FaultKind, message: str = "x", **more):
    return Fault(kind=kind, message=message, **more)


async def test_an_answer_has_the_documented_shape():
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        answer = await gw.post("/v1/infer", {"task": "text-embedding", **TEXT}, **{"x-request-id": "abc-1"})
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"] == "abc-1"
    assert body["output"] == {"embeddings": [[1.0, 0.0, 0.0, 0.0]], "dimensions": 4}
    assert body["route"] == {
        "backend": "triton",
        "model": "text_embedding",
        "version": "1",
        "rule": "embeddings",
        "attempts": 1,
    }
    assert body["usage"] == {"input_tokens": 3}
    assert body["timing"]["queue_ms"] == 1.5
    assert set(body["timing"]) == {"total_ms", "admit_ms", "queue_ms", "backend_ms"}
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.headers["x-gateway-backend"] == "triton"
    assert answer.headers["x-gateway-attempts"] == "1"
    assert answer.headers["x-gateway-rule"] == "embeddings"


@pytest.mark.parametrize(
    "kind", [FaultKind.UNAVAILABLE, FaultKind.TIMEOUT, FaultKind.BROKEN, FaultKind.OVERLOADED, FaultKind.UNKNOWN_MODEL]
)
async def test_a_failing_backend_is_followed_by_the_fallback(kind):
    async with running([ScriptedBackend("triton", [fault(kind)]), ScriptedBackend("local", [embedding()])]) as gw:
        answer = await gw.post(EMBED, TEXT)
    assert answer.status_code == 200
    assert answer.json()["route"]["backend"] == "local"
    assert answer.json()["route"]["attempts"] == 2
    assert len(gw.seen.records[0].faults) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"EMBEDDING": None},
        {"EMBEDDING": np.ones((1, 3), np.float32)},
        {"EMBEDDING": np.ones((1, 4), np.float64)},
        {"EMBEDDING": np.full((1, 4), np.nan, np.float32)},
        {"EMBEDDING": np.full((1, 4), 9.0, np.float32)},
        {"EMBEDDING": np.zeros((2, 4), np.float32)},
        {"TOKENS": None},
    ],
)
async def test_an_answer_against_the_contract_is_never_a_wrong_200(wrong):  # TN-10
    bad = ScriptedBackend("triton", [embedding(**wrong)])
    async with running([bad]) as gw:
        alone = await gw.post(EMBED, TEXT)
    assert (alone.status_code, alone.json()["code"]) == (502, "backend_error")
    bad = ScriptedBackend("triton", [embedding(**wrong)])
    async with running([bad, ScriptedBackend("local", [embedding()])]) as gw:
        assert (await gw.post(EMBED, TEXT)).json()["route"]["backend"] == "local"


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (FaultKind.UNAVAILABLE, 503, "no_healthy_backend"),
        (FaultKind.TIMEOUT, 504, "deadline_exceeded"),
        (FaultKind.BROKEN, 502, "backend_error"),
        (FaultKind.OVERLOADED, 429, "queue_full"),
        (FaultKind.UNKNOWN_MODEL, 503, "no_healthy_backend"),
        (FaultKind.UNSUPPORTED, 501, "unsupported"),
        (FaultKind.REFUSED_INPUT, 422, "invalid_input"),
    ],
)
async def test_the_last_fault_decides_the_error(kind, status, code):
    async with running([ScriptedBackend("triton", [fault(kind, "secret inside")])]) as gw:
        answer = await gw.post(EMBED, TEXT)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    assert ("secret inside" in answer.text) == (kind is FaultKind.REFUSED_INPUT)
    assert ("retry-after" in answer.headers) == (status in (429, 503))


async def test_a_refused_input_is_not_tried_elsewhere_and_does_not_hurt_the_backend():
    triton = ScriptedBackend("triton", [fault(FaultKind.REFUSED_INPUT, "IMAGE: not an image")])
    async with running([triton, ScriptedBackend("local", [scores(1, 0, 0)])]) as gw:
        for _ in range(5):
            answer = await gw.post(IMAGE, {"input": {"image": base64.b64encode(b"no").decode()}})
            assert answer.status_code == 422
            assert answer.json()["detail"] == "not an image"
            assert answer.json()["errors"][0]["field"] == "input.image"
        assert gw.board.of(Place(backend="triton", model="image_classification")).why_not(0) is None
        assert not gw.backends["local"].calls


async def test_a_backend_that_keeps_failing_is_left_out():
    triton = ScriptedBackend("triton", [fault(FaultKind.UNAVAILABLE)])
    async with running([triton, ScriptedBackend("local", [embedding()])]) as gw:
        for _ in range(6):
            assert (await gw.post(EMBED, TEXT)).status_code == 200
    assert len(triton.calls) == 3
    assert gw.seen.records[-1].route.attempts == 1
    assert any("breaker open" in reason for reason in gw.seen.records[-1].reasons)


async def test_a_hung_backend_leaves_time_for_the_fallback():
    hung = ScriptedBackend("triton", [Pause(us=30_000_000)])
    async with running([hung, ScriptedBackend("local", [embedding()])], attempt_timeout_us=50_000) as gw:
        answer = await gw.post(EMBED, TEXT)
    assert answer.json()["route"]["backend"] == "local"
    assert hung.calls[0].timeout_us <= 50_000  # it is told, and so is its server


async def test_the_callers_own_deadline_is_kept():
    hung = ScriptedBackend("triton", [Pause(us=30_000_000)])
    async with running([hung]) as gw:
        answer = await gw.post(EMBED, TEXT, **{"x-timeout-ms": "80"})
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
    assert hung.calls[0].timeout_us <= 80_000


async def test_no_rule_for_a_task_is_a_clear_503_that_nobody_is_told_to_repeat():
    async with running([ScriptedBackend("triton", [embedding()])], rules=[]) as gw:
        answer = await gw.post(EMBED, TEXT)
    assert (answer.status_code, answer.json()["code"]) == (503, "no_healthy_backend")
    assert "`gateway rules " in answer.json()["detail"]
    assert "retry_after_s" not in answer.json()
    assert "retry-after" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"


async def test_a_disabled_rule_takes_nothing():
    rules = [
        {
            "name": "off",
            "match": {"task": "text-embedding"},
            "split": [{"backend": "local", "model": "m"}],
            "enabled": False,
        },
        {"name": "on", "split": [{"backend": "triton", "model": "text_embedding"}]},
    ]
    async with running([ScriptedBackend("triton", [embedding()])], rules=rules) as gw:
        assert (await gw.post(EMBED, TEXT)).json()["route"]["rule"] == "on"


async def test_unknown_tasks_paths_and_methods():
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        unknown = await gw.post("/v1/tasks/nope", TEXT)
        by_body = await gw.post("/v1/infer", {"task": {"a": 1}, "input": {}})
        path = await gw.http.get("/v1/nope")
        method = await gw.http.get("/v1/infer")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_task")
    assert (by_body.status_code, by_body.json()["errors"][0]["field"]) == (422, "task")
    assert (path.status_code, path.json()["code"]) == (404, "not_found")
    assert (method.status_code, method.json()["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "POST"


async def test_a_key_without_the_right_is_forbidden():
    async with running([ScriptedBackend("triton", [scores(1, 0, 0)])]) as gw:
        gw.http.headers["authorization"] = f"Bearer {EMBEDDING_KEY}"
        answer = await gw.http.post(IMAGE, content=b"x", headers={"content-type": "image/png"})
        tasks = (await gw.http.get("/v1/tasks")).json()["items"]
        one = await gw.http.get(IMAGE)
        before_its_input = await gw.http.post(IMAGE, json={"input": {"wrong": 1}})
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert [t["task"] for t in tasks] == ["text-embedding"]
    assert (one.status_code, before_its_input.status_code) == (403, 403)


async def test_limits_fall_to_zero_and_then_refuse():
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        gw.http.headers["authorization"] = f"Bearer {LIMITED_KEY}"
        answers = [await gw.post(EMBED, TEXT) for _ in range(5)]
    assert [a.status_code for a in answers] == [200, 200, 200, 429, 429]
    remaining = [a.headers["x-ratelimit-remaining-requests"] for a in answers]
    assert remaining == ["2", "1", "0", "0", "0"]
    assert answers[3].json()["code"] == "rate_limited"
    assert "3 requests per minute" in answers[3].json()["detail"]
    assert 1 <= int(answers[3].headers["retry-after"]) <= 20
    assert answers[3].headers["x-ratelimit-limit-requests"] == "3"


async def test_texts_with_too_many_tokens_are_refused_unless_truncation_is_asked():
    async with running([ScriptedBackend("triton", [embedding(2, tokens=400)])]) as gw:
        refused = await gw.post(EMBED, {"input": {"text": ["a", "b"]}})
        asked = await gw.post(EMBED, {"input": {"text": ["a", "b"]}, "parameters": {"truncate": True}})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["field"] == "input.text[0]"
    assert "400 tokens" in refused.json()["detail"]
    assert asked.json()["usage"] == {"input_tokens": 512}
    assert gw.board.of(Place(backend="triton", model="text_embedding")).failures == 0


async def test_images_by_json_upload_and_raw_body():
    raw = b"\x89PNG..."
    async with running([ScriptedBackend("triton", [scores(0.1, 0.2, 0.7)])]) as gw:
        encoded = base64.b64encode(raw).decode()
        answers = [
            await gw.post(IMAGE, {"input": {"image": encoded, "top_k": 2}}),
            await gw.post(IMAGE, {"input": {"image": f"data:image/png;base64,{encoded}", "top_k": 2}}),
            await gw.http.post(IMAGE, files={"image": ("cat.png", raw, "image/png")}, data={"top_k": "2"}),
            await gw.http.post(IMAGE, files={"file": ("cat.png", raw, "image/png")}, data={"top_k": "2"}),
            await gw.http.post(f"{IMAGE}?top_k=2", content=raw, headers={"content-type": "image/png"}),
        ]
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert [(x["name"], x["index"]) for x in answer.json()["output"]["labels"]] == [
            ("Egyptian cat", 2),
            ("tiger cat", 1),
        ]
    sent = [bytes(call.call.payload.inputs[0].data) for call in gw.backends["triton"].calls]
    assert set(sent) == {len(raw).to_bytes(4, "little") + raw}


async def test_a_forms_field_that_comes_several_times_is_a_list():
    field = ("text", (None, b"a text"))
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        await gw.http.post(EMBED, files=[field] * 3)
        many = await gw.http.post(EMBED, files=[field] * 64)
    (sent,) = gw.backends["triton"].calls
    assert sent.call.payload.inputs[0].shape == (3, 1)
    assert many.json()["detail"] == "takes 1 to 4 texts, got 64"


@pytest.mark.parametrize("values", [(0.5, 0.5, 0.5), (1.5, -0.5, 0.0), (float("nan"), 0, 0)])
async def test_scores_that_are_no_probabilities_are_a_502(values):
    async with running([ScriptedBackend("triton", [scores(*values)])]) as gw:
        answer = await gw.post(IMAGE, {"input": {"image": "AAAA"}})
    assert answer.status_code == 502


async def test_a_chat_task_answers_in_its_own_contract():
    message = Message(
        body=b'{"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}'
    )
    async with running([ScriptedBackend("llm", [message])]) as gw:
        given = {"task": "general_llm", "input": {"messages": [{"role": "user", "content": "hello"}]}}
        answer = await gw.post("/v1/infer", {**given, "parameters": {"max_tokens": 5}})
        refused = await gw.post("/v1/infer", {**given, "parameters": {"stream": True}})
    assert answer.json()["output"] == {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    assert gw.backends["llm"].calls[0].call.payload.body["max_tokens"] == 5
    assert refused.status_code == 422


@pytest.mark.parametrize(
    "body", [b"{}", b'{"choices": []}', b"[]", b"null", b'{"choices": [{"message": 5}]}', LONE_SURROGATE]
)
async def test_a_chat_answer_without_a_message_is_a_502(body):
    async with running([ScriptedBackend("llm", [Message(body=body)])]) as gw:
        given = {"task": "general_llm", "input": {"messages": [{"role": "user", "content": "hello"}]}}
        answer = await gw.post("/v1/infer", given)
    assert (answer.status_code, answer.json()["code"]) == (502, "backend_error")


async def test_tasks_tell_their_schemas_and_where_they_go():
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        task = (await gw.http.get(EMBED)).json()
        missing = await gw.http.get("/v1/tasks/nope")
    assert task["input_schema"]["required"] == ["text"]
    assert task["route"]["rule"] == "embeddings"
    assert task["route"]["split"][0]["healthy"] is True
    assert task["route"]["fallback"][0]["healthy"] is False
    assert missing.status_code == 404


async def test_an_unforeseen_fault_is_a_clean_500():
    class Exploding(ScriptedBackend):
        async def infer(self, call, *, timeout_us):
            raise ZeroDivisionError("secret inside")
            yield

    async with running([Exploding("triton", [])]) as gw:
        answer = await gw.post(EMBED, TEXT)
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "secret" not in answer.text
    assert isinstance(gw.seen.records[0].error.__cause__, ZeroDivisionError)
    assert gw.seen.in_flight == 0
