"""Right answers from real parts: a photo, sentences and a chat, by every backend that serves them."""

import asyncio
import base64
import json
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import skimage

from tests.kit.reference import embed

CHELSEA = Path(skimage.__file__).parent / "data" / "chelsea.png"
CATS = {"tabby", "tiger cat", "Persian cat", "Siamese cat", "Egyptian cat"}
TEXTS = ["a man is playing a guitar", "someone plays an instrument", "the stock market fell"]
BACKENDS = ["triton", "local"]


async def classify(http, image: bytes, top_k: int = 1000) -> dict:
    answer = await http.post(
        f"/v1/tasks/image-classification?top_k={top_k}", content=image, headers={"content-type": "image/png"}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def vectors(http, texts) -> np.ndarray:
    answer = await http.post("/v1/tasks/text-embedding", json={"input": {"text": texts}})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"]["dimensions"] == 384
    return np.array(answer.json()["output"]["embeddings"])


async def test_a_cat_is_a_cat_from_both_backends_with_equal_scores(stack, http):
    scores = {}
    for backend in BACKENDS:
        async with stack.routed(backend):
            body = await classify(http, CHELSEA.read_bytes())
        assert body["route"]["backend"] == backend
        assert body["output"]["labels"][0]["name"] in CATS
        by_index = sorted((label["index"], label["score"]) for label in body["output"]["labels"])
        scores[backend] = np.array([score for _, score in by_index])
    assert scores["triton"].shape == (1000,)
    assert np.abs(scores["triton"] - scores["local"]).max() <= 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
async def test_embeddings_are_the_reference_models(stack, http, backend):
    texts = [*TEXTS, "x", "数🙂é, naïve café", "word " * 240]
    async with stack.routed(backend):
        found = await vectors(http, texts)
        single = np.vstack([await vectors(http, text) for text in texts])
    assert np.allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    for text, batched, alone in zip(texts, found, single, strict=True):
        reference = embed(text)
        assert batched @ reference >= 0.9999
        assert alone @ reference >= 0.9999
    assert found[0] @ found[1] > found[0] @ found[2]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_text_that_the_model_cannot_read_whole_is_refused(stack, http, backend):
    long = "word " * 400
    async with stack.routed(backend):
        refused = await http.post("/v1/tasks/text-embedding", json={"input": {"text": ["a", long]}})
        asked = await http.post(
            "/v1/tasks/text-embedding", json={"input": {"text": long}, "parameters": {"truncate": True}}
        )
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["field"] == "input.text[1]"
    assert np.array(asked.json()["output"]["embeddings"][0]) @ embed(long) >= 0.9999


async def test_every_form_of_upload_gives_one_answer(http):
    image = CHELSEA.read_bytes()
    path = "/v1/tasks/image-classification"
    answers = [
        await http.post(f"{path}?top_k=3", content=image, headers={"content-type": "image/png"}),
        await http.post(path, files={"image": image}, data={"top_k": "3"}),
        await http.post(path, json={"input": {"image": base64.b64encode(image).decode(), "top_k": 3}}),
    ]
    labels = [[(x["index"], round(x["score"], 4)) for x in a.json()["output"]["labels"]] for a in answers]
    assert labels[0] == labels[1] == labels[2]


async def test_a_chat_streams_while_it_is_made(stack):
    async with openai.AsyncOpenAI(base_url=f"{stack.data_url}/v1", api_key=stack.key) as client:
        stream = await client.chat.completions.create(
            model="general_llm",
            messages=[{"role": "user", "content": "Tell me a long story about a cat and a lighthouse."}],
            max_tokens=120,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = aiter(stream)
        text = ""
        while not text:
            chunk = await anext(chunks)
            text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        # Some of the answer is here, and the server is still decoding the rest.
        assert await llm_metric(stack, "llamacpp:requests_processing") >= 1
        rest = [chunk async for chunk in chunks]
    contents = [c.choices[0].delta.content for c in rest if c.choices and c.choices[0].delta.content]
    assert len(contents) > 20
    assert rest[-1].usage.completion_tokens > 20
    assert rest[-1].choices == []


async def test_a_chat_comes_whole_and_as_a_task(stack, http):
    async with openai.AsyncOpenAI(base_url=f"{stack.data_url}/v1", api_key=stack.key) as client:
        answer = await client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=20
        )
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens > 0
        listed = {model.id async for model in await client.models.list()}
        embedded = await client.embeddings.create(model="all-minilm-l6-v2", input=TEXTS)
    assert {"general_llm", "smollm2", "text-embedding", "all-minilm-l6-v2"} <= listed
    assert np.array(embedded.data[2].embedding) @ embed(TEXTS[2]) >= 0.9999
    task = await http.post(
        "/v1/infer",
        json={
            "task": "general_llm",
            "input": {"messages": [{"role": "user", "content": "Say hello."}]},
            "parameters": {"max_tokens": 8},
        },
    )
    assert task.json()["output"]["message"]["role"] == "assistant"
    assert task.json()["usage"]["output_tokens"] > 0


async def test_concurrent_chats_run_together_in_the_server(stack, http):
    ask = {"model": "general_llm", "messages": [{"role": "user", "content": "Count to fifty."}], "max_tokens": 60}
    calls = [asyncio.create_task(http.post("/v1/chat/completions", json=ask)) for _ in range(4)]
    most = 0
    while not all(call.done() for call in calls):
        most = max(most, await llm_metric(stack, "llamacpp:requests_processing"))
    assert [call.result().status_code for call in calls] == [200] * 4
    assert most >= 2  # in-flight batching: several requests in one decoding step


async def test_concurrent_embeddings_are_batched_by_triton(stack):
    texts = [f"sentence number {i} about a topic of its own" for i in range(64)]
    before = await triton_counts(stack, "text_encoder")
    answers = await at_once(stack, [{"input": {"text": text}} for text in texts])
    after = await triton_counts(stack, "text_encoder")
    assert {answer["route"]["backend"] for answer in answers} == {"triton"}
    for text, answer in list(zip(texts, answers, strict=True))[::8]:
        assert np.array(answer["output"]["embeddings"][0]) @ embed(text) >= 0.9999
    rows, executions = after[0] - before[0], after[1] - before[1]
    assert rows == 64
    assert rows / executions > 2


async def at_once(stack, bodies: list[dict]) -> list[dict]:
    """The answers to requests that lie ready on a socket each and are sent together.

    One HTTP client in Python sends 64 requests over half a second: nothing would be concurrent.
    """
    host, port = stack.data_url.removeprefix("http://").split(":")
    sockets = [await asyncio.open_connection(host, int(port)) for _ in bodies]
    for (_, writer), body in zip(sockets, bodies, strict=True):
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/tasks/text-embedding HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stack.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + content)
    wholes = await asyncio.gather(*(reader.read() for reader, _ in sockets))
    for _, writer in sockets:
        writer.close()
    return [json.loads(whole.partition(b"\r\n\r\n")[2]) for whole in wholes]


async def llm_metric(stack, name: str) -> float:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        page = (await client.get(f"{stack.llm_url}/metrics")).text
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(name))


async def triton_counts(stack, model: str) -> tuple[int, int]:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        answer = await client.get(f"{stack.triton_url}/v2/models/{model}/stats")
    stats = answer.json()["model_stats"][0]
    return stats["inference_count"], stats["execution_count"]
