"""Why requests were not let in: limits, switches, a worker that is behind; and limits decided without the store."""

from prometheus_client import CollectorRegistry, Counter

from gateway.core.types import Priority
from gateway.core.watching.record import RequestRecord
from gateway.telemetry.labels import NONE, Children


class RefusalMetrics:
    """What is counted of requests that were kept out by somebody's decision."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._limited = Children(
            Counter(
                "gateway_limited",
                "Requests refused by a limit: its kind, and its period (none: of requests at once).",
                ("task", "kind", "window"),
                registry=registry,
            )
        )
        self._blocked = Children(
            Counter(
                "gateway_blocked",
                "Requests refused by a switch, by the kind of its scope.",
                ("task", "scope"),
                registry=registry,
            )
        )
        self._shed = Children(
            Counter(
                "gateway_shed",
                "Requests refused because their worker's event loop was behind, by their priority.",
                ("priority",),
                registry=registry,
            )
        )
        self._degraded = Counter(
            "gateway_limiter_degraded",
            "Requests whose limits were decided by this process alone, the shared store being out of reach.",
            registry=registry,
        )

    def shed(self, priority: Priority, count: int) -> None:
        """So many requests were refused because their worker is behind."""
        self._shed[priority,](count)

    def ended(self, record: RequestRecord) -> None:
        """A request ended."""
        if record.degraded:
            self._degraded.inc()
        error = record.error
        if error is None:
            return
        if error.verdict is not None and (hit := error.verdict.refused_by) is not None:
            self._limited[record.task, hit.limit.kind, hit.limit.per or NONE](1)
        if record.blocked_scope:
            self._blocked[record.task, record.blocked_scope](1)
