"""Every metric of the gateway. Each is declared in this package, in the file of its topic (`*_metrics.py`).

Labels are bounded by design: tasks and backends come from the configuration, models from the rules and from what
servers serve (`labels`), replicas are servers' addresses, codes come from the closed list. With several workers each
writes its own files and the operations listener sums them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from gateway.core.breaker import Breaker
from gateway.core.errors import QueueFull
from gateway.core.models import ModelFigures
from gateway.core.rules import RuleSet
from gateway.core.types import EngineLoad, Place, Priority
from gateway.core.watching.record import RequestRecord
from gateway.telemetry.cells import count_in_place
from gateway.telemetry.engine_metrics import EngineMetrics
from gateway.telemetry.exemplars import Folder
from gateway.telemetry.labels import Names
from gateway.telemetry.model_metrics import ModelMetrics
from gateway.telemetry.process_metrics import ProcessMetrics
from gateway.telemetry.redis_metrics import RedisMetrics
from gateway.telemetry.refusal_metrics import RefusalMetrics
from gateway.telemetry.request_metrics import RequestMetrics
from gateway.telemetry.state_metrics import StateMetrics
from gateway.telemetry.usage_metrics import UsageMetrics


class Metrics:
    """The metrics of one process, and the observer (of requests, and of health) that feeds them.

    Args:
        folder: where the library writes them, and so the exemplars; None where nobody reads them from there.

    Attributes:
        redis: hears of Redis from the stores.
        process: measures the process itself, once it is started.
    """

    def __init__(self, registry: CollectorRegistry, folder: Path | None = None) -> None:
        count_in_place()
        self._names, exemplars = Names(), Folder(folder)
        self._requests = RequestMetrics(registry, self._names, exemplars)
        self._usage = UsageMetrics(registry, exemplars)
        self._refusals = RefusalMetrics(registry)
        self._state = StateMetrics(registry)
        self._models = ModelMetrics(registry)
        self._engines = EngineMetrics(registry)
        self.redis = RedisMetrics(registry)
        self.process = ProcessMetrics(registry)

    def began(self, task: str) -> None:
        """A request entered the walk."""
        self._requests.began(task)

    def ended(self, record: RequestRecord) -> None:
        """It left it."""
        at = self._names.at(record)
        self._requests.ended(record, at)
        self._usage.ended(record, at[0])
        self._refusals.ended(record)

    def refused(self, record: RequestRecord) -> None:
        """A request was refused at the door; its task is known to exist, or empty."""
        self._requests.refused(record)

    def shed(self, priority: Priority) -> None:
        """A request was refused at the door as the worker is behind; `refused` hears of it, too."""
        self._refusals.shed(priority, 1)

    def turned_away(self, priority: Priority, count: int) -> None:
        """So many were turned away for the same reason, and have no records."""
        self._refusals.shed(priority, count)
        self._requests.turned_away(QueueFull.code, count)

    def health(self, breakers: Mapping[Place, Breaker], rules: RuleSet) -> None:
        """The state of the breakers, and the rules and switches in force, told about once a second."""
        self._names.learn_rules(rules)
        self._state.breakers(breakers)
        self._state.rules(rules)

    def waiting(self, counts: Mapping[str, int]) -> None:
        """The length of our own queues."""
        self._state.waiting(counts)

    def healed(self, place: Place, outcome: str) -> None:
        """A model whose process had died was loaded anew, or could not be."""
        self._state.healed(place, outcome)

    def engines(self, backend: str, loads: Mapping[str, EngineLoad]) -> None:
        """What LLM servers say of their load."""
        self._engines.told(backend, loads)

    def figures(self, backend: str, figures: Sequence[ModelFigures]) -> None:
        """A backend's own statistics."""
        self._names.learn_figures(backend, figures)
        self._models.told(backend, figures)
