"""Plans as the pipeline makes them, without one."""

from gateway.core.routing import Plan, State, plan_by
from gateway.core.rules import RuleSet
from gateway.core.types import InferenceRequest


def plan_of(rules: RuleSet, request: InferenceRequest, state: State) -> Plan:
    """By the first rule that takes `request`; of no places where none does."""
    rule = rules.rule_of(request)
    if rule is None:
        return Plan(rule="", revision=rules.revision, candidates=())
    return plan_by(rule, rules.revision, request, state)
