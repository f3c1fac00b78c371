"""The programs of `examples/`, run as their heads say against the running stack: they print what these promise."""

import asyncio
import contextlib
import dataclasses
import doctest
import inspect
import os
import re
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import skimage
from PIL import Image, ImageEnhance
from playwright.async_api import expect

from tests.kit.browser import chromium
from tests.kit.serving import free_port
from tests.kit.wait import until, until_async

EXAMPLES = Path(__file__).parents[2] / "examples"
PHOTOS = Path(skimage.__file__).parent / "data"
LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def environ(stack) -> dict[str, str]:
    told = {"GATEWAY_URL": stack.data_url, "GATEWAY_KEY": stack.key}
    return {**os.environ, **told, "GATEWAY_ADMIN_URL": stack.admin_url, "GATEWAY_ADMIN_TOKEN": stack.admin_token}


def promised(example: Path) -> str:
    """What its head says that it prints."""
    text = re.sub(r"^# ?", "", example.read_text(), flags=re.MULTILINE)
    found = re.search(r"^Prints.*:\n\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    assert found, f"{example} does not say what it prints"
    return inspect.cleandoc(textwrap.dedent(found[1])).strip()


async def said(stack, *command: str, status: int = 0) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, env=environ(stack), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode == status, out.decode()
    return out.decode().strip()


def check(example: Path, found: str) -> None:
    wanted = promised(example)
    assert doctest.OutputChecker().check_output(wanted + "\n", found + "\n", LIKE), f"{wanted}\n--- but:\n{found}"


@contextlib.asynccontextmanager
async def application(stack, folder: str) -> AsyncIterator[str]:
    """A web application of the examples; its address."""
    port = free_port()
    words = ("-m", "uvicorn", "--app-dir", str(EXAMPLES / folder), "app:app", "--port", str(port))
    process = await asyncio.create_subprocess_exec(sys.executable, *words, env=environ(stack))
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        async with httpx.AsyncClient(trust_env=False) as http:
            with contextlib.suppress(httpx.TransportError):
                return (await http.get(url)).status_code == 200
        return False

    try:
        await until_async(answers, timeout_s=60)
        yield url
    finally:
        process.terminate()
        await process.wait()


def test_all_are_in_the_table():
    listed = set(re.findall(r"^\| \[`([^`]+?)/?`\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == {one.name for one in EXAMPLES.iterdir() if one.name not in ("README.md", "__pycache__")}


async def test_curl(stack):
    check(EXAMPLES / "curl.sh", await said(stack, "sh", str(EXAMPLES / "curl.sh")))


async def test_the_client_of_openai(stack):
    example = EXAMPLES / "openai_sdk.py"
    check(example, await said(stack, sys.executable, str(example)))


async def test_the_client_of_triton(stack):
    example = EXAMPLES / "tritonclient_http.py"
    check(example, await said(stack, sys.executable, str(example)))


async def test_a_sentence_is_sorted_by_triton_and_by_an_llm(stack, http):
    example = EXAMPLES / "nlu_with_fallback" / "run.py"
    check(example, await said(stack, sys.executable, str(example)))
    sentence = {"input": {"text": "it came broken", "labels": ["praise", "complaint"]}}
    answer = await http.post("/v1/tasks/custom_nlu", json=sentence)
    assert answer.json()["route"]["backend"] == "triton"  # all is as it was


async def test_a_voice_is_heard_where_it_is(stack):
    example = EXAMPLES / "ordered_voice_stream" / "run.py"
    found = await said(stack, sys.executable, str(example))
    check(example, found)
    begins, ends = map(float, re.findall(r"([\d.]+) s", found.splitlines()[-1])[-2:])
    assert 0.9 <= begins < ends <= 3.1


async def test_a_job_is_stopped_and_started_again(stack, tmp_path):
    example = EXAMPLES / "bulk_embedding" / "run.py"
    texts, vectors = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    words = (sys.executable, str(example), str(texts), str(vectors))
    texts.write_text("".join(f"text number {number}\n" for number in range(200)))
    check(example, await said(stack, *words))
    texts.write_text(texts.read_text() + "one more\n")
    assert await said(stack, *words) == "201 texts, 201 vectors of 384 numbers in vectors.npy"
    texts.write_text("another text\n")
    assert "of other texts" in await said(stack, *words, status=1)


async def test_a_job_that_is_killed_or_refused_goes_on_and_has_each_vector_once(stack, http, tmp_path):
    example = EXAMPLES / "bulk_embedding" / "run.py"
    lines = [f"killed text number {number}" for number in range(512)]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    words = (sys.executable, str(example), str(tmp_path / "texts.txt"), str(tmp_path / "vectors.npy"))
    async with stack.admin() as admin:  # fewer than a batch has requests, so that a part of each is refused
        limits = [{"per": "second", "requests": 2, "burst": 5}]
        made = await admin.post("/keys", json={"name": "bulk", "tenant": "bulk", "limits": limits})
    limited = dataclasses.replace(stack, key=made.json()["key"])
    process = await asyncio.create_subprocess_exec(*words, env=environ(limited))
    await until((tmp_path / "vectors.npy").exists, timeout_s=60)
    process.kill()
    await process.wait()
    assert 0 < len(np.load(tmp_path / "vectors.npy")) < len(lines)
    assert await said(limited, *words) == "512 texts, 512 vectors of 384 numbers in vectors.npy"
    some = [0, 127, 128, 511]
    wanted = await http.post("/v1/tasks/text-embedding", json={"input": {"text": [lines[at] for at in some]}})
    wanted = np.array(wanted.json()["output"]["embeddings"])
    assert np.allclose(np.load(tmp_path / "vectors.npy")[some], wanted, atol=1e-3)


async def test_a_photo_finds_those_like_it(stack, tmp_path):
    with Image.open(PHOTOS / "chelsea.png") as cat:
        ImageEnhance.Brightness(cat.crop((40, 20, 420, 290))).enhance(0.8).save(tmp_path / "cat-again.jpg")
    names = ("coffee.png", "chelsea.png", "camera.png", "astronaut.png")
    async with application(stack, "image_search") as url, chromium() as browser:
        page = await browser.new_page()
        await page.goto(url)
        await page.get_by_label("Add photos").set_input_files([PHOTOS / name for name in names])
        await page.get_by_role("button", name="Add", exact=True).click()
        await expect(page.get_by_text("4 photos.")).to_be_visible()
        await page.get_by_label("Find photos like").set_input_files(tmp_path / "cat-again.jpg")
        await page.get_by_role("button", name="Search").click()
        await expect(page.locator("figcaption").first).to_contain_text("chelsea.png")
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            refused = await http.post("/search", files={"photo": ("x.png", b"no image", "image/png")})
            named = {"photos": ("<b>.png", (PHOTOS / "coffee.png").read_bytes(), "image/png")}
            page_of_it = (await http.post("/photos", files=named)).text + (
                await http.post("/search", files={"photo": named["photos"]})
            ).text
    assert (refused.status_code, "image" in refused.json()["detail"]) == (422, True)
    assert "<b>" not in page_of_it


async def test_photos_that_are_added_at_once_are_all_found(stack, tmp_path):
    photos = {f"{turn}.png": tmp_path / f"{turn}.png" for turn in range(0, 360, 60)}
    with Image.open(PHOTOS / "astronaut.png") as astronaut:
        for number, file in enumerate(photos.values()):
            astronaut.crop((number * 40, number * 20, 300 + number * 40, 200 + number * 40)).save(file)

    async with application(stack, "image_search") as url, httpx.AsyncClient(base_url=url, trust_env=False) as web:

        async def send(path: str, field: str, name: str) -> str:
            return (
                await web.post(path, files={field: (name, photos[name].read_bytes(), "image/png")}, timeout=60)
            ).text

        await asyncio.gather(*(send("/photos", "photos", name) for name in photos))
        for name in photos:
            assert f"<figcaption>{name}: 1.00" in await send("/search", "photo", name)


async def test_a_chat_is_stopped_by_its_button(stack):
    async with application(stack, "streaming_chat") as url, chromium() as browser:
        page = await browser.new_page()
        await page.goto(url)
        await page.evaluate(
            "new MutationObserver(() => { if (document.querySelector('.answer')?.textContent) $('stop').click(); })"
            ".observe(document.body, {childList: true, subtree: true, characterData: true})"
        )
        await page.get_by_label("Message").fill("Tell me a long story about the sea.")
        async with page.expect_event("requestfailed") as left:  # the browser's own word that the call was given up
            await page.get_by_role("button", name="Send").click()
        assert (await left.value).url.endswith("/v1/chat/completions")
        await expect(page.get_by_role("button", name="Send")).to_be_enabled()
        await expect(page.locator(".answer")).not_to_be_empty()
        await expect(page.locator(".error")).to_have_count(0)


async def test_a_chat_says_what_went_wrong(stack):
    """A limit, with the time to come back, and a gateway that is not there."""
    key = await stack.limited_key(1)
    gone = dataclasses.replace(stack, data_url=f"http://127.0.0.1:{free_port()}")
    chat = {"model": "general_llm", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
    async with application(stack, "streaming_chat") as url, chromium() as browser:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False) as web:
            assert (await web.post(f"{url}/v1/chat/completions", json=chat)).status_code == 200
        page = await browser.new_page()
        await page.route("**/token", lambda route: route.fulfill(json={"token": key}))  # one that is used up
        await page.goto(url)
        await page.get_by_label("Message").fill("hello")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".error")).to_have_text(re.compile(r".+ \(come back in \d+ s\)"))
    async with application(gone, "streaming_chat") as url, httpx.AsyncClient(trust_env=False) as web:
        answer = await web.post(f"{url}/v1/chat/completions", json=chat)
        token = await web.post(f"{url}/token")
    assert (answer.status_code, answer.json()["error"]["message"]) == (502, "the gateway cannot be reached")
    assert (token.status_code, token.json()["detail"]) == (502, "the gateway cannot be reached")


async def test_a_page_streams_a_chat_without_a_key(stack):
    async with application(stack, "streaming_chat") as url, chromium() as browser:
        page = await browser.new_page()
        seen: list[str] = []
        page.on("request", lambda request: seen.append(f"{request.headers} {request.post_data}"))
        await page.goto(url)
        await page.get_by_label("Message").fill("Tell me about the sea.")
        await page.get_by_role("button", name="Send").click()
        answer = page.locator(".answer")
        await expect(answer).not_to_be_empty()
        first = len(await answer.inner_text())
        await expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=60_000)
        assert len(await answer.inner_text()) >= first
        await expect(page.locator(".error")).to_have_count(0)
        assert stack.key not in await page.content() + "".join(seen)
        assert any("gwt_" in one for one in seen)
