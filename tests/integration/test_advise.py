"""`gateway advise` before a real Triton and a real local runtime under load: its advice, followed, is true."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import uuid

import httpx
import pytest
import yaml

from gateway.tuning.load import runner, targets
from gateway.tuning.load.asks import Ask
from gateway.tuning.traffic import TrafficClass
from tests.kit.servers import TARGETS, Server, running
from tests.kit.serving import ADMIN_TOKEN, KEY, control_plane, serving

pytestmark = pytest.mark.alone

MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(one, "X").as_numpy() for one in requests]
        time.sleep(0.004 + 0.0005 * sum(len(one) for one in inputs))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", one + np.int32(1))]) for one in inputs]
"""
CONFIG = """backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { max_queue_delay_microseconds: 60000 }  # somebody thought that more is better
"""
TRAFFIC = TrafficClass(rate=120.0)
SPAN_S = 4
LONGEST_S = 90.0  # of traffic that ends with a block


@contextlib.asynccontextmanager
async def asked(url: str, *, seconds: float | None = None):
    """The traffic for so long, or while the block runs, and its report afterwards."""
    ask, stop = Ask(url=url, key=KEY, tensor="slow"), asyncio.Event()
    async with targets.clients() as clients:
        target = await clients.target(ask, TRAFFIC)
        whole_s, watch = seconds or LONGEST_S, runner.Watch(stop=stop)
        run = runner.run(target, [TRAFFIC], duration_s=whole_s, warmup_s=1.0, watch=watch)
        yield (task := asyncio.create_task(run))
        if seconds is None:
            stop.set()
        await task


async def put(server: Server, config: str) -> None:
    server.add_model("slow", config=config, model=MODEL)
    async with httpx.AsyncClient(base_url=f"http://{server.http}", trust_env=False, timeout=60) as http:
        assert (await http.post("/v2/repository/models/slow/load")).status_code == 200


async def advise(server: Server, config, ops_url: str, *options: str) -> subprocess.CompletedProcess[str]:
    port = yaml.safe_load(config.read_text())["server"]["admin_port"]
    command = (
        *(sys.executable, "-m", "gateway", "advise", "--config", str(config), "--for", f"{SPAN_S}s"),
        *("--admin-url", f"http://127.0.0.1:{port}", "--ops-url", ops_url, "--server", f"http://{server.http}"),
        *options,
    )
    environ = {**os.environ, "GATEWAY_ADMIN_TOKEN": ADMIN_TOKEN}
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=100, check=False, env=environ
    )


@pytest.mark.parametrize("name", TARGETS)
async def test_its_advice_comes_true(name, tmp_path, redis_server):
    with running(name, tmp_path / "server") as server:
        await put(server, CONFIG)
        sections = {
            "backends": {"triton": {"kind": "triton", "url": server.grpc, "repository": str(server.repository)}},
            "tasks": {"tensor": {"contract": "tensor"}},
            "rules": [{"name": "t", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}],
            "redis": {"url": redis_server.url, "prefix": f"test:{uuid.uuid4().hex[:8]}:"},
            "telemetry": {"access_log": False},
        }
        async with serving(tmp_path, "", **sections) as gateway, control_plane(gateway.config):
            async with asked(gateway.url) as before:
                done = await advise(server, gateway.config, gateway.ops_url, "--json")
            (told,) = json.loads(done.stdout)["advice"]
            assert done.returncode == 1, told
            assert told["where"] == str(server.repository / "slow" / "config.pbtxt")
            assert "-dynamic_batching { max_queue_delay_microseconds: 60000 }  # somebody" in told["diff"]
            advised = f"max_queue_delay_microseconds: {told['advised']['delay_us']} "
            assert told["advised"]["delay_us"] < 60_000
            await put(server, CONFIG.replace("max_queue_delay_microseconds: 60000 ", advised))
            async with asked(gateway.url, seconds=4) as after:
                pass
    first, last = before.result().whole, after.result().whole
    assert set(first.codes) == set(last.codes) == {"ok"}
    assert last.latency.p50 < first.latency.p50  # most of which was the delay: some 30 of 40 ms
