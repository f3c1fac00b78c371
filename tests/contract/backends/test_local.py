"""The local backend over a runtime that answers as told: what is its own is translation."""

import numpy as np
import pytest

from gateway.backends.local import GRPC_NAMES, LocalBackend
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import BackendCall, ChatPayload, Tensor, TensorPayload, Tensors
from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import InferAnswer
from local_runtime.scheduling.stats import Compute, StatsRecorder


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
    if kind is FaultKind.REFUSED_INPUT:
        assert found.message == "bad 'X' for the model"


@pytest.mark.parametrize(
    ("outcome", "request_", "kind"),
    [
        ({}, call(tensor(), outputs=("X",)), FaultKind.BROKEN),
        ({"X": np.array([1j])}, None, FaultKind.BROKEN),
        (None, call(tensor(datatype="BF16", shape=(5,))), FaultKind.REFUSED_INPUT),
        (None, call(tensor(shape=(3,))), FaultKind.REFUSED_INPUT),
        (None, call(payload=ChatPayload(body={})), FaultKind.UNSUPPORTED),
    ],
)
async def test_what_does_not_fit(outcome, request_, kind):
    assert (await fault_of(outcome, request_)).kind is kind


async def test_probe_statistics_and_close():
    runtime = Runtime()
    backend = LocalBackend("local", runtime)
    await backend.probe("good", "")
    with pytest.raises(BackendError):
        await backend.probe("bad", "")
    assert await backend.batch_sizes() == {"a": {3: 2}, "b": {3: 4}}
    await backend.close()
    assert runtime.is_closed
