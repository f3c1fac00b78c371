"""Requests: those that a model answers, and those that it makes itself (business logic scripting)."""

import asyncio
import concurrent.futures
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.executors.faults import text_of
from local_runtime.executors.services import Services
from local_runtime.executors.shim import context
from local_runtime.executors.shim.errors import TritonError, TritonModelException
from local_runtime.executors.shim.responses import InferenceResponse, InferenceResponseSender, checked_parameters
from local_runtime.executors.shim.tensors import Tensor
from local_runtime.messages import Annotated, InferAnswer, InferRequest, Parameters, Tensors
from local_runtime.scheduling.validation import CheckedRequest, Respond

# Numbers of Triton's C interface (core tritonserver.h).
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2


@dataclasses.dataclass(frozen=True, slots=True)
class PreferredMemory:
    """Where a model would like the answer; it always gets it in CPU memory."""

    preferred_memory_type: int
    preferred_device_id: int = 0


class InferenceRequest:
    """A request that a model makes to another model: `model_name`, `requested_output_names` and `inputs` say what.

    `timeout` is how long it may wait in the other model's queue, in microseconds, where that model's queue policy
    lets requests say so; 0 for the policy's own. `model_version` -1 leaves the version to the runtime. `parameters`
    maps str to bool, int or str. `trace` is taken and ignored.
    """

    def __init__(  # noqa: PLR0913 - Triton's signature
        self,
        *,
        inputs: Sequence[Tensor],
        requested_output_names: Sequence[str],
        model_name: str,
        request_id: str = "",
        correlation_id: int | str = 0,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: object = None,
        parameters: Parameters | None = None,
    ) -> None:
        if not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        self._inputs = list(inputs)
        self._requested_output_names = list(requested_output_names)
        self._model_name = model_name
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters = parameters

    def inputs(self) -> list[Tensor]:
        """The input tensors, in config order."""
        return self._inputs

    def request_id(self) -> str:
        """The caller's id, or an empty string."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """The sequence it belongs to; 0 or an empty string for none."""
        return self._correlation_id

    def flags(self) -> int:
        """Start and end of a sequence, TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the flags of a request that is yet to be made."""
        self._flags = flags

    def timeout(self) -> int:
        """How long it may wait in the queue, in microseconds; 0 if it does not say."""
        return self._timeout

    def parameters(self) -> str:
        """The request's parameters in JSON."""
        return json.dumps(dict(self._parameters or {}))

    def trace(self) -> object:
        """What was given as trace."""
        return self._trace

    def preferred_memory(self) -> PreferredMemory | None:
        """What was given as preferred memory."""
        return self._preferred_memory

    def requested_output_names(self) -> list[str]:
        """The outputs that the caller wants; others may be left out."""
        return self._requested_output_names

    def model_name(self) -> str:
        """The model that is asked."""
        return self._model_name

    def model_version(self) -> int:
        """Its version."""
        return self._model_version

    def is_cancelled(self) -> bool:
        """Whether the caller has left."""
        return False

    def get_response_sender(self) -> InferenceResponseSender:
        """What sends the responses of a request that the model was given."""
        raise TritonModelException("a request that a model makes has no response sender")

    def set_release_flags(self, flags: int) -> None:
        """Only TRITONSERVER_REQUEST_RELEASE_ALL: this runtime has no iterative sequences."""
        if flags != TRITONSERVER_REQUEST_RELEASE_ALL:
            raise TritonModelException("rescheduling a request is not supported by the local runtime")

    def exec(self, decoupled: bool = False) -> "InferenceResponse | ResponseIterator":  # noqa: FBT001, FBT002 - Triton's signature
        """Ask and wait; a failure is a response with an error.

        With `decoupled` an iterator over all responses, that asks when the first of them is taken.
        """
        services = context.services()
        request = self._as_asked()
        if decoupled:
            return ResponseIterator(services, request)
        try:
            return _response(services.infer(request).result())
        except (InferenceError, concurrent.futures.CancelledError) as error:
            return _failed(services, request, error)

    def async_exec(self, decoupled: bool = False) -> "asyncio.Future[Any]":  # noqa: FBT001, FBT002 - Triton's signature
        """As `exec`, asked at once, to be awaited in `async def execute`.

        With `decoupled` the iterator is there at once, and the other model is asked when its first response is taken.
        """
        services = context.services()
        request = self._as_asked()
        loop = asyncio.get_running_loop()
        if decoupled:
            iterator: asyncio.Future[Any] = loop.create_future()
            iterator.set_result(ResponseIterator(services, request))
            return iterator
        try:
            asked = asyncio.wrap_future(services.infer(request), loop=loop)
        except InferenceError as error:
            asked = loop.create_future()
            asked.set_exception(error)
        return loop.create_task(_awaited(services, request, asked))

    def _as_asked(self) -> InferRequest:
        return InferRequest(
            model=self._model_name,
            version="" if self._model_version < 0 else str(self._model_version),
            # Copies, as in Triton: the model may go on to work in that memory.
            inputs={tensor.name(): tensor.as_numpy().copy() for tensor in self._inputs},
            outputs=tuple(self._requested_output_names),
            request_id=self._request_id,
            queue_timeout_us=self._timeout,
            sequence_id=self._correlation_id,
            sequence_start=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            sequence_end=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
            parameters=checked_parameters(self._parameters),
        )


class ReceivedRequest(InferenceRequest):
    """One member of the batch that `execute` gets."""

    def __init__(
        self,
        member: CheckedRequest,
        *,
        model_name: str,
        model_version: int,
        checked: Callable[[InferenceResponse, CheckedRequest], Tensors | Annotated | InferenceError],
    ) -> None:
        source = member.source
        super().__init__(
            # Copies, as in Triton: a model may work in place, and others may read the same memory.
            inputs=[Tensor(name, array.copy()) for name, array in member.inputs.items()],
            requested_output_names=member.outputs,
            model_name=model_name,
            request_id=source.request_id,
            correlation_id=source.sequence_id,
            model_version=model_version,
            flags=(TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if source.sequence_start else 0)
            | (TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if source.sequence_end else 0),
            timeout=source.queue_timeout_us,
            parameters=source.parameters,
        )
        self._member = member
        self._checked = checked
        self._kept: list[Tensors | Annotated | InferenceError] = []
        # A decoupled request has its sender from the start, which notices when the model lets go of both.
        self._sender = None if member.respond is None else self._new_sender(member.respond)

    def is_cancelled(self) -> bool:
        """Whether the caller has left."""
        return self._member.cancellation.is_cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """What sends this request's responses."""
        if self._sender is None:
            self._sender = self._new_sender(None)
        return self._sender

    def sent(self) -> Tensors | Annotated | InferenceError | None:
        """The one response that a model that is not decoupled has sent, if any. For the runtime, not for models."""
        return self._kept[0] if self._kept else None

    def _new_sender(self, respond: Respond | None) -> InferenceResponseSender:
        # Neither refers to the request, so that a request that is let go of is gone at once.
        member, checked, kept = self._member, self._checked, self._kept

        def keep(outcome: Tensors | Annotated | InferenceError | None, is_final: bool) -> None:  # noqa: ARG001, FBT001 - a Respond
            if outcome is not None:
                kept.append(outcome)

        return InferenceResponseSender(
            respond=keep if respond is None else respond,
            checked=lambda response: checked(response, member),
            cancellation=member.cancellation,
            is_decoupled=respond is not None,
        )


class ResponseIterator:
    """The responses of a request to a decoupled model; waits for each. A failure is a last response with an error."""

    def __init__(self, services: Services, request: InferRequest) -> None:
        self._services = services
        self._request = request
        self._answers: Iterator[InferAnswer] | None = None
        self._failure: InferenceError | None = None
        try:
            self._answers = services.stream(request)
        except InferenceError as error:
            self._failure = error

    def __iter__(self) -> "ResponseIterator":
        return self

    def __next__(self) -> InferenceResponse:
        if self._answers is not None:
            try:
                return _response(next(self._answers))
            except InferenceError as error:
                self._failure = error
        failure, self._failure, self._answers = self._failure, None, None
        if failure is None:
            raise StopIteration
        return _failed(self._services, self._request, failure)

    def cancel(self) -> None:
        """Want no more of it."""
        close = getattr(self._answers, "close", None)
        self._answers = None
        if close is not None:
            close()


async def _awaited(
    services: Services, request: InferRequest, asked: "asyncio.Future[InferAnswer]"
) -> InferenceResponse:
    try:
        return _response(await asked)
    except InferenceError as error:
        return _failed(services, request, error)


def _response(answer: InferAnswer) -> InferenceResponse:
    if answer.error is not None:
        return InferenceResponse(error=TritonError(answer.error.message))
    # An answer of the response cache is shared: the model gets memory of its own to work in, as in Triton.
    tensors = [Tensor(name, array if array.flags.writeable else array.copy()) for name, array in answer.outputs.items()]
    return InferenceResponse(tensors, None, answer.parameters)


def _failed(services: Services, request: InferRequest, error: BaseException) -> InferenceResponse:
    """The failure as Triton tells it to models: always INTERNAL, whatever the inner code was."""
    text = text_of(error) or type(error).__name__
    is_absent = isinstance(error, InferenceError) and error.code is ErrorCode.NOT_FOUND
    if is_absent and not services.is_ready(request.model, request.version):
        text = f"Failed for execute the inference request. Model '{request.model}' is not ready."
    return InferenceResponse(error=TritonError(text))
