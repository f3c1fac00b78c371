"""What differs between two sets of rules, field by field, as operators read it."""

import bisect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from gateway.core.rules.documents import rules_document
from gateway.core.rules.rule import Rule

SHOWN: Final = 120  # characters of a value in `text`


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One field by its path in the rule's document, such as `split[0].weight`; None where it is not there."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleChange:
    """What became of one rule. One that was both changed and moved is there twice.

    Attributes:
        fields: of an added or removed rule the one field `rule`, its document; of a moved one `position`, from 1 on.
        text: the same in one line.
    """

    rule: str
    change: Literal["added", "removed", "changed", "moved"]
    fields: tuple[FieldChange, ...]
    text: str


def changes(before: Sequence[Rule], after: Sequence[Rule]) -> tuple[RuleChange, ...]:
    """All that turns `before` into `after`, in the order of `after`; what was removed comes last.

    Rules are the same by their names. Of rules that changed places as few as can be are said to have moved.
    """
    old = {rule.name: (i, rule) for i, rule in enumerate(before)}
    new = {rule.name: (i, rule) for i, rule in enumerate(after)}
    moved = _moved([old[name][0] for name in new if name in old])
    told = [change for name in new for change in _of_rule(old.get(name), new[name], moved)]
    return (*told, *(_removed(*old[name]) for name in old if name not in new))


def _of_rule(old: tuple[int, Rule] | None, new: tuple[int, Rule], moved: frozenset[int]) -> Iterator[RuleChange]:
    (at, rule), name = new, new[1].name
    if old is None:
        field = FieldChange(field="rule", before=None, after=_document(rule))
        yield RuleChange(rule=name, change="added", fields=(field,), text=f"rule '{name}': added as number {at + 1}")
        return
    place, before = old
    # Rules that are equal may be other documents, as True is 1 in Python; their texts tell, and are quick to make.
    fields = tuple(_fields("", _document(before), _document(rule))) if repr(before) != repr(rule) else ()
    if fields:
        words = "; ".join(f"{one.field}: {_shown(one.before)} -> {_shown(one.after)}" for one in fields)
        yield RuleChange(rule=name, change="changed", fields=fields, text=f"rule '{name}': {words}")
    if place in moved:
        field = FieldChange(field="position", before=place + 1, after=at + 1)
        text = f"rule '{name}': moved from number {place + 1} to number {at + 1}"
        yield RuleChange(rule=name, change="moved", fields=(field,), text=text)


def _removed(at: int, rule: Rule) -> RuleChange:
    field = FieldChange(field="rule", before=_document(rule), after=None)
    text = f"rule '{rule.name}': removed from number {at + 1}"
    return RuleChange(rule=rule.name, change="removed", fields=(field,), text=text)


def _document(rule: Rule) -> dict[str, Any]:
    return rules_document([rule])[0]


def _fields(at: str, before: Any, after: Any) -> Iterator[FieldChange]:
    """The smallest parts of two documents that differ."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys((*before, *after)):
            yield from _fields(f"{at}.{name}" if at else name, before.get(name), after.get(name))
    elif _holds_mappings(before) and _holds_mappings(after):
        for i in range(max(len(before), len(after))):
            yield from _fields(f"{at}[{i}]", _item(before, i), _item(after, i))
    elif before != after or isinstance(before, bool) != isinstance(after, bool):  # in Python, True is 1
        yield FieldChange(field=at, before=before, after=after)


def _holds_mappings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)


def _item(values: Sequence[Any], i: int) -> Any:
    return values[i] if i < len(values) else None


def _shown(value: Any) -> str:
    """A value in a line of text."""
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _moved(places: Sequence[int]) -> frozenset[int]:
    """Of different numbers those that are not in the longest run that rises: what has to move so that all rise."""
    ends: list[int] = []  # the last number of the best run of each length, which is the smallest that there is
    runs: list[int] = []  # of each number the length of the best run that ends with it
    for place in places:
        length = bisect.bisect_left(ends, place)
        ends[length : length + 1] = [place]
        runs.append(length)
    stayed, length = set(), len(ends) - 1
    for place, run in zip(reversed(places), reversed(runs), strict=True):
        if run == length:
            stayed.add(place)
            length -= 1
    return frozenset(places) - stayed
