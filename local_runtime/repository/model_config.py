"""A model's configuration as a frozen value, in Triton's words. `parsing` makes it from a `config.pbtxt`.

Field meanings: triton-inference-server/common `protobuf/model_config.proto`. Times are in microseconds.
"""

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

# The protocol's name of each datatype and its numpy type; BYTES (TYPE_STRING) are object arrays of bytes.
NUMPY_TYPES: Mapping[str, Any] = MappingProxyType(
    {
        "BOOL": np.bool_,
        "UINT8": np.uint8,
        "UINT16": np.uint16,
        "UINT32": np.uint32,
        "UINT64": np.uint64,
        "INT8": np.int8,
        "INT16": np.int16,
        "INT32": np.int32,
        "INT64": np.int64,
        "FP16": np.float16,
        "FP32": np.float32,
        "FP64": np.float64,
        "BF16": ml_dtypes.bfloat16,
        "BYTES": np.object_,
    }
)


class Backend(enum.StrEnum):
    """Which executor runs a model (Triton's word is backend)."""

    PYTHON = "python"
    PYTORCH = "pytorch"
    ONNXRUNTIME = "onnxruntime"
    ENSEMBLE = "ensemble"


class InstanceKind(enum.StrEnum):
    """Where the instances of a group run."""

    AUTO = "KIND_AUTO"
    CPU = "KIND_CPU"
    GPU = "KIND_GPU"
    MODEL = "KIND_MODEL"  # where the model itself decides


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output.

    Args:
        name: its name.
        datatype: the protocol's name: FP32, BYTES, ...
        dims: without the batch dimension; -1 is free.
        reshape: the shape that the model sees in place of `dims`, None if the same.
        label_filename: outputs only.
        is_optional: inputs only: may be left out of a request.
        allow_ragged_batch: inputs only: requests of different shapes may share a batch.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    label_filename: str = ""
    is_optional: bool = False
    allow_ragged_batch: bool = False

    @property
    def numpy_type(self) -> "np.dtype[Any]":
        """The numpy type of its arrays; object (holding bytes) for BYTES."""
        numpy_type: np.dtype[Any] = np.dtype(NUMPY_TYPES[self.datatype])
        return numpy_type


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """`count` instances, for KIND_GPU on each of the `gpus`; none named means all there are."""

    name: str
    kind: InstanceKind
    count: int
    gpus: tuple[int, ...]


class TimeoutAction(enum.StrEnum):
    """What becomes of a request that has waited its timeout."""

    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """`ModelQueuePolicy`: bounds of one priority level's queue; 0 means none."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveBatching:
    """Our own way to batch, switched on by the model's `parameters` (docs/decisions/0007).

    ADAPTIVE_BATCHING "true" switches it on; ADAPTIVE_LATENCY_TARGET_MICROSECONDS bounds what waiting and larger
    batches may add up to for the oldest request (None: no bound).
    """

    latency_target_us: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicBatching:
    """The `dynamic_batching` block. `priority_levels` 0 means that priorities are ignored."""

    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policy: Mapping[int, QueuePolicy] = dataclasses.field(default_factory=dict)
    adaptive: AdaptiveBatching | None = None


class ControlKind(enum.StrEnum):
    """What a control input tells a sequence model."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    CORRID = "CONTROL_SEQUENCE_CORRID"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControlInput:
    """An input that the scheduler adds, of shape [1, 1] (batching) or [1].

    `false_true` holds the two values (None for CORRID, which carries the id as `datatype`).
    """

    name: str
    kind: ControlKind
    datatype: str
    false_true: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """Implicit state: output `output_name` of one step is input `input_name` of the sequence's next.

    `dims` exclude the batch dimension. `initial_dims` and `initial_file` (a path below the model's folder
    `initial_state/`) describe the first step's value; without a file it is zeros.
    """

    input_name: str
    output_name: str
    datatype: str
    dims: tuple[int, ...]
    initial_dims: tuple[int, ...] | None = None
    initial_file: str = ""

    @property
    def numpy_type(self) -> "np.dtype[Any]":
        """The numpy type of its arrays; object (holding bytes) for BYTES."""
        numpy_type: np.dtype[Any] = np.dtype(NUMPY_TYPES[self.datatype])
        return numpy_type


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DirectStrategy:
    """Every sequence keeps a slot (a row of the batch) of one instance to itself."""

    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OldestStrategy:
    """Up to `max_candidate_sequences` per instance take turns in dynamic batches, oldest request first."""

    max_candidate_sequences: int
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatching:
    """The `sequence_batching` block."""

    strategy: DirectStrategy | OldestStrategy = DirectStrategy()
    max_sequence_idle_microseconds: int = 1_000_000
    controls: tuple[ControlInput, ...] = ()
    states: tuple[SequenceState, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VersionPolicy:
    """Which version folders are served: the `latest` so many, or the `specific` ones, or (both None) all."""

    latest: int | None = 1
    specific: tuple[int, ...] | None = None


class WarmupData(enum.StrEnum):
    """Where a warm-up input's values come from."""

    ZERO = "zero_data"
    RANDOM = "random_data"
    FILE = "input_data_file"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WarmupInput:
    """One tensor of a warm-up request; `dims` exclude the batch dimension; `file` lies in `<model>/warmup/`."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    data: WarmupData
    file: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """One `model_warmup` entry: a batch of `batch_size` equal rows, run `count` times by every instance."""

    name: str
    batch_size: int
    inputs: tuple[WarmupInput, ...]
    count: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleStep:
    """One step. `input_map` leads from model input, `output_map` from model output to ensemble tensor."""

    model_name: str
    model_version: str
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's configuration, checked. `message` is the protobuf it came from; treat it as read-only.

    At most one of `dynamic_batching`, `sequence_batching` and `ensemble_steps` is set.
    """

    name: str
    backend: Backend
    platform: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    instance_groups: tuple[InstanceGroup, ...]
    dynamic_batching: DynamicBatching | None
    sequence_batching: SequenceBatching | None
    ensemble_steps: tuple[EnsembleStep, ...]
    version_policy: VersionPolicy
    warmups: tuple[Warmup, ...]
    is_decoupled: bool
    has_response_cache: bool
    parameters: Mapping[str, str]
    default_model_filename: str
    message: Any = dataclasses.field(repr=False, compare=False)

    def full_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Dims as clients see them: with -1 for the batch dimension if the model has one."""
        return (-1, *spec.dims) if self.max_batch_size > 0 else spec.dims
