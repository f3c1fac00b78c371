"""A rollout: one rule's callers moved to one target in steps, each held and watched. Rules in, rules out.

The target stands first on the line of weights, so that a sticky caller that is on it stays there as its share grows;
the others keep their proportions among each other. Operators may edit the rule meanwhile: what they change beside its
split is kept, and a split that they change is theirs from then on.

A change of the split is planned before it is made: while a rollout has two `forms`, the rule may have either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final, Literal

from gateway.core.rollouts.guarding import Verdict
from gateway.core.rollouts.model_move import WHOLE, RolloutError
from gateway.core.rules.documents import MAX_WEIGHT
from gateway.core.rules.rule import Guard, Rule, StickyBy, Target

Status = Literal["running", "done", "aborted", "rolled_back", "failed"]
ENDED: Final[tuple[Status, ...]] = ("done", "aborted", "rolled_back", "failed")
Split = tuple[Target, ...]
STEPS: Final = (1, 10, 50, WHOLE)
MAX_EVENTS: Final = 100
PATIENCE_MS: Final = 30_000
"""With a target that no worker can send anything to: a server that starts again is back by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What was asked for.

    Attributes:
        target: where the callers go; its weight says nothing.
        steps: percent of the rule's requests, each more than the one before, the last 100.
        hold_s: how long each step is held at least, in seconds.
        guard: what the target may not do; None: the steps go by time alone.
        sticky_by: in the rule's stead until all are there; None: as the rule says.
    """

    target: Target
    steps: tuple[int, ...] = STEPS
    hold_s: int = 60
    guard: Guard | None = None
    sticky_by: StickyBy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, in Unix milliseconds and in words."""

    at_ms: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One rollout as it is.

    Attributes:
        split / sticky_by: the rule's, as they were.
        step: which of the course's steps it is at, or being brought to.
        forms: what the rule's split may be now; the last is what it is to be.
        ending: how it ends once the rule has the last form; empty: it goes on.
        held: why it does not go on, though its time has come; empty where nothing is in its way.
        kept_out_ms: since when no worker can send anything to the target, in Unix milliseconds; None: some can.
        reason: why it has ended as it did.
        step_since_ms: from when the step is in force.
        revision: of the rules, with the last form.
        actor / note: who began it, and what for.
    """

    id: str
    rule: str
    course: Course
    split: Split
    sticky_by: StickyBy
    forms: tuple[Split, ...]
    started_ms: int
    step_since_ms: int
    step: int = 0
    status: Status = "running"
    ending: Literal["", "aborted", "rolled_back"] = ""
    held: str = ""
    kept_out_ms: int | None = None
    reason: str = ""
    revision: int = 0
    actor: str = ""
    note: str = ""
    events: tuple[Event, ...] = ()

    @property
    def is_open(self) -> bool:
        """It has not come to an end."""
        return self.status == "running"

    @property
    def is_settled(self) -> bool:
        """The rule has the form that it is to have."""
        return len(self.forms) == 1

    @property
    def percent(self) -> int:
        """The target's share, as the rollout has set it last."""
        return share(self.forms[-1], self.course.target)

    @property
    def next_ms(self) -> int:
        """When the hold of this step is over."""
        return self.step_since_ms + self.course.hold_s * 1000

    @property
    def is_at_last(self) -> bool:
        """There is no further step."""
        return self.step == len(self.course.steps) - 1


# --- what is to be done ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Stay. `reason`: what is in the way; empty while the hold simply lasts."""

    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Go on to the next step, which is `percent`."""

    percent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """Take it back at once; `reason` in words."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """All callers are there, and nothing speaks against it."""


Next = Hold | Advance | RollBack | Done


def next_step(rollout: Rollout, verdict: Verdict, *, now_ms: int, obstacle: str = "", is_asked: bool = False) -> Next:
    """What follows from the guard's `verdict` of this step at this time.

    A breach takes back, whatever else there is. Then, in this order, an `obstacle` (changes are frozen) holds, the time
    holds, and figures that are too few hold; the last two not where an operator has asked to go on (`is_asked`).
    """
    if verdict.breach:
        return RollBack(reason=verdict.breach)
    if obstacle:
        return Hold(reason=obstacle)
    if not is_asked and now_ms < rollout.next_ms:
        return Hold()
    if not is_asked and not verdict.is_enough:
        return Hold(reason=verdict.lacks)
    return Done() if rollout.is_at_last else Advance(percent=rollout.course.steps[rollout.step + 1])


def kept_out(rollout: Rollout, why: str, *, now_ms: int) -> Rollout | RollBack:
    """What follows where too little was seen of the target and no worker can send it anything (`why`; empty: some can).

    What is broken from the start is never seen failing often enough for a guard to judge it.
    """
    if not why:
        return replace(rollout, kept_out_ms=None)
    since_ms = now_ms if rollout.kept_out_ms is None else rollout.kept_out_ms
    if now_ms - since_ms >= PATIENCE_MS:
        return RollBack(reason=f"nothing could be sent there for {PATIENCE_MS // 1000} s: {why}")
    return replace(rollout, kept_out_ms=since_ms)


# --- rules ----------------------------------------------------------------------------------------


def split_at(split: Sequence[Target], target: Target, percent: int) -> Split:
    """The split with exactly `percent` of its weight on `target`, put first; the others share the rest as before.

    A target that stands in the split already keeps its parameters, unless `target` has its own.
    Raises `RolloutError`.
    """
    others = [one for one in split if one.place != target.place]
    divisor = gcd(*(one.weight for one in others)) or 1
    weights = [one.weight // divisor for one in others]
    if not any(weights):
        raise RolloutError("no other target of its split has a share that could be moved")
    first = max(sum(weights) * percent, *(weight * (WHOLE - percent) for weight in weights))
    if first > MAX_WEIGHT:
        raise RolloutError("its weights are too far apart to be divided further")
    says_nothing = not target.parameters and not target.context_tokens
    known = next((one for one in split if one.place == target.place), target) if says_nothing else target
    shared = (replace(one, weight=weight * (WHOLE - percent)) for one, weight in zip(others, weights, strict=True))
    return (replace(known, weight=sum(weights) * percent), *shared)


def share(split: Sequence[Target], target: Target) -> int:
    """The percentage of `target` in a split, rounded."""
    whole = sum(one.weight for one in split)
    return round(WHOLE * sum(one.weight for one in split if one.place == target.place) / whole) if whole else 0


def shaped(rule: Rule, rollout: Rollout) -> Rule:
    """The rule as the rollout wants it now, with all that others have changed beside its split."""
    sticky_by, wanted = rule.sticky_by, rollout.course.sticky_by
    is_back = bool(rollout.ending) or rollout.course.steps[rollout.step] == WHOLE
    if wanted is not None and is_back and sticky_by == wanted:
        sticky_by = rollout.sticky_by
    elif wanted is not None and not is_back and sticky_by == rollout.sticky_by:
        sticky_by = wanted
    return replace(rule, split=rollout.forms[-1], sticky_by=sticky_by)


def taken_over(rule: Rule | None, rollout: Rollout) -> str:
    """Whether someone else has made the rule theirs, in words; empty where the rollout still has it."""
    if rule is None:
        return f"rule '{rollout.rule}' was removed meanwhile"
    if rule.split not in rollout.forms:
        return f"the split of rule '{rule.name}' was edited meanwhile and is left as it is"
    if rule.strategy != "weighted":
        return f"rule '{rule.name}' does not share by weight any more"
    return ""


# --- from one state to the next -------------------------------------------------------------------


def begun(rule: Rule, course: Course, *, rollout_id: str, now_ms: int) -> Rollout:
    """A rollout that is to take its first step. Raises `RolloutError` where the rule cannot take part."""
    if rule.strategy != "weighted":
        raise RolloutError(f"rule '{rule.name}': strategy '{rule.strategy}' does not share by weight")
    try:
        forms = [split_at(rule.split, course.target, percent) for percent in course.steps]
    except RolloutError as error:
        raise RolloutError(f"rule '{rule.name}': {error}") from error
    if rule.split == forms[-1]:
        raise RolloutError(f"rule '{rule.name}': all its requests go there already")
    return Rollout(
        id=rollout_id,
        rule=rule.name,
        course=course,
        split=rule.split,
        sticky_by=rule.sticky_by,
        forms=(rule.split, forms[0]),
        started_ms=now_ms,
        step_since_ms=now_ms,
    )


def advanced(rollout: Rollout, *, now_ms: int) -> Rollout:
    """Planned to be at its next step."""
    step = rollout.step + 1
    form = split_at(rollout.split, rollout.course.target, rollout.course.steps[step])
    planned = replace(rollout, step=step, step_since_ms=now_ms, held="")
    return replace(planned, forms=tuple(dict.fromkeys((*rollout.forms[-1:], form))))


def withdrawn(rollout: Rollout) -> Rollout:
    """Not planned any more to be at its next step: the rule has the form before it."""
    return replace(rollout, step=rollout.step - 1, forms=rollout.forms[:1])


def taken_back(rollout: Rollout, ending: Literal["aborted", "rolled_back"], reason: str) -> Rollout:
    """Planned to give the rule its split back, and to end so."""
    forms = tuple(dict.fromkeys((*(form for form in rollout.forms if form != rollout.split), rollout.split)))
    return replace(rollout, forms=forms, ending=ending, reason=reason, held="")


def settled(rollout: Rollout, *, now_ms: int, revision: int) -> Rollout:
    """The rule has the last form, by `revision`: the step begins, or the rollout is over."""
    now = replace(rollout, forms=rollout.forms[-1:], revision=revision, step_since_ms=now_ms, held="")
    if rollout.ending:
        return ended(now, rollout.ending, rollout.reason, now_ms=now_ms)
    return noted(now, f"{now.percent} %", now_ms=now_ms)


def ended(rollout: Rollout, status: Status, reason: str, *, now_ms: int) -> Rollout:
    """Over, the rule being left as it is."""
    over = replace(rollout, status=status, reason=reason, held="", ending="", forms=rollout.forms[-1:])
    return noted(over, status.replace("_", " ") + (f": {reason}" if reason else ""), now_ms=now_ms)


def noted(rollout: Rollout, what: str, *, now_ms: int) -> Rollout:
    """With an event more; of too many the oldest are forgotten."""
    return replace(rollout, events=(*rollout.events, Event(at_ms=now_ms, what=what))[-MAX_EVENTS:])
