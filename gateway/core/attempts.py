"""What to do next after each failed attempt: try the next candidate, or give up with an honest error."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.core import texts
from gateway.core.errors import (
    BackendBroke,
    DeadlineExceeded,
    Fault,
    FaultKind,
    GatewayError,
    InvalidInput,
    NoHealthyBackend,
    QueueFull,
    UnknownModel,
    UnsupportedByBackend,
)
from gateway.core.replicas import Draw
from gateway.core.routing import Plan, WhyNot
from gateway.core.types import Place
from gateway.core.values import quick_value

TIMER_SLACK_US = 2_000  # an event loop's timer may fire a little early
MAX_DEAD = 2  # one dead process may be chance, two in a row that one request met are likely its own doing
MIN_ATTEMPT_US = 5_000  # less than this cannot bring an answer from any backend; do not spend it on a try
# Pauses before a place is tried again: the openai clients' own (half a second, doubled each time, at most 8 s).
FIRST_PAUSE_US: Final = 500_000
LONGEST_PAUSE_US: Final = 8_000_000
LONGEST_COOLING_US: Final = 600_000_000  # what asks for more is asked again after that
# Of `RetryBudget`: the share and the rate are the defaults of Finagle's.
RETRY_SHARE: Final = 0.2
RETRIES_PER_S: Final = 10.0
RETRY_RESERVE: Final = 1000.0
NO_RULE: Final = (
    "no enabled rule takes this request, and asking again does not help; its operators: `gateway rules get` shows the "
    "rules, `gateway rules enable`, `apply` or `rollback` bring one back"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    """What follows from a fault.

    Attributes:
        try_next: another candidate may do better.
        blames_backend: the breaker counts it (the caller's own faults must never open it).
        passes: it may be gone in a moment, so the same place may be tried again, where the rule has `retries`.
        error: what the caller sees when nothing is left to try.
        detail: the sentence that goes with it; None = the backend's own (already cleaned) words.
    """

    try_next: bool
    blames_backend: bool
    error: type[GatewayError]
    detail: str | None
    passes: bool = False


CONSEQUENCES: dict[FaultKind, Consequence] = {
    FaultKind.UNAVAILABLE: Consequence(
        try_next=True,
        blames_backend=True,
        error=NoHealthyBackend,
        detail="the backend could not be reached",
        passes=True,
    ),
    FaultKind.UNREACHABLE: Consequence(
        try_next=True,
        blames_backend=True,
        error=BackendBroke,
        detail="the backend could not be reached, or closed the connection without an answer",
        passes=True,
    ),
    FaultKind.TIMEOUT: Consequence(
        try_next=True,
        blames_backend=True,
        error=DeadlineExceeded,
        detail="the backend did not answer in time",
    ),
    FaultKind.OVERLOADED: Consequence(
        try_next=True, blames_backend=False, error=QueueFull, detail="the backend's queue is full", passes=True
    ),
    FaultKind.BROKEN: Consequence(
        try_next=True, blames_backend=True, error=BackendBroke, detail="the backend's answer is broken"
    ),
    FaultKind.DENIED: Consequence(
        try_next=True,
        blames_backend=True,
        error=BackendBroke,
        detail="the backend refuses the gateway's own key or account (not yours); its operators have to act",
    ),
    # Not blamed: an upstream that answers bad input with a 5xx would let one caller take it away from all others.
    FaultKind.FAILED: Consequence(
        try_next=True,
        blames_backend=False,
        error=BackendBroke,
        detail="the backend failed on this request",
        passes=True,
    ),
    FaultKind.UNKNOWN_MODEL: Consequence(
        try_next=True,
        blames_backend=True,
        error=NoHealthyBackend,
        detail="the backend does not serve the model of this route",
    ),
    FaultKind.NO_SUCH_MODEL: Consequence(try_next=True, blames_backend=False, error=UnknownModel, detail=None),
    FaultKind.DEAD: Consequence(
        try_next=True, blames_backend=True, error=BackendBroke, detail="the model's process has died there"
    ),
    FaultKind.MISFIT: Consequence(
        try_next=True,
        blames_backend=True,
        error=BackendBroke,
        detail="the backend's model does not fit the task: the route or the model is wrong",
    ),
    # Only a model that takes more is tried next.
    FaultKind.CONTEXT_TOO_LONG: Consequence(try_next=True, blames_backend=False, error=InvalidInput, detail=None),
    FaultKind.REFUSED_INPUT: Consequence(try_next=False, blames_backend=False, error=InvalidInput, detail=None),
    FaultKind.UNSUPPORTED: Consequence(
        try_next=True,
        blames_backend=False,
        error=UnsupportedByBackend,
        detail="the backend lacks a feature that this request asks for",
    ),
    FaultKind.SKIPPED: Consequence(
        try_next=True,
        blames_backend=False,
        error=NoHealthyBackend,
        detail="the backend cannot take requests now",
        passes=True,
    ),
}


@quick_value
class Try:
    """Send the request to `place`; it must begin to answer within `begin_within_us`, and end within `timeout_us`.

    `pause_us` is to be waited first; the other two count from after it.
    """

    place: Place
    begin_within_us: int
    timeout_us: int
    pause_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Tell the caller `error`."""

    error: GatewayError


def next_attempt(
    plan: Plan,
    faults: Sequence[Fault],
    *,
    now_us: int,
    deadline_us: int,
    attempt_timeout_us: int,
    draw: Draw = lambda: 1.0,
) -> Try | GiveUp:
    """Decide from the faults so far (one per attempt made, oldest first, each with its place).

    `plan` has candidates: `nobody` is the error for one that has none.

    While another candidate remains, a backend must begin to answer within `attempt_timeout_us`, so that a hung one
    leaves time for the next; the last candidate has all that is left. Once it answers, only the deadline counts.

    Where all have failed and the rule has `retries`, those whose fault may pass are tried again in their order, each
    after a pause that doubles with every round ("full jitter": a random part of it, so that callers who failed together
    do not come back together), or as long as the place itself asked for.
    """
    if faults and (not CONSEQUENCES[faults[-1].kind].try_next or _kills(faults)):
        return GiveUp(error=told(faults, plan))
    left_us = deadline_us - now_us
    if left_us < MIN_ATTEMPT_US:
        return GiveUp(error=DeadlineExceeded("the request's time is used up"))
    fresh = _untried(plan, faults)
    if fresh:
        begin_us = left_us if len(fresh) == 1 else min(left_us, attempt_timeout_us)
        return Try(place=fresh[0], begin_within_us=begin_us, timeout_us=left_us)
    return _again(plan, faults, left_us=left_us, attempt_timeout_us=attempt_timeout_us, draw=draw)


def _untried(plan: Plan, faults: Sequence[Fault]) -> Sequence[Place]:
    """The candidates that are left of the first round. After "context too long" only longer contexts are."""
    if not faults:
        return plan.candidates
    tried = {fault.place for fault in faults}
    return _large_enough(plan, faults, [place for place in plan.candidates if place not in tried])


def _large_enough(plan: Plan, faults: Sequence[Fault], places: Sequence[Place]) -> Sequence[Place]:
    """Those that take more than what has turned out to be too little."""
    too_short = [plan.context(f.place) for f in faults if f.kind is FaultKind.CONTEXT_TOO_LONG and f.place]
    return [place for place in places if plan.context(place) > max(too_short)] if too_short else places


def second_attempt(
    plan: Plan, first: Try, why_not: WhyNot, *, now_us: int, deadline_us: int, attempt_timeout_us: int
) -> Try | None:
    """Where a hedged request goes too, while the first place has not begun; None where there is no other.

    Its time is that of any attempt: bounded by `attempt_timeout_us` while a third candidate remains.
    """
    left_us = deadline_us - now_us
    others = [place for place in plan.candidates if place != first.place]
    place = next((place for place in others if why_not(place) is None), None)
    if place is None or left_us < MIN_ATTEMPT_US:
        return None
    begin_us = left_us if len(others) == 1 else min(left_us, attempt_timeout_us)
    return Try(place=place, begin_within_us=begin_us, timeout_us=left_us)


def _again(plan: Plan, faults: Sequence[Fault], *, left_us: int, attempt_timeout_us: int, draw: Draw) -> Try | GiveUp:
    """A further round, if the rule has one and a place's fault may have passed."""
    rounds = Counter(fault.place for fault in faults)
    last = {fault.place: fault for fault in faults}
    asks_us = {place: fault.retry_after_us or 0 for place, fault in last.items()}
    passing = [
        p
        for p in _large_enough(plan, faults, plan.candidates)
        if p in last
        and CONSEQUENCES[last[p].kind].passes
        and rounds[p] <= plan.retries
        and asks_us[p] <= left_us - MIN_ATTEMPT_US
    ]
    if not passing:
        return GiveUp(error=told(faults, plan))
    # The first of those that were tried least, and of these of those that may be tried soonest.
    place = min(passing, key=lambda p: (rounds[p], asks_us[p]))
    longest_us = min(FIRST_PAUSE_US << (rounds[place] - 1), LONGEST_PAUSE_US)
    pause_us = max(int(longest_us * draw()), asks_us[place])
    left_us -= pause_us
    if left_us < MIN_ATTEMPT_US:
        return GiveUp(error=told(faults, plan))
    return Try(place=place, begin_within_us=min(left_us, attempt_timeout_us), timeout_us=left_us, pause_us=pause_us)


class RetryBudget:
    """How many further attempts requests may make after failures: a share of the traffic, no count for each request.

    A token bucket after Finagle's `RetryBudget` (Twitter): each request puts `RETRY_SHARE` in, each second
    `RETRIES_PER_S`, each further attempt takes one out. When everything fails, the load on what is left grows by that
    share and not by a multiple. It begins full, so that all that was in flight at a server that dies can go elsewhere.
    """

    def __init__(self) -> None:
        self._left = RETRY_RESERVE
        self._since_us = 0

    def request(self) -> None:
        """A request came."""
        self._left = min(RETRY_RESERVE, self._left + RETRY_SHARE)

    def take(self, now_us: int) -> bool:
        """Whether one further attempt may be made now; it is booked then."""
        passed_us, self._since_us = now_us - self._since_us, now_us
        self._left = min(RETRY_RESERVE, self._left + max(0, passed_us) * RETRIES_PER_S / 1e6)
        if self._left < 1:
            return False
        self._left -= 1
        return True


def is_turned_away(fault: Fault, *, is_sent: bool) -> bool:
    """Whether a place had no work with a request that it did not take.

    Going on to the next one is then the rule's own way and adds no load: no budget bounds it.
    """
    return not is_sent or fault.kind in (FaultKind.UNSUPPORTED, FaultKind.CONTEXT_TOO_LONG)


def _kills(faults: Sequence[Fault]) -> bool:
    """Whether a request may be what its models died of: it is not sent to kill a third one."""
    return sum(fault.kind is FaultKind.DEAD for fault in faults) >= MAX_DEAD


def blames_backend(fault: Fault, *, waited_us: int, attempt_timeout_us: int, is_named_by_caller: bool = False) -> bool:
    """Whether a breaker counts `fault`.

    A wrong answer of a model that the caller names is not counted: what it answers depends on what it was sent, and one
    caller's odd input must not take the model away from all others.

    A timeout is the backend's only if it was waited for as long as an attempt may take (`waited_us` is the last wait,
    ours for the backend): a caller's own short timeout, or a caller that reads slowly, must not open a breaker.
    """
    if fault.kind is FaultKind.TIMEOUT and not fault.is_own_limit and waited_us < attempt_timeout_us - TIMER_SLACK_US:
        return False
    if is_named_by_caller and fault.kind is FaultKind.BROKEN:
        return False
    return CONSEQUENCES[fault.kind].blames_backend


def broken_off() -> GatewayError:
    """The error of an answer that broke after a part of it had left."""
    return BackendBroke("the backend broke off: what was received is incomplete")


def nobody(plan: Plan, *, cooling_us: int | None = None) -> GatewayError:
    """The error where a plan has no candidates; `cooling_us`: all have asked not to be called for so long."""
    if not plan.rule:
        error = NoHealthyBackend(NO_RULE)
        error.should_retry = False  # until an operator changes the rules
        return error
    if cooling_us is not None:
        return QueueFull(f"every backend of rule '{plan.rule}' has asked to wait", retry_after_us=cooling_us)
    return NoHealthyBackend(f"no backend of rule '{plan.rule}' can take requests now")


def named_by_caller(fault: Fault) -> Fault:
    """The fault of a call whose model and tensors are the caller's own: what does not fit is the caller's doing."""
    kinds = {FaultKind.UNKNOWN_MODEL: FaultKind.NO_SUCH_MODEL, FaultKind.MISFIT: FaultKind.REFUSED_INPUT}
    if fault.kind not in kinds:
        return fault
    # The message becomes the caller's; what was logged until now has the code before it.
    message = fault.message if fault.reply is None else texts.triton_plain(fault.reply.text)
    return replace(fault, kind=kinds[fault.kind], message=message)


def told(faults: Sequence[Fault], plan: Plan) -> GatewayError:
    """What the caller sees of all that failed: the last fault of a place that was asked and able to do it at all."""
    asked = [fault for fault in faults if fault.kind is not FaultKind.SKIPPED]
    able = [fault for fault in asked if fault.kind is not FaultKind.UNSUPPORTED]
    fault = (able or asked or faults)[-1]
    if fault.kind is FaultKind.NO_SUCH_MODEL and _has_silent_replica(fault, faults, plan):
        return NoHealthyBackend("one replica does not have this model, and another one cannot be asked now")
    consequence = CONSEQUENCES[fault.kind]
    alike = [one.retry_after_us for one in asked or faults if one.kind is fault.kind and one.retry_after_us is not None]
    error = consequence.error(
        consequence.detail or fault.message,
        field=fault.field,
        retry_after_us=min(alike, default=None),  # of several that have asked to wait, the first to take requests again
        upstream_code=fault.code,
    )
    error.reply = fault.reply
    error.upstream_status = fault.status
    return error


def _has_silent_replica(fault: Fault, faults: Sequence[Fault], plan: Plan) -> bool:
    """Whether another replica of that place has not said the same: it may have what this one, just started, lacks."""
    if fault.place is None:
        return False
    of_all = replace(fault.place, replica="")
    silent = [place for place, _ in plan.refusals]
    silent += [one.place for one in faults if one.place is not None and one.kind is not FaultKind.NO_SUCH_MODEL]
    return any(place.replica and replace(place, replica="") == of_all for place in silent)
