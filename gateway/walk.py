"""What is known of one request on its walk: written by the steps of `pipeline`, read by settle."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gateway.attempt import Attempt, Task
from gateway.core.admissions import turn_lost
from gateway.core.errors import Fault, GatewayError
from gateway.core.recording import Recording
from gateway.core.routing import Plan
from gateway.core.rules import Rule, RuleSet
from gateway.core.rules.policies import DEFAULT, Policies
from gateway.core.switches import Switch
from gateway.core.types import (
    ALLOWED,
    NOTHING_USED,
    InferenceRequest,
    Part,
    Place,
    Route,
    Started,
    Timing,
    Usage,
    Verdict,
)
from gateway.core.watching.record import RequestRecord, Tried
from gateway.core.watching.steps import Steps
from gateway.estimates import Estimate
from gateway.ports import Admission
from gateway.recall import Recall
from gateway.shadowing import Copy


@dataclass(kw_only=True, eq=False)
class Walk:
    """One request's, so far: what is not known yet stands in the class.

    Attributes:
        rules / rule: the set by which it is decided, and the rule of it that takes the request.
        task: with the rule's time limits, as the request has its deadline.
        until_us: the deadline without them.
        won: the attempt that answers.
    """

    request: InferenceRequest
    task: Task
    estimate: Estimate
    until_us: int
    rules: RuleSet
    on_admitted: Callable[[], object] | None = None
    rule: Rule | None = field(default=None, init=False)
    policies: Policies = field(default=DEFAULT, init=False)
    recall: Recall | None = field(default=None, init=False)
    admission: Admission | None = field(default=None, init=False)
    admitted_us: int | None = field(default=None, init=False)
    routing_us: int | None = field(default=None, init=False)
    routed_us: int | None = field(default=None, init=False)
    plan: Plan | None = field(default=None, init=False)
    refused_by: Switch | None = field(default=None, init=False)
    shadow: Copy | None = field(default=None, init=False)
    attempts: list[Attempt] = field(default_factory=list, init=False)
    faults: list[Fault] = field(default_factory=list, init=False)
    won: Attempt | None = field(default=None, init=False)
    route: Route | None = field(default=None, init=False)
    timing: Timing | None = field(default=None, init=False)
    ordering_us: int = field(default=0, init=False)

    @property
    def verdict(self) -> Verdict:
        """What the limiter said."""
        return ALLOWED if self.admission is None else self.admission.verdict

    def is_ordered(self, mode: str) -> bool:
        """Whether the request is put in order in this way."""
        return bool(self.request.ordering_key) and self.found is None and self.policies.ordering.mode == mode

    def places(self) -> Iterator[Place]:
        """Where it is under way now."""
        return (attempt.step.place for attempt in self.attempts if attempt.is_sent and not attempt.is_over)

    @property
    def found(self) -> Recording | None:
        """The answer that is given again."""
        return None if self.recall is None else self.recall.found

    def check_turn(self) -> None:
        """Raise the `GatewayError` where another may be at its place in the order by now."""
        if self.admission is not None and self.admission.is_lost:
            raise turn_lost()

    @property
    def last(self) -> Attempt | None:
        """The attempt that answers, or the one made last."""
        return self.won or (self.attempts[-1] if self.attempts else None)

    @property
    def planned(self) -> Plan:
        """The plan, where it is made."""
        assert self.plan is not None  # noqa: S101 - the walk routes before it dispatches
        return self.plan

    def route_of(self, attempt: Attempt) -> Route:
        """Where `attempt` went, as the answer tells it."""
        place = attempt.step.place
        return Route(
            backend=place.backend,
            model=place.model,
            version=attempt.version or place.version,
            rule=self.planned.rule,
            attempts=len(self.attempts),
            replica=place.replica,
        )

    def started(self) -> Started:
        """The first event of its answer. Raises as `seen` does."""
        if self.request.ordering_key:
            self.check_turn()
        assert self.route is not None  # noqa: S101 - the walk dispatches before it answers
        started = Started(route=self.route, verdict=self.verdict)
        return started if self.recall is None else self.recall.started(started)

    def seen(self, part: Part) -> Part:
        """A part of its answer, which goes to the caller now, and is kept by who keeps it.

        Raises the `GatewayError` where another may be at its place in the order by now.
        """
        if self.request.ordering_key:
            self.check_turn()
        if self.shadow is not None:
            self.shadow.seen(part)
        if self.recall is not None:
            self.recall.seen(part)
        return part

    def win(self, attempt: Attempt) -> None:
        """It is the one of two that answers."""
        self.won = attempt

    @property
    def usage(self) -> Usage:
        """What it used up, with its cost."""
        return self.last.usage if self.last else NOTHING_USED

    def record(self, timing: Timing, error: GatewayError | None) -> RequestRecord:
        """How it went, for logs and metrics."""
        request, last, recall = self.request, self.last, self.recall
        return RequestRecord(
            id=request.id,
            task=request.task,
            tenant=request.caller.tenant,
            key_id=request.caller.key_id,
            total_us=timing.total_us,
            error=error,
            stream=request.stream,
            plan=self.plan,
            faults=tuple(self.faults),
            route=self.route,
            timing=timing,
            first_token_us=last.first_part_us if last else None,
            usage=self.usage,
            degraded=self.verdict.degraded,
            recalled=recall.told.outcome if recall and (error is None or error.recalled) else "",
            request=request,
            rule=self.rule.name if self.rule else "",
            revision=self.rules.revision,
            switches_revision=self.rules.switches.revision,
            refused_by=str(self.refused_by) if self.refused_by else "",
            blocked_scope=self.refused_by.scope.kind if self.refused_by else "",
            input_tokens=self.estimate.known.input_tokens if self.estimate.known else None,
            tried=tuple([Tried(one.step.place, one.outcome, one.gate_us) for one in self.attempts]),
            ordering_us=self.ordering_us,
            trace=request.trace,
            steps=self._steps(timing) if request.trace and request.trace.is_recorded else None,
        )

    def _steps(self, timing: Timing) -> Steps:
        received_us = self.request.received_us
        ended_us = received_us + timing.total_us
        return Steps(
            received_us=received_us,
            ended_us=ended_us,
            routing_us=self.routing_us,
            routed_us=self.routed_us,
            tried=tuple([attempt.traced(ended_us) for attempt in self.attempts]),
        )

    def timing_at(self, now_us: int) -> Timing:
        """How long everything has taken until now."""
        last, received_us = self.last, self.request.received_us
        gate_us = backend_us = 0
        for attempt in self.attempts:
            gate_us += attempt.gate_us
            backend_us += attempt.backend_us
        queue_us = last.queue_us if last else None
        return Timing(
            total_us=now_us - received_us,
            admit_us=(self.admitted_us or now_us) - received_us,
            backend_us=backend_us,
            queue_us=(queue_us or 0) + gate_us if gate_us else queue_us,
        )
