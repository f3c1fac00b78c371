"""What to do next after each failed attempt: try the next candidate, or give up with an honest error."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from gateway.core.routing import Plan
from gateway.core.types import Place

TIMER_SLACK_US = 2_000  # an event loop's timer may fire a little early
MAX_DEAD = 2  # one dead process may be chance, two in a row that one request met are likely its own doing
MIN_ATTEMPT_US = 5_000  # less than this cannot bring an answer from any backend; do not spend it on a try


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    """What follows from a fault.

    Attributes:
        try_next: another candidate may do better.
        blames_backend: the breaker counts it (the caller's own faults must never open it).
        error: what the caller sees when nothing is left to try.
        detail: the sentence that goes with it; None = the backend's own (already cleaned) words.
    """

    try_next: bool
    blames_backend: bool
    error: type[GatewayError]
    detail: str | None


CONSEQUENCES: dict[FaultKind, Consequence] = {
    FaultKind.UNAVAILABLE: Consequence(
        try_next=True, blames_backend=True, error=NoHealthyBackend, detail="the backend could not be reached"
    ),
    FaultKind.TIMEOUT: Consequence(
        try_next=True,
        blames_backend=True,
        error=DeadlineExceeded,
        detail="the backend did not answer in time",
    ),
    FaultKind.OVERLOADED: Consequence(
        try_next=True, blames_backend=False, error=QueueFull, detail="the backend's queue is full"
    ),
    FaultKind.BROKEN: Consequence(
        try_next=True, blames_backend=True, error=BackendBroke, detail="the backend's answer is broken"
    ),
    # Not blamed: an upstream that answers bad input with a 5xx would let one caller take it away from all others.
    FaultKind.FAILED: Consequence(
        try_next=True, blames_backend=False, error=BackendBroke, detail="the backend failed on this request"
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
    FaultKind.REFUSED_INPUT: Consequence(try_next=False, blames_backend=False, error=InvalidInput, detail=None),
    FaultKind.UNSUPPORTED: Consequence(
        try_next=True,
        blames_backend=False,
        error=UnsupportedByBackend,
        detail="the backend lacks a feature that this request asks for",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """Send the request to `place`; it must begin to answer within `begin_within_us`, and end within `timeout_us`."""

    place: Place
    begin_within_us: int
    timeout_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Tell the caller `error`."""

    error: GatewayError


def next_attempt(
    plan: Plan, faults: Sequence[Fault], *, now_us: int, deadline_us: int, attempt_timeout_us: int
) -> Try | GiveUp:
    """Decide from the faults so far (one per attempt made, oldest first).

    While another candidate remains, a backend must begin to answer within `attempt_timeout_us`, so that a hung one
    leaves time for the next; the last candidate has all that is left. Once it answers, only the deadline counts.
    """
    if not plan.candidates:
        return GiveUp(error=_nobody(plan))
    if faults and (not CONSEQUENCES[faults[-1].kind].try_next or _kills(faults)):
        return GiveUp(error=_told(faults[-1]))
    left_us = deadline_us - now_us
    if left_us < MIN_ATTEMPT_US:
        return GiveUp(error=DeadlineExceeded("the request's time is used up"))
    if len(faults) >= len(plan.candidates):
        return GiveUp(error=_told(faults[-1]))
    is_last = len(faults) == len(plan.candidates) - 1
    return Try(
        place=plan.candidates[len(faults)],
        begin_within_us=left_us if is_last else min(left_us, attempt_timeout_us),
        timeout_us=left_us,
    )


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
    if fault.kind is FaultKind.TIMEOUT and waited_us < attempt_timeout_us - TIMER_SLACK_US:
        return False
    if is_named_by_caller and fault.kind is FaultKind.BROKEN:
        return False
    return CONSEQUENCES[fault.kind].blames_backend


def broken_off() -> GatewayError:
    """The error of an answer that broke after a part of it had left."""
    return BackendBroke("the backend broke off: what was received is incomplete")


def _nobody(plan: Plan) -> GatewayError:
    if not plan.rule:
        return NoHealthyBackend("no enabled rule routes this task")
    return NoHealthyBackend(f"no backend of rule '{plan.rule}' can take requests now")


def named_by_caller(fault: Fault) -> Fault:
    """The fault of a call whose model and tensors are the caller's own: what does not fit is the caller's doing."""
    kinds = {FaultKind.UNKNOWN_MODEL: FaultKind.NO_SUCH_MODEL, FaultKind.MISFIT: FaultKind.REFUSED_INPUT}
    if fault.kind not in kinds:
        return fault
    # The message becomes the caller's; what was logged until now has the code before it.
    message = fault.message if fault.reply is None else texts.triton_plain(fault.reply.text)
    return replace(fault, kind=kinds[fault.kind], message=message)


def _told(fault: Fault) -> GatewayError:
    consequence = CONSEQUENCES[fault.kind]
    error = consequence.error(
        consequence.detail or fault.message,
        field=fault.field,
        retry_after_us=fault.retry_after_us,
        upstream_code=fault.code,
    )
    error.reply = fault.reply
    return error
