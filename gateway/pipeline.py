"""The walk of one request: admit -> route -> dispatch -> settle. Read `Pipeline.handle` from top to bottom.

Each step asks `gateway.core` what to do and a port to do it. One event stream serves unary and streamed answers
(unary = a stream of one): `Started`, then the answer's events, then `Finished`. A failure before `Started` is a
clean refusal; a failure after it ends the stream with the error raised, never with a made-up end.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from gateway.core import attempts, rate_limit, routing
from gateway.core.breaker import BreakerBoard
from gateway.core.errors import (
    BackendError,
    ClientClosed,
    Fault,
    GatewayError,
    InternalError,
    RateLimited,
)
from gateway.core.routing import Plan, Target
from gateway.core.types import (
    Answer,
    BackendCall,
    BackendEvent,
    Delta,
    Event,
    Finished,
    InferenceRequest,
    Message,
    RequestRecord,
    Route,
    Started,
    Tensors,
    Timing,
    Usage,
    Verdict,
)
from gateway.ports import Backend, Clock, Limiter, Observer, RuleSource
from gateway.tasks.contract import Contract, located


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task as configured: its contract, how long it may take, and how long one attempt may."""

    name: str
    contract: Contract
    timeout_us: int
    attempt_timeout_us: int


@dataclass(slots=True, kw_only=True)
class Trace:
    """What is known of one request so far; written only by the walk, read once by settle."""

    verdict: Verdict = field(default_factory=lambda: Verdict(allowed=True))
    admitted_us: int = 0
    plan: Plan | None = None
    faults: list[Fault] = field(default_factory=list)
    route: Route | None = None
    version: str = ""
    backend_us: int = 0
    queue_us: int | None = None
    usage: Usage = field(default_factory=Usage)

    def note(self, event: BackendEvent, answer: Answer | Message | Delta) -> None:
        """Keep what an event tells about the backend's work."""
        if isinstance(event, Tensors):
            self.version, self.queue_us = event.version, event.queue_us
        self.usage = answer.usage or self.usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The data plane's one path. `draw` gives numbers in [0, 1) for weighted splits."""

    tasks: Mapping[str, Task]
    backends: Mapping[str, Backend]
    limiter: Limiter
    rules: RuleSource
    board: BreakerBoard
    observer: Observer
    clock: Clock
    draw: Callable[[], float]

    async def handle(self, request: InferenceRequest) -> AsyncGenerator[Event, None]:
        """Answer `request` as events. Raises `GatewayError` and nothing else.

        Closing the generator early means that the caller left: the backend's work is cancelled.
        """
        trace = Trace()
        error: GatewayError | None = ClientClosed("the caller left")
        self.observer.began(request.task)
        try:
            # 1 admit: one atomic step takes all charges or none.
            trace.verdict = await self.limiter.charge(rate_limit.charges(request.caller))
            trace.admitted_us = self.clock()
            _refuse_if_limited(trace.verdict)
            # 2 route: ordered candidates, each with its reason.
            trace.plan = routing.plan(self.rules.current(), request, why_not=self.why_not, draw=self.draw())
            # 3 dispatch: the first candidate that begins to answer has the request.
            async with aclosing(self._dispatch(request, trace.plan, trace)) as events:
                async for event in events:
                    yield event
            error = None
            yield Finished(usage=trace.usage, timing=self._timing(request, trace))
        except GatewayError as refused:
            refused.verdict = trace.verdict
            error = refused
            raise
        except Exception as unforeseen:  # the request boundary: every fault gets an honest answer
            error = InternalError("the gateway failed on this request")
            error.verdict, error.__cause__ = trace.verdict, unforeseen
            raise error from unforeseen
        finally:
            # 4 settle: no await here, so a cancellation cannot cut it short.
            self.observer.ended(self._record(request, trace, error), error)

    async def _dispatch(self, request: InferenceRequest, plan: Plan, trace: Trace) -> AsyncGenerator[Event, None]:
        """Try candidates until one begins to answer, then pass on all that it says."""
        task = self.tasks[request.task]
        while True:
            step = attempts.next_attempt(
                plan,
                trace.faults,
                now_us=self.clock(),
                deadline_us=request.deadline_us,
                attempt_timeout_us=task.attempt_timeout_us,
            )
            if isinstance(step, attempts.GiveUp):
                raise step.error
            try:
                async with aclosing(self._attempt(request, task, step, trace)) as answers:
                    async for answer in answers:
                        if trace.route is None:
                            trace.route = _route(plan, step.target, trace)
                            yield Started(route=trace.route, verdict=trace.verdict)
                        yield answer
            except BackendError as failed:
                trace.faults.append(located(failed.fault, task.contract.tensor_fields))
                if trace.route is not None:  # a part has left: no second backend may continue it
                    raise attempts.broken_off() from failed
            else:
                return

    async def _attempt(
        self, request: InferenceRequest, task: Task, step: attempts.Try, trace: Trace
    ) -> AsyncGenerator[Answer | Message | Delta, None]:
        """One candidate's answer in the task's form; its breaker hears how it went."""
        target, began_us, answered, fault = step.target, self.clock(), False, None
        call = BackendCall(
            request_id=request.id,
            model=target.model,
            version=target.version,
            payload=task.contract.payload(request.input),
        )
        self.board.trying(target.backend, target.model, now_us=began_us, timeout_us=step.timeout_us)
        try:
            backend = self.backends[target.backend]
            async with aclosing(backend.infer(call, timeout_us=step.timeout_us)) as events:
                async for event in events:
                    answer = task.contract.answer(event, request.input)
                    trace.note(event, answer)
                    if not isinstance(answer, Delta) or answer.data:  # an empty delta only tells usage
                        yield answer
            answered = True
        except BackendError as failed:
            fault = failed.fault
            raise
        finally:
            now_us = self.clock()
            trace.backend_us += now_us - began_us
            self.board.ended(
                target.backend,
                target.model,
                now_us=now_us,
                answered=answered,
                fault=fault.kind if fault and attempts.CONSEQUENCES[fault.kind].blames_backend else None,
            )

    def why_not(self, target: Target) -> str | None:
        """None where `target` may be tried now, else the reason."""
        if target.backend not in self.backends:
            return "backend is not configured here"
        return self.board.of(target.backend, target.model).why_not(self.clock())

    def _timing(self, request: InferenceRequest, trace: Trace) -> Timing:
        return Timing(
            total_us=self.clock() - request.received_us,
            admit_us=max(0, trace.admitted_us - request.received_us),
            backend_us=trace.backend_us,
            queue_us=trace.queue_us,
        )

    def _record(self, request: InferenceRequest, trace: Trace, error: GatewayError | None) -> RequestRecord:
        timing = self._timing(request, trace)
        reasons = trace.plan.reasons if trace.plan else ()
        return RequestRecord(
            id=request.id,
            task=request.task,
            tenant=request.caller.tenant,
            key_id=request.caller.key_id,
            code=error.code if error else "ok",
            status=error.status if error else 200,
            total_us=timing.total_us,
            stream=request.stream,
            route=trace.route,
            timing=timing,
            usage=trace.usage,
            rule_revision=trace.plan.revision if trace.plan else 0,
            reasons=(*reasons, *(f"attempt: {f.kind.value}: {f.message}" for f in trace.faults)),
            failed_attempts=len(trace.faults),
            degraded=trace.verdict.degraded,
        )


def _refuse_if_limited(verdict: Verdict) -> None:
    if not verdict.allowed:
        raise RateLimited(f"limit reached: {verdict.name}", retry_after_us=verdict.retry_after_us)


def _route(plan: Plan, target: Target, trace: Trace) -> Route:
    return Route(
        backend=target.backend,
        model=target.model,
        version=trace.version or target.version,
        rule=plan.rule,
        attempts=len(trace.faults) + 1,
    )
