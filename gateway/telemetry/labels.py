"""Labels that callers cannot multiply: what neither the rules nor the servers know is counted as `other`."""

from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from prometheus_client.metrics import MetricWrapperBase

from gateway.core.models import ModelFigures
from gateway.core.rules import RuleSet
from gateway.core.types import ANY
from gateway.core.watching.record import RequestRecord
from gateway.telemetry.cells import counting

NONE: Final = "none"
"""There is no such thing: a request that was refused at the door has no backend."""
OTHER: Final = "other"
"""There is one, and its name is the caller's own, or one too many."""
MAX_NAMES: Final = 512
"""Of models with their versions, and of rules, over the life of a process: operators change both as they like."""

Metric = TypeVar("Metric", bound=MetricWrapperBase)
At = tuple[str, str, str]
"""Backend, model and version."""
_NOWHERE: Final[At] = (NONE, NONE, NONE)


class Children(dict[tuple[str, ...], Callable[[float], None]], Generic[Metric]):
    """What counts into a metric's child, by its labels: the library takes a lock and checks names at each `labels`."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, labels: tuple[str, ...]) -> Callable[[float], None]:
        count = self[labels] = counting(self._metric.labels(*labels))
        return count


class Known:
    """The labels of what operators and servers bring and take away: the first `limit` over the life of a process.

    A series that was there once stays. So whatever else comes is `OTHER` of the same first label, the backend.
    """

    def __init__(self, limit: int = MAX_NAMES) -> None:
        self._limit = limit
        self._known: set[tuple[str, ...]] = set()

    def __call__(self, *labels: str) -> tuple[str, ...]:
        """`labels`, or those that stand for them."""
        if labels not in self._known:
            if len(self._known) >= self._limit:
                return (labels[0], *(OTHER for _ in labels[1:]))
            self._known.add(labels)
        return labels


class Names:
    """The names of places and rules that may stand in labels."""

    def __init__(self) -> None:
        self._places: set[At] = set()
        self._models: set[str] = set()
        self._rules: set[str] = set()

    def learn_rules(self, rules: RuleSet) -> None:
        """Models and versions that rules name are known."""
        for rule in rules.rules:
            for _, target in rule.targets:
                if target.model != ANY:
                    self._learn(target.backend, target.model, target.version)

    def learn_figures(self, backend: str, figures: Iterable[ModelFigures]) -> None:
        """Models and versions that servers serve are known."""
        for one in figures:
            self._learn(backend, one.model, one.version)

    def at(self, record: RequestRecord) -> At:
        """Where a request was answered, or was tried last; of one that was sent nowhere the model that it names."""
        route, request = record.route, record.request
        place = route or (record.tried[-1].place if record.tried else None)
        if place is None:
            if request is None or not request.model:
                return _NOWHERE
            return (NONE, request.model if request.model in self._models else OTHER, NONE)
        at = (place.backend, place.model, place.version)
        if at in self._places:
            return at
        is_full = len(self._places) >= MAX_NAMES
        is_known = (place.backend, place.model, "") in self._places
        if not is_known and (is_full or (request is not None and request.model == place.model)):
            return (place.backend, OTHER, OTHER)
        if is_full or (request is not None and place.version and request.version == place.version):
            return (place.backend, place.model, OTHER)
        self._learn(*at)  # its model is a rule's, its version a rule's or what a server has told
        return at

    def rule(self, name: str) -> str:
        """A rule's name, which is one of the set in force when its request came."""
        if name in self._rules:
            return name
        if not name:
            return NONE
        if len(self._rules) >= MAX_NAMES:
            return OTHER
        self._rules.add(name)
        return name

    def _learn(self, backend: str, model: str, version: str) -> None:
        """A version brings its model along."""
        if len(self._places) < MAX_NAMES:
            self._places |= {(backend, model, ""), (backend, model, version)}
            self._models.add(model)
