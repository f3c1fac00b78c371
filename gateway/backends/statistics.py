"""Counters that a model server keeps of its models, as Triton counts them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """One version of one model since it was loaded.

    `inference_count` is rows, `execution_count` is batches: their ratio is the mean batch. `batch_sizes` maps the
    rows of a batch to the number of executions of that size. Times are sums in microseconds: `queue_us` over
    requests, `compute_us` over executions.
    """

    model: str
    version: str
    inference_count: int
    execution_count: int
    queue_us: int
    compute_us: int
    batch_sizes: Mapping[int, int]


def batch_sizes(statistics: Iterable[ModelStatistics]) -> Mapping[str, Mapping[int, int]]:
    """Executions by model and batch size, all versions together."""
    counts: dict[str, Counter[int]] = {}
    for stats in statistics:
        counts.setdefault(stats.model, Counter()).update(stats.batch_sizes)
    return counts
