"""Metrics that Python models keep of their own (`pb_utils.MetricFamily`), for the runtime's metrics endpoint.

As in Triton a family that is registered twice under one name is one family, a metric with the same labels is one
metric, and both live as long as somebody holds them: what an unloaded model kept vanishes with it.
"""

import bisect
import dataclasses
import enum
import itertools
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType

# https://prometheus.io/docs/concepts/data_model: what a scraper would refuse is refused here.
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class MetricKind(enum.StrEnum):
    """Prometheus' word for a family's type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricSample:
    """One metric now.

    `value` is that of a counter or gauge and the sum of a histogram's observations. `buckets` (histograms only) are
    (upper bound, observations up to it), cumulative, without the one to infinity, which equals `count`.
    """

    labels: Mapping[str, str]
    value: float
    buckets: tuple[tuple[float, int], ...] = ()
    count: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamilySample:
    """One family with all its metrics now."""

    name: str
    description: str
    kind: MetricKind
    samples: tuple[MetricSample, ...]


class Metric:
    """One metric. Every method raises ValueError, with Triton's text, if the kind cannot do it. Thread-safe."""

    def __init__(self, *, kind: MetricKind, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        self._kind = kind
        self._labels = MappingProxyType(dict(labels))
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._value = 0.0
        self._lock = threading.Lock()

    def increment(self, by: float) -> None:
        """Add to a counter (never less than 0) or a gauge."""
        self._refuse("Increment", MetricKind.HISTOGRAM)
        if self._kind is MetricKind.COUNTER and by < 0:
            raise ValueError(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            )
        with self._lock:
            self._value += by

    def set(self, value: float) -> None:
        """Give a gauge its value."""
        self._refuse("Set", MetricKind.COUNTER, MetricKind.HISTOGRAM)
        with self._lock:
            self._value = float(value)

    def observe(self, value: float) -> None:
        """Count one observation of a histogram."""
        self._refuse("Observe", MetricKind.COUNTER, MetricKind.GAUGE)
        with self._lock:
            self._value += value
            self._counts[bisect.bisect_left(self._bounds, value)] += 1

    def value(self) -> float:
        """The value of a counter or a gauge."""
        self._refuse("Value", MetricKind.HISTOGRAM)
        return self._value

    def sample(self) -> MetricSample:
        """A frozen copy."""
        with self._lock:
            value, counts = self._value, tuple(self._counts)
        if self._kind is not MetricKind.HISTOGRAM:
            return MetricSample(labels=self._labels, value=value)
        *cumulative, total = itertools.accumulate(counts)
        return MetricSample(
            labels=self._labels,
            value=value,
            buckets=tuple(zip(self._bounds, cumulative, strict=True)),
            count=total,
        )

    def _refuse(self, what: str, *kinds: MetricKind) -> None:
        if self._kind in kinds:
            raise ValueError(f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {what}")


class Family:
    """Metrics of one name and kind, told apart by their labels. Thread-safe."""

    def __init__(self, *, name: str, description: str, kind: MetricKind) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self._metrics: weakref.WeakValueDictionary[tuple[tuple[str, str], ...], Metric] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def metric(self, labels: Mapping[str, str], *, bounds: Sequence[float] = ()) -> Metric:
        """The metric with these labels, made if there is none; it exists as long as the caller holds it.

        `bounds` are a histogram's upper bounds. Raises ValueError for labels or bounds that Prometheus refuses.
        """
        for name in labels:
            if _LABEL_NAME.fullmatch(name) is None:
                raise ValueError(f"invalid label name '{name}'")
        if any(low >= high for low, high in itertools.pairwise(bounds)):
            raise ValueError("Bucket boundaries must be in increasing order")
        key = tuple(sorted(labels.items()))
        with self._lock:
            metric = self._metrics.get(key)
            if metric is None:
                metric = self._metrics[key] = Metric(kind=self.kind, labels=labels, bounds=bounds)
        return metric

    def sample(self) -> MetricFamilySample:
        """A frozen copy."""
        with self._lock:
            metrics = list(self._metrics.items())
        return MetricFamilySample(
            name=self.name,
            description=self.description,
            kind=self.kind,
            samples=tuple(metric.sample() for _, metric in sorted(metrics, key=lambda item: item[0])),
        )


class MetricRegistry:
    """All of them, for one runtime. Thread-safe."""

    def __init__(self) -> None:
        self._families: weakref.WeakValueDictionary[str, Family] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def family(self, name: str, *, description: str, kind: MetricKind) -> Family:
        """The family of that name, made if there is none; it exists as long as the caller holds it.

        Raises ValueError for a name that Prometheus refuses and for one that is taken by another kind.
        """
        if _METRIC_NAME.fullmatch(name) is None:
            raise ValueError(f"invalid metric name '{name}'")
        with self._lock:
            family = self._families.get(name)
            if family is None:
                family = self._families[name] = Family(name=name, description=description, kind=kind)
        if family.kind is not kind:
            raise ValueError(f"metric family '{name}' exists already as a {family.kind}")
        return family

    def families(self) -> tuple[MetricFamilySample, ...]:
        """What is there now, by name."""
        with self._lock:
            families = list(self._families.values())
        return tuple(family.sample() for family in sorted(families, key=lambda family: family.name))
