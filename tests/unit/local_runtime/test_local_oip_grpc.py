"""Triton's own client against the gRPC server."""

import asyncio
import contextlib
import threading

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from local_runtime.protocol.oip_grpc import start_server
from local_runtime.runtime import LocalRuntime

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT_" + tensor.name(), tensor.as_numpy()) for tensor in request.inputs()]
            )
            for request in requests
        ]
"""
ECHO_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "S" data_type: TYPE_STRING dims: [ 2 ] }, { name: "N" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "OUT_S" data_type: TYPE_STRING dims: [ 2 ] }, { name: "OUT_N" data_type: TYPE_INT64 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
FAIL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        code = int(requests[0].inputs()[0].as_numpy()[0, 0])
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("own text", code)) for _ in requests]
"""
GATED = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        threading.test_entered.set()
        assert threading.test_gate.wait(30)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""


@contextlib.asynccontextmanager
async def served(repository, tmp_path, **arguments):
    runtime = await LocalRuntime.open(repository, **arguments)
    address = f"unix:{tmp_path}/s"
    server = await start_server(runtime, address)
    try:
        async with triton.InferenceServerClient(address) as client:
            yield client
    finally:
        await server.stop(grace=None)
        await runtime.close()


def tensor(name, array, datatype):
    wrapped = triton.InferInput(name, list(array.shape), datatype)
    wrapped.set_data_from_numpy(array)
    return wrapped


def floats(*values):
    return [tensor("X", np.array([[value, value] for value in values], np.float32), "FP32")]


async def test_health_metadata_config_and_statistics(repository, tmp_path, write_python):
    write_python("double")
    async with served(repository, tmp_path) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("double")
        assert await client.is_model_ready("double", "1")
        assert not await client.is_model_ready("double", "2")
        assert not await client.is_model_ready("nope")
        assert (await client.get_server_metadata()).name == "local_runtime"
        metadata = await client.get_model_metadata("double")
        assert (metadata.inputs[0].name, list(metadata.inputs[0].shape)) == ("X", [-1, 2])
        assert (await client.get_model_config("double")).config.max_batch_size == 8
        await client.infer("double", floats(1, 2))
        (statistics,) = (await client.get_inference_statistics("double")).model_stats
        assert (statistics.inference_count, statistics.execution_count) == (2, 1)
        assert statistics.batch_stats[0].batch_size == 2
        index = await client.get_model_repository_index()
        assert [(model.name, model.state) for model in index.models] == [("double", "READY")]


async def test_server_is_not_ready_with_a_broken_model(repository, tmp_path, write_python):
    write_python("double")
    write_python("broken", "1 / 0")
    async with served(repository, tmp_path) as client:
        assert await client.is_server_live()
        assert not await client.is_server_ready()
        assert await client.is_model_ready("double")


async def test_tensors_round_trip_raw(repository, tmp_path, write_python):
    write_python("echo", ECHO, ECHO_CONFIG)
    strings = np.array([[b"", b"a\x00b"], ["é".encode(), b"long" * 99]], dtype=object)
    numbers = np.array([[-(2**63), 2**63 - 1, 0], [1, 2, 3]], np.int64)
    async with served(repository, tmp_path) as client:
        answer = await client.infer(
            "echo", [tensor("S", strings, "BYTES"), tensor("N", numbers, "INT64")], request_id="r1"
        )
        only = await client.infer(
            "echo",
            [tensor("S", strings, "BYTES"), tensor("N", numbers, "INT64")],
            outputs=[triton.InferRequestedOutput("OUT_N")],
        )
    np.testing.assert_array_equal(answer.as_numpy("OUT_S"), strings)
    np.testing.assert_array_equal(answer.as_numpy("OUT_N"), numbers)
    assert answer.get_response().id == "r1"
    assert [output.name for output in only.get_response().outputs] == ["OUT_N"]


async def test_typed_contents(repository, tmp_path, write_python):
    write_python("echo", ECHO, ECHO_CONFIG)
    request = service_pb2.ModelInferRequest(model_name="echo")
    request.inputs.add(name="S", datatype="BYTES", shape=[1, 2]).contents.bytes_contents.extend([b"x", b"y"])
    request.inputs.add(name="N", datatype="INT64", shape=[1, 1]).contents.int64_contents.append(7)
    async with served(repository, tmp_path), grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        response = await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert response.raw_output_contents[1] == (7).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, "INTERNAL"),
        (1, "INTERNAL"),
        (2, "NOT_FOUND"),
        (3, "INVALID_ARGUMENT"),
        (4, "UNAVAILABLE"),
        (5, "UNIMPLEMENTED"),
        (7, "CANCELLED"),
    ],
)
async def test_model_error_codes(repository, tmp_path, write_python, code, status):
    write_python("fail", FAIL)
    async with served(repository, tmp_path) as client:
        with pytest.raises(InferenceServerException) as error:
            await client.infer("fail", floats(code))
    assert (error.value.status(), error.value.message()) == (f"StatusCode.{status}", "own text")


async def test_wrong_requests(repository, tmp_path, write_python):
    write_python("double")
    async with served(repository, tmp_path) as client:
        with pytest.raises(InferenceServerException) as unknown:
            await client.infer("nope", floats(1))
        with pytest.raises(InferenceServerException) as too_many:
            await client.infer("double", floats(*range(9)))
    assert unknown.value.status() == "StatusCode.NOT_FOUND"
    assert unknown.value.message() == "Request for unknown model: 'nope' is not found"
    assert too_many.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert too_many.value.message() == (
        "[request id: <id_unknown>] inference request batch-size must be <= 8 for 'double'"
    )


async def test_streaming_is_unimplemented(repository, tmp_path, write_python):
    write_python("double")
    async with served(repository, tmp_path), grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name="double"))
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("leaves", ["cancels", "deadline"])
async def test_client_that_leaves_is_taken_out_of_the_queue(repository, tmp_path, write_python, monkeypatch, leaves):
    gate = threading.Event()
    monkeypatch.setattr(threading, "test_gate", gate, raising=False)
    monkeypatch.setattr(threading, "test_entered", threading.Event(), raising=False)
    write_python("gated", GATED)
    events = []
    try:
        async with served(repository, tmp_path, observer=events.append) as client:
            first = asyncio.create_task(client.infer("gated", floats(1)))
            assert await asyncio.to_thread(threading.test_entered.wait, 30)
            if leaves == "deadline":
                with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
                    await client.infer("gated", floats(2), client_timeout=0.05)
            else:
                second = asyncio.create_task(client.infer("gated", floats(2)))
                await client.is_server_live()
                second.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await second
            # A call after the one that left: its answer means that the server has seen the leaving.
            for _ in range(3):
                await client.is_server_live()
            gate.set()
            await first
            await client.infer("gated", floats(3))
    finally:
        gate.set()
    assert sum(event.requests for event in events) == 2


async def test_address_that_cannot_be_bound(repository, tmp_path, write_python):
    write_python("double")
    runtime = await LocalRuntime.open(repository)
    try:
        with pytest.raises(OSError, match="cannot listen on"):
            await start_server(runtime, f"unix:{tmp_path}/absent/s")
    finally:
        await runtime.close()
