"""Tensor tasks whose rule falls back on LLM endpoints, as a caller of the whole data plane meets them."""

import contextlib
import json
import math

import jsonschema
import pytest

from gateway.backends.scripted import ScriptedBackend
from gateway.core.errors import Fault, FaultKind
from gateway.tasks.text_classification import TextClassification
from gateway.tasks.text_embedding import TextEmbedding
from tests.kit.app import DIMENSIONS, LABELS, running, scores
from tests.kit.llm_plane import Endpoint
from tests.kit.upstream import Upstream, completion, error_reply, json_reply

NLU = TextClassification()
TEXT = {"input": {"text": "Goal!", "labels": ["sports", "cooking"]}}
PNG = {"content": b"\x89PNG\r\n\x1a\n....", "headers": {"content-type": "image/png"}}
DOWN = Fault(kind=FaultKind.UNAVAILABLE, message="down")
PRICES = {"model-1": {"input": 1, "output": 2}}


@contextlib.asynccontextmanager
async def plane(task, *upstreams):
    """`task` is asked at a Triton that is down, then at the upstreams in order."""
    rule = {
        "name": "with-llms",
        "match": {"task": task},
        "split": [{"backend": "triton", "model": "m"}],
        "fallback": [{"backend": f"up{n}", "model": f"model-{n}"} for n, _ in enumerate(upstreams, start=1)],
    }
    async with contextlib.AsyncExitStack() as stack:
        backends = [ScriptedBackend("triton", [DOWN])]
        for number, up in enumerate(upstreams, start=1):
            await stack.enter_async_context(up)
            backend = Endpoint(upstreams=(up,)).backend(f"up{number}")
            stack.push_async_callback(backend.close)
            backends.append(backend)
        yield await stack.enter_async_context(
            running(backends, rules=[rule], more_tasks={"custom_nlu": NLU}, prices=PRICES)
        )


def written(*, logprobs=None, finish="stop", **document):
    """A whole chat answer with a JSON document."""
    body = completion(json.dumps(document), prompt=40, completion_tokens=6)
    body["choices"][0] |= {"logprobs": logprobs, "finish_reason": finish}
    return json_reply(200, body)


def place(answer):
    """Who answered, and at which attempt."""
    route = answer.json()["route"]
    return route["backend"], route["attempts"]


async def test_a_chat_model_answers_for_a_triton_that_is_down():
    up = Upstream(written(label="sports"))
    async with plane("custom_nlu", up) as gw:
        answer = await gw.post("/v1/tasks/custom_nlu", TEXT)
    found = answer.json()
    jsonschema.validate(found["output"], NLU.output_schema)
    assert found["output"] == {"label": "sports", "scores": [1, 0]}
    usage = {"input_tokens": 40, "output_tokens": 6, "cost_usd": 0.000052, "estimated_scores": True}
    assert found["usage"] == usage
    assert place(answer) == ("up1", 2)
    (request,) = up.requests
    assert (request.json()["model"], request.json()["temperature"]) == ("model-1", 0)
    assert gw.seen.records[0].usage.estimated_scores is True


async def test_scores_from_log_probabilities_carry_no_mark():
    def token(text, p, **others):
        top = [{"token": name, "logprob": math.log(value)} for name, value in others.items()]
        return {"token": text, "logprob": math.log(p), "top_logprobs": top}

    content = [token('{"label": "', 1), token("sports", 0.75, cooking=0.25), token('"}', 1)]
    async with plane("custom_nlu", Upstream(written(label="sports", logprobs={"content": content}))) as gw:
        found = (await gw.post("/v1/tasks/custom_nlu", TEXT)).json()
    assert found["output"] == {"label": "sports", "scores": pytest.approx([0.75, 0.25])}
    assert "estimated_scores" not in found["usage"]


UNFIT = {
    "another label": written(label="hacked"),
    "another case": written(label="Sports"),
    "no document": json_reply(200, completion("It is about sports.")),
    "cut": written(label="sports", finish="length"),
    "no choices": json_reply(200, completion() | {"choices": []}),
}


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT)
async def test_an_answer_against_the_contract_goes_to_the_next_candidate(unfit):
    up1, up2 = Upstream(unfit), Upstream(written(label="cooking"))
    async with plane("custom_nlu", up1, up2) as gw:
        answer = await gw.post("/v1/tasks/custom_nlu", TEXT)
    assert answer.json()["output"] == {"label": "cooking", "scores": [0, 1]}
    assert place(answer) == ("up2", 3)
    assert (len(up1.requests), len(up2.requests)) == (1, 1)


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT)
async def test_an_answer_against_the_contract_is_never_shown(unfit):
    async with plane("custom_nlu", Upstream(unfit)) as gw:
        answer = await gw.post("/v1/tasks/custom_nlu", TEXT)
    assert (answer.status_code, answer.json()["code"]) == (502, "backend_error")
    assert "hacked" not in answer.text


async def test_what_a_text_talks_a_model_into_opens_no_breaker():
    up = Upstream(*[written(label="hacked")] * 20, written(label="sports"))
    async with plane("custom_nlu", up) as gw:
        for _ in range(20):
            assert (await gw.post("/v1/tasks/custom_nlu", TEXT)).status_code == 502
        assert not [at for at in gw.board.all() if at.backend == "up1"]
        good = await gw.post("/v1/tasks/custom_nlu", TEXT)
    assert good.json()["output"]["label"] == "sports"


async def test_a_vision_model_answers_for_a_triton_that_is_down():
    named = [{"name": LABELS[2], "confidence": 20}, {"name": LABELS[0], "confidence": 70}]
    lion = [{"name": "lion", "confidence": 90}]
    up1, up2 = Upstream(written(labels=lion)), Upstream(written(labels=named))
    async with plane("image-classification", up1, up2) as gw:
        answer = await gw.http.post("/v1/tasks/image-classification", **PNG)
    found = answer.json()
    assert found["output"]["labels"] == [
        {"name": LABELS[0], "index": 0, "score": 0.7},
        {"name": LABELS[2], "index": 2, "score": 0.2},
    ]
    assert found["usage"]["estimated_scores"] is True
    assert place(answer) == ("up2", 3)


async def test_an_embeddings_endpoint_answers_for_a_triton_that_is_down():
    def vectors(size):
        entries = [{"object": "embedding", "index": i, "embedding": [2.0] + [0.0] * (size - 1)} for i in range(2)]
        used = {"prompt_tokens": 9, "total_tokens": 9}
        return json_reply(200, {"object": "list", "data": entries, "model": "m", "usage": used})

    up1, up2 = Upstream(vectors(DIMENSIONS + 1)), Upstream(vectors(DIMENSIONS))
    async with plane("text-embedding", up1, up2) as gw:
        answer = await gw.post("/v1/tasks/text-embedding", {"input": {"text": ["a", "b"]}})
    found = answer.json()
    jsonschema.validate(found["output"], TextEmbedding(dimensions=DIMENSIONS).output_schema)
    assert found["output"]["embeddings"] == [[1, 0, 0, 0]] * 2
    assert found["usage"]["input_tokens"] == 9
    assert place(answer) == ("up2", 3)
    assert up2.requests[0].path == "/v1/embeddings"


async def test_embeddings_of_an_endpoint_that_tells_no_usage_have_an_estimate():
    entry = {"object": "embedding", "index": 0, "embedding": [1.0] + [0.0] * (DIMENSIONS - 1)}
    up = Upstream(json_reply(200, {"object": "list", "data": [entry], "model": "m"}))
    async with plane("text-embedding", up) as gw:
        answer = await gw.post("/v1/embeddings", {"model": "text-embedding", "input": "five words of plain text"})
    assert answer.json()["usage"]["prompt_tokens"] > 0


async def test_an_endpoints_refusal_of_the_schema_goes_to_the_next_candidate():
    wrong = {"message": "response_format is not supported", "type": "invalid_request_error", "param": None}
    up1, up2 = Upstream(error_reply(501, wrong)), Upstream(written(label="cooking"))
    async with plane("custom_nlu", up1, up2) as gw:
        answer = await gw.post("/v1/tasks/custom_nlu", TEXT)
    assert place(answer) == ("up2", 3)


async def test_an_image_that_no_vision_model_takes_is_not_sent_to_one():
    up = Upstream(written(labels=[]))
    async with plane("image-classification", up) as gw:
        bmp = {"content": b"BM....", "headers": {"content-type": "image/bmp"}}
        answer = await gw.http.post("/v1/tasks/image-classification", **bmp)
        assert (gw.loads, [at.backend for at in gw.board.all()]) == ({}, ["triton"])
    assert (answer.status_code, answer.json()["code"]) == (503, "no_healthy_backend")
    assert not up.requests


@pytest.mark.parametrize("strategy", ["least_in_flight", "fastest", "cheapest", "prefix_affinity"])
async def test_what_no_llm_can_be_asked_still_goes_to_the_model_server(strategy):
    async with Upstream(json_reply(200, {})) as up:
        split = [{"backend": "triton", "model": "m"}, {"backend": "up1", "model": "x"}]
        rule = {"name": "r", "match": {"task": "image-classification"}, "strategy": strategy, "split": split}
        backends = [ScriptedBackend("triton", [scores(0.5, 0.3, 0.2)]), Endpoint(upstreams=(up,)).backend("up1")]
        async with running(backends, rules=[rule]) as gw:
            headers = {"content-type": "image/bmp"}
            answer = await gw.http.post("/v1/tasks/image-classification", content=b"BM....", headers=headers)
            assert (answer.status_code, place(answer)[0]) == (200, "triton")
        await backends[1].close()
