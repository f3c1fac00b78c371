"""Routing: (rules, request, health, chance) -> ordered candidates, each with its reason."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.core.rules import RuleSet, Target
from gateway.core.types import InferenceRequest, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where a request may go, best first; `refusals` says of every other place of the rule why it may not.

    `rule` is empty where no enabled rule takes the request; `candidates` may be empty too: then nobody can answer.
    """

    rule: str
    revision: int
    candidates: tuple[Place, ...]
    refusals: tuple[tuple[Place, str], ...] = ()


WhyNot = Callable[[Place], str | None]
"""Health, given from outside: None if the place may be tried, else the reason why not."""


def plan(rules: RuleSet, request: InferenceRequest, *, why_not: WhyNot, draw: float) -> Plan:
    """Order the places of the first rule that takes `request`.

    `draw` is a number in [0, 1) that chooses among a weighted split; with `sticky_by: tenant` it is replaced by a hash
    of the tenant, so that a caller stays on its side.
    """
    rule = rules.rule_for(task=request.task, tenant=request.caller.tenant)
    if rule is None:
        return Plan(rule="", revision=rules.revision, candidates=())
    refusals: list[tuple[Place, str]] = []
    primary = _usable(rule.split, why_not, refusals)
    fallback = _usable(rule.fallback, why_not, refusals)
    if rule.strategy == "weighted" and len(primary) > 1:
        point = _sticky_draw(rule.name, request.caller.tenant) if rule.sticky_by == "tenant" else draw
        primary = _chosen_first(primary, point)
    # Each place at its first standing: whatever the weights say, a place that failed is not tried again.
    candidates = tuple(dict.fromkeys(target.place for target in (*primary, *fallback)))
    return Plan(rule=rule.name, revision=rules.revision, candidates=candidates, refusals=tuple(refusals))


def _usable(targets: Iterable[Target], why_not: WhyNot, refusals: list[tuple[Place, str]]) -> tuple[Target, ...]:
    kept = []
    for target in targets:
        reason = "weight 0" if target.weight == 0 else why_not(target.place)
        if reason is None:
            kept.append(target)
        else:
            refusals.append((target.place, reason))
    return tuple(kept)


def _chosen_first(targets: tuple[Target, ...], draw: float) -> tuple[Target, ...]:
    """The target under `draw` on the line of weights, then the others in their written order."""
    point = draw * sum(t.weight for t in targets)
    chosen = targets[-1]
    for target in targets:
        point -= target.weight
        if point < 0:
            chosen = target
            break
    return (chosen, *(t for t in targets if t is not chosen))


def _sticky_draw(rule: str, tenant: str) -> float:
    """A stable number in [0, 1): the same caller falls on the same side in every worker and replica."""
    digest = hashlib.blake2b(f"{rule}\0{tenant}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
