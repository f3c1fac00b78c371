"""The Triton adapter against a small servicer of our own, which can misbehave as Triton would."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from gateway.backends.triton_grpc import TritonBackend
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import BackendCall, ChatPayload, Tensor, TensorPayload, Tensors

LONG_US = 5_000_000


class Servicer(pb_grpc.GRPCInferenceServiceServicer):
    def __init__(self, answer: Callable | None = None) -> None:
        self.answer = answer or echo
        self.requests = []
        self.deadlines = []
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def ModelInfer(self, request, context):  # noqa: N802 - gRPC's name
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        self.arrived.set()
        try:
            return await self.answer(request, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ModelReady(self, request, context):  # noqa: N802 - gRPC's name
        return pb.ModelReadyResponse(ready=request.name == "good")

    async def ModelStatistics(self, request, context):  # noqa: N802 - gRPC's name
        response = pb.ModelStatisticsResponse()
        stats = response.model_stats.add(name=request.name or "m", version="1", inference_count=6, execution_count=2)
        batch = stats.batch_stats.add(batch_size=3)
        batch.compute_infer.count = 2
        return response


async def echo(request, context):
    response = pb.ModelInferResponse(model_version="1", id=request.id)
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(raw)
    return response


async def hang(request, context):
    await asyncio.sleep(60)


def aborting(code, text):
    async def abort(request, context):
        await context.abort(code, text)

    return abort


@asynccontextmanager
async def served(answer=None, *, address="127.0.0.1:0"):
    servicer = Servicer(answer)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 8_000_000)])
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    url = address if address.startswith("unix:") else f"127.0.0.1:{port}"
    backend = TritonBackend("triton", url)
    try:
        yield backend, servicer, server
    finally:
        await backend.close()
        await server.stop(0)


def call(*inputs, outputs=(), payload=None):
    payload = payload or TensorPayload(inputs=inputs or (tensor(),), outputs=outputs)
    return BackendCall(request_id="req-1", model="good", version="1", payload=payload)


def tensor(size=8):
    return Tensor(name="X", datatype="UINT8", shape=(size,), data=bytes(size))


async def answer_of(backend, request=None, *, timeout_us=LONG_US):
    return [item async for item in backend.infer(request or call(), timeout_us=timeout_us)]


async def fault_of(backend, request=None, *, timeout_us=LONG_US):
    with pytest.raises(BackendError) as caught:
        await answer_of(backend, request, timeout_us=timeout_us)
    return caught.value.fault


async def test_one_answer_with_its_bytes():
    text = Tensor(name="T", datatype="BYTES", shape=(1,), data=b"\x02\x00\x00\x00\xff\x00")
    async with served() as (backend, servicer, _):
        answer = await answer_of(backend, call(text, tensor(), outputs=("X", "T")))
    assert answer == [Tensors(outputs=(tensor(), text), version="1")]
    assert servicer.requests[0].id == "req-1"
    assert LONG_US / 2e6 < servicer.deadlines[0] < LONG_US / 0.5e6  # gRPC rounds; it is there, that is all


async def test_a_unix_socket(tmp_path):
    async with served(address=f"unix:{tmp_path}/s") as (backend, _, _):
        assert len(await answer_of(backend)) == 1


async def test_the_constructor_needs_no_loop_and_makes_no_channel():
    assert TritonBackend("t", "127.0.0.1:1")._channel is None


async def test_large_tensors_pass():  # TN-13
    async with served() as (backend, _, _):
        (answer,) = await answer_of(backend, call(tensor(5_000_000)))
    assert len(answer.outputs[0].data) == 5_000_000


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "[request id: a] Exceeds maximum queue size", FaultKind.OVERLOADED),
        (grpc.StatusCode.UNAVAILABLE, "model is going away", FaultKind.UNAVAILABLE),
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'x' is not found", FaultKind.UNKNOWN_MODEL),
        (grpc.StatusCode.INVALID_ARGUMENT, "[request id: a] bad 'X' for model 'm'", FaultKind.REFUSED_INPUT),
        (grpc.StatusCode.INTERNAL, "Stub process 'm_0_0' is not healthy.", FaultKind.BROKEN),
        (grpc.StatusCode.INTERNAL, "boom", FaultKind.FAILED),
        (grpc.StatusCode.UNIMPLEMENTED, "decoupled", FaultKind.UNSUPPORTED),
        (grpc.StatusCode.CANCELLED, "by the server", FaultKind.UNAVAILABLE),
    ],
)
async def test_errors(code, text, kind):
    async with served(aborting(code, text)) as (backend, _, _):
        found = await fault_of(backend)
    assert found.kind is kind
    if kind is FaultKind.REFUSED_INPUT:
        assert found.message == "bad 'X' for the model"


async def test_a_request_over_the_servers_bound_is_the_callers_fault():
    async with served() as (backend, _, _):
        assert (await fault_of(backend, call(tensor(9_000_000)))).kind is FaultKind.REFUSED_INPUT


async def test_an_answer_that_breaks_the_protocol():
    async def short(request, context):
        response = await echo(request, context)
        response.outputs[0].shape[0] += 1
        return response

    async with served(short) as (backend, _, _):
        assert (await fault_of(backend)).kind is FaultKind.BROKEN


async def test_a_missing_output():
    async with served() as (backend, _, _):
        assert (await fault_of(backend, call(tensor(), outputs=("Y",)))).kind is FaultKind.BROKEN


async def test_a_deadline():
    async with served(hang) as (backend, _, _):
        assert (await fault_of(backend, timeout_us=20_000)).kind is FaultKind.TIMEOUT


async def test_cancelling_the_wait_reaches_the_server():
    async with served(hang) as (backend, servicer, _):
        task = asyncio.create_task(answer_of(backend))
        await servicer.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(servicer.cancelled.wait(), 1)


async def test_closing_the_backend_ends_calls_in_flight_as_unavailable():
    async with served(hang) as (backend, servicer, _):
        task = asyncio.create_task(fault_of(backend))
        await servicer.arrived.wait()
        await backend.close()
        assert (await task).kind is FaultKind.UNAVAILABLE


async def test_a_server_that_dies_and_one_that_is_not_there():
    async with served(hang) as (backend, servicer, server):
        task = asyncio.create_task(fault_of(backend))
        await servicer.arrived.wait()
        await server.stop(0)
        assert (await task).kind is FaultKind.UNAVAILABLE
        assert (await fault_of(backend)).kind is FaultKind.UNAVAILABLE
        for asked in (backend.probe("good", ""), backend.batch_sizes()):
            with pytest.raises(BackendError) as caught:
                await asked
            assert caught.value.fault.kind is FaultKind.UNAVAILABLE


async def test_probe():
    async with served() as (backend, _, _):
        await backend.probe("good", "")
        with pytest.raises(BackendError) as caught:
            await backend.probe("bad", "1")
    assert caught.value.fault.kind is FaultKind.UNAVAILABLE


async def test_batch_sizes():
    async with served() as (backend, _, _):
        assert await backend.batch_sizes() == {"m": {3: 2}}


async def test_chat_is_not_for_this_backend():
    backend = TritonBackend("t", "127.0.0.1:1")
    assert (await fault_of(backend, call(payload=ChatPayload(body={})))).kind is FaultKind.UNSUPPORTED
    await backend.close()
