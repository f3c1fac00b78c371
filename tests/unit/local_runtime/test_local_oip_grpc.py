"""The gRPC server, asked by Triton's own clients: over a fake runtime, then over the real one."""

import asyncio
import contextlib
import queue
import threading

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from local_runtime.errors import ErrorCode, InferenceError, invalid
from local_runtime.protocol import oip_stream
from local_runtime.protocol.oip_grpc import start_server
from local_runtime.runtime import LocalRuntime
from tests.kit.local_fake import FakeModel, FakeRuntime, Gate, answer, countdown, failing
from tests.kit.wait import until

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
PYTHON_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
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
async def faked(**models):
    """A fake runtime and Triton's client of the server before it."""
    runtime = FakeRuntime(models={"echo": FakeModel(), **models})
    server = await start_server(runtime, "127.0.0.1:0")
    try:
        async with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            client.server, client.address = server, f"127.0.0.1:{server.port}"
            yield runtime, client
    finally:
        await server.stop(grace_s=0)


@contextlib.asynccontextmanager
async def served(repository, tmp_path, **arguments):
    runtime = await LocalRuntime.open(repository, **arguments)
    address = f"unix:{tmp_path}/s"
    server = await start_server(runtime, address)
    try:
        async with triton.InferenceServerClient(address) as client:
            yield client
    finally:
        await server.stop(grace_s=0)
        await runtime.close()


def tensor(name, array, datatype):
    wrapped = triton.InferInput(name, list(array.shape), datatype)
    wrapped.set_data_from_numpy(array)
    return wrapped


def floats(*values):
    return [tensor("X", np.array([[value, value] for value in values], np.float32), "FP32")]


# --- over a fake runtime --------------------------------------------------------------------------


async def refused(call):
    with pytest.raises(InferenceServerException) as error:
        await call
    return error.value.status().removeprefix("StatusCode."), error.value.message()


@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("FP32", np.array([[np.nan, -np.inf, -0.0]], np.float32)),
        ("FP16", np.array([[np.inf, 0.01]], np.float16)),
        ("BF16", np.array([[1.5, np.nan]], ml_dtypes.bfloat16)),
        ("UINT64", np.array([[2**64 - 1]], np.uint64)),
        ("BOOL", np.array([[True, False]])),
        ("FP32", np.zeros((2, 0), np.float32)),
    ],
)
async def test_tensors_come_back_bit_exact(datatype, array):
    async with faked() as (_, client):
        told = (await client.infer("echo", [tensor("X", array, datatype)])).as_numpy("X")
    assert (told.dtype, told.shape, told.tobytes()) == (array.dtype, array.shape, array.tobytes())


async def test_parameters_and_deadline_reach_the_runtime():
    async with faked() as (runtime, client):
        await client.infer(
            "echo",
            floats(1),
            model_version="1",
            request_id="r7",
            sequence_id="user-x",
            sequence_end=True,
            priority=2,
            timeout=900,
            client_timeout=30,
            parameters={"own": "mine"},
        )
    (asked,) = runtime.requests
    assert (asked.request_id, asked.version, asked.sequence_id) == ("r7", "1", "user-x")
    assert (asked.sequence_start, asked.sequence_end) == (False, True)
    assert (asked.priority, asked.queue_timeout_us, asked.parameters) == (2, 900, {"own": "mine"})
    assert 0 < asked.timeout_us < 40_000_000


async def test_best_classes_in_place_of_values():
    async with faked() as (_, client):
        result = await client.infer("echo", floats(1), outputs=[triton.InferRequestedOutput("X", class_count=1)])
    assert result.as_numpy("X").tolist() == [[b"1.000000:0:zero"]]


async def test_decoupled_models_are_refused_in_tritons_words():
    async with faked(many=FakeModel(answers=countdown, is_decoupled=True)) as (_, client):
        assert await refused(client.infer("many", floats(1))) == (
            "UNIMPLEMENTED",
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        )


async def test_a_fault_of_the_server_is_logged_and_answered(caplog):
    async def broken(_request):
        raise ZeroDivisionError("secret")
        yield

    async with faked(bad=FakeModel(answers=broken)) as (_, client):
        status, text = await refused(client.infer("bad", floats(1)))
        async for _, error in client.stream_infer(once({"model_name": "bad", "inputs": floats(1)})):
            assert error.message() == text
    assert status == "INTERNAL"
    assert "secret" not in text
    assert caplog.text.count("secret") >= 2


async def test_repository_control():
    async with faked() as (runtime, client):
        index = (await client.get_model_repository_index()).models
        await client.load_model("m", config="{}", files={"file:1/model.py": b"x"})
        await client.unload_model("m", unload_dependents=True)
        assert await refused(client.load_model("broken")) == ("INVALID_ARGUMENT", "it is broken")
    assert [(model.name, model.state, model.reason) for model in index] == [
        ("echo", "READY", ""),
        ("broken", "UNAVAILABLE", "it is broken"),
        ("never", "", ""),
    ]
    assert runtime.loads == [
        ("load", "m", "{}", {"1/model.py": b"x"}),
        ("unload", "m", True),
        ("load", "broken", None, None),
    ]


async def test_health_check_follows_readiness():
    async with faked() as (runtime, client), grpc.aio.insecure_channel(client.address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"") == b"\x08\x01"
        runtime.is_up = False
        assert await check(b"") == b"\x08\x02"


async def test_what_is_not_offered_says_so():
    async with faked() as (_, client):
        for call in (
            client.get_trace_settings(),
            client.get_log_settings(),
            client.register_system_shared_memory("r", "/k", 1),
            client.get_cuda_shared_memory_status(),
        ):
            status, text = await refused(call)
            assert status == "UNIMPLEMENTED"
            assert "this server" in text
        assert not (await client.get_system_shared_memory_status()).regions


# --- streams --------------------------------------------------------------------------------------


async def once(*requests):
    for request in requests:
        yield request


async def stream(client, *requests, **options):
    """What one stream answers: (id, values or error, is it final)."""
    told = []
    async for result, error in client.stream_infer(once(*requests), **options):
        if error is not None:
            told.append((None, error.message(), None))
            continue
        response = result.get_response()
        outputs = [result.as_numpy(output.name).flat[0] for output in response.outputs]
        told.append((response.id, outputs, response.parameters["triton_final_response"].bool_param))
    return told


async def raw_stream(client, *messages):
    """The messages that one stream answers, asked without Triton's client."""
    async with grpc.aio.insecure_channel(client.address) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(once(*messages))
        return [message async for message in call]


def count(number, request_id):
    array = np.array([[number]], np.int32)
    return {"model_name": "many", "inputs": [tensor("X", array, "INT32")], "request_id": request_id}


def count_message(number):
    message = service_pb2.ModelInferRequest(model_name="many", id="a")
    message.inputs.add(name="X", datatype="INT32", shape=[1, 1]).contents.int_contents.append(number)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


MANY = FakeModel(answers=countdown, is_decoupled=True)


async def test_a_stream_gives_every_answer_and_says_which_is_final():
    async with faked(many=MANY) as (_, client):
        plain = await stream(client, count(2, "a"))
        silent = await stream(client, count(0, "a"))
        told = await raw_stream(client, count_message(2))
        nothing = await raw_stream(client, count_message(0))
    assert (plain, silent) == ([("a", [2], False), ("a", [1], False)], [])
    finals = [message.infer_response.parameters["triton_final_response"].bool_param for message in told]
    assert finals == [False, False, True]
    assert [(len(message.infer_response.outputs), message.infer_response.id) for message in nothing] == [(0, "a")]


async def test_a_stream_of_a_model_that_is_gone_before_its_last_answer_ends_well():
    async def last(request):
        yield answer(request, is_final=False)
        del runtime.models["last"]
        yield answer(request, outputs={})

    asked = service_pb2.ModelInferRequest(model_name="last", id="a")
    asked.inputs.add(name="X", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(1)
    asked.outputs.add(name="X").parameters["classification"].int64_param = 1
    async with faked(last=FakeModel(answers=last, is_decoupled=True)) as (runtime, client):
        messages = await raw_stream(client, asked)
    assert [message.error_message for message in messages] == [""]
    assert messages[0].infer_response.raw_output_contents[0][4:] == b"1.000000:0:zero"


async def test_requests_of_several_models_share_a_stream_and_enter_in_order():
    async with faked(many=MANY) as (runtime, client):
        requests = [count(3, "a"), {"model_name": "echo", "inputs": floats(7), "request_id": "b"}, count(2, "c")]
        told = await stream(client, *requests)
    assert [request.request_id for request in runtime.requests] == ["a", "b", "c"]
    assert [entry[1] for entry in told if entry[0] == "a"] == [[3], [2], [1]]
    assert [entry for entry in told if entry[0] == "b"] == [("b", [7.0], True)]
    assert [entry[1] for entry in told if entry[0] == "c"] == [[2], [1]]


async def test_a_slow_request_holds_up_no_other_of_its_stream():
    gate = Gate()

    async def requests():
        yield {"model_name": "gated", "inputs": floats(1), "request_id": "slow"}
        yield {"model_name": "echo", "inputs": floats(2), "request_id": "quick"}

    async with faked(gated=FakeModel(answers=gate.answers)) as (_, client):
        ids = []
        async for result, _ in client.stream_infer(requests()):
            ids.append(result.get_response().id)
            gate.opened.set()
    assert ids == ["quick", "slow"]


async def test_errors_on_a_stream_carry_the_id_and_the_stream_goes_on():
    async def some(request):
        yield answer(request, error=None, is_final=False)
        yield answer(request, outputs={}, error=invalid("only this one"), is_final=False)
        yield answer(request)

    malformed = service_pb2.ModelInferRequest(model_name="some", id="m")
    malformed.inputs.add(name="X", datatype="WHAT", shape=[1])
    asked = [service_pb2.ModelInferRequest(model_name=name, id=key) for name, key in (("nope", "w"), ("some", "s"))]
    async with faked(some=FakeModel(answers=some)) as (_, client):
        messages = await raw_stream(client, *asked, malformed)
    told = [(message.infer_response.id, message.error_message) for message in messages]
    assert ("w", "Request for unknown model: 'nope' is not found") in told
    assert ("m", "[request id: m] invalid datatype for input 'X': 'WHAT'") in told
    assert [text for request_id, text in told if request_id == "s"] == ["", "only this one", ""]


async def test_errors_become_the_streams_status_where_the_client_wants_that():
    gate = Gate()
    async with faked(gated=FakeModel(answers=gate.answers), fail=FakeModel(answers=failing)) as (runtime, client):
        requests = [
            {"model_name": "gated", "inputs": floats(1)},
            {"model_name": "fail", "inputs": floats(1), "parameters": {"code": "UNAVAILABLE"}},
        ]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream(client, *requests, headers={"triton_grpc_error": "true"})
        assert (error.value.code(), error.value.details()) == (grpc.StatusCode.UNAVAILABLE, "own text")
        await until(lambda: runtime.cancelled)


async def test_cancelling_a_stream_cancels_what_is_in_flight():
    gate = Gate()
    async with faked(gated=FakeModel(answers=gate.answers)) as (runtime, client):
        request = {"model_name": "gated", "inputs": floats(1)}
        answers = client.stream_infer(once(request, request))
        taking = asyncio.create_task(anext(aiter(answers)))
        await until(lambda: len(runtime.requests) == 2)
        answers.cancel()
        await until(lambda: len(runtime.cancelled) == 2)
        with pytest.raises((asyncio.CancelledError, StopAsyncIteration, InferenceServerException)):
            await taking


async def test_the_blocking_client_streams_too():
    async with faked(many=MANY) as (_, client):

        def ask():
            told = queue.Queue()
            with tritonclient.grpc.InferenceServerClient(client.address) as blocking:
                blocking.start_stream(lambda result, error: told.put((result, error)))
                made = tritonclient.grpc.InferInput("X", [1, 1], "INT32")
                made.set_data_from_numpy(np.array([[2]], np.int32))
                blocking.async_stream_infer("many", [made], request_id="a", enable_empty_final_response=True)
                return [told.get(timeout=10)[0].get_response().parameters["triton_final_response"] for _ in range(3)]

        finals = await asyncio.to_thread(ask)
    assert [final.bool_param for final in finals] == [False, False, True]


async def test_stopping_finishes_what_streams_have_asked_for_and_ends_them():
    gate = Gate()
    never = asyncio.Event()

    async def requests():
        yield {"model_name": "gated", "inputs": floats(1), "request_id": "a"}
        await never.wait()

    async with faked(gated=FakeModel(answers=gate.answers)) as (runtime, client):
        answers = aiter(client.stream_infer(requests()))
        taking = asyncio.create_task(anext(answers))
        await until(lambda: runtime.requests)
        stopping = asyncio.create_task(client.server.stop(grace_s=30))
        await asyncio.sleep(0)
        gate.opened.set()
        result, error = await taking
        assert (result.get_response().id, error) == ("a", None)
        with pytest.raises(grpc.aio.AioRpcError, match="Server is stopping"):
            await anext(answers)
        await asyncio.wait_for(stopping, 10)
        never.set()


class Textless:
    def __str__(self):
        raise ZeroDivisionError


BAD_TEXTS = {"object": Textless(), "none": None, "surrogate": "half \udcff", "long": "日" * 20_000}


async def badly_failing(request):
    if request.request_id == "name":
        yield answer(request, outputs={"half \udcff": request.inputs["X"]})
    if request.request_id in BAD_TEXTS:
        raise InferenceError(ErrorCode.UNAVAILABLE, BAD_TEXTS[request.request_id])
    yield answer(request)


async def test_an_error_of_any_text_is_answered_and_harms_no_other_of_its_stream():
    ids = [*BAD_TEXTS, "name", "good"]
    async with faked(bad=FakeModel(answers=badly_failing)) as (_, client):
        for request_id in BAD_TEXTS:
            status, text = await refused(client.infer("bad", floats(1), request_id=request_id, client_timeout=10))
            assert status == "UNAVAILABLE"
            assert text
        asked = [{"model_name": "bad", "inputs": floats(1), "request_id": request_id} for request_id in ids]
        told = await stream(client, *asked)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream(client, asked[2], headers={"triton_grpc_error": "true"})
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert sorted(entry[0] or "" for entry in told) == [""] * 5 + ["good"]


async def test_what_is_no_message_is_refused_without_a_traceback(caplog):
    async with faked() as (_, client), grpc.aio.insecure_channel(client.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\xff")
        good = service_pb2.ModelInferRequest(model_name="echo", id="a").SerializeToString()
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(once(b"\xff", good))
        first, second = [service_pb2.ModelStreamInferResponse.FromString(message) async for message in call]
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sorted((first.error_message, second.error_message)) == ["", "the request is not a message of this call"]
    assert not caplog.records


async def test_a_stream_takes_no_more_requests_than_it_may_leave_unanswered(monkeypatch):
    monkeypatch.setattr(oip_stream, "MAX_UNANSWERED", 2)
    gate = Gate()
    requests = [{"model_name": "gated", "inputs": floats(1), "request_id": str(number)} for number in range(5)]
    async with faked(gated=FakeModel(answers=gate.answers)) as (runtime, client):
        taking = asyncio.create_task(stream(client, *requests))
        await until(lambda: len(runtime.requests) == 2)
        assert len(await stream(client, {"model_name": "echo", "inputs": floats(1)})) == 1  # time for a third to come
        assert len(runtime.requests) == 3
        gate.opened.set()
        assert sorted(entry[0] for entry in await taking) == ["0", "1", "2", "3", "4"]


async def test_a_client_that_leaves_its_stream_is_no_fault_of_the_server(caplog):
    left = asyncio.Event()

    async def endless(request):
        yield answer(request, is_final=False)
        await left.wait()
        for _ in range(3):
            yield answer(request, is_final=False)

    class Context:
        def __init__(self):
            self.writes = 0

        def invocation_metadata(self):
            return ()

        def time_remaining(self):
            return None

        async def write(self, _data):
            self.writes += 1
            if self.writes > 1:
                raise grpc.aio.UsageError("RPC already finished.")
            left.set()

    context = Context()
    runtime = FakeRuntime(models={"endless": FakeModel(answers=endless, is_decoupled=True)})
    message = service_pb2.ModelInferRequest(model_name="endless")
    message.inputs.add(name="X", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    assert await oip_stream.serve_stream(runtime, once(message), context, readers=set()) is None
    assert context.writes == 2
    assert len(runtime.cancelled) == 1
    assert not caplog.records


# --- over the real runtime ------------------------------------------------------------------------


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
        (0, "UNKNOWN"),
        (1, "INTERNAL"),
        (2, "NOT_FOUND"),
        (3, "INVALID_ARGUMENT"),
        (4, "UNAVAILABLE"),
        (5, "UNIMPLEMENTED"),
        (6, "ALREADY_EXISTS"),
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


async def test_labels_of_the_best_classes(repository, tmp_path, write_python):
    labelled = PYTHON_CONFIG.replace('name: "Y"', 'name: "Y" label_filename: "labels.txt"')
    (write_python("double", config=labelled) / "labels.txt").write_text("cat\ndog\n")
    async with served(repository, tmp_path) as client:
        wanted = [triton.InferRequestedOutput("Y", class_count=2)]
        result = await client.infer("double", [tensor("X", np.array([[1, 2]], np.float32), "FP32")], outputs=wanted)
    assert result.as_numpy("Y").tolist() == [[b"4.000000:1:dog", b"2.000000:0:cat"]]
