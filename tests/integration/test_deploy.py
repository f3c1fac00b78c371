"""A model changed from one version to the next under load: real Triton, real Redis, two workers, the control plane."""

import asyncio
import contextlib
import hashlib
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import httpx
import pytest
import pytest_asyncio
import yaml

from tests.kit.servers import Server, running
from tests.kit.serving import ADMIN_TOKEN, Serving, control_plane, free_port, serving
from tests.kit.wait import until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENANTS = tuple(f"tenant-{n}" for n in range(8))
CONNECTIONS = 3  # of each tenant: its requests go to both workers
ENOUGH = 5000
RULES = [{"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}]
BODY = {"inputs": [{"name": "X", "shape": [1, 1], "datatype": "INT32", "data": [7]}]}

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "VERSION" data_type: TYPE_INT32 dims: [ 1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
dynamic_batching {{ }}
model_warmup [ {{ name: "one" batch_size: 1 count: 2
  inputs {{ key: "X" value: {{ data_type: TYPE_INT32 dims: [ 1 ] zero_data: true }} }} }} ]
"""
# Answers its own version; a file beside it says how it misbehaves.
MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.fails = os.path.exists(os.path.join(folder, "fails"))
        if os.path.exists(os.path.join(folder, "slow")):
            time.sleep(2)
        if os.path.exists(os.path.join(folder, "broken")):
            raise RuntimeError("the weights are damaged")

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if self.fails and x.any():
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("no")))
            else:
                version = np.full((len(x), 1), self.version, np.int32)
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("VERSION", version)]))
        return answers
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory) -> Iterator[Server]:
    with running("triton", tmp_path_factory.mktemp("triton")) as server:
        yield server


@dataclass
class Seen:
    """One request: when it was sent and answered, and what came."""

    tenant: str
    sent: float
    answered: float
    status: int
    version: int


@dataclass
class Load:
    """A closed loop of all tenants, each over connections of its own."""

    url: str
    model: str
    seen: list[Seen] = field(default_factory=list)

    async def loop(self, tenant: str, stop: asyncio.Event) -> None:
        headers = {"authorization": f"Bearer {tenant}"}
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=1)) as session:
            while not stop.is_set():
                sent = time.perf_counter()
                async with session.post(f"{self.url}/v2/models/{self.model}/infer", json=BODY) as answer:
                    told = await answer.json()
                version = told["outputs"][0]["data"][0] if answer.status == 200 else 0
                self.seen.append(Seen(tenant, sent, time.perf_counter(), answer.status, version))

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        loops = [asyncio.create_task(self.loop(tenant, stop)) for tenant in TENANTS for _ in range(CONNECTIONS)]
        try:
            await until(lambda: len(self.seen) > 10, timeout_s=10)
            yield
        finally:
            stop.set()
            await asyncio.gather(*loops)

    def failed(self) -> list[Seen]:
        return [one for one in self.seen if one.status != 200]

    def out_of_order(self, *, downwards: bool = False) -> list[tuple[Seen, int]]:
        """Requests that were sent after their caller had seen a later version than they got."""
        sign = -1 if downwards else 1
        wrong = []
        for tenant in TENANTS:
            mine = [one for one in self.seen if one.tenant == tenant]
            answers = sorted(mine, key=lambda one: one.answered)
            best, at = -(10**9), 0
            for one in sorted(mine, key=lambda one: one.sent):
                while answers[at].answered < one.sent:
                    best = max(best, sign * answers[at].version)
                    at += 1
                if sign * one.version < best:
                    wrong.append((one, sign * best))
        return wrong


@dataclass
class Plane:
    """Everything together."""

    triton: Server
    gateway: Serving
    admin: httpx.AsyncClient

    def add(self, name: str, *files: str) -> Path:
        return self.triton.add_model(name, config=CONFIG.format(name=name), model=MODEL)

    async def deploy(self, model: str, version: str, **options) -> dict:
        body = {"version": version, "hold_s": 1.0, **options}
        begun = await self.admin.post(f"/models/{model}/deploy", json=body)
        assert begun.status_code == 202, begun.text
        return begun.json()

    async def ended(self, deploy: dict, *, timeout_s: float = 40) -> dict:
        async def is_over() -> bool:
            deploy.update((await self.admin.get(f"/deploys/{deploy['id']}")).json())
            return deploy["status"] != "running"

        await until_async(is_over, timeout_s=timeout_s)
        return deploy

    async def states(self, model: str) -> dict[str, str]:
        (found,) = (await self.admin.get(f"/models/{model}")).json()["items"]
        return {one["version"]: one["state"] for one in found["replicas"][0]["versions"]}

    async def rules(self) -> list:
        return (await self.admin.get("/rules")).json()["rules"]

    async def ask(self, model: str, tenant: str = TENANTS[0]) -> httpx.Response:
        headers = {"authorization": f"Bearer {tenant}"}
        async with httpx.AsyncClient(base_url=self.gateway.url, headers=headers, trust_env=False, timeout=30) as http:
            return await http.post(f"/v2/models/{model}/infer", json=BODY)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def plane(triton, tmp_path_factory, redis_server) -> AsyncIterator[Plane]:
    sections = {
        "backends": {"triton": {"kind": "triton", "url": triton.grpc, "repository": str(triton.repository)}},
        "tasks": {"tensor": {"contract": "tensor"}},
        "rules": RULES,
        "redis": {"url": redis_server.url, "prefix": f"test:{uuid.uuid4().hex[:8]}:"},
        "keys": [{"id": one, "tenant": one, "key_sha256": hashlib.sha256(one.encode()).hexdigest()} for one in TENANTS],
        "telemetry": {"access_log": False},
    }
    async with (
        serving(tmp_path_factory.mktemp("plane"), "", "--workers", "2", **sections) as gateway,
        control_plane(gateway.config) as admin,
    ):
        yield Plane(triton, gateway, admin)


def beside(folder: Path, version: str, *files: str) -> Path:
    """A version like the first one, put beside it whole."""
    incoming = folder / f".incoming-{version}"
    shutil.copytree(folder / "1", incoming, ignore=shutil.ignore_patterns("__pycache__"))
    for file in files:
        (incoming / file).write_text("")
    return incoming.rename(folder / version)


async def loaded(plane: Plane, model: str) -> None:
    done = await plane.admin.post(f"/models/{model}/load")
    assert done.status_code == 200, done.text
    assert done.json()["applied"] == {"replicas": 1, "of": 1}


async def test_a_deploy_and_its_rollback_lose_no_request_and_keep_each_callers_order(plane, tmp_path):
    folder = plane.add("moving")
    await loaded(plane, "moving")
    before = await plane.rules()
    load = Load(plane.gateway.url, "moving")
    shutil.copytree(folder / "1", tmp_path / "build")
    async with load.under_way():
        command = ("deploy", "moving", str(tmp_path / "build"), "--hold-s", "1")
        code, out = await models(plane, *command)
        assert code == 0, out
        await until(lambda: len(load.seen) >= ENOUGH, timeout_s=60)
    assert "moving: version 2 serves, 1 is retired" in out
    assert not load.failed()
    assert not load.out_of_order()
    assert {one.version for one in load.seen[:100]} == {1}
    assert {one.version for one in load.seen[-100:]} == {2}
    # In between there was a time in which some callers were on each.
    assert len(shares(load)) > 2
    assert (await plane.states("moving"))["1"] == "UNAVAILABLE"
    assert await plane.rules() == before

    back = Load(plane.gateway.url, "moving")
    async with back.under_way():
        code, out = await models(plane, "rollback", "moving")
        assert code == 0, out
        count = len(back.seen)
        await until(lambda: len(back.seen) > count + 200, timeout_s=20)
    assert not back.failed()
    assert not back.out_of_order(downwards=True)
    assert back.seen[-1].version == 1
    assert (await plane.states("moving"))["2"] == "UNAVAILABLE"
    assert await plane.rules() == before
    # A server that starts anew serves the same.
    assert sorted(path.name for path in folder.iterdir() if path.name != "config.pbtxt") == [".rolled-back-2", "1"]


def shares(load: Load) -> set[frozenset[str]]:
    """The sets of tenants that were on the new version, over time."""
    return {
        frozenset(one.tenant for one in chunk if one.version == 2)
        for chunk in (load.seen[at : at + 200] for at in range(0, len(load.seen), 200))
    }


async def models(plane: Plane, *args: str) -> tuple[int, str]:
    """Run `gateway models`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "models", *args),
        *("--admin-url", str(plane.admin.base_url).removesuffix("/admin/v1/"), "--admin-token", ADMIN_TOKEN),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def test_what_goes_wrong_leaves_the_old_version_serving_and_the_rules_as_they_were(plane, tmp_path):
    folder = plane.add("wrong")
    await loaded(plane, "wrong")
    before = await plane.rules()
    load = Load(plane.gateway.url, "wrong")
    async with load.under_way():
        # It does not load.
        shutil.copytree(folder / "1", tmp_path / "build")
        (tmp_path / "build" / "broken").write_text("")
        code, out = await models(plane, "deploy", "wrong", str(tmp_path / "build"))
        assert code == 1
        assert "the weights are damaged" in out
        assert (folder / ".rolled-back-2").is_dir()
        # It is not there.
        missing = await plane.ended(await plane.deploy("wrong", "9"))
        assert "no version 9" in missing["reason"]
        # The whole configuration is broken: no deploy, the operator's own load.
        (folder / "config.pbtxt").write_text("max_batch_size: many")
        refused = await plane.admin.post("/models/wrong/load")
        assert (refused.status_code, refused.json()["code"]) == (502, "backend_error")
        (folder / "config.pbtxt").write_text(CONFIG.format(name="wrong"))
        # An operator has second thoughts.
        beside(folder, "4")
        changed = await plane.deploy("wrong", "4", hold_s=60)
        await until_async(lambda: weighs(plane, changed, 10), timeout_s=20)
        second = await plane.admin.post("/models/wrong/deploy", json={"version": "3"})
        assert (second.status_code, second.json()["code"]) == (409, "deploy_conflict")
        assert (await plane.admin.post("/models/wrong/rollback")).status_code == 202
        assert (await plane.ended(changed))["status"] == "rolled_back"
        # It loads, and fails: what the failing version was sent the old one answers.
        beside(folder, "5", "fails")
        failing = await plane.ended(await plane.deploy("wrong", "5", canary=50, hold_s=30))
        assert failing["status"] == "failed"
        assert "version 5 failed" in failing["reason"]
        count = len(load.seen)
        await until(lambda: len(load.seen) > count + 100, timeout_s=20)
    assert {one.version for one in load.seen[-50:]} == {1}
    assert not load.failed()
    states = await plane.states("wrong")
    assert states.pop("1") == "READY"
    assert set(states.values()) == {"UNAVAILABLE"}
    assert await plane.rules() == before


async def weighs(plane: Plane, deploy: dict, percent: int) -> bool:
    return (await plane.admin.get(f"/deploys/{deploy['id']}")).json()["weight"] == percent


async def test_a_deploy_outlives_its_control_plane(plane, tmp_path):
    model = "interrupted"
    folder = plane.add(model)
    await loaded(plane, model)
    beside(folder, "2")
    before = await plane.rules()
    document = yaml.safe_load(plane.gateway.config.read_text())
    document["server"]["admin_port"] = free_port()
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(document))
    async with control_plane(tmp_path / "other.yaml") as other:
        begun = await other.post(f"/models/{model}/deploy", json={"version": "2", "canary": 100, "hold_s": 1})
        deploy = begun.json()
        await until_async(lambda: weighs(plane, deploy, 100), timeout_s=20)
    shown = (await plane.admin.get(f"/deploys/{deploy['id']}")).json()
    assert (shown["status"], shown["step"]) == ("interrupted", "shift")
    assert (await plane.admin.post(f"/models/{model}/deploy", json={"version": "2"})).status_code == 409
    assert (await plane.ask(model)).json()["model_version"] == "2"
    assert (await plane.admin.post(f"/deploys/{deploy['id']}/continue")).status_code == 202
    assert (await plane.ended(deploy))["status"] == "done"
    states = await plane.states(model)
    assert [version for version, state in states.items() if state == "READY"] == ["2"]
    assert (await plane.ask(model)).json()["model_version"] == "2"
    assert await plane.rules() == before


async def test_a_reload_moves_callers_once_and_a_broken_one_moves_nobody(plane):  # CF-02
    folder = plane.add("plain")
    await loaded(plane, "plain")
    load = Load(plane.gateway.url, "plain")
    async with load.under_way():
        beside(folder, "2")
        await loaded(plane, "plain")
        await until(lambda: load.seen[-1].version == 2, timeout_s=20)
        (folder / "config.pbtxt").write_text("max_batch_size: many")
        assert (await plane.admin.post("/models/plain/load")).status_code == 502
        count = len(load.seen)
        await until(lambda: len(load.seen) > count + 200, timeout_s=20)
    assert not load.failed()
    assert not load.out_of_order()
    assert {one.version for one in load.seen[-200:]} == {2}


async def test_loads_tell_the_truth_and_ready_agrees_with_what_infer_answers(plane):  # CF-01, CF-04
    folder = plane.add("truth")
    good = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text("max_batch_size: many")
    for _ in range(2):
        refused = await plane.admin.post("/models/truth/load")
        assert refused.status_code == 502
        assert "failed to load 'truth'" in refused.json()["detail"]
        assert set((await plane.states("truth")).values()) <= {"UNAVAILABLE"}
        await agrees(plane, "truth", ready=False)
    (folder / "config.pbtxt").write_text(good)
    (folder / "1" / "slow").write_text("")
    loading = asyncio.create_task(loaded(plane, "truth"))
    await until_async(lambda: is_state(plane, "truth", "LOADING"), timeout_s=10)
    await agrees(plane, "truth", ready=False)
    await loading
    await agrees(plane, "truth", ready=True)
    assert (await plane.admin.post("/models/truth/unload")).status_code == 200
    await agrees(plane, "truth", ready=False)
    assert (await plane.admin.post("/models/nobody/load")).status_code == 404


async def is_state(plane: Plane, model: str, state: str) -> bool:
    return state in (await plane.states(model)).values()


async def agrees(plane: Plane, model: str, *, ready: bool) -> None:
    """What the gateway says of a model is what a request meets; the gateway itself is live throughout."""
    headers = {"authorization": f"Bearer {TENANTS[0]}"}
    async with httpx.AsyncClient(base_url=plane.gateway.url, headers=headers, trust_env=False, timeout=30) as http:
        assert (await http.get("/healthz/live")).status_code == 200
        assert ((await http.get(f"/v2/models/{model}/ready")).status_code == 200) is ready
    assert ((await plane.ask(model)).status_code == 200) is ready
