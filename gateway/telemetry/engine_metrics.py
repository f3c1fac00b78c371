"""What LLM servers say of their own load, as metrics. All workers ask every server: the newest word stands for all."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge

from gateway.core.types import EngineLoad
from gateway.telemetry.labels import Known


class EngineMetrics:
    """The gauges of one process, and what feeds them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Gauge(
            "gateway_engine_requests",
            "Requests of everybody that an LLM server has in its batch (running) and in its queue (waiting).",
            ("backend", "replica", "state"),
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self._kv_used = Gauge(
            "gateway_engine_kv_used_ratio",
            "How much of an LLM server's KV cache is taken, 0 to 1, where it tells.",
            ("backend", "replica"),
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self._servers = Known()
        self._told: set[tuple[str, ...]] = set()
        self._told_kv: set[tuple[str, ...]] = set()

    def told(self, backend: str, loads: Mapping[str, EngineLoad]) -> None:
        """A backend's servers, all that tell; one that has stopped telling is shown as empty."""
        now: dict[tuple[str, ...], EngineLoad] = {}
        for replica, load in loads.items():
            at = self._servers(backend, replica)
            now[at] = load if at not in now else _both(now[at], load)
        for key in self._told - now.keys():
            if key[0] == backend:
                now[key] = EngineLoad(running=0, waiting=0)
        for key, load in now.items():
            self._requests.labels(*key, "running").set(load.running)
            self._requests.labels(*key, "waiting").set(load.waiting)
            if load.kv_used is not None or key in self._told_kv:
                self._kv_used.labels(*key).set(load.kv_used or 0.0)
                self._told_kv.add(key)
        self._told |= now.keys()


def _both(one: EngineLoad, other: EngineLoad) -> EngineLoad:
    """Two servers as one."""
    kv_used = max((load.kv_used for load in (one, other) if load.kv_used is not None), default=None)
    return EngineLoad(running=one.running + other.running, waiting=one.waiting + other.waiting, kv_used=kv_used)
