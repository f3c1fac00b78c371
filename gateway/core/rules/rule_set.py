"""A set of rules under one revision, compiled once, with the switches that stand above it."""

from dataclasses import dataclass, field
from typing import Any

from gateway.core.rules.matching import NOWHERE, Circumstances, RuleTable
from gateway.core.rules.rule import Rule
from gateway.core.switches import NO_SWITCHES, Switches
from gateway.core.types import Caller, InferenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """What requests are routed by; never changed, only replaced whole. `revision` 0 is the configuration file's own."""

    revision: int
    rules: tuple[Rule, ...]
    switches: Switches = NO_SWITCHES
    table: RuleTable = field(init=False, repr=False, compare=False)
    headers: frozenset[str] = field(init=False, repr=False, compare=False)
    """The names of those that its rules match on."""
    plans: dict[tuple[str, str, str], Any] = field(init=False, repr=False, compare=False)
    """What `core.routing` has settled once for all, by rule, and by the model and version that a request names."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", RuleTable(self.rules))
        object.__setattr__(self, "plans", {})
        object.__setattr__(self, "headers", frozenset(name for rule in self.rules for name in rule.match.headers))

    def rule_of(self, request: InferenceRequest, at: Circumstances = NOWHERE) -> Rule | None:
        """The first enabled rule that takes `request`."""
        return self.table.find(request, at)

    def rule_for(self, caller: Caller, *, task: str, model: str = "") -> Rule | None:
        """The first enabled rule that takes a request of `caller` of which nothing more is known."""
        plain = InferenceRequest(id="", task=task, caller=caller, input=None, received_us=0, deadline_us=0, model=model)
        return self.table.find(plain, NOWHERE)

    def named(self, name: str) -> Rule | None:
        """The rule of that name, enabled or not."""
        return next((rule for rule in self.rules if rule.name == name), None)
