"""Routing: (rules, request, health, loads, chance) -> ordered candidates, each with its reason."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gateway.core import strategies
from gateway.core.replicas import FEW, Draw, ReplicaLoads, two_choices, two_of
from gateway.core.rules import Rule, Target
from gateway.core.rules.rule import place_at
from gateway.core.strategies import Option
from gateway.core.switches import Forced
from gateway.core.types import InferenceRequest, OpenAIPayload, Place
from gateway.core.values import quick_value


@quick_value
class Plan:
    """Where a request may go, best first; `refusals` says of every other place of the rule why it may not.

    `rule` is empty where no enabled rule takes the request; `candidates` may be empty too: then nobody can answer.

    Attributes:
        targets: of the places whose target says more of them than where they are.
        retries / hedge: the rule's.
        forced: where switches send it, whatever the rule says.
    """

    rule: str
    revision: int
    candidates: tuple[Place, ...]
    refusals: tuple[tuple[Place, str], ...] = ()
    targets: Mapping[Place, Target] = field(default_factory=dict)
    retries: int = 0
    hedge: bool = False
    forced: Forced | None = None

    def context(self, place: Place) -> int:
        """How many tokens a prompt and its answer may have there; 0 = not told."""
        target = self.targets.get(place)
        return target.context_tokens if target else 0

    def payload_for(self, place: Place, payload: OpenAIPayload) -> OpenAIPayload:
        """The caller's body with the fields that the target sets for this place alone. Never changes the one given."""
        target = self.targets.get(place) if self.targets else None
        if target is None or not target.parameters:
            return payload
        merged: dict[str, Any] = {**payload.body, **target.parameters}
        return replace(payload, body={k: v for k, v in merged.items() if v is not None or k not in target.parameters})


WhyNot = Callable[[Place], str | None]
"""Health, given from outside: None if the place may be tried, else the reason why not."""

BACKEND_OFF: Final = "backend is off: not enabled, its key's variable not set, or not in the configuration"

_BY_TWO: Final = ("weighted", "ordered")  # the strategies that take two of a target's replicas

Loads = Callable[[str], Mapping[str, int]]
"""A backend's replicas and how many requests each has in flight, given from outside; empty for one without replicas."""


@quick_value
class Pool:
    """What strategies that look at the places' state have to know.

    Attributes:
        option: a place as they weigh it for this request.
        prefix: how its prompt begins (`core.tokens.prefix_of`). All are asked for only where somebody needs them.
    """

    option: Callable[[Place], Option]
    prefix: Callable[[], bytes]


@quick_value
class State:
    """The state of the world that a plan is made from; `pool` is None for requests that are not generative.

    `forced`: where switches send the request. `is_brief`: nobody asks why each place may not be tried. Where a backend
    has many replicas, the two that are drawn are looked at first, and the others only if one of the two may not be
    tried: each pair that may be is as likely as if all had been looked at. `Plan.refusals` may then lack some.
    """

    why_not: WhyNot
    loads: Loads
    draw: Draw
    pool: Pool | None = None
    forced: Forced | None = None
    is_brief: bool = False


def plan_by(rule: Rule, revision: int, request: InferenceRequest, state: State) -> Plan:
    """Order the places of `rule`, which takes `request`; `revision` is of its rule set.

    A weighted split is decided by chance, or where it is sticky by a hash, so that a caller stays on its side. Of a
    target's replicas two are taken, the less loaded first. The other strategies put all replicas of all targets in one
    order. Where switches force a backend only its places are left, whatever their weights are.
    """
    refusals: list[tuple[Place, str]] = []
    is_skipped = state.forced is not None and state.forced.is_fallback
    # Strategies that put all replicas in one order have to see all of them.
    sees_all = state.is_brief and state.pool is not None and rule.strategy not in _BY_TWO
    of_split = replace(state, is_brief=False) if sees_all else state
    primary = (
        _skipped(rule, request, state, refusals) if is_skipped else _usable(rule.split, request, of_split, refusals)
    )
    fallback = _usable(rule.fallback, request, state, refusals)
    # Each place at its first standing: whatever the weights say, a place that failed is not tried again.
    places = (*_in_order(rule, primary, request, state), *(p for usable in fallback for p in usable.picked(state.draw)))
    return Plan(
        rule=rule.name,
        revision=revision,
        candidates=tuple(dict.fromkeys(places)),
        refusals=tuple(refusals),
        targets=_telling((*primary, *fallback)),
        retries=rule.retries,
        hedge=rule.hedge,
        forced=state.forced,
    )


def is_settled(rule: Rule, plan_: Plan) -> bool:
    """Whether `plan_` is the one for every such request, as long as all its places are well and have no replicas."""
    has_order = len(rule.split) == 1 or rule.strategy == "ordered"
    return has_order and not plan_.refusals and not any(place.replica for place in plan_.candidates)


def sticky_draw(rule: Rule, request: InferenceRequest) -> float | None:
    """A stable number in [0, 1): what a caller's side is by, the same in every worker; None where chance decides."""
    tenant = request.caller.tenant
    if rule.sticky_by == "request":
        return None
    if rule.sticky_by == "tenant":
        return _hashed(rule.name, tenant)
    if rule.sticky_by == "ordering_key":
        return _hashed(rule.name, tenant, "o", request.ordering_key) if request.ordering_key else None
    session = request.session or (str(request.sequence.id) if request.sequence else "")
    return _hashed(rule.name, tenant, "s", session) if session else None


def only(plan_: Plan, place: Place) -> Plan:
    """The plan narrowed to one place, which what came before has settled."""
    return replace(plan_, candidates=(place,), refusals=())


@dataclass(frozen=True, slots=True)
class _Usable:
    """A target that can be tried now, where, and how many requests are in flight there."""

    target: Target
    places: Sequence[Place]
    loads: Sequence[int]

    def picked(self, draw: Draw) -> Sequence[Place]:
        """Two of its places, the less loaded first; the only one where there is but one."""
        if len(self.places) == 1:
            return self.places
        return [self.places[at] for at in two_choices(self.loads, draw)]


def _in_order(rule: Rule, primary: list[_Usable], request: InferenceRequest, state: State) -> Sequence[Place]:
    """The places of a split, best first."""
    if rule.strategy in _BY_TWO or state.pool is None:
        if rule.strategy == "weighted" and len(primary) > 1:
            draw = None if rule.sticky_by == "request" else sticky_draw(rule, request)
            primary = _chosen_first(primary, state.draw() if draw is None else draw)
        return [place for usable in primary for place in usable.picked(state.draw)]
    places = list(dict.fromkeys(place for usable in primary for place in usable.places))
    if len(places) < 2:  # noqa: PLR2004 - nothing to choose
        return places
    prefix = state.pool.prefix() if rule.strategy == "prefix_affinity" else b""
    options = [state.pool.option(place) for place in places]
    return [places[at] for at in strategies.ordered(rule.strategy, options, prefix=prefix, draw=state.draw)]


def _telling(usables: Iterable[_Usable]) -> Mapping[Place, Target]:
    """The targets that say more of a place, by place; the first one's word counts."""
    found: dict[Place, Target] = {}
    for usable in usables:
        if usable.target.parameters or usable.target.context_tokens:
            for place in usable.places:
                found.setdefault(place, usable.target)
    return found


def _usable(
    targets: Iterable[Target], request: InferenceRequest, state: State, refusals: list[tuple[Place, str]]
) -> list[_Usable]:
    kept, backend = [], state.forced.backend if state.forced else ""
    for target in targets:
        place = target.place_for(model=request.model, version=request.version)
        if backend and target.backend != backend:
            refusals.append((place, f"requests are sent to '{backend}' by {_by(state)}"))
        elif target.weight == 0 and not backend:
            refusals.append((place, "weight 0"))
        elif not place.model:
            refusals.append((place, "the request names no model"))
        else:
            healthy = _healthy(place, state, refusals)
            if healthy:
                kept.append(_Usable(target, [one for one, _ in healthy], [load for _, load in healthy]))
    return kept


def _skipped(rule: Rule, request: InferenceRequest, state: State, refusals: list[tuple[Place, str]]) -> list[_Usable]:
    """No place of the split, as a switch says so."""
    places = [target.place_for(model=request.model, version=request.version) for target in rule.split]
    refusals += [(place, f"requests are sent to the fallbacks by {_by(state)}") for place in places]
    return []


def _by(state: State) -> str:
    return ", ".join(state.forced.by) if state.forced else ""


def _healthy(place: Place, state: State, refusals: list[tuple[Place, str]]) -> Sequence[tuple[Place, int]]:
    """The replicas of `place` that may be tried now, with their loads."""
    loads = state.loads(place.backend)
    if not loads:
        reason = state.why_not(place)
        if reason is not None:
            refusals.append((place, reason))
            return ()
        return ((place, 0),)
    if state.is_brief and len(loads) > FEW and (drawn := _drawn(place, loads, state)):
        return drawn
    healthy = []
    for replica, load in loads.items():
        one = place_at(place.backend, place.model, place.version, replica)
        reason = state.why_not(one)
        if reason is None:
            healthy.append((one, load))
        else:
            refusals.append((one, reason))
    return healthy


def _drawn(place: Place, loads: Mapping[str, int], state: State) -> Sequence[tuple[Place, int]]:
    """Two of the replicas by chance, with their loads; none where one of them may not be tried."""
    names = loads.names if isinstance(loads, ReplicaLoads) else tuple(loads)
    found = []
    for at in two_of(len(names), state.draw):
        one = place_at(place.backend, place.model, place.version, names[at])
        if state.why_not(one) is not None:
            return ()
        found.append((one, loads[names[at]]))
    return found


def _chosen_first(targets: list[_Usable], draw: float) -> list[_Usable]:
    """The target under `draw` on the line of weights, then the others in their written order."""
    point = draw * sum([t.target.weight for t in targets])
    chosen = targets[-1]
    for target in targets:
        point -= target.target.weight
        if point < 0:
            chosen = target
            break
    return [chosen, *(t for t in targets if t is not chosen)]


def _hashed(*parts: str) -> float:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
