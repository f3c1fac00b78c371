"""What backends count of their models themselves, as metrics: sums over the replicas, since each server started.

Gauges, though they count up: a server that is started again counts from nothing. All workers are told the same, so the
newest word stands for all.
"""

from collections import Counter as Counts
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge

from gateway.core.models import ModelFigures
from gateway.telemetry.labels import Known


class ModelMetrics:
    """The gauges of one process, and what feeds them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        model = ("backend", "model", "version")
        self._gauges = {
            name: Gauge(
                f"gateway_model_{name}",
                text,
                (*labels, *((more,) if more else ())),
                registry=registry,
                multiprocess_mode="livemostrecent",
            )
            for name, text, labels, more in (
                ("requests", "Requests that a model answered (ok) and failed on (failed).", model, "outcome"),
                ("inferences", "Rows that a model inferred; by its executions, the mean batch.", model, ""),
                ("executions", "Batches that a model executed.", model, ""),
                ("seconds", "Time that requests spent in a model's queue, and that its stages took.", model, "stage"),
                ("batch_executions", "Batches executed, by their size in rows.", ("backend", "model"), "batch_size"),
            )
        }
        self._known: dict[str, set[tuple[str, ...]]] = {name: set() for name in self._gauges}
        self._models = Known()

    def told(self, backend: str, figures: Sequence[ModelFigures]) -> None:
        """A backend's statistics, all of them."""
        for name, values in _sums(backend, figures, self._models).items():
            gauge, known = self._gauges[name], self._known[name]
            for labels in known - values.keys():
                if labels[0] == backend:  # a server that was started again counts from nothing
                    gauge.labels(*labels).set(0)
            for labels, value in values.items():
                gauge.labels(*labels).set(value)
            known.update(values)


def _sums(
    backend: str, figures: Sequence[ModelFigures], models: Known
) -> Mapping[str, Mapping[tuple[str, ...], float]]:
    """By metric and labels, what all replicas together have counted."""
    requests: Counts[tuple[str, ...]] = Counts()
    inferences: Counts[tuple[str, ...]] = Counts()
    executions: Counts[tuple[str, ...]] = Counts()
    micros: Counts[tuple[str, ...]] = Counts()
    batches: Counts[tuple[str, ...]] = Counts()
    for one in figures:
        model = models(backend, one.model, one.version)
        requests.update({(*model, "ok"): one.requests, (*model, "failed"): one.failures})
        inferences[model] += one.inferences
        executions[model] += one.executions
        micros[(*model, "queue")] += one.queue_us
        micros[(*model, "compute_input")] += one.compute_input_us
        micros[(*model, "compute_infer")] += one.compute_infer_us
        micros[(*model, "compute_output")] += one.compute_output_us
        batches.update({(*model[:2], str(size)): count for size, count in one.batch_sizes.items()})
    seconds = {labels: total / 1e6 for labels, total in micros.items()}
    return {
        "requests": requests,
        "inferences": inferences,
        "executions": executions,
        "seconds": seconds,
        "batch_executions": batches,
    }
