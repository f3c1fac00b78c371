"""CF-04: live, ready and per-model ready agree with what a request meets, whatever is gone.

The rule: `live` is that the process runs; `ready` is that it takes requests (so not while it drains), whether or not
there is a backend or a Redis; a model is ready where some server can be asked for it now. What loads and unloads make
of it is in `test_deploy`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.kit.redis import RedisServer
from tests.kit.servers import running
from tests.kit.serving import KEY, Serving, serving
from tests.kit.wait import until_async

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "MS" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "MS" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
SLOW = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            ms = pb_utils.get_input_tensor_by_name(request, "MS").as_numpy()
            time.sleep(float(ms[0]) / 1000)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("MS", ms)]))
        return answers
"""


@dataclass
class Plane:
    gateway: Serving
    http: httpx.AsyncClient

    async def infer(self, ms: int = 0) -> int:
        body = {"inputs": [{"name": "MS", "shape": [1], "datatype": "INT32", "data": [ms]}]}
        return (await self.http.post("/v2/models/slow/infer", json=body)).status_code

    async def says(self) -> tuple[int, int, int, int]:
        """Live, ready, the model's ready, and what a request meets."""
        told = [(await self.http.get(path)).status_code for path in ("/healthz/live", "/healthz/ready")]
        model = (await self.http.get("/v2/models/slow/ready")).status_code
        return told[0], told[1], model, await self.infer()

    async def come_to(self, *said: int) -> None:
        async def is_so() -> bool:
            return await self.says() == said

        await until_async(is_so, timeout_s=20)


@contextlib.asynccontextmanager
async def plane(folder: Path, redis: RedisServer, triton_grpc: str) -> AsyncIterator[Plane]:
    sections = {
        "backends": {"triton": {"kind": "triton", "url": triton_grpc}},
        "tasks": {"tensor": {"contract": "tensor"}},
        "rules": [{"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}],
        "redis": {"url": redis.url},
        "keys": [{"id": "test", "tenant": "test", "key_env": "SERVING_KEY", "admin": True}],
    }
    async with serving(folder, "", **sections) as gateway:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, trust_env=False, timeout=30) as http:
            yield Plane(gateway, http)


@pytest.fixture
def redis():
    with RedisServer() as server:
        yield server


async def test_what_is_said_is_what_requests_meet(tmp_path, redis):
    (tmp_path / "gateway").mkdir()
    with contextlib.ExitStack() as stack:
        triton = stack.enter_context(running("triton", tmp_path / "triton"))
        triton.add_model("slow", config=CONFIG, model=SLOW)
        async with plane(tmp_path / "gateway", redis, triton.grpc) as at:
            assert (await at.says())[:3] == (200, 200, 503)
            assert (await at.http.post("/v2/repository/models/slow/load")).status_code == 200
            assert await at.says() == (200, 200, 200, 200)

            redis.hang()  # the limits are each worker's own, the rules are the last ones
            assert await at.says() == (200, 200, 200, 200)
            redis.resume()

            asked = asyncio.create_task(at.infer(2000))
            await until_async(lambda: _is_under_way(at))
            at.gateway.process.terminate()
            await until_async(lambda: _is_draining(at))
            assert await asked == 200  # what is under way is answered
            assert await at.gateway.process.wait() == 0
        async with plane(tmp_path / "gateway", redis, triton.grpc) as at:
            await at.come_to(200, 200, 200, 200)
            stack.close()  # Triton is gone
            await at.come_to(200, 200, 503, 503)


async def _is_under_way(at: Plane) -> bool:
    async with httpx.AsyncClient(trust_env=False) as http:
        page = (await http.get(f"{at.gateway.ops_url}/metrics")).text
    return 'gateway_requests_in_flight{task="tensor"} 1.0' in page


async def _is_draining(at: Plane) -> bool:
    """The operations listener answers to the end; the process itself is live."""
    async with httpx.AsyncClient(trust_env=False) as http:
        live = await http.get(f"{at.gateway.ops_url}/healthz/live")
        assert live.status_code == 200
        return (await http.get(f"{at.gateway.ops_url}/healthz/ready")).status_code == 503
