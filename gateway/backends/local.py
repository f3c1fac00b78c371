"""The in-process PyTorch runtime as a backend: the only file of the gateway that brings the runtime itself along."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Final, Self

import ml_dtypes
import numpy as np

from gateway.backends.triton import documents as triton_documents
from gateway.backends.triton.faults import fault_of, wrong_names
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFacts, ModelFigures
from gateway.core.tensors import BF16, Array, check, from_numpy, to_numpy
from gateway.core.types import ANY, BackendCall, BackendEvent, Place, SequenceStep, Tensor, TensorPayload, Tensors
from gateway.ports import JsonObject
from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.messages import InferAnswer, InferRequest, ModelControl
from local_runtime.protocol import oip_describe
from local_runtime.protocol.answering import classes_of, server_version, with_classes
from local_runtime.runtime import LocalRuntime, ModelStatistics, RuntimeOptions

# The runtime names its errors as Triton's core does; gRPC's names of the same are what `triton.faults` knows.
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
_ALONE: Final = SequenceStep(id=0)  # part of no sequence, in Triton's words


class LocalBackend:
    """Tensor calls to an opened `LocalRuntime`, which this owns: `close` closes it."""

    speaks: Final = "tensors"
    is_probed: Final = True

    def __init__(self, name: str, runtime: LocalRuntime) -> None:
        self.name = name
        self._runtime = runtime

    @classmethod
    async def open(cls, name: str, repository: Path, *, models: Sequence[str] | None = None) -> Self:
        """Load the models of a repository, or the named ones, and return when all loads have ended.

        Raises ValueError where there is no such repository. A model that cannot be loaded is simply not ready.
        """
        options = RuntimeOptions(control_mode=ModelControl.EXPLICIT)
        try:
            return cls(name, await LocalRuntime.open(repository, models=models or ("*",), options=options))
        except ModelLoadError as error:
            raise ValueError(str(error)) from error

    async def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """One `Tensors` with its queue time, or those of a stream."""
        payload = call.payload
        if not isinstance(payload, TensorPayload):
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message="a chat call to a tensor backend"))
        request = _request(call, payload, timeout_us)
        try:
            classes = classes_of(self._runtime, request, payload.classes)
            if not payload.stream:
                yield _tensors(with_classes(await self._runtime.infer(request), classes), payload.outputs)
                return
            async with aclosing(self._runtime.stream(request)) as answers:
                async for answer in answers:
                    if answer.error is not None:
                        raise answer.error
                    if answer.outputs:
                        yield _tensors(with_classes(answer, classes), payload.outputs)
                    elif payload.wants_empty_final:
                        yield _tensors(answer, ())
        except InferenceError as error:
            raise _fault(error) from error

    def engine_load(self, replica: str) -> None:  # noqa: ARG002 - the port's
        """Nothing: it is no LLM server."""
        return

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

    # --- as a model server ------------------------------------------------------------------------

    async def facts(self, place: Place) -> ModelFacts:
        """See `ports.ModelServer`; as the model is served at this moment."""
        with _translated():
            metadata = self._runtime.model_metadata(place.model, place.version)
            return triton_documents.facts(metadata, self._runtime.model_config(place.model, place.version))

    async def server_metadata(self, replica: str) -> JsonObject:  # noqa: ARG002 - there is but this one
        """Name, version and extensions of the runtime."""
        return oip_describe.server(server_version())

    async def metadata(self, place: Place) -> JsonObject:
        """A model's inputs and outputs."""
        with _translated():
            return oip_describe.metadata(self._runtime.model_metadata(place.model, place.version))

    async def config(self, place: Place) -> JsonObject:
        """A model's whole configuration."""
        with _translated():
            return triton_documents.document(self._runtime.model_config(place.model, place.version))

    async def statistics(self, place: Place) -> JsonObject:
        """A model's counters; of all models with an empty model."""
        with _translated():
            return oip_describe.statistics(self._runtime.statistics(place.model, place.version))

    async def index(self, replica: str, *, ready_only: bool = False) -> list[JsonObject]:  # noqa: ARG002 - as above
        """The models of the repository, and the state of each version."""
        lines = oip_describe.index(self._runtime.index(ready_only=ready_only))
        return [{name: value for name, value in line.items() if value} for line in lines]

    async def load(
        self,
        model: str,
        *,
        replica: str,  # noqa: ARG002 - as above
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Load a model, or load it anew; returns when it is ready."""
        named = {name.removeprefix("file:"): content for name, content in (files or {}).items()}
        with _translated():
            await self._runtime.load(model, config=config, files=named or None)

    async def unload(self, model: str, *, replica: str, unload_dependents: bool = False) -> None:  # noqa: ARG002 - as above
        """Unload a model; returns when no new request is taken."""
        with _translated():
            await self._runtime.unload(model, unload_dependents=unload_dependents)


@contextmanager
def _translated() -> Iterator[None]:
    """The runtime's errors as `BackendError`."""
    try:
        yield
    except InferenceError as error:
        raise _fault(error) from error


def _fault(error: InferenceError) -> BackendError:
    return BackendError(fault_of(GRPC_NAMES[error.code], error.message))


def _request(call: BackendCall, payload: TensorPayload, timeout_us: int) -> InferRequest:
    step = call.sequence or _ALONE
    return InferRequest(
        model=call.model,
        version=call.version,
        request_id=call.request_id,
        timeout_us=timeout_us,
        inputs=_arrays(payload.inputs),
        outputs=payload.outputs,
        priority=payload.priority,
        queue_timeout_us=payload.queue_timeout_us,
        parameters=payload.parameters,
        sequence_id=step.id,
        sequence_start=step.is_start,
        sequence_end=step.is_end,
    )


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
    if wanted and (wrong := wrong_names(list(answer.outputs), wanted)):
        raise BackendError(Fault(kind=FaultKind.BROKEN, message=wrong))
    try:
        outputs = tuple([_tensor(name, answer.outputs[name]) for name in wanted or answer.outputs])
    except ValueError as error:
        raise BackendError(Fault(kind=FaultKind.BROKEN, message=str(error))) from error
    return Tensors(
        outputs=outputs,
        version=answer.version,
        queue_us=answer.queue_us,
        parameters=answer.parameters,
        is_final=answer.is_final,
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
