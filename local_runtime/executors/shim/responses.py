"""Responses, and what sends them."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.executors.shim.errors import TritonError, TritonModelException
from local_runtime.executors.shim.tensors import Tensor
from local_runtime.messages import Annotated, Parameters, Tensors
from local_runtime.scheduling.validation import Cancellation, Respond

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # Triton's C interface, core tritonserver.h


def checked_parameters(parameters: object) -> Parameters:
    """A copy of what a model gave as parameters; TritonModelException for what the protocols cannot carry."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"parameters must be a dict, not {type(parameters).__name__}")
    return {_checked_name(name): _checked_value(value) for name, value in parameters.items()}


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TritonModelException(f"the name of a parameter must be str, not {type(name).__name__}")
    return _checked_text(name)


def _checked_value(value: object) -> str | int | float | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _checked_text(value)
    if isinstance(value, float):
        return float(value)
    if not isinstance(value, int):
        raise TritonModelException(f"a parameter must be str, int, float or bool, not {type(value).__name__}")
    if not -(2**63) <= value < 2**64:
        raise TritonModelException("an int of the parameters does not fit into 64 bits")
    return int(value)


def _checked_text(text: str) -> str:
    try:
        return text.encode().decode()
    except UnicodeEncodeError as error:
        raise TritonModelException("text of the parameters is not well-formed Unicode") from error


class InferenceResponse:
    """The answer to one request: tensors, or an error."""

    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] | None = None,
        error: TritonError | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        self._output_tensors = list(output_tensors or ())
        self._error = error
        self._parameters = checked_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        """The outputs, in the order given."""
        return self._output_tensors

    def has_error(self) -> bool:
        """Whether this answer is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if any."""
        return self._error

    def parameters(self) -> str:
        """The response's parameters in JSON."""
        return json.dumps(self._parameters)

    def own_parameters(self) -> Parameters:
        """The same as they were given. For the runtime, not for models."""
        return self._parameters


class InferenceResponseSender:
    """Sends the responses of one request, from any thread.

    Whoever lets go of a decoupled request's sender before its final response can never send it: the caller then
    gets an error (in Triton it waits for ever).

    Args:
        respond: takes the outcome and whether it is the last.
        checked: a response as outputs or error.
        cancellation: whether the caller has left.
        is_decoupled: any number of responses, or exactly one.
    """

    def __init__(
        self,
        *,
        respond: Respond,
        checked: Callable[[InferenceResponse], Tensors | Annotated | InferenceError],
        cancellation: Cancellation,
        is_decoupled: bool,
    ) -> None:
        self._respond = respond
        self._checked = checked
        self._cancellation = cancellation
        self._is_decoupled = is_decoupled
        self._is_closed = False
        self._sent = 0
        self._lock = threading.Lock()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response (or none, with the final flag alone). TritonModelException after the final one."""
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        with self._lock:
            self._refuse(response)
            # Before anything is noted: a response that cannot even be looked at is not sent.
            outcome = None if response is None else self._checked(response)
            self._is_closed = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
            self._sent += response is not None
            if response is not None or self._is_decoupled:
                self._respond(outcome, self._is_closed)

    def is_cancelled(self) -> bool:
        """Whether the caller has left."""
        return self._cancellation.is_cancelled

    def fail(self, error: InferenceError) -> None:
        """End with an error, unless it has ended. For the runtime, not for models."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._respond(error, True)  # noqa: FBT003 - the fixed order of Respond

    def __del__(self) -> None:
        if self._is_decoupled:
            self.fail(InferenceError(ErrorCode.INTERNAL, "the model gave up the request without a final response"))

    def _refuse(self, response: InferenceResponse | None) -> None:
        if not self._is_decoupled and response is not None and self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if not self._is_decoupled and response is None and not self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )
        if self._is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
