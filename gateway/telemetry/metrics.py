"""Every metric of the gateway, declared in this one file.

Labels are bounded by design: tasks and backends come from the configuration, models from the rules and from what
servers serve, replicas are servers' addresses, codes come from the closed list. With several workers each writes its
own files and the operations listener sums them.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.core.breaker import Breaker
from gateway.core.models import ModelFigures
from gateway.core.record import RequestRecord
from gateway.core.types import EngineLoad, Place
from gateway.telemetry.model_metrics import ModelMetrics

# From a fast embedding on one core to a long chat answer; seconds.
DURATION_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
NONE: Final = "none"


class Metrics:
    """The metrics of one process, and the observer that feeds them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._places: set[Place] = set()
        # The library takes a lock and checks names at each `labels`, of which a request needs five.
        self._of = functools.cache(lambda metric, *labels: metric.labels(*labels))
        self.requests = Counter(
            "gateway_requests",
            "Requests ended, by task, the backend that answered, and outcome (ok or an error code).",
            ("task", "backend", "code"),
            registry=registry,
        )
        self.duration = Histogram(
            "gateway_request_duration_seconds",
            "From the request's first byte read to the end of its answer.",
            ("task", "backend"),
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.backend_duration = Histogram(
            "gateway_backend_duration_seconds",
            "The part of a request's time that was spent waiting for backends, all attempts together.",
            ("task", "backend"),
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "gateway_requests_in_flight",
            "Requests between admission and the end of their answer.",
            ("task",),
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.requests_waiting = Gauge(
            "gateway_requests_waiting",
            "Requests that wait in the gateway, a backend's servers having as many as they may; once a second.",
            ("backend",),
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.tokens = Counter(
            "gateway_tokens",
            "Tokens that backends reported, by direction (input, output).",
            ("task", "direction"),
            registry=registry,
        )
        self.failed_attempts = Counter(
            "gateway_failed_attempts",
            "Attempts that did not bring an answer; a request may hold several and still end ok.",
            ("task",),
            registry=registry,
        )
        self.degraded = Counter(
            "gateway_limiter_degraded",
            "Requests whose limits were decided by this process alone, the shared store being out of reach.",
            registry=registry,
        )
        self.breaker_open = Gauge(
            "gateway_breaker_open",
            "1 while a place fails: no request is sent there, but for one that tries; the worst worker counts.",
            ("backend", "model", "version", "replica"),
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.heals = Counter(
            "gateway_model_heals",
            "Models whose process had died on a server, by what became of loading them anew there.",
            ("backend", "model", "outcome"),
            registry=registry,
        )
        self.rules_revision = Gauge(
            "gateway_rules_revision",
            "Revision of the routing rules in force; the most backward worker counts.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._models = ModelMetrics(registry)

    def began(self, task: str) -> None:
        """A request entered the walk."""
        self._of(self.in_flight, task).inc()

    def ended(self, record: RequestRecord) -> None:
        """It left it."""
        self._of(self.in_flight, record.task).dec()
        backend = record.route.backend if record.route else NONE
        self._of(self.requests, record.task, backend, record.code).inc()
        self._of(self.duration, record.task, backend).observe(record.total_us / 1e6)
        if record.timing and record.route:
            self._of(self.backend_duration, record.task, backend).observe(record.timing.backend_us / 1e6)
        for direction, count in (("input", record.usage.input_tokens), ("output", record.usage.output_tokens)):
            if count:
                self.tokens.labels(record.task, direction).inc(count)
        if record.faults:
            self.failed_attempts.labels(record.task).inc(len(record.faults))
        if record.degraded:
            self.degraded.inc()

    def refused(self, record: RequestRecord) -> None:
        """A request was refused at the door; its task is known to exist, or empty."""
        self.requests.labels(record.task or NONE, NONE, record.code).inc()

    def health(self, breakers: Mapping[Place, Breaker], revision: int) -> None:
        """The state of the breakers and of the rules, told about once a second."""
        for place in self._places - breakers.keys():
            self._breaker(place).set(0)
        for place, breaker in breakers.items():
            self._breaker(place).set(breaker.open_until_us is not None)
        self._places |= breakers.keys()
        self.rules_revision.set(revision)

    def waiting(self, counts: Mapping[str, int]) -> None:
        """The length of our own queues."""
        for backend, count in counts.items():
            self.requests_waiting.labels(backend).set(count)

    def healed(self, place: Place, outcome: str) -> None:
        """A model whose process had died was loaded anew, or could not be."""
        self.heals.labels(place.backend, place.model, outcome).inc()

    def engines(self, backend: str, loads: Mapping[str, EngineLoad]) -> None:
        """What LLM servers say of their load."""

    def figures(self, backend: str, figures: Sequence[ModelFigures]) -> None:
        """A backend's own statistics."""
        self._models.told(backend, figures)

    def _breaker(self, place: Place) -> Gauge:
        return self.breaker_open.labels(place.backend, place.model, place.version, place.replica)
