"""The local backend over a runtime that answers as told: what is its own is translation."""

import numpy as np
import pytest

from gateway.backends.local import GRPC_NAMES, LocalBackend
from gateway.core.errors import BackendError, FaultKind, Reply
from gateway.core.tensors import to_numpy
from gateway.core.types import BackendCall, OpenAIPayload, Place, SequenceStep, Tensor, TensorPayload, Tensors
from gateway.ports import ModelServer
from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import InferAnswer
from local_runtime.scheduling.stats import Compute, StatsRecorder
from tests.kit import local_fake


class Runtime:
    def __init__(self, outcome=None):
        self.outcome = outcome
        self.requests = []
        self.is_closed = False

    async def infer(self, request):
        self.requests.append(request)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        outputs = request.inputs if self.outcome is None else self.outcome
        return InferAnswer(model="m", version="2", outputs=outputs, queue_us=5, compute_us=7, batch_size=3)

    def is_ready(self, model, version=""):
        return model == "good"

    def statistics(self):
        recorders = [
            StatsRecorder(name=name, version=version) for name, version in (("a", "1"), ("b", "1"), ("b", "2"))
        ]
        for recorder in recorders:
            for _ in range(2):
                recorder.executed(rows=3, compute=Compute())
        return tuple(recorder.snapshot() for recorder in recorders)

    async def close(self):
        self.is_closed = True


def tensor(name="X", datatype="FP32", shape=(2,), data=bytes(8)):
    return Tensor(name=name, datatype=datatype, shape=shape, data=data)


def call(*inputs, outputs=(), payload=None):
    payload = payload or TensorPayload(inputs=inputs or (tensor(),), outputs=outputs)
    return BackendCall(request_id="req-1", model="good", version="2", payload=payload)


async def fault_of(outcome, request=None):
    with pytest.raises(BackendError) as caught:
        await anext(LocalBackend("local", Runtime(outcome)).infer(request or call(), timeout_us=1000))
    return caught.value.fault


async def test_an_answer():
    runtime = Runtime()
    text = tensor("T", "BYTES", (1,), b"\x01\x00\x00\x00x")
    backend = LocalBackend("local", runtime)
    (answer,) = [item async for item in backend.infer(call(tensor(), text, outputs=("T", "X")), timeout_us=1000)]
    assert answer == Tensors(outputs=(text, tensor()), version="2", queue_us=5)
    (request,) = runtime.requests
    assert (request.model, request.version, request.request_id) == ("good", "2", "req-1")
    assert (request.timeout_us, request.outputs) == (1000, ("T", "X"))
    assert request.inputs["T"].tolist() == [b"x"]


async def test_bf16_goes_through_bit_for_bit():
    values = tensor(datatype="BF16", shape=(2, 2), data=bytes.fromhex("803f00800100807f"))
    (answer,) = [item async for item in LocalBackend("local", Runtime()).infer(call(values), timeout_us=1000)]
    assert answer.outputs == (values,)


async def test_what_belongs_to_a_request_comes_along():
    runtime = Runtime()
    payload = TensorPayload(inputs=(tensor(),), parameters={"a": 1}, priority=2, queue_timeout_us=7)
    step = SequenceStep(id=5, is_start=True)
    request = BackendCall(request_id="r", model="good", version="", payload=payload, sequence=step)
    await anext(LocalBackend("local", runtime).infer(request, timeout_us=1000))
    (asked,) = runtime.requests
    assert (asked.parameters, asked.priority, asked.queue_timeout_us) == ({"a": 1}, 2, 7)
    assert (asked.sequence_id, asked.sequence_start, asked.sequence_end) == (5, True, False)


def test_every_code_of_the_runtime_is_known():
    assert set(GRPC_NAMES) == set(ErrorCode)


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (ErrorCode.INVALID_ARG, "[request id: a] bad 'X' for model 'm'", FaultKind.REFUSED_INPUT),
        (ErrorCode.NOT_FOUND, "Request for unknown model: 'x' is not found", FaultKind.UNKNOWN_MODEL),
        (ErrorCode.UNSUPPORTED, "x", FaultKind.UNSUPPORTED),
        (ErrorCode.INTERNAL, "x", FaultKind.FAILED),
        (ErrorCode.UNAVAILABLE, "[request id: a] Exceeds maximum queue size", FaultKind.OVERLOADED),
        (ErrorCode.UNAVAILABLE, "Server is stopping", FaultKind.UNAVAILABLE),
        (ErrorCode.CANCELLED, "x", FaultKind.UNAVAILABLE),
        (ErrorCode.DEADLINE, "x", FaultKind.TIMEOUT),
    ],
)
async def test_errors(code, text, kind):
    found = await fault_of(InferenceError(code, text))
    assert found.kind is kind
    assert (found.reply is None) == (kind is FaultKind.TIMEOUT)
    if kind is FaultKind.REFUSED_INPUT:
        assert found.message == "bad 'X' for the model"


@pytest.mark.parametrize(
    ("outcome", "request_", "kind"),
    [
        ({}, call(tensor(), outputs=("X",)), FaultKind.BROKEN),
        ({"X": np.array([1j])}, None, FaultKind.BROKEN),
        (None, call(tensor(datatype="BF16", shape=(5,))), FaultKind.REFUSED_INPUT),
        (None, call(tensor(shape=(3,))), FaultKind.REFUSED_INPUT),
        (None, call(payload=OpenAIPayload(body={})), FaultKind.UNSUPPORTED),
    ],
)
async def test_what_does_not_fit(outcome, request_, kind):
    assert (await fault_of(outcome, request_)).kind is kind


async def test_probe_statistics_and_close():
    runtime = Runtime()
    backend = LocalBackend("local", runtime)
    await backend.probe(Place(backend="local", model="good"))
    await backend.probe(Place(backend="local", model="*"))
    with pytest.raises(BackendError):
        await backend.probe(Place(backend="local", model="bad"))
    figures = await backend.figures()
    assert [(one.model, one.version, one.executions, one.batch_sizes) for one in figures] == [
        ("a", "1", 2, {3: 2}),
        ("b", "1", 2, {3: 2}),
        ("b", "2", 2, {3: 2}),
    ]
    await backend.close()
    assert runtime.is_closed


# --- streams, and as a model server: over a runtime with a real face --------------------------------------


async def counted(request):
    for number in range(3):
        yield local_fake.answer(request, is_final=False, parameters={"number": number})
    yield local_fake.answer(request, outputs={}, is_final=True)


async def failing(request):
    yield local_fake.answer(request, is_final=False)
    yield local_fake.answer(request, outputs={}, error=InferenceError(ErrorCode.INVALID_ARG, "no more"))


def fake():
    models = {
        "plain": local_fake.FakeModel(),
        "many": local_fake.FakeModel(answers=counted, is_decoupled=True),
        "failing": local_fake.FakeModel(answers=failing, is_decoupled=True),
    }
    return local_fake.FakeRuntime(models=models)


def streamed(model, **fields):
    payload = TensorPayload(inputs=(tensor(shape=(1, 2)),), stream=True, **fields)
    return BackendCall(request_id="r", model=model, version="", payload=payload)


@pytest.mark.parametrize(("wants_empty_final", "count"), [(False, 3), (True, 4)])
async def test_a_stream(wants_empty_final, count):
    backend = LocalBackend("local", fake())
    request = streamed("many", wants_empty_final=wants_empty_final)
    found = [one async for one in backend.infer(request, timeout_us=10**6)]
    assert len(found) == count
    assert [one.parameters["number"] for one in found[:3]] == [0, 1, 2]
    assert not any(one.is_final for one in found[:3])


async def test_an_error_in_a_stream():
    answers = LocalBackend("local", fake()).infer(streamed("failing"), timeout_us=10**6)
    assert isinstance(await anext(answers), Tensors)
    with pytest.raises(BackendError) as caught:
        await anext(answers)
    assert caught.value.fault.reply == Reply(code="INVALID_ARGUMENT", text="no more")


async def test_a_decoupled_model_cannot_be_asked_once():
    request = BackendCall(request_id="r", model="many", version="", payload=TensorPayload(inputs=(tensor(),)))
    with pytest.raises(BackendError) as caught:
        await anext(LocalBackend("local", fake()).infer(request, timeout_us=10**6))
    assert caught.value.fault.kind is FaultKind.UNSUPPORTED


async def test_as_a_model_server():
    runtime = fake()
    backend, plain = LocalBackend("local", runtime), Place(backend="local", model="plain")
    assert isinstance(backend, ModelServer)
    facts = await backend.facts(plain)
    assert (facts.name, facts.max_batch_size, list(facts.inputs)) == ("plain", 8, ["X"])
    assert (await backend.facts(Place(backend="local", model="many"))).is_decoupled
    assert (await backend.server_metadata(""))["name"] == "local_runtime"
    assert (await backend.metadata(plain))["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [-1, -1]}]
    assert (await backend.config(plain))["max_batch_size"] == 8
    assert "model_stats" in await backend.statistics(plain)
    assert {line["name"] for line in await backend.index("")} >= {"plain", "many"}
    await backend.load("plain", replica="", config="{}", files={"file:1/a": b"x"})
    await backend.unload("plain", replica="", unload_dependents=True)
    assert len(runtime.loads) == 2
    for asked in (backend.facts, backend.metadata, backend.config):
        with pytest.raises(BackendError) as caught:
            await asked(Place(backend="local", model="nope"))
        assert caught.value.fault.kind is FaultKind.UNKNOWN_MODEL
        assert caught.value.fault.reply is not None


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_best_classes_in_place_of_values(is_stream):
    values = tensor(shape=(1, 2), data=np.array([0.25, 0.5], np.float32).tobytes())
    payload = TensorPayload(inputs=(values,), outputs=("X",), classes={"X": 1}, stream=is_stream)
    request = BackendCall(request_id="r", model="plain", version="", payload=payload)
    (answer,) = [one async for one in LocalBackend("local", fake()).infer(request, timeout_us=10**6)]
    assert to_numpy(answer.outputs[0]).tolist() == [[b"0.500000:1:one"]]
