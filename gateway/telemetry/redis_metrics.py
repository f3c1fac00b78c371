"""How Redis answers, as the stores tell."""

from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Histogram

from gateway.telemetry.labels import Children

# From a Redis on the same host to one that is given up; seconds.
BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
POLL: Final = "rules"
"""The operation that every worker makes twice a second, whatever its requests are."""


class RedisMetrics:
    """The metrics of one process; an instance is a `ports.StoreObserver`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Children(
            Histogram(
                "gateway_redis_seconds",
                "Time that Redis took: admissions (admit), rules and switches (rules), API keys (keys).",
                ("operation",),
                buckets=BUCKETS,
                registry=registry,
            )
        )
        self._up = Gauge(
            "gateway_redis_up",
            "Whether Redis answered when it was asked last, twice a second; of all workers the worst. 1 without one.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._up.set(1)

    def __call__(self, operation: str, took_s: float | None) -> None:
        """See `ports.StoreObserver`."""
        if took_s is not None:
            self._seconds[operation,](took_s)
        if operation == POLL:
            self._up.set(took_s is not None)
