"""Bodies of the admin API. Rules come in as plain JSON: `core.rules.parse_rules` names the faults."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from gateway.core.policies import DEFAULT, Cache, Idempotency, OnStoreDown, Ordering
from gateway.core.rules import Strategy


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RulesIn(_Body):
    """A whole set of rules."""

    rules: list[Any] = Field(description="the rules in order of precedence; each as in the answer")
    revision: int | None = Field(None, description="the revision that they were made from, instead of If-Match")


class RuleChange(_Body):
    """What may change in a single rule."""

    enabled: StrictBool


class TargetOut(_Body):
    """One place to send a request."""

    backend: str
    model: str
    version: str = ""
    weight: int
    parameters: dict[str, Any] = Field(default_factory=dict, exclude_if=lambda fields: not fields)
    context_tokens: int = Field(0, exclude_if=lambda tokens: not tokens)


class MatchOut(_Body):
    """Which requests a rule takes; `*` takes all."""

    task: str
    tenant: str
    model: str


class RuleOut(_Body):
    """One rule."""

    name: str
    match: MatchOut
    split: list[TargetOut]
    strategy: Strategy
    sticky_by: Literal["request", "tenant"]
    fallback: list[TargetOut]
    retries: int = Field(0, exclude_if=lambda rounds: not rounds)
    hedge: bool = Field(default=False, exclude_if=lambda hedges: not hedges)
    ordering: Ordering | None = Field(None, exclude_if=lambda ordering: ordering is None, description="unless as usual")
    cache: Cache | None = Field(None, exclude_if=lambda cache: cache is None)
    on_store_down: OnStoreDown = Field(DEFAULT.on_store_down, exclude_if=lambda how: how == DEFAULT.on_store_down)
    idempotency: Idempotency = Field(DEFAULT.idempotency, exclude_if=lambda how: how == DEFAULT.idempotency)
    enabled: bool


class AppliedOut(_Body):
    """How many of the live workers ran the revision, and how long after the change that was seen."""

    workers: int
    of: int
    ms: int


class RulesOut(_Body):
    """The rules in force."""

    revision: int
    rules: list[RuleOut]


class RulesApplied(RulesOut):
    """The rules after a change."""

    applied: AppliedOut
    warnings: list[str]


class RuleApplied(_Body):
    """One rule after a change."""

    revision: int
    rule: RuleOut
    applied: AppliedOut
    warnings: list[str]


class RulesValid(_Body):
    """A set that would be taken."""

    valid: Literal[True]
    rules: list[RuleOut]
    warnings: list[str]


class WorkerOut(_Body):
    """What one worker says of itself; `refused` means that it keeps an older set, `detail` says why."""

    id: str
    pid: int
    revision: int
    started: int = Field(description="Unix seconds")
    state: str
    detail: str


class Workers(_Body):
    """The live workers."""

    items: list[WorkerOut]
    next: str | None
