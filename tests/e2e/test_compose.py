"""What the stack of docker-compose.yml alone has; the other end-to-end tests run against it too.

Its services are processes of this machine, with their own commands, files, order and health checks:
`tests/kit/compose.py` tells what is put in place of an engine.
"""

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import redis.asyncio as redis
import skimage
import yaml
from compose_spec import PyCompose
from websockets.asyncio.client import connect

from gateway.stack import welcome
from tests.kit import speech
from tests.kit.compose import FILE, NOT_HERE, SECRETS, TOOLS, config
from tests.kit.wait import until

pytestmark = [pytest.mark.stack("compose"), pytest.mark.timeout(300)]
CHELSEA = Path(skimage.__file__).parent / "data" / "chelsea.png"
CATS = {"tabby", "tiger cat", "Persian cat", "Siamese cat", "Egyptian cat"}
KEY, TOKEN = SECRETS["GATEWAY_DEV_KEY"], SECRETS["GATEWAY_ADMIN_TOKEN"]
PAUSE_S = 0.1  # of a caller between two requests: the processors have to start gateways too
STORY = {"model": "general_llm", "stream": True, "messages": [{"role": "user", "content": "Tell me a story."}]}


@pytest.fixture
def compose(stack):
    """The services."""
    return stack.parts


async def test_the_file_keeps_to_the_specification():
    whole = PyCompose.from_yaml(config())
    whole.validate()
    assert set(whole.service_names()) == yaml.safe_load(FILE.read_text())["services"].keys()


async def test_every_service_but_two_runs_and_says_that_it_is_well(compose):
    assert compose.services.keys() == yaml.safe_load(FILE.read_text())["services"].keys() - NOT_HERE - TOOLS
    for name in compose.services.keys() - {"models"}:
        assert await compose.health(name) == 0, name
    built = compose.folder / "volumes" / "models" / "triton_models"
    assert json.loads((built / ".build.json").read_text())


async def test_the_three_calls_that_a_person_tries_are_answered_by_the_engines(compose):
    answers = []
    for call in welcome.calls(compose.url("front", 8080), KEY, CHELSEA):
        shell = await asyncio.create_subprocess_shell(call, stdout=asyncio.subprocess.PIPE)
        out, _ = await shell.communicate()
        answers.append(json.loads(out))
    photo, text, chat = answers
    assert photo["output"]["labels"][0]["name"] in CATS
    assert text["output"]["dimensions"] == 384
    assert [photo["route"]["backend"], text["route"]["backend"]] == ["triton", "triton"]
    assert chat["choices"][0]["message"]["content"]
    assert chat["model"] == "smollm2"


async def test_the_front_keeps_no_part_of_a_stream_back(http):
    async with http.stream("POST", "/v1/chat/completions", json=STORY | {"max_tokens": 40}) as answer:
        assert answer.status_code == 200
        parts = [part async for part in answer.aiter_raw()]
    assert len(parts) >= 10  # kept back, they would come as one or two
    assert b"".join(parts).endswith(b"data: [DONE]\n\n")


async def test_a_websocket_goes_through_the_front(compose):
    samples = np.round(speech.vowels(chunks=12, pitch=140) * 32767).astype("<i2")
    url = compose.url("front", 8080).replace("http", "ws") + "/v1/tasks/speech-activity/stream"
    async with connect(url, additional_headers={"authorization": f"Bearer {KEY}"}, proxy=None) as ws:
        for chunk in samples:
            await ws.send(chunk.tobytes())
        async with asyncio.timeout(30):
            answers = [json.loads(await ws.recv()) for _ in samples]
    heard = [answer["output"]["speech_probability"] for answer in answers]
    assert np.allclose(heard, speech.reference(samples.astype(np.float32) / 32768), atol=1e-3)


async def test_the_console_and_its_log_in_go_through_the_front(compose):
    url = compose.url("front", 8090)
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
        page = await http.get("/console/login")
        refused = await http.post("/admin/v1/session", json={"token": TOKEN}, headers={"origin": "http://elsewhere"})
        taken = await http.post("/admin/v1/session", json={"token": TOKEN}, headers={"origin": url})
        whoami = await http.get("/admin/v1/session")
    assert page.status_code == 200
    assert "<form" in page.text
    assert refused.status_code == 403
    assert taken.is_success, taken.text
    assert whoami.json()["role"] == "admin"


async def test_the_command_line_runs_beside_the_control_plane(compose):
    status, text = await compose.run("cli", "models", "list", "--json")
    assert status == 0, text
    assert "text_encoder" in text


async def test_redis_asks_for_the_password_which_no_command_line_tells_and_logs_every_change(compose):
    password = SECRETS["GATEWAY_REDIS_PASSWORD"]
    host = compose.services["redis"].address
    for wrong in ({}, {"username": "gateway", "password": "wrong"}):
        async with redis.Redis(host=host, retry=None, **wrong) as stranger:
            with pytest.raises(redis.AuthenticationError):
                await stranger.ping()
    async with redis.Redis(host=host, username="gateway", password=password) as gateway:
        assert await gateway.ping()
        with pytest.raises(redis.ResponseError, match=r"(?i)noperm|permission"):
            await gateway.config_get("*")
    assert not [name for name in compose.services if password in compose.command_line(name)]
    assert any((compose.folder / "volumes" / "redis").rglob("appendonly*"))


async def test_gateways_are_renewed_one_after_the_other_and_nobody_notices(compose, http):
    over, begun, statuses, faults, answered = asyncio.Event(), set(), [], [], [0] * 4

    async def ask(number: int) -> None:
        while not over.is_set():
            answer = await http.post("/v1/tasks/text-embedding", json={"input": {"text": "a cat"}})
            statuses.append(answer.status_code)
            answered[number] += 1
            if not answer.is_success:
                faults.append(answer.text)
            await asyncio.sleep(PAUSE_S)

    async def story(number: int) -> bytes:
        heard = b""
        async with http.stream("POST", "/v1/chat/completions", json=STORY | {"max_tokens": 150}) as answer:
            async for part in answer.aiter_raw():
                heard += part
                begun.add(number)
        return heard

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(ask(number))
        stories = [group.create_task(story(number)) for number in range(4)]
        await until(lambda: len(begun) == len(stories), timeout_s=60)
        for name in ("gateway-1", "gateway-2"):
            off = compose.services["front"].folder / "tmpfs" / "tmp" / f"off-{name}"
            off.touch()
            before = list(answered)  # two answers each: what was on its way when it was set is through
            await until(
                lambda before=before: all(now >= then + 2 for now, then in zip(answered, before, strict=True)),
                timeout_s=60,
            )
            if name == "gateway-1":
                assert not any(one.done() for one in stories)
            assert await compose.stop(name) == 0
            await compose.start(name)
            off.unlink()
        over.set()
    assert not faults, compose.services["front"].log
    assert set(statuses) == {200}
    assert all(one.result().endswith(b"data: [DONE]\n\n") for one in stories)
