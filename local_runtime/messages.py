"""The values that cross the runtime's face: what is asked, what is answered, what was executed."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

# TYPE_STRING tensors are object arrays of bytes, as in Triton's Python backend.
Array: TypeAlias = NDArray[Any]
Tensors: TypeAlias = Mapping[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """One inference request.

    Args:
        model: name of the model in the repository.
        inputs: arrays by input name, batch dimension first when the model has a max_batch_size. TYPE_STRING
            inputs are object arrays of bytes (str elements are encoded as UTF-8).
        version: version folder, or "" for the one that is served.
        request_id: the caller's name for the request, for logs, errors and Python models.
        timeout_us: from now to the deadline, in microseconds; None waits as long as the caller does.
        outputs: names of the outputs wanted; empty means all of them.
    """

    model: str
    inputs: Tensors
    version: str = ""
    request_id: str = ""
    timeout_us: int | None = None
    outputs: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InferAnswer:
    """The outputs of one request and how it was served.

    `queue_us` and `compute_us` are the request's own wait and its batch's execution, in microseconds; for an
    ensemble they are sums over its steps. `batch_size` is the rows of the batch that carried the request (for
    an ensemble, the request's own rows).
    """

    model: str
    version: str
    outputs: Tensors
    queue_us: int
    compute_us: int
    batch_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchExecuted:
    """One execution of a model, as told to the observer. Times in microseconds, `batch_size` in rows."""

    model: str
    version: str
    batch_size: int
    requests: int
    failed: int
    oldest_queue_us: int
    compute_us: int
    reason: str


class ModelState(enum.StrEnum):
    """State of a model in the index, in Triton's words."""

    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One line of the model index; `reason` says why a model is unavailable and is empty otherwise."""

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
