"""The metrics of all workers as one page, in Prometheus's text format or as OpenMetrics with exemplars."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest, multiprocess
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from gateway.telemetry import exemplars
from gateway.telemetry.exemplars import Bucket

OPENMETRICS: Final = "application/openmetrics-text"


def metrics_page(folder: Path, accept: str) -> tuple[bytes, str]:
    """The page out of the workers' files in `folder`, and its content type.

    `accept` is the request's header; whoever names OpenMetrics there gets it, as Prometheus does. Both forms have the
    same series.
    """
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]  # untyped there
    if not _takes_openmetrics(accept):
        return generate_latest(registry), CONTENT_TYPE_LATEST
    page: bytes = openmetrics.generate_latest(_WithExemplars(registry, exemplars.read(folder)))  # type: ignore[no-untyped-call]  # untyped there
    return page, openmetrics.CONTENT_TYPE_LATEST


def _takes_openmetrics(accept: str) -> bool:
    """Whether one of the types in an `Accept` header is OpenMetrics, and not one that it rules out."""
    for one in accept.lower().split(","):
        name, *parameters = (part.strip() for part in one.split(";"))
        if name == OPENMETRICS:
            quality = next((part.partition("=")[2] for part in parameters if part.startswith("q=")), "1")
            return bool(quality.strip("0."))
    return False


class _WithExemplars(Collector):
    """What `metrics` tells, with an exemplar on each bucket that has one."""

    def __init__(self, metrics: Collector, newest: Mapping[Bucket, Exemplar]) -> None:
        self._metrics = metrics
        self._newest = newest
        self._histograms = {histogram for histogram, _, _ in newest}

    def collect(self) -> Iterable[Metric]:
        """Each metric."""
        for metric in self._metrics.collect():
            if metric.name in self._histograms:
                metric.samples = [self._with_exemplar(metric.name, one) for one in metric.samples]
            yield metric

    def _with_exemplar(self, histogram: str, sample: Sample) -> Sample:
        labels = dict(sample.labels)
        bound = labels.pop("le", None)
        if bound is None:
            return sample
        return sample._replace(exemplar=self._newest.get((histogram, frozenset(labels.items()), float(bound))))
