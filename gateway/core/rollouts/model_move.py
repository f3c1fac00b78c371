"""A model's move from one version to another, as routing rules: rules in, rules out.

While a model moves, every target that leads to it names its version, so that a load moves nobody; callers are then
moved by weight. Every rule so changed is sticky by tenant, and the new version stands before the old one on the line of
weights: a caller that is on the new version stays there as its weight grows. Callers of `/v2` name the model
themselves and are routed by targets with the model `*`; a rule of their own is put before each such rule.

Operators may edit rules meanwhile. What they changed of a rule is kept; a rule whose split they changed is theirs from
then on.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import Any

from gateway.core.rules import MAX_WEIGHT, Rule, Target, parse_rules, rules_document
from gateway.core.rules.fields import NAME
from gateway.core.types import ANY

WHOLE = 100
MAX_NAME = 128


class RolloutError(ValueError):
    """A rule that cannot take part in a move; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """From version `old` of `model` to `new`, on the `backends` that serve it."""

    model: str
    backends: frozenset[str]
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A rule that a move has changed.

    Attributes:
        original: as it was, with what was edited since.
        forms: what the move made of it, the last two: one may have been planned and not stored.
        is_released: someone else changed its split; the move leaves it alone.
    """

    original: Rule
    forms: tuple[Rule, ...] = ()
    is_released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What a move has left in the rules: the rules it holds by name, and the names of those it added."""

    held: Mapping[str, Held] = field(default_factory=dict)
    added: frozenset[str] = frozenset()

    @property
    def released(self) -> tuple[str, ...]:
        """The rules that someone else has taken over."""
        return tuple(name for name, held in self.held.items() if held.is_released)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaped:
    """A rule set with a move's share in it."""

    rules: tuple[Rule, ...]
    marks: Marks


def shape(rules: Iterable[Rule], marks: Marks, move: Move, *, percent: int) -> Shaped:
    """Send `percent` of the model's callers to the new version, the others to the old one.

    May be repeated, and applied to rules that others have changed since `marks` was made. A target that does not share
    by weight (a fallback, a later one of an ordered split) goes to the new version with the last caller.
    Raises `RolloutError`.
    """
    if not NAME.fullmatch(move.model):  # workers would refuse the whole set
        raise RolloutError(f"no rule can name the model '{move.model}'")
    shaped: list[Rule] = []
    held: dict[str, Held] = {}
    added: set[str] = set()
    for rule in rules:
        if rule.name in marks.added:
            continue
        mark = _merged(rule, marks.held.get(rule.name))
        original = rule if mark.is_released else mark.original
        if _leads_by_name(original, move):
            named = _named(original, move)
            added.add(named.name)
            shaped.append(_shaped(named, move, percent))
        if mark.is_released:
            held[rule.name] = mark
        elif any(_is_ours(target, original, move) for target in (*original.split, *original.fallback)):
            original = _shaped(original, move, percent)
            held[rule.name] = replace(mark, forms=(*mark.forms[-1:], original))
        shaped.append(original)
    unique = tuple(rule for i, rule in enumerate(shaped) if all(rule.name != other.name for other in shaped[:i]))
    return Shaped(rules=unique, marks=Marks(held=held, added=frozenset(added)))


def restore(rules: Iterable[Rule], marks: Marks, move: Move, *, serves: str) -> tuple[Rule, ...]:
    """The rules without the move, which has ended with the version `serves`.

    They are as they were, with what was edited since; a target that named the old version by its number names `serves`.
    """
    restored = []
    for rule in rules:
        if rule.name in marks.added:
            continue
        mark = _merged(rule, marks.held.get(rule.name))
        restored.append(rule if mark.is_released else _serving(mark.original, move, serves))
    return tuple(restored)


def names_version(rules: Iterable[Rule], move: Move, version: str) -> tuple[str, ...]:
    """The enabled rules that lead to `version` of the model by its number."""
    return tuple(
        rule.name
        for rule in rules
        if rule.enabled
        and any(t.version == version and _is_model(t, rule, move) for t in (*rule.split, *rule.fallback))
    )


def marks_document(marks: Marks) -> dict[str, Any]:
    """As plain lists and dicts, for a store."""
    held = {
        name: {
            "original": rules_document([one.original])[0],
            "forms": rules_document(one.forms),
            "is_released": one.is_released,
        }
        for name, one in marks.held.items()
    }
    return {"held": held, "added": sorted(marks.added)}


def parse_marks(document: Mapping[str, Any]) -> Marks:
    """The inverse of `marks_document`. Raises `RuleError`."""
    held = {
        name: Held(
            original=parse_rules([one["original"]])[0],
            forms=tuple(parse_rules([form])[0] for form in one["forms"]),
            is_released=one["is_released"],
        )
        for name, one in document["held"].items()
    }
    return Marks(held=held, added=frozenset(document["added"]))


def _merged(rule: Rule, held: Held | None) -> Held:
    """`held` with what someone else has changed of the rule since."""
    if held is None:
        return Held(original=rule)
    forms = (held.original, *held.forms)
    edits = {
        one.name: getattr(rule, one.name)
        for one in fields(Rule)
        if all(getattr(rule, one.name) != getattr(form, one.name) for form in forms)
    }
    if held.is_released or "split" in edits:  # an edited split says itself who goes where
        return replace(held, is_released=True)
    edited = [replace(form, **edits) for form in forms]
    return replace(held, original=edited[0], forms=tuple(edited[1:]))


def _is_model(target: Target, rule: Rule, move: Move) -> bool:
    """Whether all that `target` gets is for the model."""
    named = rule.match.model if target.model == ANY else target.model
    return target.backend in move.backends and named == move.model


def _is_ours(target: Target, rule: Rule, move: Move) -> bool:
    """Whether what `target` gets goes to the old version now."""
    return _is_model(target, rule, move) and target.version in ("", move.old)


def _leads_by_name(rule: Rule, move: Move) -> bool:
    """Whether callers that name the model themselves may come by this rule, among others."""
    return rule.match.model == ANY and any(
        t.model == ANY and t.backend in move.backends and t.version in ("", move.old)
        for t in (*rule.split, *rule.fallback)
    )


def _named(rule: Rule, move: Move) -> Rule:
    """The same rule for the callers of the model alone."""

    def one(target: Target) -> Target:
        is_ours = target.model == ANY and target.backend in move.backends
        return replace(target, model=move.model) if is_ours else target

    return replace(
        rule,
        name=_rule_name(rule, move),
        match=replace(rule.match, model=move.model),
        split=tuple(map(one, rule.split)),
        fallback=tuple(map(one, rule.fallback)),
    )


def _rule_name(rule: Rule, move: Move) -> str:
    """What is cut short ends in a digest of the whole: no two of them are one."""
    name = f"deploy-{move.model}-{rule.name}"
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - len(digest) - 1]}-{digest}"


def _shaped(rule: Rule, move: Move, percent: int) -> Rule:
    split, fallback, strategy = rule.split, rule.fallback, rule.strategy
    if strategy == "ordered" and (first := next((t for t in split if t.weight), None)) and _is_ours(first, rule, move):
        # The first of an ordered split is shared by weight; the others follow it as before.
        fallback = (*(t for t in split if t.weight and t is not first), *fallback)
        split, strategy = (replace(first, weight=1),), "weighted"
    serves = move.new if percent == WHOLE else move.old
    if strategy == "weighted" and any(_is_ours(t, rule, move) for t in split):
        split, sticky = _shared(rule, split, move, percent), True
    else:
        split, sticky = _pinned(split, rule, move, serves), False
    return replace(
        rule,
        split=split,
        fallback=_pinned(fallback, rule, move, serves),
        strategy=strategy,
        sticky_by="tenant" if sticky else rule.sticky_by,
    )


def _shared(rule: Rule, split: Sequence[Target], move: Move, percent: int) -> tuple[Target, ...]:
    """Every weight a hundredfold; ours divided in two, the new version first."""
    divisor = gcd(*(t.weight for t in split)) or 1
    shared = []
    for target in split:
        weight = target.weight // divisor
        if weight * WHOLE > MAX_WEIGHT:
            raise RolloutError(f"rule '{rule.name}': its weights are too far apart to be divided further")
        if not _is_ours(target, rule, move):
            shared.append(replace(target, weight=weight * WHOLE))
            continue
        halves = ((move.new, weight * percent), (move.old, weight * (WHOLE - percent)))
        # A target without weight would be probed all the same, before the version is there and after it has gone.
        shared += [replace(target, version=version, weight=part) for version, part in halves if part]
    # A split whose every weight is 0 (its fallback answers) stays as it is.
    return tuple(shared) or _pinned(split, rule, move, move.new if percent == WHOLE else move.old)


def _pinned(targets: Sequence[Target], rule: Rule, move: Move, version: str) -> tuple[Target, ...]:
    return tuple(replace(t, version=version) if _is_ours(t, rule, move) else t for t in targets)


def _serving(rule: Rule, move: Move, serves: str) -> Rule:
    def one(target: Target) -> Target:
        is_named = target.version == move.old and _is_model(target, rule, move)
        return replace(target, version=serves) if is_named else target

    return replace(rule, split=tuple(map(one, rule.split)), fallback=tuple(map(one, rule.fallback)))
