"""The walk of one request: recall -> admit -> route -> dispatch -> settle. Read `Pipeline.handle` from top to bottom.

Each step asks `gateway.core` what to do and a port to do it. One event stream serves unary and streamed answers
(unary = a stream of one): `Started`, then the answer's events, then `Finished`. A failure before `Started` is a clean
refusal; a failure after it ends the stream with the error raised, never with a made-up end.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from gateway import hedging
from gateway.attempt import Attempt, Task
from gateway.core import attempts, cost, rate_limit, routing
from gateway.core.admissions import Wanted, refusal, turn_lost
from gateway.core.attempts import RetryBudget
from gateway.core.breaker import BreakerBoard
from gateway.core.errors import (
    BackendError,
    ClientClosed,
    Fault,
    FaultKind,
    GatewayError,
    InternalError,
)
from gateway.core.loads import LoadBoard
from gateway.core.policies import DEFAULT
from gateway.core.record import RequestRecord
from gateway.core.recording import Recording
from gateway.core.replicas import Draw
from gateway.core.routing import Plan
from gateway.core.rules import Rule
from gateway.core.types import (
    ALLOWED,
    NOTHING_USED,
    Event,
    Finished,
    InferenceRequest,
    Part,
    Place,
    Route,
    Started,
    Timing,
    Usage,
    Verdict,
)
from gateway.estimates import Estimate
from gateway.gate import Gate
from gateway.ports import Admission, Admissions, Backend, Clock, Observer, RuleSource, Sequences
from gateway.recall import Recall, Recalls
from gateway.releasing import released

__all__ = ["Pipeline", "Task"]


@dataclass(slots=True, kw_only=True)
class Walk:
    """What is known of one request so far; written by the steps, read by settle. `won` is the attempt that answers."""

    on_admitted: Callable[[], object] = bool  # which does nothing
    rule: Rule | None = None
    recall: Recall | None = None
    admission: Admission | None = None
    admitted_us: int | None = None
    plan: Plan | None = None
    estimate: Estimate | None = None
    attempts: list[Attempt] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    won: Attempt | None = None
    route: Route | None = None
    timing: Timing | None = None
    ordering_us: int = 0

    @property
    def verdict(self) -> Verdict:
        """What the limiter said."""
        return ALLOWED if self.admission is None else self.admission.verdict

    def estimate_of(self, request: InferenceRequest, pipeline: "Pipeline") -> Estimate:
        """What the request will take."""
        if self.estimate is None:
            self.estimate = Estimate(request, pipeline.tasks[request.task], pipeline)
        return self.estimate

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

    def win(self, attempt: Attempt) -> None:
        """It is the one of two that answers."""
        self.won = attempt

    @property
    def usage(self) -> Usage:
        """What it used up, with its cost."""
        return self.last.usage if self.last else NOTHING_USED


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The data plane's one path. `draw` gives numbers in [0, 1) for weighted splits and the choice of replicas."""

    tasks: Mapping[str, Task]
    backends: Mapping[str, Backend]
    gates: Mapping[str, Gate]
    admissions: Admissions
    rules: RuleSource
    recalls: Recalls
    sequences: Sequences
    board: BreakerBoard
    observer: Observer
    clock: Clock
    draw: Draw
    loads: LoadBoard = field(default_factory=LoadBoard)
    prices: cost.PriceTable = field(default_factory=cost.PriceTable)
    usd_per_hour: Mapping[str, float] = field(default_factory=dict)
    budgets: dict[str, RetryBudget] = field(default_factory=dict)

    async def handle(
        self, request: InferenceRequest, *, on_admitted: Callable[[], object] = bool
    ) -> AsyncGenerator[Event, None]:
        """Answer `request` as events. Raises `GatewayError` and nothing else.

        `on_admitted` is called when its place in its order is taken, before its turn is waited for.
        Closing the generator early means that the caller left: the backend's work is cancelled.
        """
        walk = Walk(on_admitted=on_admitted)
        error: GatewayError | None = ClientClosed("the caller left")  # until another end is known
        self.observer.began(request.task)
        try:
            walk.rule = self.rules.current().rule_of(request)
            # 1 recall: what was answered before is given again, and costs a request alone.
            if request.idempotency_key or (walk.rule and walk.rule.policies.cache):
                walk.recall = await self.recalls.find(request, walk.rule)
            # 2 admit: one atomic step takes of all limits, and a ticket of the order, or nothing.
            await self._admit(request, walk)
            if walk.recall is not None and walk.recall.found is not None:
                for event in walk.recall.again(walk.recall.found, walk.verdict):
                    yield event
                error = None
                return
            # 3 route: ordered candidates, each other place with the reason why not.
            walk.plan = self.plan(request, walk)
            if request.sequence is not None:  # what has begun goes on where its state is
                walk.plan = await self.sequences.route(request, walk.plan)
            # 4 dispatch: the first candidate that begins to answer has the request.
            async with aclosing(self._dispatch(request, walk.plan, walk)) as events:
                async for event in events:
                    yield event if walk.recall is None else walk.recall.seen(event)
            error = None
            walk.timing = self._timing(request, walk)
            finished = Finished(usage=walk.usage, timing=walk.timing)
            if walk.recall is not None:
                await walk.recall.keep(finished)
            yield finished
        except GatewayError as refused:
            error = refused
            error.verdict = walk.verdict
            if walk.recall is not None:
                await walk.recall.refused(error)
            raise
        except Exception as unforeseen:  # the request boundary: every fault gets an honest answer
            error = InternalError("the gateway failed on this request")
            error.verdict, error.__cause__ = walk.verdict, unforeseen
            raise error from unforeseen
        finally:
            # 5 settle: what was taken is given back, and one record is written.
            self._settle(request, walk, error)

    async def _admit(self, request: InferenceRequest, walk: Walk) -> None:
        """Take what the request will use, and wait for its turn where its order says so. Raises `GatewayError`."""
        policies = walk.rule.policies if walk.rule else DEFAULT
        counted = rate_limit.counters(request.caller, request.task, request.model, request.priority)
        ordering_key = request.ordering_key
        if walk.found is not None:
            counted, ordering_key = tuple([take for take in counted if not take.is_held]), ""
        if not counted and not ordering_key:
            walk.admitted_us = self.clock()
            return
        tokens, nano_usd = walk.estimate_of(request, self).reserved(walk.rule, counted)
        wanted = Wanted(
            tenant=request.caller.tenant,
            takes=rate_limit.takes(counted, tokens=tokens, nano_usd=nano_usd),
            ordering_key=ordering_key,
            queue_bound=policies.ordering.max_queue_size,
            on_store_down=policies.on_store_down,
            orders_alone=policies.ordering.on_store_down == "local",
        )
        walk.admission = await self.admissions.admit(wanted)
        walk.admitted_us = self.clock()
        if not walk.verdict.allowed:
            raise refusal(walk.verdict)
        walk.on_admitted()
        if self._is_ordered(request, walk, "serial"):
            await self._turn(request, walk)

    def _is_ordered(self, request: InferenceRequest, walk: Walk, mode: str) -> bool:
        """Whether the request is put in order in this way."""
        if not request.ordering_key or walk.found is not None:
            return False
        return (walk.rule.policies if walk.rule else DEFAULT).ordering.mode == mode

    async def _turn(self, request: InferenceRequest, walk: Walk) -> None:
        """Wait for the request's turn. Raises `GatewayError`."""
        if walk.admission is None:
            return
        now_us = self.clock()
        max_wait_us = (walk.rule.policies if walk.rule else DEFAULT).ordering.max_wait_ms * 1000
        left_us = request.deadline_us - now_us
        await walk.admission.turn(within_us=min(left_us, max_wait_us) if max_wait_us else left_us)
        walk.ordering_us += self.clock() - now_us

    async def _dispatch(self, request: InferenceRequest, plan: Plan, walk: Walk) -> AsyncGenerator[Event, None]:
        """Try candidates until one begins to answer, then pass on all that it says."""
        self._budget(request).request()
        while True:
            step = await self._next_step(request, plan, walk)
            try:
                async with aclosing(self._in_order(request, walk, self._parts(request, plan, step, walk))) as parts:
                    async for part in parts:
                        walk.check_turn()
                        if walk.route is None:
                            walk.won = walk.won or walk.attempts[-1]
                            walk.route = _route(plan, walk.won, walk)
                            yield Started(route=walk.route, verdict=walk.verdict)
                        yield part
            except BackendError as failed:
                walk.faults.append(failed.fault)
                if request.sequence is not None:
                    await self.sequences.failed(request, step.place, failed.fault)
                if walk.route is not None:  # a part has left: no second backend may continue it
                    raise attempts.broken_off() from failed
                walk.won = None
            else:
                return

    async def _next_step(self, request: InferenceRequest, plan: Plan, walk: Walk) -> attempts.Try:
        """Where to go next, its pause waited. Raises the `GatewayError` to give up with."""
        while True:
            now_us = self.clock()
            if not plan.candidates:
                raise attempts.nobody(plan, cooling_us=self.board.shortest_cooling_us(plan.refusals, now_us))
            step = attempts.next_attempt(
                plan,
                walk.faults,
                now_us=now_us,
                deadline_us=request.deadline_us,
                attempt_timeout_us=self.tasks[request.task].attempt_timeout_us,
                draw=self.draw,
            )
            if isinstance(step, attempts.GiveUp):
                raise step.error
            walk.check_turn()
            if not walk.faults:
                return step
            if step.pause_us:
                await asyncio.sleep(step.pause_us / 1e6)
            if reason := self.why_not(step.place):  # health has moved on since the plan was made
                walk.faults.append(Fault(kind=FaultKind.SKIPPED, message=reason, place=step.place))
            elif walk.attempts[-1].is_turned_away or self._budget(request).take(self.clock()):
                return step
            else:
                raise attempts.told(walk.faults)

    def _in_order(self, request: InferenceRequest, walk: Walk, parts: AsyncGenerator[Part]) -> AsyncGenerator[Part]:
        """`parts`, held back until the request's turn where its order says so."""
        if not self._is_ordered(request, walk, "release"):
            return parts
        return released(parts, self._turn(request, walk))

    def _budget(self, request: InferenceRequest) -> RetryBudget:
        return self.budgets.setdefault(request.task, RetryBudget())

    def _parts(self, request: InferenceRequest, plan: Plan, step: attempts.Try, walk: Walk) -> AsyncGenerator[Part]:
        """What the place of `step` answers, or, hedged, the place that begins first. Raises `BackendError`."""
        task = self.tasks[request.task]

        def attempt(at: attempts.Try) -> Attempt:
            work = walk.estimate.known if walk.estimate else None
            made = Attempt(request=request, task=task, plan=plan, step=at, on=self, work=work, check=walk.check_turn)
            walk.attempts.append(made)
            return made

        after_us = self._hedge_after_us(request, plan, step, walk)
        if after_us is None:
            return attempt(step).answers()

        def second() -> Attempt | None:
            now_us = self.clock()
            other = attempts.second_attempt(
                plan,
                step,
                self.why_not,
                now_us=now_us,
                deadline_us=request.deadline_us,
                attempt_timeout_us=task.attempt_timeout_us,
            )
            return attempt(other) if other and self._budget(request).take(now_us) else None

        return hedging.first_to_begin(attempt(step), second, after_us=after_us, won=walk.win, lost=walk.faults.append)

    def _hedge_after_us(self, request: InferenceRequest, plan: Plan, step: attempts.Try, walk: Walk) -> int | None:
        """After how long without a first part a second copy is sent; None where none is."""
        if not plan.hedge or walk.faults or request.priority != "interactive" or len(plan.candidates) == 1:
            return None
        standing = self.loads.standing(step.place, now_us=self.clock())
        return standing.usual_first_token_us if request.stream else standing.usual_whole_us

    def plan(self, request: InferenceRequest, walk: Walk | None = None) -> Plan:
        """Where `request` goes now."""
        pool = (walk or Walk()).estimate_of(request, self).pool()
        state = routing.State(why_not=self.why_not, loads=self.replica_loads, draw=self.draw, pool=pool)
        rules = self.rules.current()
        if walk is None or walk.rule is None:
            return routing.plan(rules, request, state)
        return routing.plan_by(walk.rule, rules.revision, request, state)

    def why_not(self, place: Place) -> str | None:
        """None where `place` may be tried now, else the reason."""
        if place.backend not in self.backends:
            return "backend is off: not enabled, its key's variable not set, or not in the configuration"
        return self.board.why_not(place, self.clock())

    def why_not_any(self, place: Place) -> str | None:
        """None where some replica of `place` may be tried now, else why the first may not."""
        replicas = self.replica_loads(place.backend)
        reasons = [self.why_not(replace(place, replica=name)) for name in replicas] or [self.why_not(place)]
        return None if None in reasons else reasons[0]

    def replica_loads(self, backend: str) -> Mapping[str, int]:
        """The replicas of a backend, and how many requests of this process each has to do."""
        found, gate = self.backends.get(backend), self.gates.get(backend)
        return {} if found is None or gate is None else {name: gate.load(name) for name in found.replicas()}

    def _settle(self, request: InferenceRequest, walk: Walk, error: GatewayError | None) -> None:
        """No await in here, so that a cancellation cannot cut it short."""
        if walk.recall is not None:
            walk.recall.drop()
        timing, usage = walk.timing or self._timing(request, walk), walk.usage
        if walk.admission is not None:
            used = (usage.input_tokens or 0) + (usage.output_tokens or 0)
            walk.admission.settle(tokens=used, nano_usd=usage.cost_nano_usd or 0)
        last = walk.last
        if walk.route is None and walk.plan and last and last.is_sent and not last.has_failed:
            walk.route = _route(walk.plan, last, walk)  # the caller left before an answer: the work was done there
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
                first_token_us=last.first_part_us if last else None,
                usage=usage,
                degraded=walk.verdict.degraded,
                recalled=walk.recall.told.outcome if walk.recall and (error is None or error.recalled) else "",
            )
        )

    def _timing(self, request: InferenceRequest, walk: Walk) -> Timing:
        now_us = self.clock()
        last = walk.last
        gate_us = sum([attempt.gate_us for attempt in walk.attempts])
        queue_us = last.queue_us if last else None
        return Timing(
            total_us=now_us - request.received_us,
            admit_us=(walk.admitted_us or now_us) - request.received_us,
            backend_us=sum([attempt.backend_us for attempt in walk.attempts]),
            queue_us=(queue_us or 0) + gate_us if gate_us else queue_us,
        )


def _route(plan: Plan, attempt: Attempt, walk: Walk) -> Route:
    place = attempt.step.place
    return Route(
        backend=place.backend,
        model=place.model,
        version=attempt.version or place.version,
        rule=plan.rule,
        attempts=len(walk.attempts),
        replica=place.replica,
    )
