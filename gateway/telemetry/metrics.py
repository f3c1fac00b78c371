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
from gateway.core.types import EngineLoad, Place
from gateway.core.watching.record import RequestRecord
from gateway.telemetry.engine_metrics import EngineMetrics
from gateway.telemetry.model_metrics import ModelMetrics

# From a fast embedding on one core to a long chat answer; seconds.
DURATION_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# Those of OpenTelemetry's `gen_ai.server.time_to_first_token`, and two more for long queues; seconds.
FIRST_TOKEN_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0),
)
NANO: Final = 1_000_000_000
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
            "Tokens, by direction: input, cached (a part of input), output, reasoning (a part of output).",
            ("task", "direction"),
            registry=registry,
        )
        self.estimated_usage = Counter(
            "gateway_estimated_usage",
            "Requests whose tokens are the gateway's own estimate, as the backend did not tell.",
            ("task",),
            registry=registry,
        )
        self.cost = Counter(
            "gateway_cost_usd",
            "What requests cost, where a price is known, in US dollars.",
            ("task", "backend"),
            registry=registry,
        )
        self.first_token = Histogram(
            "gateway_first_token_seconds",
            "Of streamed answers: from the request's first byte read to the answer's first part.",
            ("task", "backend"),
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.failed_attempts = Counter(
            "gateway_failed_attempts",
            "Attempts that did not bring an answer; a request may hold several and still end ok.",
            ("task",),
            registry=registry,
        )
        self.recalls = Counter(
            "gateway_recalls",
            "Answers that may be given again: given again (replayed, hit, collapsed), or made for the cache (miss).",
            ("task", "outcome"),
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
        self._engines = EngineMetrics(registry)

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
        if record.first_token_us is not None and record.route:
            self._of(self.first_token, record.task, backend).observe(record.first_token_us / 1e6)
        self._used(record, backend)
        if record.faults:
            self.failed_attempts.labels(record.task).inc(len(record.faults))
        if record.recalled:
            self._of(self.recalls, record.task, record.recalled).inc()
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
        self._engines.told(backend, loads)

    def figures(self, backend: str, figures: Sequence[ModelFigures]) -> None:
        """A backend's own statistics."""
        self._models.told(backend, figures)

    def _used(self, record: RequestRecord, backend: str) -> None:
        usage = record.usage
        for direction, count in (
            ("input", usage.input_tokens),
            ("output", usage.output_tokens),
            ("cached", usage.cached_tokens),
            ("reasoning", usage.reasoning_tokens),
        ):
            if count and count > 0:
                self._of(self.tokens, record.task, direction).inc(count)
        if usage.is_estimated:
            self._of(self.estimated_usage, record.task).inc()
        if usage.cost_nano_usd is not None:
            self._of(self.cost, record.task, backend).inc(usage.cost_nano_usd / NANO)

    def _breaker(self, place: Place) -> Gauge:
        return self.breaker_open.labels(place.backend, place.model, place.version, place.replica)
