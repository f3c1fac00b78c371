"""What a set of rules would do to requests of before: how many would go elsewhere, and how many nowhere.

Health, load and switches are not looked at: it compares what the rules say, not what happened.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.routing import sticky_draw
from gateway.core.rules.matching import Circumstances
from gateway.core.rules.rule import Rule, Target
from gateway.core.rules.rule_set import RuleSet
from gateway.core.types import Caller, InferenceRequest

REFUSED: Final = "refused"
"""Where requests go that no rule takes, or whose rule leads nowhere."""
_DIGITS: Final = 1  # of figures that are shares of requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A request of which all is known that a rule may match on.

    Attributes:
        at_s: Unix time.
        input_tokens: of its prompt; None where they were not counted.
        stands_for: so many requests of its kind.
    """

    request: InferenceRequest
    at_s: float
    input_tokens: int | None = None
    stands_for: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """So many requests would leave one place for another; they are fractions, as splits are shares."""

    from_place: str
    to_place: str
    requests: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleShare:
    """How many requests a rule takes in either set; rules that take none in both are left out."""

    rule: str
    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The effect of a change. The largest moves come first, rules in the order of the new set.

    Attributes:
        requests: that were looked at.
        moved: of them those that would go elsewhere, or to nobody, or no longer to nobody.
        unrecorded_headers: that the new rules match on, and the samples do not have: for these nothing can be told.
    """

    requests: int
    moved: float
    refused_before: int
    refused_after: int
    moves: tuple[Move, ...]
    rules: tuple[RuleShare, ...]
    unrecorded_headers: tuple[str, ...]


def sample_of(document: Mapping[str, Any]) -> Sample | None:
    """A document of `core.watching.request_documents`; None where the request was refused before any rule was asked."""
    if not document["task"] or not document["tenant"]:
        return None
    request = InferenceRequest(
        id=document["id"],
        task=document["task"],
        caller=Caller(key_id=document["key"], tenant=document["tenant"]),
        input=None,
        received_us=0,
        deadline_us=0,
        stream=document["stream"],
        model=document["model"],
        version=document["version"],
        priority=document["priority"],
        ordering_key=document["ordering_key"],
        headers=document["headers"],
        input_bytes=document["input_bytes"],
        session=document["session"],
    )
    return Sample(
        request=request,
        at_s=document["at_ms"] / 1000,
        input_tokens=document["input_tokens"],
        stands_for=document.get("stands_for", 1),
    )


def dry_run(before: RuleSet, after: RuleSet, samples: Iterable[Sample], *, is_recorded: bool = True) -> DryRun:
    """What `after` would do to `samples`, which are gone through once, in place of `before`.

    `is_recorded`: they have only those headers that rules matched on when they came.
    """
    count, seen = 0, set[str]()
    moves: defaultdict[tuple[str, str], float] = defaultdict(float)
    taken: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    refused = [0, 0]
    for sample in samples:
        count += sample.stands_for
        seen.update(sample.request.headers)
        shares = []
        for i, rules in enumerate((before, after)):
            rule = rules.rule_of(sample.request, _circumstances(sample))
            if rule is not None:
                taken[i][rule.name] += sample.stands_for
            shares.append(_shares(rule, sample.request))
            refused[i] += sample.stands_for * (REFUSED in shares[-1])
        for (source, to), share in _moves(*shares).items():
            moves[source, to] += share * sample.stands_for
    names = dict.fromkeys(rule.name for rules in (after, before) for rule in rules.rules)
    return DryRun(
        requests=count,
        moved=round(sum(moves.values()), _DIGITS),
        refused_before=refused[0],
        refused_after=refused[1],
        moves=tuple(
            Move(from_place=source, to_place=to, requests=round(count, _DIGITS))
            for (source, to), count in sorted(moves.items(), key=lambda one: (-one[1], one[0]))
            if round(count, _DIGITS)
        ),
        rules=tuple(
            RuleShare(rule=name, before=taken[0][name], after=taken[1][name])
            for name in names
            if taken[0][name] or taken[1][name]
        ),
        unrecorded_headers=_unrecorded(before, after, seen) if is_recorded else (),
    )


def _circumstances(sample: Sample) -> Circumstances:
    return Circumstances(now_s=lambda: sample.at_s, input_tokens=lambda: sample.input_tokens)


def _shares(rule: Rule | None, request: InferenceRequest) -> Mapping[str, float]:
    """Where such requests go, and which part of them; together 1.

    By weight, or where it is sticky to one side; by the strategies that look at the places' state, to all of them
    alike. The fallback is asked where the split leads nowhere.
    """
    split = _open(rule.split, request) if rule else []
    fallback = _open(rule.fallback, request) if rule else []
    if rule is None or not (split or fallback):
        return {REFUSED: 1.0}
    if not split or rule.strategy == "ordered":
        return {_place(target, request): 1.0 for target in (split or fallback)[:1]}
    weights = [target.weight if rule.strategy == "weighted" else 1 for target in split]
    draw = sticky_draw(rule, request) if rule.strategy == "weighted" else None
    if draw is not None:
        return {_place(_under(draw, split), request): 1.0}
    shares: dict[str, float] = {}
    for target, weight in zip(split, weights, strict=True):
        place = _place(target, request)
        shares[place] = shares.get(place, 0.0) + weight / sum(weights)
    return shares


def _open(targets: Iterable[Target], request: InferenceRequest) -> list[Target]:
    """Those that lead somewhere."""
    return [
        target
        for target in targets
        if target.weight and target.place_for(model=request.model, version=request.version).model
    ]


def _place(target: Target, request: InferenceRequest) -> str:
    return str(target.place_for(model=request.model, version=request.version))


def _under(draw: float, targets: Sequence[Target]) -> Target:
    """The target under `draw` on the line of weights, as `core.routing` takes it."""
    point = draw * sum(target.weight for target in targets)
    for target in targets:
        point -= target.weight
        if point < 0:
            return target
    return targets[-1]


def _moves(before: Mapping[str, float], after: Mapping[str, float]) -> Mapping[tuple[str, str], float]:
    """As little as can be moved to turn the one into the other; what leaves a place goes to all that gain alike."""
    lost = {place: share - after.get(place, 0.0) for place, share in before.items() if share > after.get(place, 0.0)}
    gained = {place: share - before.get(place, 0.0) for place, share in after.items() if share > before.get(place, 0.0)}
    whole = sum(gained.values())
    return {(source, to): loss * gain / whole for source, loss in lost.items() for to, gain in gained.items()}


def _unrecorded(before: RuleSet, after: RuleSet, seen: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(_matched_headers(after) - _matched_headers(before) - set(seen)))


def _matched_headers(rules: RuleSet) -> set[str]:
    return {name for rule in rules.rules if rule.enabled for name in rule.match.headers}
