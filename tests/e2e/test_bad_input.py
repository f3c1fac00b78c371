"""Bad input against the real stack, from every backend: 4xx that names the field, never a 500."""

import asyncio
import io
import zlib

import httpx
import pytest
from PIL import Image

EMBED = "/v1/tasks/text-embedding"
IMAGE = "/v1/tasks/image-classification"
PNG = {"content-type": "image/png"}


def picture() -> bytes:
    out = io.BytesIO()
    Image.effect_noise((64, 64), 60).convert("RGB").save(out, "JPEG")
    return out.getvalue()


def bomb() -> bytes:
    """A PNG of 60,000 x 60,000 pixels in a few hundred bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    head = (60_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("backend", ["triton", "local"])
@pytest.mark.parametrize(
    "image", [picture()[:200], b"not an image at all", b"\x00" * 1000, bomb(), b"GIF89a", picture()[:-40]],
    ids=["cut", "text", "zeros", "bomb", "gif head", "cut at the end"],
)  # fmt: skip
async def test_what_is_no_image_is_a_422_and_its_neighbours_are_answered(stack, http, backend, image):
    async with stack.routed(backend):
        calls = [http.post(IMAGE, content=picture(), headers=PNG) for _ in range(3)]
        bad, *good = await asyncio.gather(http.post(IMAGE, content=image, headers=PNG), *calls)
    assert bad.status_code == 422, bad.text
    assert bad.json()["code"] == "invalid_input"
    assert "Error" not in bad.json()["detail"]
    assert "Traceback" not in bad.text
    assert bad.json()["errors"][0]["field"] == "input.image"
    assert [a.status_code for a in good] == [200] * 3
    assert {a.json()["route"]["backend"] for a in good} == {backend}


async def test_too_much_is_refused_early(http):
    body = await http.post(IMAGE, content=b"x" * 50_000_000, headers=PNG)
    assert (body.status_code, body.json()["code"]) == (413, "body_too_large")
    text = await http.post(EMBED, json={"input": {"text": "x" * 100_000}})
    assert text.status_code == 422
    assert text.json()["errors"][0]["field"] == "input.text"


async def test_wrong_types_unknown_tasks_and_no_key(stack, http):
    wrong = await http.post(EMBED, json={"input": {"text": {"a": 1}}})
    unknown = await http.post("/v1/tasks/nope", json={"input": {}})
    async with httpx.AsyncClient(base_url=stack.data_url, trust_env=False) as stranger:
        no_key = await stranger.post(EMBED, json={"input": {"text": "x"}})
        live = await stranger.get("/healthz/live")
        ready = await stranger.get("/healthz/ready")
    assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "input.text")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_task")
    assert (no_key.status_code, no_key.json()["code"]) == (401, "unauthorized")
    assert (live.status_code, ready.status_code) == (200, 200)


async def test_what_the_llm_refuses_is_told_in_its_words(http):
    huge = [{"role": "user", "content": "word " * 20_000}]
    answer = await http.post("/v1/chat/completions", json={"model": "general_llm", "messages": huge})
    assert 400 <= answer.status_code < 500
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
