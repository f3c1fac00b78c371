"""What the control plane works on, each part behind its port. Parts that are None have no paths."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.admin.models.model_routes import ModelPlane
from gateway.admin.rollouts.rollouts import Rollouts
from gateway.admin_ports import (
    AuditLog,
    FigureSource,
    KeyStore,
    RequestLog,
    RuleStore,
    Sessions,
    ShadowSource,
    UsageSource,
)
from gateway.core.cost import PriceTable
from gateway.core.rules import Rule
from gateway.core.types import Caller, Limit


def _fits(_: Sequence[Rule]) -> None:
    """Every rule fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """The whole of it.

    Attributes:
        check: raises `RuleError` for rules that do not fit the configuration.
        tasks: those that there are.
        callers: of the keys of the configuration, by their ids.
        key_limits: of a key that has none of its own.
        llm_tasks: of the tasks those that an LLM can answer.
        prices: of the models that have one.
    """

    rules: RuleStore | None = None
    check: Callable[[Sequence[Rule]], None] = _fits
    tasks: Collection[str] = ()
    callers: Mapping[str, Caller] = field(default_factory=dict)
    key_limits: tuple[Limit, ...] = ()
    llm_tasks: Collection[str] = ()
    prices: PriceTable = field(default_factory=PriceTable)
    models: ModelPlane | None = None
    usage: UsageSource | None = None
    keys: KeyStore | None = None
    audit: AuditLog | None = None
    sessions: Sessions | None = None
    figures: FigureSource | None = None
    requests: RequestLog | None = None
    shadows: ShadowSource | None = None
    rollouts: Rollouts | None = None
