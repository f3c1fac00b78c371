"""Counters of one model version, as Triton counts them (`protocol/extension_statistics.md`, `user_guide/metrics.md`).

Validation errors and refusals at a full queue are counted nowhere, as in Triton. Only the event loop touches these.
"""

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class FailureReason(enum.StrEnum):
    """The label of `nv_inference_request_failure`."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """How often something happened and how long it took altogether, in microseconds."""

    count: int = 0
    total_us: int = 0


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """One execution, in microseconds: batch put together, model run, outputs taken apart."""

    input_us: int = 0
    infer_us: int = 0
    output_us: int = 0

    @property
    def total_us(self) -> int:
        """All of it."""
        return self.input_us + self.infer_us + self.output_us


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics:
    """The executions of one batch size."""

    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """A snapshot.

    `inference_count` is rows answered by an execution, `execution_count` runs of the model: the mean batch is their
    ratio. `success`, `queue` and the compute durations count requests; `batch_stats` (by rows) counts executions.
    `pending_count` is requests that wait now, `last_inference_ms` Unix time (0 for never), `load_us` the time that
    loading took.
    """

    name: str
    version: str
    last_inference_ms: int
    inference_count: int
    execution_count: int
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration
    batch_stats: Mapping[int, BatchStatistics]
    failures: Mapping[FailureReason, int]
    pending_count: int
    load_us: int

    @property
    def batch_sizes(self) -> Mapping[int, int]:
        """Executions by batch size in rows."""
        return {rows: stats.compute_infer.count for rows, stats in self.batch_stats.items()}


class _Sum:
    """A `Duration` that grows."""

    __slots__ = ("count", "total_us")

    def __init__(self) -> None:
        self.count = 0
        self.total_us = 0

    def add(self, total_us: int, count: int = 1) -> None:
        self.count += count
        self.total_us += total_us

    def value(self) -> Duration:
        return Duration(count=self.count, total_us=self.total_us)


class _ComputeSum:
    """A sum of `Compute`s."""

    __slots__ = ("infer", "input", "output")

    def __init__(self) -> None:
        self.input = _Sum()
        self.infer = _Sum()
        self.output = _Sum()

    def add(self, compute: Compute, count: int = 1) -> None:
        self.input.add(compute.input_us * count, count)
        self.infer.add(compute.infer_us * count, count)
        self.output.add(compute.output_us * count, count)

    def value(self) -> BatchStatistics:
        return BatchStatistics(
            compute_input=self.input.value(), compute_infer=self.infer.value(), compute_output=self.output.value()
        )


class StatsRecorder:
    """Counts for one model version."""

    def __init__(self, *, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self._last_inference_ms = 0
        self._rows = 0
        self._executions = 0
        self._success = _Sum()
        self._fail = _Sum()
        self._queue = _Sum()
        self._compute = _ComputeSum()
        self._cache_hit = _Sum()
        self._cache_miss = _Sum()
        self._batches: dict[int, _ComputeSum] = {}
        self._failures = dict.fromkeys(FailureReason, 0)
        self._load_us = 0

    def loaded(self, *, load_us: int) -> None:
        """Loading the version took so long."""
        self._load_us = load_us

    def answered(self, *, rows: int, queue_us: int, compute: Compute, at_ms: int, requests: int = 1) -> None:
        """One request, or so many together, were executed and answered; `at_ms` is Unix time."""
        self._rows += rows
        self._success.add(queue_us + compute.total_us * requests, requests)
        self._queue.add(queue_us, requests)
        self._compute.add(compute, requests)
        self._last_inference_ms = at_ms

    def hit(self, *, lookup_us: int) -> None:
        """One request was answered from the response cache: a success that counts no inference."""
        self._success.add(lookup_us)
        self._cache_hit.add(lookup_us)

    def missed(self, *, lookup_us: int) -> None:
        """One request was looked for in the response cache in vain; `lookup_us` includes storing its answer."""
        self._cache_miss.add(lookup_us)

    def failed(self, reason: FailureReason, *, after_us: int = 0) -> None:
        """One accepted request ended in an error, so long after it came."""
        self._fail.add(after_us)
        self._failures[reason] += 1

    def executed(self, *, rows: int, compute: Compute) -> None:
        """The model ran once over a batch of so many rows."""
        self._executions += 1
        self._batches.setdefault(rows, _ComputeSum()).add(compute)

    def snapshot(self, *, pending_count: int = 0) -> ModelStatistics:
        """The counters as they are now."""
        return ModelStatistics(
            name=self.name,
            version=self.version,
            last_inference_ms=self._last_inference_ms,
            inference_count=self._rows,
            execution_count=self._executions,
            success=self._success.value(),
            fail=self._fail.value(),
            queue=self._queue.value(),
            compute_input=self._compute.input.value(),
            compute_infer=self._compute.infer.value(),
            compute_output=self._compute.output.value(),
            cache_hit=self._cache_hit.value(),
            cache_miss=self._cache_miss.value(),
            batch_stats=MappingProxyType({rows: self._batches[rows].value() for rows in sorted(self._batches)}),
            failures=MappingProxyType(dict(self._failures)),
            pending_count=pending_count,
            load_us=self._load_us,
        )
