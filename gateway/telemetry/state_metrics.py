"""How things stand, told about once a second: breakers, queues, and the rules and switches in force."""

import time
from collections import Counter as Counts
from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.core.breaker import Breaker
from gateway.core.rules import RuleSet
from gateway.core.switches import ACTIONS
from gateway.core.types import Place
from gateway.telemetry.labels import Known

MAX_PLACES: Final = 2048
"""Models and versions on replicas, over the life of a process: in a cluster each new pod is a replica."""


class StateMetrics:
    """The gauges of one process, and what feeds them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._breakers, self._healed = Known(MAX_PLACES), Known()
        self._is_open: dict[tuple[str, ...], bool] = {}
        self._waiting = Gauge(
            "gateway_requests_waiting",
            "Requests that wait in the gateway, a backend's servers having as many as they may; once a second.",
            ("backend",),
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._breaker_open = Gauge(
            "gateway_breaker_open",
            "1 while a place fails: no request is sent there, but for one that tries; the worst worker counts.",
            ("backend", "model", "version", "replica"),
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._heals = Counter(
            "gateway_model_heals",
            "Models whose process had died on a server, by what became of loading them anew there.",
            ("backend", "model", "outcome"),
            registry=registry,
        )
        self._revision = Gauge(
            "gateway_rules_revision",
            "Revision of the routing rules in force; the most backward worker counts.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._revision_max = Gauge(
            "gateway_rules_revision_max",
            "The same of the most forward worker; other than the least for longer than a moment, one does not follow.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._worker_revision = Gauge(
            "gateway_worker_rules_revision",
            "The same of each worker.",
            registry=registry,
            multiprocess_mode="liveall",
        )
        self._switches = Gauge(
            "gateway_switches_in_force",
            "Switches that hold now; the worker that knows most counts.",
            ("action",),
            registry=registry,
            multiprocess_mode="livemax",
        )

    def breakers(self, breakers: Mapping[Place, Breaker]) -> None:
        """All of them; one that is there no more is shown as shut."""
        is_open = dict.fromkeys(self._is_open, False)
        for place, breaker in breakers.items():
            at = self._breakers(place.backend, place.model, place.version, place.replica)
            is_open[at] = is_open.get(at, False) or breaker.open_until_us is not None
        for at, now in is_open.items():
            if self._is_open.get(at) is not now:
                self._breaker_open.labels(*at).set(now)
        self._is_open = is_open

    def rules(self, rules: RuleSet) -> None:
        """The set in force."""
        for gauge in (self._revision, self._revision_max, self._worker_revision):
            gauge.set(rules.revision)
        held = Counts(one.action for one in rules.switches.in_force(time.time_ns() // 1_000_000))
        for action in ACTIONS:
            self._switches.labels(action).set(held[action])

    def waiting(self, counts: Mapping[str, int]) -> None:
        """The length of our own queues."""
        for backend, count in counts.items():
            self._waiting.labels(backend).set(count)

    def healed(self, place: Place, outcome: str) -> None:
        """A model whose process had died was loaded anew, or could not be."""
        self._heals.labels(*self._healed(place.backend, place.model), outcome).inc()
