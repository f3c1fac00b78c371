"""The in-process PyTorch runtime as a backend: the only file of the gateway that imports `local_runtime`."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import ml_dtypes
import numpy as np

from gateway.backends.triton_faults import fault_of, wrong_names
from gateway.core.breaker import ANY
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFigures
from gateway.core.tensors import BF16, Array, check, from_numpy, to_numpy
from gateway.core.types import BackendCall, BackendEvent, Place, Tensor, TensorPayload, Tensors
from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.messages import InferAnswer, InferRequest
from local_runtime.runtime import LocalRuntime, ModelStatistics

# The runtime names its errors as Triton's core does; gRPC's names of the same are what `triton_faults` knows.
GRPC_NAMES: Final[Mapping[ErrorCode, str]] = {
    ErrorCode.INVALID_ARG: "INVALID_ARGUMENT",
    ErrorCode.NOT_FOUND: "NOT_FOUND",
    ErrorCode.UNSUPPORTED: "UNIMPLEMENTED",
    ErrorCode.INTERNAL: "INTERNAL",
    ErrorCode.UNAVAILABLE: "UNAVAILABLE",
    ErrorCode.CANCELLED: "CANCELLED",
    ErrorCode.ALREADY_EXISTS: "ALREADY_EXISTS",
    ErrorCode.UNKNOWN: "UNKNOWN",
    ErrorCode.DEADLINE: "DEADLINE_EXCEEDED",
}


class LocalBackend:
    """Tensor calls to an opened `LocalRuntime`, which this owns: `close` closes it."""

    def __init__(self, name: str, runtime: LocalRuntime) -> None:
        self.name = name
        self._runtime = runtime

    @classmethod
    async def open(cls, name: str, repository: Path, *, models: Sequence[str] | None = None) -> Self:
        """Load the models of a repository, or the named ones, and return when all loads have ended.

        Raises ValueError where there is no such repository. A model that cannot be loaded is simply not ready.
        """
        try:
            return cls(name, await LocalRuntime.open(repository, models=models))
        except ModelLoadError as error:
            raise ValueError(str(error)) from error

    async def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """Exactly one `Tensors`, with its queue time and batch size."""
        payload = call.payload
        if not isinstance(payload, TensorPayload):
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message="a chat call to a tensor backend"))
        request = InferRequest(
            model=call.model,
            version=call.version,
            request_id=call.request_id,
            timeout_us=timeout_us,
            inputs=_arrays(payload.inputs),
            outputs=payload.outputs,
        )
        try:
            answer = await self._runtime.infer(request)
        except InferenceError as error:
            raise BackendError(fault_of(GRPC_NAMES[error.code], error.message)) from error
        yield _tensors(answer, payload.outputs)

    def replicas(self) -> Sequence[str]:
        """One, in this process."""
        return ()

    async def probe(self, place: Place) -> None:
        """Whether the runtime serves the model now; costs a look-up."""
        if place.model != ANY and not self._runtime.is_ready(place.model, place.version):
            raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message=f"model '{place.model}' is not ready"))

    async def figures(self) -> Sequence[ModelFigures]:
        """The runtime's own counters."""
        return [_figures(one) for one in self._runtime.statistics()]

    async def close(self) -> None:
        """Finish accepted work within the runtime's grace time, then stop it."""
        await self._runtime.close()


def _arrays(tensors: tuple[Tensor, ...]) -> dict[str, Array]:
    """The inputs as arrays; what does not hold what it says is refused in the caller's name."""
    arrays: dict[str, Array] = {}
    for tensor in tensors:
        try:
            arrays[tensor.name] = _array(tensor)
        except ValueError as error:
            raise BackendError(Fault(kind=FaultKind.REFUSED_INPUT, message=str(error))) from error
    return arrays


def _array(tensor: Tensor) -> Array:
    """The tensor as an array; plain numpy has no BF16, the package that the runtime uses for it does."""
    if tensor.datatype != BF16:
        return to_numpy(tensor)
    check(tensor)
    return np.frombuffer(tensor.data, dtype=ml_dtypes.bfloat16).reshape(tensor.shape)


def _tensor(name: str, array: Array) -> Tensor:
    if array.dtype != ml_dtypes.bfloat16:
        return from_numpy(name, array)
    return Tensor(name=name, datatype=BF16, shape=array.shape, data=array.tobytes())


def _tensors(answer: InferAnswer, wanted: tuple[str, ...]) -> Tensors:
    wrong = wrong_names(list(answer.outputs), wanted)
    if wrong:
        raise BackendError(Fault(kind=FaultKind.BROKEN, message=wrong))
    try:
        outputs = tuple(_tensor(name, answer.outputs[name]) for name in wanted or answer.outputs)
    except ValueError as error:
        raise BackendError(Fault(kind=FaultKind.BROKEN, message=str(error))) from error
    return Tensors(
        outputs=outputs,
        version=answer.version,
        queue_us=answer.queue_us,
    )


def _figures(stats: ModelStatistics) -> ModelFigures:
    return ModelFigures(
        replica="",
        model=stats.name,
        version=stats.version,
        requests=stats.success.count,
        failures=stats.fail.count,
        inferences=stats.inference_count,
        executions=stats.execution_count,
        queue_us=stats.queue.total_us,
        compute_input_us=stats.compute_input.total_us,
        compute_infer_us=stats.compute_infer.total_us,
        compute_output_us=stats.compute_output.total_us,
        batch_sizes=stats.batch_sizes,
    )
