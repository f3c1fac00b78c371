"""`gateway doctor` against two real stacks: one that is set up wrong in every way, and one that is well.

Triton, the local runtime, Redis, gateways and control planes are real; a GPU's memory is a page that says so.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import pytest_asyncio
import yaml
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gateway.cli.admin_client import Admin
from gateway.cli.doctor_looks import Looker, Places
from gateway.core.doctor import examine
from gateway.core.memory_plan import GIB
from gateway.settings import load_settings
from tests.kit.commands import served
from tests.kit.servers import Server, running
from tests.kit.serving import ADMIN_TOKEN, KEY, Serving, control_plane, serving
from tests.kit.upstream import DONE, Pause, Upstream, delta, event, sse_head
from tests.kit.wait import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone]

SPAN = "2s"
TENSORS = {"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}
CHAT = (
    "/v1/chat/completions",
    {"model": "general_llm", "stream": True, "messages": [{"role": "user", "content": "hi"}]},
)
BODY = {"inputs": [{"name": "X", "shape": [1, 1], "datatype": "INT32", "data": [7]}]}
MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({seconds})
        inputs = [pb_utils.get_input_tensor_by_name(one, "X").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", one + np.int32(1))]) for one in inputs]
"""
GOOD = "dynamic_batching { max_queue_delay_microseconds: 1000 }"
CONFIG = """
backend: "{backend}"
max_batch_size: {rows}
input [ {{ name: "X" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }} ]
instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
{blocks}
"""


@dataclass
class Load:
    """Closed loops; `clients` are models (`chat`: streams of an LLM) with a priority, one connection each."""

    url: str
    clients: Sequence[tuple[str, str]]
    key: str = KEY
    pause_s: float = 0.0
    statuses: list[int] = field(default_factory=list)

    async def _loop(self, model: str, priority: str, stop: asyncio.Event) -> None:
        headers = {"authorization": f"Bearer {self.key}", "x-priority": priority}
        async with aiohttp.ClientSession(headers=headers) as session:
            while not stop.is_set():
                path, body = CHAT if model == "chat" else (f"/v2/models/{model}/infer", BODY)
                async with session.post(f"{self.url}{path}", json=body) as answer:
                    await answer.read()
                self.statuses.append(answer.status)
                await asyncio.sleep(self.pause_s)

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        loops = [asyncio.create_task(self._loop(*client, stop)) for client in self.clients]
        try:
            await until(lambda: not loops or len(self.statuses) > 2 * len(loops), timeout_s=20)
            yield
        finally:
            stop.set()
            await asyncio.gather(*loops)


@dataclass
class Stack:
    """A gateway and its control plane before a server."""

    server: Server
    gateway: Serving
    servers: Sequence[str] = ()

    async def doctor(self, *options: str) -> subprocess.CompletedProcess[str]:
        port = yaml.safe_load(self.gateway.config.read_text())["server"]["admin_port"]
        command = (
            *(sys.executable, "-m", "gateway", "doctor", "--config", str(self.gateway.config), "--for", SPAN),
            *("--admin-url", f"http://127.0.0.1:{port}", "--ops-url", self.gateway.ops_url),
            *(word for url in self.servers or (f"http://{self.server.http}",) for word in ("--server", url)),
            *options,
        )
        environ = {**os.environ, "GATEWAY_ADMIN_TOKEN": ADMIN_TOKEN}
        return await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=50, check=False, env=environ
        )


@contextlib.asynccontextmanager
async def stack(server: Server, folder, redis_url: str, **sections: Any) -> AsyncIterator[Stack]:
    document = {
        "rules": [TENSORS],
        "redis": {"url": redis_url, "prefix": f"test:{uuid.uuid4().hex[:8]}:"},
        "telemetry": {"access_log": False},
        **sections,
    }
    async with serving(folder, "", **document) as gateway, control_plane(gateway.config):
        yield Stack(server, gateway)


def add(server: Server, name: str, blocks: str, *, rows: int = 8, instances: int = 1, ms: int = 0, backend="python"):
    config = CONFIG.format(backend=backend, rows=rows, instances=instances, blocks=blocks)
    server.add_model(name, config=config, model=MODEL.format(seconds=ms / 1000))


async def load(server: Server, *models: str, verb: str = "load") -> None:
    async with httpx.AsyncClient(base_url=f"http://{server.http}", trust_env=False, timeout=60) as http:
        for model in models:
            answer = await http.post(f"/v2/repository/models/{model}/{verb}")
            assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def gpu_page() -> Iterator[str]:
    """Triton's page where a GPU is nearly full: no machine without one can have it."""
    text = (
        f'# TYPE nv_gpu_memory_total_bytes gauge\nnv_gpu_memory_total_bytes{{gpu_uuid="GPU-0"}} {16 * GIB}\n'
        f'# TYPE nv_gpu_memory_used_bytes gauge\nnv_gpu_memory_used_bytes{{gpu_uuid="GPU-0"}} {int(15.7 * GIB)}\n'
    )
    with served(Starlette(routes=[Route("/metrics", lambda _: PlainTextResponse(text))])) as url:
        yield url


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def local(tmp_path_factory) -> AsyncIterator[Server]:
    with running("local", tmp_path_factory.mktemp("local")) as server:
        add(server, "local_good", GOOD, ms=20)
        await load(server, "local_good")
        yield server


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def triton(tmp_path_factory) -> AsyncIterator[Server]:
    with running("triton", tmp_path_factory.mktemp("triton")) as server:
        add(server, "good", GOOD, ms=20)
        await load(server, "good")
        yield server


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def wrong(local, triton, gpu_page, tmp_path_factory, redis_server) -> dict[str, dict]:
    """The findings of one look at all that is wrong, by symptom and subject."""
    add(triton, "alone", "dynamic_batching { max_queue_delay_microseconds: 20000 }")
    add(
        triton,
        "preferred",
        "dynamic_batching { preferred_batch_size: [ 7 ] max_queue_delay_microseconds: 30000 }",
        ms=10,
    )
    add(triton, "spread", "dynamic_batching { }", instances=4, ms=30)
    add(triton, "crowded", "", rows=1, ms=20)
    add(triton, "patient", "dynamic_batching { max_queue_delay_microseconds: 40000000 }")
    loaded = ("alone", "preferred", "spread", "crowded", "patient")
    await load(triton, *loaded)
    # These two no server would load: they lie in the repository.
    add(triton, "both", "dynamic_batching { }\nsequence_batching { }")
    add(triton, "llm", "dynamic_batching { }", backend="vllm")
    repository = str(triton.repository)
    sections = {
        "backends": {
            "triton": {"kind": "triton", "url": triton.grpc, "repository": repository},
            "twin": {"kind": "triton", "url": f"{triton.grpc},{local.grpc}", "repository": repository},
        },
        "tasks": {
            "tensor": {"contract": "tensor", "timeout_ms": 60_000, "attempt_timeout_ms": 30_000},
            "speech": {"contract": "speech-activity"},
        },
        "rules": [
            TENSORS,
            {"name": "speech", "match": {"task": "speech"}, "split": [{"backend": "triton", "model": "alone"}]},
        ],
    }
    clients = [
        *([("crowded", "batch")] * 6 + [("crowded", "interactive")] * 2),
        *([("spread", "interactive")] * 4 + [("preferred", "interactive")] * 3 + [("alone", "interactive")]),
    ]
    async with stack(triton, tmp_path_factory.mktemp("wrong"), redis_server.url, **sections) as one:
        traffic = Load(one.gateway.url, clients)
        async with traffic.under_way():
            done = await one.doctor("--slo", "100ms", "--metrics-url", gpu_page, "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert set(traffic.statuses) == {200}
    await load(triton, *loaded, verb="unload")
    for name in (*loaded, "both", "llm"):
        shutil.rmtree(triton.repository / name)
    return {f"{found['symptom']} {found['subject']}": found for found in json.loads(done.stdout)["findings"]}


@pytest.mark.parametrize(
    ("finding", "number", "words"),
    [
        ("single-batches triton/alone", "delay_us", "the load is too low"),
        ("late-by-queue tensor at triton/crowded", "p99_ms", "instances busy"),
        ("stateful-batched triton/alone", "max_batch_size", "the task 'speech' sends steps of sequences there"),
        ("stateful-batched triton/both", "max_batch_size", "it would mix the steps of different sequences"),
        ("llm-batched triton/llm", "max_batch_size", "the engine joins requests token by token itself"),
        ("interactive-behind-batch triton", "batch", "interactive requests among"),
        ("instances-and-batches triton/spread", "instances", "spread over the instances"),
        ("preferred-never-reached triton/preferred", "largest", "too few requests"),
        ("timeout-below-delay tensor at triton/patient", "timeout_ms", "waits the whole delay"),
        ("hot-replica twin@", "share", "not loaded there"),
    ],
)
async def test_it_finds(wrong, finding, number, words):
    name = next((name for name in wrong if name.startswith(finding)), None)
    assert name is not None, f"{finding} is not in {', '.join(wrong)}"
    found = wrong[name]
    assert found["numbers"][number] >= 0
    assert words in found["cause"]
    assert found["lines"] or found["symptom"] == "hot-replica"


async def test_it_finds_a_full_gpu(wrong):
    (found,) = (one for one in wrong.values() if one["symptom"] == "gpu-memory")
    assert "15.7 of 16.0 GiB are used" in found["seen"]


async def test_it_names_nothing_that_is_well(wrong):
    assert [name for name in wrong if name.startswith("single-batches triton")] == ["single-batches triton/alone"]
    assert [name for name in wrong if name.startswith("preferred")][:1] == ["preferred-never-reached triton/preferred"]
    assert [name for name in wrong if name.startswith("timeout")] == ["timeout-below-delay tensor at triton/patient"]
    assert [name for name in wrong if name.startswith("llm-batched")] == ["llm-batched triton/llm"]
    assert [name for name in wrong if name.startswith("instances")] == ["instances-and-batches triton/spread"]


async def test_what_it_says_has_the_documented_form(wrong):
    fields = ("symptom", "subject", "severity", "seen", "cause", "change", "where", "lines", "numbers")
    assert {tuple(found) for found in wrong.values()} == {fields}
    assert {found["severity"] for found in wrong.values()} == {"error", "warning"}
    manual = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
    assert not [word for word in (*fields, *(one["symptom"] for one in wrong.values())) if f"`{word}`" not in manual]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def healthy(local, triton, tmp_path_factory, redis_server) -> AsyncIterator[Stack]:
    """Real Triton, the local runtime and an LLM behind one gateway; a server has two batches, the rest waits here."""
    small = hashlib.sha256(b"gw-test-small").hexdigest()
    async with Upstream([sse_head(), *[event(delta("word ")), Pause(0.02)] * 20, DONE]) as llm:
        sections = {
            "backends": {
                "triton": {"kind": "triton", "url": triton.grpc, "max_in_flight": 16},
                "local": {"kind": "triton", "url": local.grpc, "max_in_flight": 16},
                "llm": {"kind": "openai", "base_url": llm.base_url, "hosted": True},
            },
            "tasks": {"tensor": {"contract": "tensor"}, "general_llm": {"contract": "chat"}},
            "rules": [
                {**TENSORS, "match": {"task": "tensor", "model": "good"}},
                {"name": "local", "match": {"task": "tensor"}, "split": [{"backend": "local", "model": "*"}]},
                {"name": "chat", "match": {"task": "general_llm"}, "split": [{"backend": "llm", "model": "m"}]},
            ],
            "keys": [
                {"id": "test", "tenant": "test", "key_env": "SERVING_KEY"},
                {"id": "small", "tenant": "small", "key_sha256": small, "limits": [{"per": "second", "requests": 2}]},
            ],
        }
        async with stack(triton, tmp_path_factory.mktemp("healthy"), redis_server.url, **sections) as one:
            one.servers = (f"triton=http://{triton.http}", f"local=http://{local.http}")
            yield one


@pytest.mark.parametrize(
    ("each", "pause_s"),
    [
        ([], 0.0),
        (["interactive"], 0.05),
        (["interactive"] * 40, 0.0),  # two and a half times what the servers' places hold
        (["batch"] * 20 + ["interactive"] * 4, 0.0),
    ],
    ids=["no load", "light", "heavy", "mixed"],
)
async def test_it_is_silent_where_all_is_well(healthy, each, pause_s):
    models = ("good", "local_good", *(["chat"] if each else []))
    # Streams are some of each load; a server's places are for tensors.
    clients = [(model, priority) for model in models for priority in (each[:4] if model == "chat" else each)]
    traffic = Load(healthy.gateway.url, clients, pause_s=pause_s)
    async with traffic.under_way():
        done = await healthy.doctor("--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["findings"]) == (0, []), done.stdout + done.stderr
    assert tuple(told) == ("window_s", "findings", "unseen")
    assert set(traffic.statuses) <= {200}
    assert told["unseen"] == ["GPU memory: no server tells (--metrics-url: Triton's metrics page)"]


async def test_a_model_that_was_loaded_anew_between_the_looks_is_not_judged(healthy, triton):
    admin = f"http://127.0.0.1:{yaml.safe_load(healthy.gateway.config.read_text())['server']['admin_port']}"
    places = Places(ops_url=healthy.gateway.ops_url, servers=healthy.servers)
    looker = Looker(Admin(admin, ADMIN_TOKEN), load_settings(healthy.gateway.config), places)
    async with Load(healthy.gateway.url, [("good", "interactive"), ("local_good", "interactive")]).under_way():
        before = await asyncio.to_thread(looker.look, 1)
        await load(triton, "good", verb="unload")
        await load(triton, "good")
        after = await asyncio.to_thread(looker.look, 1)
        facts = await asyncio.to_thread(looker.facts, before, after, target_p99_ms=0.001)
    assert ("triton", "good") not in facts.traffic
    assert (
        "queues and batches of good on 'triton': their counters began anew, as after a start or a load" in facts.unseen
    )
    assert [found for found in examine(facts) if "good" in found.subject and "local" not in found.subject] == []


async def test_it_finds_a_limit_below_capacity(healthy):
    async with Load(
        healthy.gateway.url, [("local_good", "interactive")] * 2, key="gw-test-small", pause_s=0.05
    ).under_way():
        done = await healthy.doctor("--json")
    (found,) = json.loads(done.stdout)["findings"]
    assert found["symptom"] == "refused-below-capacity"
    assert found["numbers"]["refused"] > 10
    assert "2 requests per second" in found["cause"]


async def test_without_a_control_plane_it_says_so(healthy):
    done = await healthy.doctor("--admin-url", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "no control plane answers at http://127.0.0.1:9\n"
