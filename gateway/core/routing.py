"""Routing: (rules, request, health, loads, chance) -> ordered candidates, each with its reason."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.core.replicas import Draw, two_choices
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

Loads = Callable[[str], Mapping[str, int]]
"""A backend's replicas and how many requests each has in flight, given from outside; empty for one without replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of the world that a plan is made from."""

    why_not: WhyNot
    loads: Loads
    draw: Draw


def plan(rules: RuleSet, request: InferenceRequest, state: State) -> Plan:
    """Order the places of the first rule that takes `request`.

    A weighted split is decided by chance, or with `sticky_by: tenant` by a hash of the tenant, so that a caller stays
    on its side. Of a target's replicas two are taken, the less loaded first.
    """
    rule = rules.rule_for(task=request.task, tenant=request.caller.tenant, model=request.model)
    if rule is None:
        return Plan(rule="", revision=rules.revision, candidates=())
    refusals: list[tuple[Place, str]] = []
    primary = _usable(rule.split, request, state, refusals)
    fallback = _usable(rule.fallback, request, state, refusals)
    if rule.strategy == "weighted" and len(primary) > 1:
        is_sticky = rule.sticky_by == "tenant"
        primary = _chosen_first(primary, _sticky_draw(rule.name, request.caller.tenant) if is_sticky else state.draw())
    # Each place at its first standing: whatever the weights say, a place that failed is not tried again.
    candidates = tuple(dict.fromkeys(place for usable in (*primary, *fallback) for place in usable.places))
    return Plan(rule=rule.name, revision=rules.revision, candidates=candidates, refusals=tuple(refusals))


def only(plan_: Plan, place: Place) -> Plan:
    """The plan narrowed to one place, which what came before has settled."""
    return replace(plan_, candidates=(place,), refusals=())


@dataclass(frozen=True, slots=True)
class _Usable:
    """A target that can be tried now, and where."""

    weight: int
    places: Sequence[Place]


def _usable(
    targets: Iterable[Target], request: InferenceRequest, state: State, refusals: list[tuple[Place, str]]
) -> list[_Usable]:
    kept = []
    for target in targets:
        place = target.place_for(model=request.model, version=request.version)
        if target.weight == 0:
            refusals.append((place, "weight 0"))
        elif not place.model:
            refusals.append((place, "the request names no model"))
        elif places := _places(place, state, refusals):
            kept.append(_Usable(target.weight, places))
    return kept


def _places(place: Place, state: State, refusals: list[tuple[Place, str]]) -> Sequence[Place]:
    """The replicas of `place` worth a try."""
    loads = state.loads(place.backend)
    if not loads:
        reason = state.why_not(place)
        if reason is not None:
            refusals.append((place, reason))
            return ()
        return (place,)
    healthy = []
    for replica, load in loads.items():
        one = replace(place, replica=replica)
        reason = state.why_not(one)
        if reason is None:
            healthy.append((one, load))
        else:
            refusals.append((one, reason))
    return [healthy[at][0] for at in two_choices([load for _, load in healthy], state.draw)]


def _chosen_first(targets: list[_Usable], draw: float) -> list[_Usable]:
    """The target under `draw` on the line of weights, then the others in their written order."""
    point = draw * sum(t.weight for t in targets)
    chosen = targets[-1]
    for target in targets:
        point -= target.weight
        if point < 0:
            chosen = target
            break
    return [chosen, *(t for t in targets if t is not chosen)]


def _sticky_draw(rule: str, tenant: str) -> float:
    """A stable number in [0, 1): the same caller falls on the same side in every worker and replica."""
    digest = hashlib.blake2b(f"{rule}\0{tenant}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
