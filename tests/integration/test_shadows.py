"""Shadows over real servers: Triton answers, a local runtime has the copies; and their reports in a Redis Cluster."""

import asyncio

import numpy as np
import pytest

from gateway.backends.triton.backend import TritonBackend
from gateway.core.tensors import from_numpy
from gateway.core.types import TensorPayload, Tensors
from gateway.stores.control.shadows import RedisShadows, RedisShadowSource
from gateway.stores.redis_script import connect
from gateway.tasks.tensor import TensorInput, TensorTask
from tests.contract.stores.test_shadows import RULES, UNLIKE, result
from tests.kit.servers import running
from tests.kit.shadowed import request, shadowed
from tests.kit.wait import until

CONFIG = """backend: "python"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(one, "x").as_numpy()) for one in requests]

    def answer(self, x):
        time.sleep(float(x.flat[1]))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x * FACTOR)])
"""
RULE = {
    "name": "tensors",
    "split": [{"backend": "triton", "model": "*"}],
    "shadow": {"backend": "local", "model": "*"},
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shadows")
    with running("triton", folder / "triton") as triton, running("local", folder / "local") as local:
        for server, factors in ((triton, ("2", "2")), (local, ("2.0001", "3"))):
            for name, factor in zip(("same", "other"), factors, strict=True):
                server.add_model(name, config=CONFIG, model=MODEL.replace("FACTOR", factor))
        yield triton, local


@pytest.fixture
async def plane(servers):
    triton, local = servers
    backends = [await TritonBackend.open("triton", triton.grpc), await TritonBackend.open("local", local.grpc)]
    for backend in backends:
        for model in ("same", "other"):
            await backend.load(model, replica=next(iter(backend.replicas()), ""))
    async with shadowed(*backends, rules=[RULE], more_tasks={"tensor": TensorTask()}) as plane:
        yield plane
    for backend in backends:
        await backend.close()


def asked(model: str, *, sleeps_s: float = 0.0):
    x = np.array([[1.5, sleeps_s, -3.0]], np.float32)
    payload = TensorPayload(inputs=(from_numpy("x", x),))
    return request("tensor", TensorInput(model=model, version="", payload=payload), model=model)


@pytest.mark.parametrize("model", ["same", "other"])
async def test_triton_is_compared_with_the_local_runtime(plane, model):
    _, answer, _ = await plane.ask(asked(model))
    assert isinstance(answer, Tensors)
    told = await plane.result()
    assert (told.outcome, told.comparison.what) == ("answered", "tensors")
    assert told.comparison.agreed is (model == "same")
    assert told.comparison.similarity == (1.0 if model == "same" else pytest.approx(1 / 3))
    assert told.real_us > 0
    assert told.shadow_us > 0


async def test_a_copy_that_is_taken_back_leaves_nothing_at_a_real_server(plane):
    await plane.ask(asked("same", sleeps_s=0.3))
    await until(lambda: list(plane.shadows.at_servers()))
    await plane.shadows.close()
    assert (plane.loads, plane.told.results) == ({}, [])
    assert isinstance((await plane.ask(asked("same")))[1], Tensors)


async def test_reports_in_a_cluster(redis_cluster, redis_prefix):
    client = connect(redis_cluster.url)
    shadows, source = RedisShadows(client, redis_prefix), RedisShadowSource(client, redis_prefix, timeout_s=5)
    for rule in RULES:
        shadows.told(result(rule, comparison=UNLIKE))
    await asyncio.wait_for(shadows.flush(), 5)
    found = await source.read()
    assert [(one["rule"], one["sent"], len(one["disagreements"])) for one in found] == [
        (rule, 1, 1) for rule in sorted(RULES)
    ]
    await source.forget(RULES[0])
    assert [one["rule"] for one in await source.read()] == sorted(RULES[1:])
    await client.aclose()
