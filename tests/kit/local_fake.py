"""The local runtime's face without models: what the servers in front of it ask, and answers made up here."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2

from local_runtime.errors import ErrorCode, InferenceError, unknown_model
from local_runtime.executors.model_metrics import MetricRegistry
from local_runtime.messages import (
    InferAnswer,
    InferRequest,
    ModelMetadata,
    ModelState,
    ModelStatus,
    TensorMetadata,
)
from local_runtime.scheduling.stats import Compute, FailureReason, ModelStatistics, StatsRecorder

Answers = Callable[[InferRequest], AsyncGenerator[InferAnswer, None]]


def answer(request: InferRequest, **fields: Any) -> InferAnswer:
    """What was asked comes back, with `fields` in place of the usual ones."""
    usual = {"outputs": request.inputs, "queue_us": 1, "compute_us": 2, "batch_size": 1}
    return InferAnswer(model=request.model, version=request.version or "1", **(usual | fields))


async def echo(request: InferRequest) -> AsyncGenerator[InferAnswer, None]:
    """Every input is an output."""
    yield answer(request)


@dataclass(kw_only=True)
class FakeModel:
    """One model; `answers` decides what comes of a request."""

    answers: Answers = echo
    inputs: Sequence[tuple[str, str, tuple[int, ...]]] = (("X", "FP32", (-1, -1)),)
    max_batch_size: int = 8
    is_decoupled: bool = False


@dataclass(kw_only=True)
class FakeRuntime:
    """`LocalRuntime` for the servers. Remembers what it was asked for, in order."""

    models: Mapping[str, FakeModel]
    requests: list[InferRequest] = field(default_factory=list)
    loads: list[tuple[Any, ...]] = field(default_factory=list)
    cancelled: list[InferRequest] = field(default_factory=list)
    is_up: bool = True
    custom_metrics: MetricRegistry = field(default_factory=MetricRegistry)

    async def infer(self, request: InferRequest) -> InferAnswer:
        if self._model(request.model).is_decoupled:
            raise InferenceError(ErrorCode.UNSUPPORTED, "it can only be streamed")
        async for one in self.stream(request):
            return one
        raise AssertionError("a model that is not decoupled answers")

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferAnswer, None]:
        self.requests.append(request)
        try:
            async for one in self._model(request.model).answers(request):
                yield one
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request)
            raise

    def is_ready(self, model: str, version: str = "") -> bool:
        return model in self.models and version in ("", "1")

    def is_server_ready(self) -> bool:
        return self.is_up

    def index(self, *, ready_only: bool = False) -> tuple[ModelStatus, ...]:
        ready = [ModelStatus(name=name, version="1", state=ModelState.READY, reason="") for name in self.models]
        broken = ModelStatus(name="broken", version="2", state=ModelState.UNAVAILABLE, reason="it is broken")
        never = ModelStatus(name="never", version="", state=ModelState.NONE, reason="")
        return tuple(ready) if ready_only else (*ready, broken, never)

    def model_metadata(self, model: str, version: str = "") -> ModelMetadata:
        found = self._model(model)
        tensors = tuple(TensorMetadata(name=n, datatype=d, shape=s) for n, d, s in found.inputs)
        return ModelMetadata(name=model, versions=("1",), platform="python", inputs=tensors, outputs=tensors)

    def model_config(self, model: str, version: str = "") -> Any:
        found = self._model(model)
        config = model_config_pb2.ModelConfig(name=model, max_batch_size=found.max_batch_size)
        config.input.add(name="X", data_type=model_config_pb2.TYPE_FP32, dims=[-1])
        config.dynamic_batching.max_queue_delay_microseconds = 7
        config.parameters["WHAT"].string_value = "that"
        config.model_transaction_policy.decoupled = found.is_decoupled
        return config

    def labels(self, model: str, version: str, output: str) -> tuple[str, ...]:
        return ("zero", "one") if output == "X" else ()

    def statistics(self, model: str = "", version: str = "") -> tuple[ModelStatistics, ...]:
        if model:
            self._model(model)
        return tuple(statistics(name) for name in self.models if model in ("", name))

    async def load(self, model: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        self.loads.append(("load", model, config, files))
        if model == "broken":
            raise InferenceError(ErrorCode.INVALID_ARG, "it is broken")

    async def unload(self, model: str, *, unload_dependents: bool = False) -> None:
        self.loads.append(("unload", model, unload_dependents))

    def _model(self, name: str) -> FakeModel:
        if name not in self.models:
            raise unknown_model(name)
        return self.models[name]


def statistics(name: str) -> ModelStatistics:
    """Two requests in one batch of 3 rows, and one that was refused."""
    recorder = StatsRecorder(name=name, version="1")
    compute = Compute(input_us=1, infer_us=20, output_us=3)
    recorder.executed(rows=3, compute=compute)
    recorder.answered(rows=1, queue_us=100, compute=compute, at_ms=5)
    recorder.answered(rows=2, queue_us=200, compute=compute, at_ms=6)
    recorder.failed(FailureReason.REJECTED, after_us=9)
    recorder.loaded(load_us=1_500_000)
    return recorder.snapshot(pending_count=4)


async def countdown(request: InferRequest) -> AsyncGenerator[InferAnswer, None]:
    """X = n: n answers, counting down to 1, then an empty final one. X = 0: nothing but that."""
    for left in range(int(request.inputs["X"].flat[0]), 0, -1):
        yield answer(request, outputs={"Y": np.array([left], np.int32)}, is_final=False)
    yield answer(request, outputs={})


async def failing(request: InferRequest) -> AsyncGenerator[InferAnswer, None]:
    """Fails with the code that its parameter `code` names."""
    raise InferenceError(ErrorCode[str(request.parameters["code"])], "own text")
    yield


class Gate:
    """Answers that wait until the gate is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def answers(self, request: InferRequest) -> AsyncGenerator[InferAnswer, None]:
        await self.opened.wait()
        yield answer(request)
