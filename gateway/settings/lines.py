"""Which line of a YAML file a fault is about: what refuses a document has read its values, and knows no lines."""

import re
from collections.abc import Sequence
from typing import Any, Final

import yaml

_OF_A_RULE: Final = re.compile(r"rule '([^']+)': (.*)", re.DOTALL)
_OF_AN_ENTRY: Final = re.compile(r"rules\[(\d+)\]: (.*)", re.DOTALL)
_FIELD: Final = re.compile(r"([a-z_]+(?:\[\d+\]|\.[^\s:\[\]]+)*): ")
_STEP: Final = re.compile(r"[^.\[\]]+")
_UNKNOWN: Final = re.compile(r"unknown field '([^']+)'")


def line_at(node: yaml.Node, way: Sequence[int | str]) -> int:
    """The line, from 1, of the innermost part of `way` (names and places in lists) that stands below `node`.

    Parts that do not stand there are passed over: checks name things on the way that a file does not.
    """
    line = node.start_mark.line + 1
    for part in way:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if str(key.value).lower() == str(part).lower()]
            if found:
                line, node = found[-1][0].start_mark.line + 1, found[-1][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return int(line)


def below(node: yaml.Node | None, name: str) -> yaml.Node | None:
    """What stands under `name` in a mapping."""
    entries = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for key, value in entries if key.value == name), None)


def rule_line(rules: yaml.Node | None, fault: str) -> int | None:
    """The line of what a `RuleError` is about, by its words, in the list of rules; None where they name no rule of it.

    `rule 'x': split[0]: unknown field 'wieght'` leads to the line of `wieght`.
    """
    found = _place(rules, fault) if isinstance(rules, yaml.SequenceNode) else None
    if found is None:
        return None
    rule, words = found
    field = _FIELD.match(words)
    way: list[int | str] = [_part(step) for step in _STEP.findall(field[1])] if field else []
    if unknown := _UNKNOWN.search(words):
        way.append(unknown[1])
    return line_at(rule, way)


def _place(rules: yaml.SequenceNode, fault: str) -> tuple[Any, str] | None:
    """The rule that the words are about, and what they say of it. Of two with one name the last: it is the surplus."""
    if entry := _OF_AN_ENTRY.match(fault):
        number = int(entry[1])
        return (rules.value[number], entry[2]) if number < len(rules.value) else None
    if named := _OF_A_RULE.match(fault):
        those = [rule for rule in rules.value if getattr(below(rule, "name"), "value", None) == named[1]]
        return (those[-1], named[2]) if those else None
    return None


def _part(step: str) -> int | str:
    return int(step) if step.isdecimal() else step
