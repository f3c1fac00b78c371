"""`pb_utils.MetricFamily` over the runtime's metrics."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from local_runtime.executors import model_metrics
from local_runtime.executors.model_metrics import MetricKind
from local_runtime.executors.shim import context
from local_runtime.executors.shim.errors import TritonModelException


class Metric:
    """One metric; it disappears from the endpoint when nobody holds it."""

    def __init__(self, family: model_metrics.Family, metric: model_metrics.Metric) -> None:
        self._family = family  # families, too, live only as long as they are held
        self._metric = metric

    def increment(self, value: float) -> None:
        """Add to a counter (never less than 0) or a gauge."""
        with _failing("Failed to increment metric value: "):
            self._metric.increment(value)

    def set(self, value: float) -> None:
        """Give a gauge its value."""
        with _failing("Failed to set metric value: "):
            self._metric.set(value)

    def observe(self, value: float) -> None:
        """Count one observation of a histogram."""
        with _failing("Failed to observe metric value: "):
            self._metric.observe(value)

    def value(self) -> float:
        """The value of a counter or a gauge."""
        with _failing("Failed to get metric value: "):
            return self._metric.value()


class MetricFamily:
    """Metrics of one name and kind. Made twice under one name it is the same family."""

    COUNTER: ClassVar[MetricKind] = MetricKind.COUNTER
    GAUGE: ClassVar[MetricKind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[MetricKind] = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        with _failing("Error when creating MetricFamily: "):
            self._family = context.services().metrics.family(name, description=description, kind=MetricKind(kind))

    def Metric(self, labels: Mapping[str, Any] | None = None, buckets: list[float] | None = None) -> Metric:  # noqa: N802 - Triton's name
        """The metric with these labels; `buckets` are the upper bounds that a histogram must have."""
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if buckets is None and self._family.kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        if buckets is not None and self._family.kind is not MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        texts = {str(name): str(value) for name, value in (labels or {}).items()}
        with _failing("Error when creating Metric: "):
            return Metric(self._family, self._family.metric(texts, bounds=[float(bound) for bound in buckets or ()]))


@contextlib.contextmanager
def _failing(prefix: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise TritonModelException(f"{prefix}{error}") from error
