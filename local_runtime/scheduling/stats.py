"""Counters of one model, as Triton counts them: rows, executions, and how large the batches were.

Validation errors and refusals at a full queue are counted nowhere, as in Triton.
Only the event loop touches these.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """A snapshot. Times are sums in microseconds; `queue_us` over requests, `compute_us` over executions.

    `inference_count` is rows answered, `execution_count` runs of the model: the mean batch is their ratio.
    `batch_sizes` maps the rows of a batch to the number of executions of that size.
    """

    name: str
    version: str
    success_count: int
    fail_count: int
    inference_count: int
    execution_count: int
    queue_us: int
    compute_us: int
    batch_sizes: Mapping[int, int]


class StatsRecorder:
    """Counts for one model version."""

    def __init__(self, *, name: str, version: str) -> None:
        self._name = name
        self._version = version
        self._success = 0
        self._fail = 0
        self._rows = 0
        self._executions = 0
        self._queue_us = 0
        self._compute_us = 0
        self._batch_sizes: Counter[int] = Counter()

    def answered(self, *, rows: int, queue_us: int) -> None:
        """One request was executed and answered."""
        self._success += 1
        self._rows += rows
        self._queue_us += queue_us

    def failed(self) -> None:
        """One accepted request ended in an error (model fault, deadline, shutdown)."""
        self._fail += 1

    def executed(self, *, rows: int, compute_us: int) -> None:
        """The model ran once over a batch of so many rows."""
        self._executions += 1
        self._compute_us += compute_us
        self._batch_sizes[rows] += 1

    def snapshot(self) -> ModelStatistics:
        """The counters as they are now."""
        return ModelStatistics(
            name=self._name,
            version=self._version,
            success_count=self._success,
            fail_count=self._fail,
            inference_count=self._rows,
            execution_count=self._executions,
            queue_us=self._queue_us,
            compute_us=self._compute_us,
            batch_sizes=MappingProxyType(dict(sorted(self._batch_sizes.items()))),
        )
