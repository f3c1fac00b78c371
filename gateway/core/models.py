"""What the gateway knows of a model that a server serves, and how its answers are held against that."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.core.tensors import ITEM_SIZES, byte_size
from gateway.core.types import Tensor

DEFAULT_SEQUENCE_IDLE_US = 1_000_000  # Triton's `max_sequence_idle_microseconds` where a model sets none


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """An input or output as the protocol describes it: full shape with the batch dimension, -1 for a free one."""

    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's metadata and the part of its configuration that matters to the gateway.

    Attributes:
        versions: those that are served.
        max_batch_size: 0 where the first dimension is not a batch.
        has_priority_levels: requests may bear Triton's `priority`.
        allows_timeout: requests may bear Triton's `timeout`.
        is_sequence: the model keeps state from request to request; `sequence_idle_us` ends a silent sequence.
        correlation_bits: of the integer that the model sees as its correlation id; 64 where it sees none.
    """

    name: str
    versions: tuple[str, ...] = ()
    inputs: Mapping[str, TensorFacts] = field(default_factory=dict)
    outputs: Mapping[str, TensorFacts] = field(default_factory=dict)
    max_batch_size: int = 0
    is_decoupled: bool = False
    has_priority_levels: bool = False
    allows_timeout: bool = False
    is_sequence: bool = False
    sequence_idle_us: int = DEFAULT_SEQUENCE_IDLE_US
    correlation_bits: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """What a server counts of one version of a model since it was loaded. Times are sums, in microseconds.

    Attributes:
        requests / failures: requests answered, and failed.
        inferences / executions: rows inferred, and the batches that they ran in: rows / batches = the mean batch.
        batch_sizes: executions by batch size in rows.
    """

    replica: str
    model: str
    version: str
    requests: int
    failures: int
    inferences: int
    executions: int
    queue_us: int
    compute_input_us: int
    compute_infer_us: int
    compute_output_us: int
    batch_sizes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Requests that a version of a model has answered, and failed."""

    requests: int = 0
    failures: int = 0

    def since(self, before: "Outcomes") -> "Outcomes":
        """What has come since; a server that started again counts from 0."""
        return Outcomes(
            requests=max(0, self.requests - before.requests), failures=max(0, self.failures - before.failures)
        )

    @property
    def ratio(self) -> float:
        """The part that failed."""
        whole = self.requests + self.failures
        return self.failures / whole if whole else 0.0


def rows(facts: ModelFacts, inputs: Sequence[Tensor]) -> int | None:
    """How many rows a request has, and so its answer must have; None where the model does not batch."""
    if not facts.max_batch_size or not inputs or not inputs[0].shape:
        return None
    return inputs[0].shape[0]


def output_sizes(facts: ModelFacts, names: Sequence[str], row_count: int | None) -> Mapping[str, int]:
    """The bytes of those outputs of an answer (all of them where none is named) whose sizes the model fixes."""
    sizes = {}
    for name in names or facts.outputs:
        known = facts.outputs.get(name)
        if known is None or known.datatype not in ITEM_SIZES:
            continue
        shape = known.shape if row_count is None else (row_count, *known.shape[1:])
        if -1 in shape:
            continue
        with contextlib.suppress(ValueError):  # a shape that no tensor can have
            sizes[name] = byte_size(known.datatype, shape)
    return sizes


def why_wrong(facts: ModelFacts, outputs: Sequence[Tensor], row_count: int | None) -> str | None:
    """What is wrong with a model's outputs, or None.

    Triton checks none of this: wrong datatypes, shapes, row counts and names go straight to its clients. `row_count` is
    that of `rows`; decoupled models may answer any number of rows.
    """
    for tensor in outputs:
        known = facts.outputs.get(tensor.name)
        if known is None:
            return f"output '{tensor.name}' is not one of the model's: {', '.join(facts.outputs)}"
        if tensor.datatype != known.datatype:
            return f"output '{tensor.name}' is {tensor.datatype}, the model declares {known.datatype}"
        fits = len(tensor.shape) == len(known.shape) and all(
            want in (-1, have) for want, have in zip(known.shape, tensor.shape, strict=True)
        )
        if not fits:
            return f"output '{tensor.name}' has the shape {list(tensor.shape)}, the model declares {list(known.shape)}"
        if row_count is not None and not facts.is_decoupled and tensor.shape[0] != row_count:
            return f"output '{tensor.name}' has {tensor.shape[0]} rows for {row_count} of the request"
    return None
