"""The closed list of ways a request can fail, with Triton's own codes and texts.

Every failure that leaves the runtime is one `InferenceError`. Its `code` is Triton's
(TRITONSERVER_Error_Code) and so is its text where Triton has one: a client cannot tell which of the two
answered.
"""

import enum
from collections.abc import Iterable, Sequence


class ErrorCode(enum.StrEnum):
    """Triton's error codes, plus DEADLINE (in Triton only the gRPC layer knows deadlines)."""

    INVALID_ARG = "INVALID_ARG"
    NOT_FOUND = "NOT_FOUND"
    UNSUPPORTED = "UNSUPPORTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    UNKNOWN = "UNKNOWN"
    DEADLINE = "DEADLINE"


class InferenceError(Exception):
    """One request failed. `code` says how, `message` is safe to show to an operator, not to an end user."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ModelLoadError(Exception):
    """One model cannot be served; the text is the reason that the model index shows."""


def with_request_id(request_id: str, text: str) -> str:
    """The text with the prefix that Triton puts before errors found while it checks a request."""
    return f"[request id: {request_id or '<id_unknown>'}] {text}"


def invalid(text: str) -> InferenceError:
    """The caller sent something that the model's configuration does not allow."""
    return InferenceError(ErrorCode.INVALID_ARG, text)


def unknown_model(model: str) -> InferenceError:
    """No such folder in the repository, or it was not asked to be loaded."""
    return InferenceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{model}' is not found")


def unknown_version(model: str, version: str) -> InferenceError:
    """The model is served, but not in this version."""
    text = f"Request for unknown model: '{model}' version {version} is not found"
    return InferenceError(ErrorCode.NOT_FOUND, text)


def no_available_versions(model: str) -> InferenceError:
    """The model is known, but failed to load or was unloaded."""
    return InferenceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{model}' has no available versions")


def version_not_a_number(version: str) -> InferenceError:
    """A version must be a positive whole number."""
    return invalid(
        f"failed to get model version from specified version string '{version}' (details: stoll), "
        "version should be an integral value > 0"
    )


def queue_full(request_id: str) -> InferenceError:
    """The model's queue has reached its bound: try later or elsewhere."""
    return InferenceError(ErrorCode.UNAVAILABLE, with_request_id(request_id, "Exceeds maximum queue size"))


def queue_timeout() -> InferenceError:
    """The request has waited as long as the model's queue policy lets it."""
    return InferenceError(ErrorCode.UNAVAILABLE, "Request timeout expired")


def no_correlation_id(model: str) -> InferenceError:
    """A sequence model must know which sequence a request belongs to."""
    return invalid(f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID")


def not_started(model: str, sequence_id: int | str) -> InferenceError:
    """No such sequence runs: it was never started, has ended, or was silent for too long."""
    return invalid(
        f"inference request for sequence {sequence_id} to model '{model}' must specify the START flag on the first "
        "request of the sequence"
    )


def sequence_broken(model: str, sequence_id: int | str) -> InferenceError:
    """An earlier request of the sequence was cancelled or came too late, so the state would be wrong."""
    return InferenceError(
        ErrorCode.CANCELLED,
        f"sequence {sequence_id} of model '{model}' was ended: an earlier request of it was cancelled",
    )


def decoupled_needs_stream(model: str) -> InferenceError:
    """A decoupled model may answer any number of times; a single call cannot hold that."""
    return InferenceError(
        ErrorCode.UNSUPPORTED, f"model '{model}' has a decoupled transaction policy: it can only be streamed"
    )


def too_slow(model: str) -> InferenceError:
    """The caller of a decoupled model does not take its answers as fast as they are made."""
    return InferenceError(ErrorCode.UNAVAILABLE, f"the caller of model '{model}' is too slow: its stream was ended")


def control_not_allowed() -> InferenceError:
    """Load and unload belong to explicit model control."""
    return InferenceError(ErrorCode.UNAVAILABLE, "explicit model load / unload is not allowed if polling is enabled")


def failed_to_poll(model: str) -> InferenceError:
    """What lies in the repository is no model; Triton tells the reason in its log alone (and we in the index, too)."""
    return InferenceError(ErrorCode.INTERNAL, f"failed to load '{model}', failed to poll from model repository")


def load_failed(model: str, version: str, reason: str) -> InferenceError:
    """A version could not be loaded; what was served before still is."""
    return invalid(f"load failed for model '{model}': version {version} is at UNAVAILABLE state: Internal: {reason};")


def deadline_passed(model: str) -> InferenceError:
    """The caller's deadline passed; the request was not, or will not be, answered."""
    return InferenceError(ErrorCode.DEADLINE, f"Deadline exceeded for model '{model}'")


def stopping(model: str) -> InferenceError:
    """The runtime is closing."""
    return InferenceError(
        ErrorCode.UNAVAILABLE,
        f"Server is stopping, scheduler for model '{model}' has stopped accepting new inference requests",
    )


def stopped(model: str) -> InferenceError:
    """The grace time of the closing runtime ended before the model answered."""
    return InferenceError(ErrorCode.UNAVAILABLE, f"Server stopped before model '{model}' answered")


def model_fault(model: str, text: str) -> InferenceError:
    """The model broke its own contract or raised; the caller did nothing wrong."""
    return InferenceError(ErrorCode.INTERNAL, f"model '{model}' {text}")


def in_ensemble(ensemble: str, error: InferenceError) -> InferenceError:
    """The error of a composing model as the ensemble's caller sees it: same code, Triton's prefix."""
    return InferenceError(error.code, f"in ensemble '{ensemble}', {error.message}")


def wrong_inputs(model: str, *, required: Sequence[str], optional: int, got: Iterable[str]) -> str:
    """Triton's text for a wrong number of inputs, its unbalanced bracket for surplus inputs included.

    `optional` is how many more inputs than the required ones the model can take.
    """
    names = sorted(got)
    missing = [name for name in sorted(required) if name not in names]
    listed = ",".join(f"'{name}'" for name in names)
    lacking = "[" + ",".join(f"'{name}'" for name in missing) if missing else ""
    most = len(required) + optional
    expected = f"number of inputs between {len(required)} and {most}" if optional else f"{most} inputs"
    return (
        f"expected {expected} but got {len(names)} inputs for model '{model}'. "
        f"Got input(s) [{listed}], but missing required input(s) {lacking}]. "
        "Please provide all required input(s)."
    )
