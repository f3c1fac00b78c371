"""Why a request goes where it goes: the same rules, switches and plan that a worker makes, with a word for each choice.

`routing.plan_by` makes the plan here too; what is told of it is read out of the plan, and decides nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.core import rate_limit, routing
from gateway.core.cost import NANO_USD_PER_USD, PriceTable, expected_nano_usd
from gateway.core.rate_limit import Take
from gateway.core.replicas import Draw
from gateway.core.routing import Plan
from gateway.core.rules import Rule, RuleSet, Target
from gateway.core.rules.matching import Circumstances, why_not
from gateway.core.strategies import Option
from gateway.core.switches import Switch
from gateway.core.types import InferenceRequest, Place, Work
from gateway.core.watching.worker_view import WorkerView

NO_RULE: Final = "no enabled rule takes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a worker knows beside rules and requests, as far as its report tells.

    Attributes:
        work: what the request will take; None for a task that no LLM can answer.
        draw: chance; see `routing.State`.
    """

    view: WorkerView
    draw: Draw
    work: Work | None = None
    prices: PriceTable = field(default_factory=PriceTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A rule that the request was held against; `why` says why it does not take it, or that it does."""

    rule: str
    matched: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A place of the rule that takes the request.

    Attributes:
        side: its field in the rule, such as `split[0]`.
        rank: its standing in the plan, from 1; None where it may not be tried.
        score: what it is chosen by.
    """

    place: Place
    side: str
    rank: int | None
    score: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All of it.

    Attributes:
        rule: the one that takes the request; None where none does.
        looked: the rules up to that one.
        refused: why the request is not served at all, whatever the places are; empty where it is.
        switches: those that concern it, or one of its places.
        limits: the counters that it takes of.
        plan: what a worker makes of it; None without a rule.
    """

    rule: Rule | None
    looked: tuple[Looked, ...]
    refused: str = ""
    candidates: tuple[Candidate, ...] = ()
    switches: tuple[Switch, ...] = ()
    limits: tuple[Take, ...] = ()
    plan: Plan | None = None

    @property
    def taken(self) -> Place | None:
        """Where it would go first."""
        return None if self.refused or self.plan is None else next(iter(self.plan.candidates), None)


def explain(rules: RuleSet, request: InferenceRequest, at: Circumstances, world: World) -> Explanation:
    """What becomes of `request` by `rules` and the switches above them, in that worker's world."""
    looked = tuple(looked_at(rules.rules, request, at))
    rule = rules.named(looked[-1].rule) if looked and looked[-1].matched else None
    now_ms = int(at.now_s() * 1000)
    refused = _refused(rules, request, now_ms)
    if rule is None:
        limits = rate_limit.counters(request.caller, request.task, request.model, request.priority)
        return Explanation(
            rule=None,
            looked=looked,
            refused=refused or NO_RULE,
            switches=_concerning(rules, request, (), now_ms),
            limits=limits,
        )
    state = _state(rules, request, world, now_ms)
    plan = routing.plan_by(rule, rules.revision, request, state)
    candidates = tuple(_Telling(rule, request, world, plan, state).candidates())
    return Explanation(
        rule=rule,
        looked=looked,
        refused=refused,
        candidates=candidates,
        switches=_concerning(rules, request, [one.place for one in candidates], now_ms),
        limits=rate_limit.counters(request.caller, request.task, request.model, request.priority, rule.limits),
        plan=plan,
    )


def looked_at(rules: Sequence[Rule], request: InferenceRequest, at: Circumstances) -> Iterator[Looked]:
    """The rules in their order, up to the one that takes `request`."""
    for rule in rules:
        if not rule.enabled:
            yield Looked(rule=rule.name, matched=False, why="is switched off")
            continue
        why = why_not(rule.match, request, at)
        yield Looked(rule=rule.name, matched=why is None, why=why or "takes it")
        if why is None:
            return


def headers_of(explanation: Explanation) -> Mapping[str, str]:
    """The headers that tell the route, as the answer of the first candidate would bear them."""
    taken, rule = explanation.taken, explanation.rule
    if taken is None or rule is None:
        return {}
    return {
        "x-gateway-backend": taken.backend,
        "x-gateway-model": taken.model,
        "x-gateway-attempts": "1",
        "x-gateway-rule": rule.name,
    }


def _refused(rules: RuleSet, request: InferenceRequest, now_ms: int) -> str:
    caller = request.caller
    if caller.tasks is not None and request.task not in caller.tasks:
        return f"the key '{caller.key_id}' may not use the task '{request.task}'"
    if caller.models is not None and request.model and request.model not in caller.models:
        return f"the key '{caller.key_id}' may not name the model '{request.model}'"
    switch = rules.switches.refusing(request, now_ms)
    return f"refused by {switch}" if switch else ""


def _concerning(rules: RuleSet, request: InferenceRequest, places: Sequence[Place], now_ms: int) -> tuple[Switch, ...]:
    return tuple(
        one
        for one in rules.switches.in_force(now_ms)
        if one.action != "freeze" and (one.scope.has_request(request) or any(map(one.scope.has_place, places)))
    )


def _state(rules: RuleSet, request: InferenceRequest, world: World, now_ms: int) -> routing.State:
    def why_not_there(place: Place) -> str | None:
        closing = rules.switches.closing(place, now_ms)
        return f"closed by {closing}" if closing else world.view.why_not(place)

    def option(place: Place) -> Option:
        return Option(
            place=place,
            standing=world.view.standing(place),
            engine=world.view.engines.get((place.backend, place.replica)),
            expected_nano_usd=_expected(place, world),
        )

    pool = None if world.work is None else routing.Pool(option=option, prefix=lambda: b"")
    forced = rules.switches.forced(request, now_ms)
    return routing.State(why_not=why_not_there, loads=world.view.loads, draw=world.draw, pool=pool, forced=forced)


def _expected(place: Place, world: World) -> int | None:
    price = world.prices.of(place.backend, place.model)
    return None if price is None or world.work is None else expected_nano_usd(price, world.work)


class _Telling:
    """Puts words to one plan."""

    def __init__(self, rule: Rule, request: InferenceRequest, world: World, plan: Plan, state: routing.State) -> None:
        self._rule = rule
        self._request = request
        self._world = world
        self._plan = plan
        self._state = replace(state, draw=lambda: 0.0)  # what is asked of it here is no matter of chance
        self._ranks = {place: i + 1 for i, place in enumerate(plan.candidates)}
        open_places = {replace(place, replica="") for place in plan.candidates}
        self._open_sides = [
            target.place_for(model=request.model, version=request.version) in open_places for target in rule.split
        ].count(True)
        self._sides: dict[Place, str] = {}

    def candidates(self) -> Iterator[Candidate]:
        """Every place of the rule, in the order in which the rule has them."""
        for i, target in enumerate(self._rule.split):
            yield from self._of_target(target, f"split[{i}]", replace(self._rule, split=(target,), fallback=()))
        for i, target in enumerate(self._rule.fallback):
            yield from self._of_target(target, f"fallback[{i}]", replace(self._rule, split=(), fallback=(target,)))

    def _of_target(self, target: Target, side: str, alone: Rule) -> Iterator[Candidate]:
        """The places of one target; `alone` is the rule with nothing else in it."""
        refused = dict(routing.plan_by(alone, self._plan.revision, self._request, self._state).refusals)
        place = target.place_for(model=self._request.model, version=self._request.version)
        replicas = () if place in refused else self._world.view.loads(place.backend)
        score = self._share(target, side)
        for one in [replace(place, replica=name) for name in replicas] or [place]:
            if one in refused:
                yield Candidate(place=one, side=side, rank=None, score=score, reason=refused[one])
                continue
            is_first = self._sides.setdefault(one, side) == side
            rank = self._ranks.get(one) if is_first else None
            reason = self._why(rank, side) if is_first else f"stands above as {self._sides[one]}"
            yield Candidate(place=one, side=side, rank=rank, score=f"{score}; {self._standing(one)}", reason=reason)

    def _share(self, target: Target, side: str) -> str:
        """What a side has by the rule alone."""
        if side.startswith("fallback"):
            return f"{side}, in the written order"
        if not self._is_weighed:
            return f"{side} of a split by {self._rule.strategy}"
        if self._rule.strategy == "ordered":
            return f"{side}, in the written order"
        return f"weight {target.weight} of {sum(one.weight for one in self._rule.split)}"

    def _standing(self, place: Place) -> str:
        """What strategies look at."""
        view = self._world.view
        standing, engine = view.standing(place), view.engines.get((place.backend, place.replica))
        words = [f"{standing.requests} requests in flight"]
        if self._world.work is None or self._is_weighed:
            return words[0]
        words.append(f"{standing.tokens} tokens")
        if engine is not None:
            words.append(f"its engine runs {engine.running} and has {engine.waiting} waiting")
        if self._rule.strategy == "fastest":
            first = standing.first_token_us
            words.append("not measured" if first is None else f"first token after {first / 1000:.0f} ms")
        if self._rule.strategy == "cheapest":
            nano = _expected(place, self._world)
            words.append("no price" if nano is None else f"{nano / NANO_USD_PER_USD:.6f} USD expected")
        return ", ".join(words)

    def _why(self, rank: int | None, side: str) -> str:
        if rank is None:
            return "not among the two of its replicas that were drawn"
        if rank > 1:
            return f"would be tried as number {rank}, if those before it fail"
        return f"taken: {self._choice(side)}"

    def _choice(self, side: str) -> str:
        """What made it the first."""
        if self._plan.forced is not None:
            return f"sent there by {', '.join(self._plan.forced.by)}"
        if side.startswith("fallback"):
            return "the first fallback that may be tried, as no place of the split may"
        if len(self._plan.candidates) == 1:
            return "the only place that may be tried"
        if self._rule.strategy == "weighted" and self._is_weighed:
            return self._side_by_weight()
        return _CHOICES["ordered" if self._is_weighed else self._rule.strategy]

    def _side_by_weight(self) -> str:
        if self._open_sides == 1:
            return "the only side that may be tried"
        draw = routing.sticky_draw(self._rule, self._request)
        if draw is None:
            return "the side on which chance falls here; others fall on the other sides, by their weights"
        return f"the side on which the hash of its {self._rule.sticky_by} falls ({draw:.3f}), always the same"

    @property
    def _is_weighed(self) -> bool:
        """Whether the places are not looked at: their order is the written one, or that of the weights."""
        return self._rule.strategy in ("weighted", "ordered") or self._world.work is None


_CHOICES: Final = {
    "ordered": "the first in the written order that may be tried",
    "least_in_flight": "the fewest tokens in flight",
    "fastest": "the shortest time to the first token, or not measured lately",
    "cheapest": "the lowest expected cost",
    "prefix_affinity": "the fewest tokens in flight; the prompt, by which its like go to one place, is not known here",
}
