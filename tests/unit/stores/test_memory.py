from gateway.core.rules import RuleSet
from gateway.stores.memory import MemoryRuleSource


def test_rules_are_replaced_whole():
    first, second = (RuleSet(revision=n, rules=()) for n in (1, 2))
    rules = MemoryRuleSource(first)
    assert rules.current() is first
    rules.replace(second)
    assert rules.current() is second
