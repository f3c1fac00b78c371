"""`gateway serve` as processes: how it starts, drains, replaces what dies, and refuses what it cannot serve."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.kit.serving import children, config, serving, start
from tests.kit.stack import is_running
from tests.kit.upstream import HOLD, Pause, Upstream, completion, delta, event, json_reply, sse_head
from tests.kit.wait import until, until_async

DONE = event("[DONE]")
REPOSITORY = Path(__file__).parents[2] / "triton_models"
MODEL = "class TritonPythonModel:\n    def execute(self, requests): ...\n"
MODEL_CONFIG = """backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


async def test_a_stop_finishes_what_is_in_flight_and_takes_nothing_new(tmp_path):  # DB-14
    slow = [Pause(1.0), *json_reply(200, completion("late"))]
    async with Upstream(json_reply(200, {"data": []}), slow) as up, serving(tmp_path, up.base_url) as gateway:
        asking = asyncio.create_task(gateway.ask())
        await until(lambda: any(seen.method == "POST" for seen in up.requests))
        gateway.process.terminate()
        await until_async(lambda: is_draining(gateway))
        await until_async(lambda: is_refused(gateway))
        answer = await asking
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "late"
        async with asyncio.timeout(10):
            assert await gateway.process.wait() == 0
    assert "Traceback" not in gateway.log.read_text()


async def test_a_stream_that_outlasts_the_drain_time_is_told_so(tmp_path):  # DB-14
    script = [sse_head(), event(delta("one")), HOLD]
    server = {"drain_timeout_s": 1}
    async with (
        Upstream(json_reply(200, {"data": []}), script) as up,
        serving(tmp_path, up.base_url, **server) as gateway,
    ):
        body = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with gateway.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert "one" in await anext(lines)
            gateway.process.terminate()
            rest = [line async for line in lines if line]
        async with asyncio.timeout(10):
            assert await gateway.process.wait() == 0
    assert "the gateway stops" in rest[-1]
    assert "Traceback" not in gateway.log.read_text()


async def is_draining(gateway) -> bool:
    return await gateway.is_ready() == 503


async def is_refused(gateway) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def test_a_worker_that_dies_is_replaced_and_metrics_stay_right(tmp_path):
    async with (
        Upstream(json_reply(200, completion())) as up,
        serving(tmp_path, up.base_url, "--workers", "2") as gateway,
    ):
        for _ in range(6):
            assert (await gateway.ask()).status_code == 200
        before = children(gateway.process.pid)
        assert len(before) == 2
        victim = next(iter(before))
        os.kill(victim, signal.SIGKILL)
        await until(lambda: not is_running(victim))
        await until(lambda: len(children(gateway.process.pid)) == 2, timeout_s=15)
        for _ in range(4):
            assert (await gateway.ask()).status_code == 200
        async with httpx.AsyncClient(trust_env=False) as http:
            page = (await http.get(f"{gateway.ops_url}/metrics")).text
    labels = 'backend="llm",code="ok",model="m",rule="chat",task="general_llm",version=""'
    assert f"gateway_requests_total{{{labels}}} 10.0" in page
    assert 'gateway_requests_in_flight{task="general_llm"} 0.0' in page


async def test_the_parent_killed_leaves_no_worker_behind(tmp_path):
    async with (
        Upstream(json_reply(200, completion())) as up,
        serving(tmp_path, up.base_url, "--workers", "2") as gateway,
    ):
        workers = list(children(gateway.process.pid))
        gateway.process.kill()
        await until(lambda: not any(is_running(pid) for pid in workers), timeout_s=15)


async def test_the_shared_runtime_is_replaced_too(tmp_path):
    sections = {
        "backends": {"local": {"kind": "local", "repository": str(REPOSITORY), "models": ["text_embedding"]}},
        "tasks": {"text-embedding": {"contract": "text-embedding"}},
        "rules": [{"name": "embed", "split": [{"backend": "local", "model": "text_embedding"}]}],
    }

    async def embed() -> int:
        async with gateway.http() as http:
            return (await http.post("/v1/tasks/text-embedding", json={"input": {"text": "hi"}})).status_code

    def runtime() -> list[int]:
        return [pid for pid, line in children(gateway.process.pid).items() if "local_runtime" in line]

    async with serving(tmp_path, "", "--workers", "2", **sections) as gateway:
        assert await embed() == 200
        (victim,) = runtime()
        os.kill(victim, signal.SIGKILL)
        await until(lambda: victim not in runtime())
        seen = set()
        async with asyncio.timeout(40):
            while (status := await embed()) != 200:
                seen.add(status)
                await asyncio.sleep(0.1)
        assert seen <= {503}


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_an_admin_key_loads_and_unloads_models_of_the_local_runtime(tmp_path, workers):
    repository = tmp_path / "models"
    for name in ("first", "second"):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(MODEL)
        (repository / name / "config.pbtxt").write_text(MODEL_CONFIG)
    sections = {
        "backends": {"local": {"kind": "local", "repository": str(repository), "models": ["first"]}},
        "tasks": {"tensor": {"contract": "tensor"}},
        "rules": [{"name": "tensors", "split": [{"backend": "local", "model": "*"}]}],
        "keys": [{"id": "test", "tenant": "test", "key_env": "SERVING_KEY", "admin": True}],
    }

    async def ready() -> dict[str, bool]:
        return {name: (await http.get(f"/v2/models/{name}/ready")).is_success for name in ("first", "second")}

    async with serving(tmp_path, "", "--workers", workers, **sections) as gateway, gateway.http() as http:
        assert await ready() == {"first": True, "second": False}
        assert (await http.post("/v2/repository/models/second/load")).status_code == 200
        assert (await http.post("/v2/repository/models/first/unload")).status_code == 200
        assert await ready() == {"first": False, "second": True}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"backends": {"llm": {"kind": "openai", "base_url": "http://h/v1?x=1"}}}, "must be http(s) URLs"),
        ({"tasks": {"general_llm": {"contract": "chatt"}}}, "contract: must be one of text-embedding"),
        ({"redis": {"url": "redis://h:port/0"}}, "redis.url:"),
        (
            {"backends": {"llm": {"kind": "local", "repository": "/nonexistent"}}},
            "backends.llm: model repository /nonexistent is not a folder",
        ),
    ],
)
async def test_what_cannot_be_served_ends_at_once_with_its_reason(tmp_path, sections, told):
    path, _, _ = config(tmp_path, "http://127.0.0.1:1/v1", **sections)
    process, log = await start(path)
    async with asyncio.timeout(30):
        assert await process.wait() == 78
    assert told in log.read_text()
    assert "Traceback" not in log.read_text()


async def test_a_repository_that_is_not_there_ends_several_workers_too(tmp_path):
    sections = {"backends": {"llm": {"kind": "local", "repository": "/nonexistent"}}}
    path, _, _ = config(tmp_path, "", **sections)
    process, log = await start(path, "--workers", "2")
    async with asyncio.timeout(30):
        assert await process.wait() == 78
    assert "/nonexistent is not a folder" in log.read_text()
    assert "Traceback" not in log.read_text()


async def test_a_port_in_use_is_one_line(tmp_path):
    async with Upstream(json_reply(200, {})) as up:
        path, port, _ = config(tmp_path, up.base_url)
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", port):
            process, log = await start(path)
            async with asyncio.timeout(20):
                assert await process.wait() == 78
    assert log.read_text().strip() == f"cannot listen on 127.0.0.1:{port}: Address already in use"


async def test_streams_pass_through_two_processes_as_they_are_made(tmp_path):
    chunks = [event(delta("one")), Pause(0.3), event(delta("two")), DONE]
    script = [sse_head(), *chunks]
    async with Upstream(json_reply(200, {"data": []}), script) as up, serving(tmp_path, up.base_url) as gateway:
        body = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with gateway.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
    assert [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in lines[:-1]] == ["one", "two"]
    assert lines[-1] == "data: [DONE]"
