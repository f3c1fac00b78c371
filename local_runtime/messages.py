"""The values that cross the runtime's face: what is asked, what is answered, what was executed."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from numpy.typing import NDArray

from local_runtime.errors import InferenceError

# TYPE_STRING tensors are object arrays of bytes, as in Triton's Python backend.
Array: TypeAlias = NDArray[Any]
Tensors: TypeAlias = Mapping[str, NDArray[Any]]
Parameters: TypeAlias = Mapping[str, str | int | float | bool]


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One inference request.

    Args:
        model: name of the model in the repository.
        inputs: arrays by input name, batch dimension first when the model has a max_batch_size. TYPE_STRING
            inputs are object arrays of bytes (str elements are encoded as UTF-8).
        version: version folder, or "" for the one that is served.
        request_id: the caller's name for the request, for logs, errors and Python models.
        timeout_us: from now to the deadline, in microseconds; None waits as long as the caller does.
        outputs: names of the outputs wanted; empty means all of them.
        priority: Triton's `priority`: 1 is the highest level, 0 the model's default.
        queue_timeout_us: Triton's `timeout`: how long it may wait in the queue, where the model's queue policy
            lets requests say so; 0 for the policy's own.
        sequence_id: Triton's correlation id (unsigned 64-bit integer or string); 0 and "" mean none.
        sequence_start: first request of its sequence.
        sequence_end: last request of its sequence.
        parameters: the caller's own parameters, for Python models.
    """

    model: str
    inputs: Tensors
    version: str = ""
    request_id: str = ""
    timeout_us: int | None = None
    outputs: Sequence[str] = ()
    priority: int = 0
    queue_timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    parameters: Parameters = msgspec.field(default_factory=dict)


class Annotated(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs with parameters that a Python model gave its response."""

    outputs: Tensors
    parameters: Parameters


class InferAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of one request and how it was served: its only answer, or one of a decoupled model's many.

    `queue_us` and `compute_us` are the request's own wait and its batch's execution, in microseconds; for an
    ensemble they are sums over its steps. `batch_size` is the rows of the batch that carried the request (for
    an ensemble, the request's own rows).
    `error` (streams only) says that this answer is an error, and `is_final` that no other follows; a decoupled
    model may end its stream with an answer that has neither outputs nor error. `parameters` are the model's own.
    """

    model: str
    version: str
    outputs: Tensors
    queue_us: int
    compute_us: int
    batch_size: int
    parameters: Parameters = msgspec.field(default_factory=dict)
    error: InferenceError | None = None
    is_final: bool = True


class BatchExecuted(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of a model, as told to the observer. Times in microseconds, `batch_size` in rows."""

    model: str
    version: str
    batch_size: int
    requests: int
    failed: int
    oldest_queue_us: int
    compute_us: int
    reason: str


class ModelControl(enum.StrEnum):
    """Triton's `--model-control-mode`: who says which models are served.

    none: all of the repository, once, at the start. poll: as none, and the repository is looked at again and again.
    explicit: the models named at the start, then what is loaded and unloaded by request.
    """

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


class ModelState(enum.StrEnum):
    """State of a model version in the index, in Triton's words; NONE for a model that was never loaded."""

    NONE = ""
    READY = "READY"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One line of the repository index: a model's version (version "" where none is known) and its state.

    `reason` says why a version is unavailable and is empty otherwise.
    """

    name: str
    version: str
    state: ModelState
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """Name, datatype in the protocol's words (FP32, BYTES, ...) and full shape, -1 for a free dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    """What the Open Inference Protocol tells about a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
