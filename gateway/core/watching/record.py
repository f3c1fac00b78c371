"""One record per request, for logs and metrics. Never holds bodies, prompts or secrets."""

from dataclasses import field
from typing import Final, NamedTuple

from gateway.core.errors import Fault, FaultKind, GatewayError
from gateway.core.routing import Plan
from gateway.core.trace import Trace
from gateway.core.types import InferenceRequest, Place, Route, Timing, Usage
from gateway.core.values import quick_value
from gateway.core.watching.steps import Steps

OK_STATUS = 200
_ABOUT_INPUT: Final = (FaultKind.REFUSED_INPUT, FaultKind.CONTEXT_TOO_LONG)


class Tried(NamedTuple):
    """One attempt, as every record tells it; `core.watching.steps.TracedAttempt` tells more.

    Attributes:
        outcome: `ok`, the kind of its fault, or `left`: its caller went away, or another attempt began first.
        gate_us: how long it waited in the gateway, the server having as many requests as it may.
    """

    place: Place
    outcome: str
    gate_us: int


@quick_value
class RequestRecord:
    """How a request went. `error` None: a whole answer was given.

    Attributes:
        plan: None where the request did not get so far.
        faults: one for each failed attempt, with its place.
        first_token_us: of a streamed answer, from the request's arrival to its first part.
        recalled: see `Recalled.outcome`.
        request: itself; None where it was refused at the door. Its input is nobody's to write down.
        rule: the one that took it; empty where none did, or it did not get so far.
        revision / switches_revision: of the rules and the switches by which it was decided.
        refused_by: the switch that refused it, in words; `blocked_scope` the kind of its scope.
        input_tokens: of its prompt, as the gateway estimated them; None where nobody had to know.
        tried: every attempt that was made, in the order in which they began.
        ordering_us: how long it waited for its turn under its ordering key.
        trace: that it is part of; None where there is none.
        steps: of a request whose trace is recorded, and which was not refused at the door.
    """

    id: str
    task: str
    tenant: str
    key_id: str
    total_us: int
    error: GatewayError | None = None
    stream: bool = False
    plan: Plan | None = None
    faults: tuple[Fault, ...] = ()
    route: Route | None = None
    timing: Timing | None = None
    usage: Usage = field(default_factory=Usage)
    first_token_us: int | None = None
    degraded: bool = False
    recalled: str = ""
    request: InferenceRequest | None = field(default=None, repr=False)
    rule: str = ""
    revision: int = 0
    switches_revision: int = 0
    refused_by: str = ""
    blocked_scope: str = ""
    input_tokens: int | None = None
    tried: tuple[Tried, ...] = ()
    ordering_us: int = 0
    trace: Trace | None = None
    steps: Steps | None = field(default=None, repr=False)

    @property
    def code(self) -> str:
        """`ok`, or the error's."""
        return self.error.code if self.error else "ok"

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.error.status if self.error else OK_STATUS

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why each place was not taken, or what became of it; no words about the input, which may repeat it."""
        if not self.faults and not (self.plan and self.plan.refusals):
            return ()
        refused = (f"{place}: {why}" for place, why in (self.plan.refusals if self.plan else ()))
        at = (f" at {fault.place}" if fault.place else "" for fault in self.faults)
        tried = (f"attempt{where}: {_words(f)}" for where, f in zip(at, self.faults, strict=True))
        return (*refused, *tried)

    @property
    def detail(self) -> str:
        """The error's words; none where they are a backend's about the input, which the caller alone is told."""
        is_about_input = bool(self.faults) and self.faults[-1].kind in _ABOUT_INPUT
        return self.error.detail if self.error and not is_about_input else ""


def _words(fault: Fault) -> str:
    if fault.kind in _ABOUT_INPUT:
        return f"{fault.kind.value} of {fault.field}" if fault.field else fault.kind.value
    return f"{fault.kind.value}: {fault.message}"
