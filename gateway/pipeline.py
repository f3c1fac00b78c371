"""The walk of one request: admit -> route -> dispatch -> settle. Read `Pipeline.handle` from top to bottom.

Each step asks `gateway.core` what to do and a port to do it. One event stream serves unary and streamed answers
(unary = a stream of one): `Started`, then the answer's events, then `Finished`. A failure before `Started` is a clean
refusal; a failure after it ends the stream with the error raised, never with a made-up end.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace

from gateway.core import attempts, rate_limit, routing
from gateway.core.breaker import BreakerBoard
from gateway.core.errors import (
    BackendError,
    ClientClosed,
    Fault,
    FaultKind,
    GatewayError,
    InternalError,
    RateLimited,
)
from gateway.core.record import RequestRecord
from gateway.core.replicas import Draw
from gateway.core.routing import Plan
from gateway.core.types import (
    Answer,
    BackendCall,
    BackendEvent,
    Event,
    Finished,
    InferenceRequest,
    Message,
    Metered,
    Part,
    Place,
    Route,
    Started,
    Tensors,
    Timing,
    Usage,
    Verdict,
)
from gateway.gate import Gate
from gateway.ports import Backend, Clock, Limiter, Observer, RuleSource, Sequences
from gateway.tasks.contract import Contract, located


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task as configured: its contract, how long it may take, and how long a backend may take to begin."""

    name: str
    contract: Contract
    timeout_us: int
    attempt_timeout_us: int


@dataclass(slots=True, kw_only=True)
class Walk:
    """What is known of one request so far; written by the steps, read by settle."""

    verdict: Verdict = field(default_factory=lambda: Verdict(allowed=True))
    admitted_us: int | None = None
    plan: Plan | None = None
    faults: list[Fault] = field(default_factory=list)
    route: Route | None = None
    backend_us: int = 0  # spent waiting for backends, all attempts together
    last_wait_us: int = 0
    gate_us: int = 0  # spent in our own queues, all attempts together
    version: str = ""
    queue_us: int | None = None
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The data plane's one path. `draw` gives numbers in [0, 1) for weighted splits and the choice of replicas."""

    tasks: Mapping[str, Task]
    backends: Mapping[str, Backend]
    gates: Mapping[str, Gate]
    limiter: Limiter
    rules: RuleSource
    sequences: Sequences
    board: BreakerBoard
    observer: Observer
    clock: Clock
    draw: Draw

    async def handle(self, request: InferenceRequest) -> AsyncGenerator[Event, None]:
        """Answer `request` as events. Raises `GatewayError` and nothing else.

        Closing the generator early means that the caller left: the backend's work is cancelled.
        """
        walk = Walk()
        error: GatewayError | None = ClientClosed("the caller left")  # until another end is known
        self.observer.began(request.task)
        try:
            # 1 admit: one atomic step takes all charges or none.
            walk.verdict = await self.limiter.charge(rate_limit.charges(request.caller))
            walk.admitted_us = self.clock()
            _refuse_if_limited(walk.verdict)
            # 2 route: ordered candidates, each other place with the reason why not.
            walk.plan = self.plan(request)
            if request.sequence is not None:  # what has begun goes on where its state is
                walk.plan = await self.sequences.route(request, walk.plan)
            # 3 dispatch: the first candidate that begins to answer has the request.
            async with aclosing(self._dispatch(request, walk.plan, walk)) as events:
                async for event in events:
                    yield event
            error = None
            yield Finished(usage=walk.usage, timing=self._timing(request, walk))
        except GatewayError as refused:
            error = refused
            error.verdict = walk.verdict
            raise
        except Exception as unforeseen:  # the request boundary: every fault gets an honest answer
            error = InternalError("the gateway failed on this request")
            error.verdict, error.__cause__ = walk.verdict, unforeseen
            raise error from unforeseen
        finally:
            # 4 settle: what was taken is given back, and one record is written.
            self._settle(request, walk, error)

    async def _dispatch(self, request: InferenceRequest, plan: Plan, walk: Walk) -> AsyncGenerator[Event, None]:
        """Try candidates until one begins to answer, then pass on all that it says."""
        task = self.tasks[request.task]
        while True:
            step = attempts.next_attempt(
                plan,
                walk.faults,
                now_us=self.clock(),
                deadline_us=request.deadline_us,
                attempt_timeout_us=task.attempt_timeout_us,
            )
            if isinstance(step, attempts.GiveUp):
                raise step.error
            if walk.faults and (reason := self.why_not(step.place)):  # health has moved on since the plan was made
                walk.faults.append(Fault(kind=FaultKind.UNAVAILABLE, message=reason))
                continue
            try:
                async with aclosing(self._attempt(request, task, step, walk)) as answers:
                    async for answer in answers:
                        if walk.route is None:
                            walk.route = _route(plan, step.place, walk)
                            yield Started(route=walk.route, verdict=walk.verdict)
                        yield answer
            except BackendError as failed:
                walk.faults.append(located(failed.fault, task.contract.tensor_fields))
                if request.sequence is not None:
                    await self.sequences.failed(request, step.place, failed.fault)
                if walk.route is not None:  # a part has left: no second backend may continue it
                    raise attempts.broken_off() from failed
            else:
                return

    async def _attempt(
        self, request: InferenceRequest, task: Task, step: attempts.Try, walk: Walk
    ) -> AsyncGenerator[Part, None]:
        """What one candidate answers, in the task's own form. Raises `BackendError`."""
        place = step.place
        began_us = self.clock()
        has_begun = False
        gate = self.gates[place.backend]
        with self._attempted(request, step, task, walk):
            if await gate.enter(place.replica, priority=request.priority, within_us=step.begin_within_us):
                walk.gate_us += self.clock() - began_us
            try:
                call = await self._call(request, task, place)
                # What comes whole has begun when it ends: the backend's own bound does. A stream may go on for longer.
                begin_by_us = began_us + step.begin_within_us if call.payload.stream else None
                end_by_us = began_us + (step.timeout_us if call.payload.stream else step.begin_within_us)
                answers = self.backends[place.backend].infer(call, timeout_us=end_by_us - self.clock())
                async with aclosing(answers) as events:
                    while (
                        event := await self._next(events, walk, by_us=None if has_begun else begin_by_us)
                    ) is not None:
                        answer = _answer(task, request, event, walk)
                        if answer is None:
                            continue
                        if not has_begun:
                            has_begun = True
                            self.board.began(place)  # it works again: others need not wait for the end
                        yield answer
            finally:
                gate.leave(place.replica)
            if not has_begun:
                raise BackendError(Fault(kind=FaultKind.BROKEN, message="ended without an answer"))
        if request.sequence is not None:
            await self.sequences.answered(request, version=walk.version)

    async def _call(self, request: InferenceRequest, task: Task, place: Place) -> BackendCall:
        return BackendCall(
            request_id=request.id,
            model=place.model,
            version=place.version,
            replica=place.replica,
            payload=task.contract.payload(request.input),
            sequence=None if request.sequence is None else await self.sequences.bind(request, place),
        )

    @contextmanager
    def _attempted(self, request: InferenceRequest, step: attempts.Try, task: Task, walk: Walk) -> Iterator[None]:
        """The breaker hears of an attempt: that it is made, and whether it fails."""
        self.board.trying(step.place, now_us=self.clock(), within_us=step.begin_within_us)
        try:
            yield
        except BackendError as failed:
            if request.model:
                failed.fault = attempts.named_by_caller(failed.fault)
            if attempts.blames_backend(
                failed.fault,
                waited_us=walk.last_wait_us,
                attempt_timeout_us=task.attempt_timeout_us,
                is_named_by_caller=bool(request.model),
            ):
                self.board.failed(step.place, now_us=self.clock(), fault=failed.fault)
            else:
                self.board.released(step.place)
            raise
        except BaseException:  # the caller left, or its input was bad after all: no verdict on the backend
            self.board.released(step.place)
            raise
        else:
            self.board.answered(step.place)

    async def _next(
        self, events: AsyncGenerator[BackendEvent, None], walk: Walk, *, by_us: int | None
    ) -> BackendEvent | None:
        """The next event, at `by_us` at the latest; None at the end. Only this waiting is the backend's time."""
        began_us = self.clock()
        try:
            if by_us is None:
                return await anext(events, None)
            async with asyncio.timeout((by_us - began_us) / 1e6):
                return await anext(events, None)
        except TimeoutError:
            raise BackendError(Fault(kind=FaultKind.TIMEOUT, message="did not begin to answer in time")) from None
        finally:
            walk.last_wait_us = self.clock() - began_us
            walk.backend_us += walk.last_wait_us

    def plan(self, request: InferenceRequest) -> Plan:
        """Where `request` may go now, by the rules in force."""
        state = routing.State(why_not=self.why_not, loads=self.loads, draw=self.draw)
        return routing.plan(self.rules.current(), request, state)

    def why_not(self, place: Place) -> str | None:
        """None where `place` may be tried now, else the reason."""
        if place.backend not in self.backends:
            return "backend is not configured here"
        return self.board.why_not(place, self.clock())

    def why_not_any(self, place: Place) -> str | None:
        """None where some replica of `place` may be tried now, else why the first may not."""
        replicas = self.loads(place.backend)
        reasons = [self.why_not(replace(place, replica=name)) for name in replicas] or [self.why_not(place)]
        return None if None in reasons else reasons[0]

    def loads(self, backend: str) -> Mapping[str, int]:
        """The replicas of a backend, and how many requests of this process each has to do."""
        found, gate = self.backends.get(backend), self.gates.get(backend)
        return {} if found is None or gate is None else {name: gate.load(name) for name in found.replicas()}

    def _settle(self, request: InferenceRequest, walk: Walk, error: GatewayError | None) -> None:
        """No await in here, so that a cancellation cannot cut it short."""
        timing = self._timing(request, walk)
        self.observer.ended(
            RequestRecord(
                id=request.id,
                task=request.task,
                tenant=request.caller.tenant,
                key_id=request.caller.key_id,
                total_us=timing.total_us,
                error=error,
                stream=request.stream,
                plan=walk.plan,
                faults=tuple(walk.faults),
                route=walk.route,
                timing=timing,
                usage=walk.usage,
                degraded=walk.verdict.degraded,
            )
        )

    def _timing(self, request: InferenceRequest, walk: Walk) -> Timing:
        now_us = self.clock()
        return Timing(
            total_us=now_us - request.received_us,
            admit_us=(walk.admitted_us or now_us) - request.received_us,
            backend_us=walk.backend_us,
            queue_us=(walk.queue_us or 0) + walk.gate_us if walk.gate_us else walk.queue_us,
        )


def _refuse_if_limited(verdict: Verdict) -> None:
    if not verdict.allowed:
        raise RateLimited(f"limit reached: {verdict.name}", retry_after_us=verdict.retry_after_us)


def _answer(task: Task, request: InferenceRequest, event: BackendEvent, walk: Walk) -> Part | None:
    """An event in the task's own form; None where it is for our books alone."""
    if isinstance(event, Metered):
        walk.usage = event.usage
        return None
    if isinstance(event, Tensors):
        walk.version, walk.queue_us = event.version, event.queue_us
    answer = task.contract.answer(event, request.input)
    if isinstance(answer, Answer | Message):
        walk.usage = answer.usage
    return answer


def _route(plan: Plan, place: Place, walk: Walk) -> Route:
    return Route(
        backend=place.backend,
        model=place.model,
        version=walk.version or place.version,
        rule=plan.rule,
        attempts=len(walk.faults) + 1,
        replica=place.replica,
    )
