"""The local runtime on a Ray cluster of two nodes, behind a gateway: how it grows, batches, and loses a replica."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from local_runtime.runtime import InferRequest, LocalRuntime
from tests.kit.ray_cluster import ROOT, START_S, ray_cluster
from tests.kit.serving import serving
from tests.kit.wait import until, until_async

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400), pytest.mark.alone]

REPOSITORY = ROOT / "triton_models"
TEXTS = ["a cat", "the weather of tomorrow", "how to bake bread"]
CLIENTS = 32
SECTIONS = {
    "tasks": {"text-embedding": {"contract": "text-embedding", "timeout_ms": 60_000, "attempt_timeout_ms": 30_000}},
    "rules": [
        {
            "name": "embeddings",
            "match": {"task": "text-embedding"},
            "split": [{"backend": "ray", "model": "text_embedding"}],
            "retries": 3,
        }
    ],
}


class Load:
    """Callers that ask one text after the other; `statuses` are what they were answered, after so many `attempts`."""

    def __init__(self, http):
        self.http, self.statuses, self.attempts = http, [], []

    async def _ask(self, stop):
        while not stop.is_set():
            answer = await embed(self.http, f"text {len(self.statuses)}")
            self.statuses.append(answer.status_code)
            self.attempts.append(int(answer.headers["x-gateway-attempts"]))

    @asynccontextmanager
    async def under_way(self):
        stop = asyncio.Event()
        asking = [asyncio.create_task(self._ask(stop)) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*asking)


async def embed(http, text):
    return await http.post("/v1/tasks/text-embedding", json={"input": {"text": text}})


@asynccontextmanager
async def proxy(port):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def is_ready(stub):
    try:
        return (await stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=10)).ready
    except grpc.aio.AioRpcError:
        return False


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4, "upscale_delay_s": 1}
    async with ray_cluster(repository=REPOSITORY, models="text_embedding", autoscaling=scaling) as running:
        async with proxy(running.grpc[0]) as stub:
            try:
                await until_async(lambda: is_ready(stub), timeout_s=START_S)
            except TimeoutError as error:
                raise AssertionError(running.log) from error
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster, tmp_path_factory):
    backends = {"ray": {"kind": "triton", "url": f"127.0.0.1:{cluster.grpc[0]}"}}
    folder = tmp_path_factory.mktemp("gateway")
    async with serving(folder, "", backends=backends, **SECTIONS) as gateway, gateway.http() as client:
        yield client


async def test_its_numbers_are_those_of_the_local_runtime(http):
    answer = await embed(http, TEXTS)
    assert answer.status_code == 200, answer.text
    runtime = await LocalRuntime.open(REPOSITORY, models=["text_embedding"])
    texts = np.array([[text.encode()] for text in TEXTS], dtype=object)
    own = await runtime.infer(InferRequest(model="text_embedding", inputs={"TEXT": texts}))
    await runtime.close()
    np.testing.assert_allclose(answer.json()["output"]["embeddings"], own.outputs["EMBEDDING"], atol=1e-5)


async def test_what_it_does_not_offer_is_refused_in_words(cluster):
    async def one():
        yield service_pb2.ModelInferRequest(model_name="text_embedding")

    async with proxy(cluster.grpc[0]) as stub:
        load = stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name="ocr"))
        with pytest.raises(grpc.aio.AioRpcError, match="load their models when they start") as caught:
            await load
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError, match="streams are not offered") as caught:
            await anext(aiter(stub.ModelStreamInfer(one())))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError, match="'nope' is not found") as caught:
            await stub.ModelInfer(service_pb2.ModelInferRequest(model_name="nope"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_caller_that_has_left_is_not_computed_for(cluster):
    request = service_pb2.ModelInferRequest(model_name="text_embedding")
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(serialize_byte_tensor(np.array([b"a long text " * 60], dtype=object)).item())

    async def failed(stub):
        told = await stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name="text_embedding"))
        return told.model_stats[0].inference_stats.fail.count

    async with proxy(cluster.grpc[0]) as stub:
        assert await failed(stub) == 0
        # More than can be done until then: some wait in the runtime's queue when their callers leave.
        asked = [stub.ModelInfer(request, timeout=0.2) for _ in range(120)]
        assert any(isinstance(one, Exception) for one in await asyncio.gather(*asked, return_exceptions=True))
        await until_async(lambda: failed(stub), timeout_s=30)


async def test_under_load_it_batches_and_grows_to_the_other_node_and_a_lost_replica_costs_nobody_an_answer(
    cluster, http
):
    (first,) = [pid for pids in cluster.replicas() for pid in pids]
    load = Load(http)
    async with load.under_way():
        await until(lambda: all(cluster.replicas()), timeout_s=90)
        async with proxy(cluster.grpc[1]) as stub:  # the second node takes requests, too
            await until_async(lambda: is_ready(stub), timeout_s=60)
            statistics = await stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name="text_encoder"))
        (model,) = statistics.model_stats
        assert model.inference_count > 2 * model.execution_count
        answered = len(load.statuses)
        os.kill(first, signal.SIGKILL)  # with half of the requests, or more, under way in it
        await until(lambda: len(load.statuses) > answered + 10 * CLIENTS, timeout_s=60)
        await until(lambda: all(set(pids) - {first} for pids in cluster.replicas()), timeout_s=60)
    assert set(load.statuses) == {200}
    assert max(load.attempts) > 1
