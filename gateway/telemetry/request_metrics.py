"""Requests: how many, how they ended, how long they took, and how much of that was the gateway's own."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.core.watching.record import RequestRecord
from gateway.telemetry.exemplars import Folder, Newest
from gateway.telemetry.labels import NONE, At, Children, Names

# From a fast embedding on one core to a long chat answer; seconds.
DURATION_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# From a request that is passed on at once to one with a large image on a busy core; seconds.
OVERHEAD_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
WAIT_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RequestMetrics:
    """What is counted and measured of every request."""

    def __init__(self, registry: CollectorRegistry, names: Names, exemplars: Folder) -> None:
        self._names = names
        place = ("task", "backend")
        self._requests = Children(
            Counter(
                "gateway_requests",
                "Requests ended, by where they were answered or tried last, their rule, and outcome (ok or an error).",
                (*place, "model", "version", "rule", "code"),
                registry=registry,
            )
        )
        self._in_flight = Children(
            Gauge(
                "gateway_requests_in_flight",
                "Requests between their door and the end of their answer.",
                ("task",),
                registry=registry,
                multiprocess_mode="livesum",
            )
        )
        self._attempts = Children(
            Counter(
                "gateway_attempts",
                "Requests sent to a place: ok, the fault's kind, or left (its caller went, or another began first).",
                (*place, "outcome"),
                registry=registry,
            )
        )
        self._failed_attempts = Children(
            Counter(
                "gateway_failed_attempts",
                "Attempts that did not bring an answer; a request may hold several and still end ok.",
                ("task",),
                registry=registry,
            )
        )
        self._recalls = Children(
            Counter(
                "gateway_recalls",
                "Answers kept to be given again: given again (replayed, hit, collapsed), or made for the cache (miss).",
                ("task", "outcome"),
                registry=registry,
            )
        )
        self._durations(registry)
        self._exemplars = Newest("gateway_request_duration_seconds", place, DURATION_BUCKETS, exemplars)

    def _durations(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Children[Histogram]:
            return Children(Histogram(f"gateway_{name}_seconds", text, labels, buckets=buckets, registry=registry))

        place = ("task", "backend")
        self._duration = histogram(
            "request_duration", "From the request's first byte read to the end of its answer.", place, DURATION_BUCKETS
        )
        self._backend_duration = histogram(
            "backend_duration",
            "The part of a request's time that was spent waiting for backends, all attempts together.",
            place,
            DURATION_BUCKETS,
        )
        self._overhead = histogram(
            "overhead",
            "A request's time less what it waited for backends, in queues and in its order.",
            ("task",),
            OVERHEAD_BUCKETS,
        )
        self._queue_wait = histogram(
            "queue_wait", "How long attempts waited in the gateway for a full server; only of those that did.", place,
            WAIT_BUCKETS,
        )  # fmt: skip
        self._ordering_wait = histogram(
            "ordering_wait", "How long requests waited for their turn under an ordering key; only of those that did.",
            ("task",), WAIT_BUCKETS,
        )  # fmt: skip

    def began(self, task: str) -> None:
        """A request entered the walk."""
        self._in_flight[task,](1)

    def ended(self, record: RequestRecord, at: At) -> None:
        """It left it, having been answered or tried last at `at`."""
        task, place = record.task, (record.task, at[0])
        self._in_flight[task,](-1)
        self._requests[task, *at, self._names.rule(record.rule), record.code](1)
        total_s = record.total_us / 1e6
        self._duration[place](total_s)
        self._exemplars.seen(place, total_s, record.trace)
        if at[0] != NONE and record.timing:
            self._backend_duration[place](record.timing.backend_us / 1e6)
        waited_us = self._tried(record)
        if record.ordering_us:
            self._ordering_wait[task,](record.ordering_us / 1e6)
        if record.timing and not record.recalled:  # what is given again may have waited for another request's answer
            own_us = record.total_us - record.timing.backend_us - waited_us - record.ordering_us
            self._overhead[task,](max(0, own_us) / 1e6)  # waits at the same time (a hedge's, a turn's) count twice
        if record.recalled:
            self._recalls[task, record.recalled](1)

    def _tried(self, record: RequestRecord) -> int:
        """Count its attempts. How long they waited for full servers, in microseconds."""
        waited_us = 0
        for place, outcome, gate_us in record.tried:
            self._attempts[record.task, place.backend, outcome](1)
            if gate_us:
                waited_us += gate_us
                self._queue_wait[record.task, place.backend](gate_us / 1e6)
        if record.faults:
            self._failed_attempts[record.task,](len(record.faults))
        return waited_us

    def refused(self, record: RequestRecord) -> None:
        """A request was refused at the door; its task is known to exist, or empty."""
        self._requests[record.task or NONE, NONE, NONE, NONE, NONE, record.code](1)

    def turned_away(self, code: str, count: int) -> None:
        """So many were refused before anything was known of them."""
        self._requests[NONE, NONE, NONE, NONE, NONE, code](count)
