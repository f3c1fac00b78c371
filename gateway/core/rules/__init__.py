"""Routing rules: what they are (`rule`), how they are read and written (`documents`), and which one takes a request.

`rule_set` is what requests are routed by; `matching` compiles it; `checks` holds rules against a configuration.
"""

from gateway.core.rules.checks import (
    check_models,
    check_prices,
    check_shared_limits,
    check_speech,
    check_targets,
    unrouted,
    warnings_of,
)
from gateway.core.rules.documents import MAX_RULES, MAX_WEIGHT, OURS, parse_rules, rules_document
from gateway.core.rules.rule import (
    STRATEGIES,
    Guard,
    Match,
    Rule,
    Shadow,
    StickyBy,
    Strategy,
    Target,
    TimeWindow,
)
from gateway.core.rules.rule_set import RuleSet

__all__ = [
    "MAX_RULES",
    "MAX_WEIGHT",
    "OURS",
    "STRATEGIES",
    "Guard",
    "Match",
    "Rule",
    "RuleSet",
    "Shadow",
    "StickyBy",
    "Strategy",
    "Target",
    "TimeWindow",
    "check_models",
    "check_prices",
    "check_shared_limits",
    "check_speech",
    "check_targets",
    "parse_rules",
    "rules_document",
    "unrouted",
    "warnings_of",
]
