"""The walk of one request: recall -> admit -> route -> dispatch -> settle. Read `Pipeline.handle` from top to bottom.

Each step asks `gateway.core` what to do and a port to do it. One event stream serves unary and streamed answers
(unary = a stream of one): `Started`, then the answer's events, then `Finished`. A failure before `Started` is a clean
refusal; a failure after it ends the stream with the error raised, never with a made-up end.

A little longer than others: one request is read here from top to bottom.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gateway import hedging
from gateway.attempt import Attempt, Task
from gateway.core import attempts, cost, rate_limit, routing
from gateway.core.admissions import Wanted, refusal
from gateway.core.attempts import RetryBudget
from gateway.core.breaker import BreakerBoard
from gateway.core.errors import (
    BackendError,
    ClientClosed,
    Fault,
    FaultKind,
    GatewayError,
    InternalError,
    QueueFull,
)
from gateway.core.loads import LoadBoard
from gateway.core.replicas import FEW, Draw, ReplicaLoads
from gateway.core.routing import Plan
from gateway.core.rules.matching import MEMO, Circumstances
from gateway.core.switches import Switch, blocked
from gateway.core.types import Event, Finished, InferenceRequest, Part, Parts, Place
from gateway.estimates import Estimate
from gateway.gate import Gate
from gateway.ports import Admissions, Backend, Clock, Observer, RuleSource, Sequences
from gateway.recall import Recalls
from gateway.releasing import released
from gateway.shadowing import Shadows
from gateway.walk import Walk

__all__ = ["Pipeline", "Task"]

_LEFT: Final = ClientClosed("the caller left")  # never raised: what a record says


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The data plane's one path.

    Attributes:
        board / loads: how the places are, and what each has to do.
        clock: the process's own, in microseconds, by which requests have their times.
        draw: gives numbers in [0, 1) for weighted splits and the choice of replicas.
        usd_per_hour: of backends that are paid by their servers' time; `prices`: of those paid by the token.
        wall_clock: Unix time in microseconds, by which rules and switches hold.
        under_way: the requests of now, for those who report on them.
        budgets: of further attempts, by task.
        full: rules whose places had no room when they were looked at last.
    """

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
    wall_clock: Clock
    draw: Draw
    loads: LoadBoard = field(default_factory=LoadBoard)
    prices: cost.PriceTable = field(default_factory=cost.PriceTable)
    usd_per_hour: Mapping[str, float] = field(default_factory=dict)
    shadows: Shadows | None = None
    under_way: dict[int, Walk] = field(default_factory=dict)
    budgets: dict[str, RetryBudget] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)

    async def handle(
        self, request: InferenceRequest, *, on_admitted: Callable[[], object] | None = None
    ) -> AsyncGenerator[Event, None]:
        """Answer `request` as events. Raises `GatewayError` and nothing else.

        `on_admitted` is called when its place in its order is taken, before its turn is waited for.
        Closing the generator early means that the caller left: the backend's work is cancelled.
        """
        walk = self._begin(request, on_admitted)
        error: GatewayError | None = _LEFT  # until another end is known
        self.observer.began(request.task)
        self.under_way[id(walk)] = walk
        try:
            self._take_rule(walk)
            # 1 recall: what was answered before is given again, and costs a request alone.
            if request.idempotency_key or walk.policies.cache:
                walk.recall = await self.recalls.find(walk.request, walk.rule)
            # 2 admit: one atomic step takes of all limits, and a ticket of the order, or nothing.
            await self._admit(walk)
            if walk.recall is not None and walk.recall.found is not None:
                for event in walk.recall.again(walk.recall.found, walk.verdict):
                    yield event
                error = None
                return
            # 3 route: ordered candidates, each other place with the reason why not.
            await self._route(walk)
            # 4 dispatch: the first candidate that begins to answer has the request.
            first, parts = await self._dispatch(walk)
            try:
                yield walk.started()
                yield walk.seen(first)
                async for part in parts:
                    yield walk.seen(part)
            except BackendError as failed:  # a part has left: no second backend may continue it
                await self._failed(walk, failed)
                raise attempts.broken_off() from failed
            finally:
                await parts.aclose()
            error = None
            walk.timing = walk.timing_at(self.clock())
            finished = Finished(usage=walk.usage, timing=walk.timing)
            if walk.recall is not None:
                await walk.recall.keep(finished)
            yield finished
        except GatewayError as refused:
            error = refused
            await self._refused(walk, refused)
            raise
        except Exception as unforeseen:  # the request boundary: every fault gets an honest answer
            error = InternalError("the gateway failed on this request")
            error.verdict, error.__cause__ = walk.verdict, unforeseen
            raise error from unforeseen
        finally:
            # 5 settle: what was taken is given back, and one record is written.
            self._settle(walk, error)
            del error  # its traceback has this frame: a cycle would be left to the garbage collection

    async def _refused(self, walk: Walk, error: GatewayError) -> None:
        """Tell what the limits said, and remember what may be refused sooner, or again."""
        error.verdict = walk.verdict
        if walk.recall is not None:
            await walk.recall.refused(error)
        if isinstance(error, QueueFull) and walk.rule is not None:
            self.full.add(walk.rule.name)

    def _begin(self, request: InferenceRequest, on_admitted: Callable[[], object] | None = None) -> Walk:
        task = self.tasks[request.task]
        estimate = Estimate(request, task, self)
        rules, until_us = self.rules.current(), request.deadline_us
        return Walk(
            request=request, task=task, estimate=estimate, until_us=until_us, rules=rules, on_admitted=on_admitted
        )

    def _take_rule(self, walk: Walk) -> None:
        """Find its rule in `walk.rules`, and keep to its time limits. Raises `Blocked`."""
        rules = walk.rules
        at = Circumstances(now_s=self._now_s, input_tokens=walk.estimate.input_tokens)
        rule = walk.rule = rules.rule_of(walk.request, at)
        if rule is not None and walk.admitted_us is None:  # what has begun in one order is not put in another
            walk.policies = rule.policies
        if rules.switches:
            self._refuse_blocked(walk)
        if rule is None:
            return
        task, until_us = self.tasks[walk.request.task], walk.until_us  # not those of a rule before
        if rule.timeout_ms:
            until_us = min(until_us, walk.request.received_us + rule.timeout_ms * 1000)
        if until_us != walk.request.deadline_us:
            walk.request = replace(walk.request, deadline_us=until_us)
        walk.task = (
            replace(task, attempt_timeout_us=rule.attempt_timeout_ms * 1000) if rule.attempt_timeout_ms else task
        )

    def _now_s(self) -> float:
        return self.wall_clock() / 1e6

    def _refuse_blocked(self, walk: Walk, request: InferenceRequest | None = None) -> None:
        """Raise `Blocked` where a switch that is in force now stops it, or `request` in its stead."""
        switch = self._refusing(request or walk.request)
        if switch is not None:
            walk.refused_by = switch
            raise blocked(switch, self.wall_clock() // 1000)

    def _refusing(self, request: InferenceRequest) -> Switch | None:
        """The switch in force now for which `request` is not served at all."""
        return self.rules.current().switches.refusing(request, self.wall_clock() // 1000)

    def _closed(self, place: Place, *, goes_on: bool = False) -> str | None:
        """Which switch closes `place` now, in words; `goes_on`: to a sequence whose state is there."""
        switch = self.rules.current().switches.closing(place, self.wall_clock() // 1000, goes_on=goes_on)
        return f"closed by {switch}" if switch else None

    async def _admit(self, walk: Walk) -> None:
        """Take what the request will use, and wait for its turn where its order says so. Raises `GatewayError`."""
        if self.full and walk.recall is None:
            self._refuse_full(walk)
        request, policies = walk.request, walk.policies
        of_rule = walk.rule.limits if walk.rule else ()
        counted = rate_limit.counters(request.caller, request.task, request.model, request.priority, of_rule)
        ordering_key = request.ordering_key
        if walk.found is not None:
            counted, ordering_key = tuple([take for take in counted if not take.is_held]), ""
        if not counted and not ordering_key:
            walk.admitted_us = self.clock()
            return
        tokens, nano_usd = walk.estimate.reserved(walk.rule, counted)
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
        if walk.on_admitted is not None:
            walk.on_admitted()
        if walk.is_ordered("serial"):
            await self._turn(walk)

    def _refuse_full(self, walk: Walk) -> None:
        """Raise `QueueFull` where all its places would refuse it now: no limit is asked, and nothing taken of one.

        Looked at where the rule's last request met that, and nothing is between a request and its place: no order, no
        sequence, no further round.
        """
        rule, request = walk.rule, walk.request
        if rule is None or rule.name not in self.full or request.ordering_key or request.sequence or rule.retries:
            return
        walk.plan = self._settled(walk)
        tenant, priority = request.caller.tenant, request.priority
        within_us = request.deadline_us - self.clock()
        faults = []
        for place in walk.plan.candidates:
            gate = self.gates[place.backend]
            full = gate.refusal(place.replica, tenant=tenant, priority=priority, within_us=within_us)
            if full is None:
                break
            faults.append(replace(full.fault, place=place))
        else:
            if faults:
                walk.faults += faults
                raise attempts.told(faults, walk.plan)
        self.full.discard(rule.name)

    async def _turn(self, walk: Walk) -> None:
        """Wait for the request's turn. Raises `GatewayError`."""
        if walk.admission is None:
            return
        now_us = self.clock()
        max_wait_us = walk.policies.ordering.max_wait_ms * 1000
        left_us = walk.request.deadline_us - now_us
        try:
            await walk.admission.turn(within_us=min(left_us, max_wait_us) if max_wait_us else left_us)
        finally:
            walk.ordering_us += self.clock() - now_us

    async def _route(self, walk: Walk) -> None:
        """Plan where it goes, by the rules that are in force now: it may have waited for its turn. Raises `Blocked`."""
        walk.routing_us = self.clock()
        rules = self.rules.current()
        if walk.rules is not rules:
            walk.rules = rules
            self._take_rule(walk)
        plan = walk.plan = self._settled(walk)
        if walk.request.sequence is not None:  # what has begun goes on where its state is
            walk.plan = await self.sequences.route(walk.request, plan)
            if walk.plan is plan:  # no state of it is kept anywhere that a drain would have to spare
                self._refuse_blocked(walk, replace(walk.request, sequence=None))
        if self.shadows is not None:
            walk.shadow = self.shadows.watch(walk.request, walk.rule, walk.plan, on=self)
        walk.routed_us = self.clock()

    async def _dispatch(self, walk: Walk) -> tuple[Part, Parts]:
        """Try candidates until one begins to answer: the first part of that, and where the others will come from."""
        plan = walk.planned
        self._budget(walk).request()
        if not plan.candidates:
            raise attempts.nobody(plan, cooling_us=self.board.shortest_cooling_us(plan.refusals, self.clock()))
        while True:
            step = await self._next_step(plan, walk)
            parts = self._parts(plan, step, walk)
            if walk.is_ordered("release"):
                parts = released(parts, self._turn(walk))
            try:
                part = await anext(parts)
            except BackendError as failed:
                await self._failed(walk, failed)
                walk.won = None
            else:
                walk.won = walk.won or walk.attempts[-1]
                walk.route = walk.route_of(walk.won)
                return part, parts

    async def _failed(self, walk: Walk, failed: BackendError) -> None:
        """A place has failed: what is known of it is written down. Raises `Blocked` where a switch was the reason."""
        fault = failed.fault
        walk.faults.append(fault)
        if fault.kind is FaultKind.SKIPPED:
            self._refuse_blocked(walk)
        if walk.request.sequence is not None:
            await self.sequences.failed(walk.request, walk.attempts[-1].step.place, fault)

    async def _next_step(self, plan: Plan, walk: Walk) -> attempts.Try:
        """Where to go next, its pause waited. Raises the `GatewayError` to give up with."""
        while True:
            step = attempts.next_attempt(
                plan,
                walk.faults,
                now_us=self.clock(),
                deadline_us=walk.request.deadline_us,
                attempt_timeout_us=walk.task.attempt_timeout_us,
                draw=self.draw,
            )
            if isinstance(step, attempts.GiveUp):
                try:
                    raise step.error
                finally:
                    del step  # as in `handle`
            walk.check_turn()
            if not walk.faults and not (walk.request.sequence and walk.rules.switches):
                return step
            if step.pause_us:
                await asyncio.sleep(step.pause_us / 1e6)
            if self.rules.current().switches:
                self._refuse_blocked(walk)
            # Health has moved on since the plan was made. What keeps a sequence's state is tried while it is drained.
            goes_on, place = walk.request.goes_on, step.place
            if reason := self._closed(place, goes_on=True) if goes_on else self.why_not(place):
                walk.faults.append(Fault(kind=FaultKind.SKIPPED, message=reason, place=step.place))
            elif not walk.faults or walk.attempts[-1].is_turned_away or self._budget(walk).take(self.clock()):
                return step
            else:
                raise attempts.told(walk.faults, plan)

    def _check_sending(self, walk: Walk, place: Place) -> None:
        """Raise what keeps it from being sent to `place`, whose server it may have waited for."""
        walk.check_turn()
        if self.rules.current() is walk.rules:
            return
        switch = self._refusing(walk.request)
        reason = f"refused by {switch}" if switch else self._closed(place, goes_on=walk.request.goes_on)
        if reason:  # as of a place that cannot take it: its hedge, if there is one, is under way and may go on
            raise BackendError(Fault(kind=FaultKind.SKIPPED, message=reason))

    def _budget(self, walk: Walk) -> RetryBudget:
        budget = self.budgets.get(walk.task.name)
        if budget is None:
            budget = self.budgets[walk.task.name] = RetryBudget()
        return budget

    def _parts(self, plan: Plan, step: attempts.Try, walk: Walk) -> Parts:
        """What the place of `step` answers, or, hedged, the place that begins first. Raises `BackendError`."""
        first = self._attempt(plan, step, walk)
        after_us = self._hedge_after_us(plan, step, walk)
        if after_us is None:
            return first.answers()

        def second() -> Attempt | None:
            now_us = self.clock()
            other = attempts.second_attempt(
                plan,
                step,
                self.why_not,
                now_us=now_us,
                deadline_us=walk.request.deadline_us,
                attempt_timeout_us=walk.task.attempt_timeout_us,
            )
            return self._attempt(plan, other, walk) if other and self._budget(walk).take(now_us) else None

        return hedging.first_to_begin(first, second, after_us=after_us, won=walk.win, lost=walk.faults.append)

    def _attempt(self, plan: Plan, step: attempts.Try, walk: Walk) -> Attempt:
        made = Attempt(
            request=walk.request,
            task=walk.task,
            plan=plan,
            step=step,
            on=self,
            board=self.board,
            work=walk.estimate.known,
            check=lambda: self._check_sending(walk, step.place),
        )
        walk.attempts.append(made)
        return made

    def _hedge_after_us(self, plan: Plan, step: attempts.Try, walk: Walk) -> int | None:
        """After how long without a first part a second copy is sent; None where none is."""
        request = walk.request
        if not plan.hedge or walk.faults or request.priority != "interactive" or len(plan.candidates) == 1:
            return None
        standing = self.loads.standing(step.place, now_us=self.clock())
        return standing.usual_first_token_us if request.stream else standing.usual_whole_us

    def plan(self, request: InferenceRequest) -> Plan:
        """Where `request` goes now, and why nowhere else. Raises `Blocked`."""
        walk = self._begin(request)
        self._take_rule(walk)
        return self._planned(walk)

    def _planned(self, walk: Walk, *, is_brief: bool = False) -> Plan:
        rules, rule, request = walk.rules, walk.rule, walk.request
        if rule is None:
            return Plan(rule="", revision=rules.revision, candidates=())
        state = routing.State(
            why_not=self.why_not,
            loads=self.replica_loads,
            draw=self.draw,
            pool=walk.estimate.pool(),
            forced=rules.switches.forced(request, self.wall_clock() // 1000) if rules.switches else None,
            is_brief=is_brief,
        )
        return routing.plan_by(rule, rules.revision, request, state)

    def _settled(self, walk: Walk) -> Plan:
        """The plan; the same one again where all is well and there is nothing to choose."""
        rules, rule, request = walk.rules, walk.rule, walk.request
        if rule is None or rules.switches or not self.board.is_quiet:
            return self._planned(walk, is_brief=True)
        key = (rule.name, request.model, request.version)
        known: Plan | None = rules.plans.get(key)
        if known is not None and not self._have_replicas(known.candidates):
            return known
        plan = self._planned(walk, is_brief=True)
        if routing.is_settled(rule, plan):
            if len(rules.plans) >= MEMO:  # callers name models themselves
                rules.plans.clear()
            rules.plans[key] = plan
        return plan

    def _have_replicas(self, places: Sequence[Place]) -> bool:
        for place in places:  # noqa: SIM110 - `any` would make a generator for each request
            if self.backends[place.backend].replicas():
                return True
        return False

    def is_refused(self, request: InferenceRequest) -> bool:
        """Whether a switch keeps such a request from being served now."""
        return self._refusing(request) is not None

    def why_not(self, place: Place) -> str | None:
        """None where `place` may be tried now, else the reason."""
        if place.backend not in self.backends:
            return routing.BACKEND_OFF
        if self.rules.current().switches and (reason := self._closed(place)):
            return reason
        return self.board.why_not(place, self.clock())

    def why_not_any(self, place: Place) -> str | None:
        """None where some replica of `place` may be tried now, else why the first may not."""
        replicas = self.replica_loads(place.backend)
        reasons = [self.why_not(replace(place, replica=name)) for name in replicas] or [self.why_not(place)]
        return None if None in reasons else reasons[0]

    def replica_loads(self, backend: str) -> Mapping[str, int]:
        """The replicas of a backend, and how many requests of this process each has to do."""
        found, gate = self.backends.get(backend), self.gates.get(backend)
        if found is None or gate is None:
            return {}
        names = found.replicas()
        return ReplicaLoads(names, gate.load) if len(names) > FEW else {name: gate.load(name) for name in names}

    def _settle(self, walk: Walk, error: GatewayError | None) -> None:
        """No await in here, so that a cancellation cannot cut it short."""
        self.under_way.pop(id(walk), None)
        if walk.recall is not None:
            walk.recall.drop()
        timing, usage = walk.timing or walk.timing_at(self.clock()), walk.usage
        if walk.admission is not None:
            used = (usage.input_tokens or 0) + (usage.output_tokens or 0)
            walk.admission.settle(tokens=used, nano_usd=usage.cost_nano_usd or 0)
        last = walk.last
        if walk.route is None and last and last.is_sent and not last.has_failed:
            walk.route = walk.route_of(last)  # the caller left before an answer: the work was done there
        if walk.shadow is not None:
            walk.shadow.ended(route=walk.route, timing=timing, usage=usage, error=error, plan=walk.plan)
        self.observer.ended(walk.record(timing, error))
        for attempt in walk.attempts:
            attempt.forget()
