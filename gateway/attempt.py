"""One attempt of a request: at one place, from the gate before it to the end of its answer.

A little longer than others: what an attempt needs of its plane, and what becomes of it, are read together.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from gateway.core import attempts, cost, tokens
from gateway.core.breaker import BreakerBoard
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.loads import LoadBoard, Sending
from gateway.core.routing import Plan
from gateway.core.trace import Headers, Trace
from gateway.core.types import (
    NOTHING_USED,
    STREAMED,
    Answer,
    BackendCall,
    BackendEvent,
    Delta,
    Deltas,
    InferenceRequest,
    Message,
    Metered,
    OpenAIPayload,
    Part,
    Payload,
    TensorPayload,
    Tensors,
    Usage,
    Work,
)
from gateway.core.waiting import items_of
from gateway.core.watching.steps import MAX_EVENT_BYTES, TracedAttempt
from gateway.gate import Gate, Waited
from gateway.ports import Backend, Clock, Sequences
from gateway.tasks.contract import Contract, Form, located


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task as configured: its contract, how long it may take, and how long a backend may take to begin."""

    name: str
    contract: Contract
    timeout_us: int
    attempt_timeout_us: int


class Plane(Protocol):
    """What an attempt needs of the pipeline that makes it."""

    @property
    def backends(self) -> Mapping[str, Backend]:
        """By name."""
        ...

    @property
    def gates(self) -> Mapping[str, Gate]:
        """The queue before each of them."""
        ...

    @property
    def sequences(self) -> Sequences:
        """Where sequences live."""
        ...

    @property
    def loads(self) -> LoadBoard:
        """What each place has to do."""
        ...

    @property
    def prices(self) -> cost.PriceTable:
        """By the token."""
        ...

    @property
    def usd_per_hour(self) -> Mapping[str, float]:
        """Of backends that are paid by their servers' time."""
        ...

    @property
    def clock(self) -> Clock:
        """In microseconds."""
        ...


_Events = AsyncGenerator[BackendEvent, None]


def new_span_id() -> str:
    """At random, and not all zeros, which would be none."""
    return f"{random.getrandbits(64) or 1:016x}"


def _nothing() -> None:
    """It may be sent."""


@dataclass(kw_only=True, eq=False)
class Attempt:
    """A request at one place, and what has become known of it so far: what is not known yet stands in the class.

    Attributes:
        board: the breakers that hear of it.
        backend_us: spent waiting for the backend; `gate_us`: in our own queue before it.
        queue_us: spent in the backend's own queue, where it tells.
        first_part_us: from the request's arrival to the first part of a streamed answer.
        began_us / ended_us: on the clock; 0 until then.
        fault: why it failed.
        span_id: that its place is told as the parent of what is done there; empty where no trace is recorded.
        version: of the model that answers, where it tells.
        usage: final, with its cost, once the answers have ended, whichever way.
        is_sent / is_over: the backend has the request; it has no more to do with it.
        has_begun / has_failed: a part of its answer has come; it failed.
        outcome: see `core.watching.record.Tried`.
        is_dropped: nobody waits for its answer any more.
        is_turned_away: it failed before the place had any work with it.
        work: what a generative request will take, where the choice of the place or a queue had to know it.
        check: called right before it is sent; raises the `GatewayError` or `BackendError` for which it must not be.
    """

    request: InferenceRequest
    task: Task
    plan: Plan
    step: attempts.Try
    on: Plane
    board: BreakerBoard
    work: Work | None = None
    check: Callable[[], None] = _nothing
    backend_us: int = field(default=0, init=False)
    gate_us: int = field(default=0, init=False)
    queue_us: int | None = field(default=None, init=False)
    first_part_us: int | None = field(default=None, init=False)
    began_us: int = field(default=0, init=False)
    ended_us: int = field(default=0, init=False)
    fault: Fault | None = field(default=None, init=False)
    span_id: str = field(default="", init=False)
    version: str = field(default="", init=False)
    usage: Usage = field(default=NOTHING_USED, init=False)
    is_sent: bool = field(default=False, init=False)
    is_over: bool = field(default=False, init=False)
    has_begun: bool = field(default=False, init=False)
    has_failed: bool = field(default=False, init=False)
    is_turned_away: bool = field(default=False, init=False)
    outcome: str = field(default="left", init=False)
    is_dropped: bool = field(default=False, init=False)
    _asked_us: int | None = field(default=None, init=False)  # since when the backend is waited for, while it is
    _begin_by_us: int | None = field(default=None, init=False)
    _last_wait_us: int = field(default=0, init=False)
    _form: Form | None = field(default=None, init=False)
    _payload: Payload | None = field(default=None, init=False)
    _generative: "_Generative | None" = field(default=None, init=False)

    async def answers(self) -> AsyncGenerator[Part, None]:
        """What the place answers, in the task's own form. Raises `BackendError`.

        The breaker hears of the attempt: that it is made, and whether it fails.
        """
        place, board, clock = self.step.place, self.board, self.on.clock
        self.began_us = clock()
        board.trying(place, now_us=self.began_us, within_us=self.step.begin_within_us)
        try:
            backend, gate = self.on.backends[place.backend], self.on.gates[place.backend]
            form = self._form = self._form_of(backend)
            waited = None if gate.enters(place.replica) else await self._wait(gate, form)
            try:
                events = await self._sent(backend, form)
                try:
                    by_us = self._begin_by_us
                    first = await (self._in_time(events, form, by_us) if by_us else self._begun(events, form))
                    if first is not None:
                        yield first
                        asked_us = self._asked_us = clock()
                        async for event in events:
                            self.backend_us += clock() - asked_us
                            self._asked_us = None
                            part = self._part(form, event)
                            if part is not None:
                                yield part
                            asked_us = self._asked_us = clock()
                finally:
                    await events.aclose()
            except BackendError:
                self.has_failed = True
                raise
            finally:
                self._leave(gate, waited)
            self._expect_begun()
        except BackendError as failed:
            self._judge(failed)
            raise
        except BaseException as ended:  # the caller left, or its input was bad after all: no verdict on the backend
            self.is_dropped = isinstance(ended, asyncio.CancelledError | GeneratorExit)
            board.released(place)
            raise
        self.outcome = "ok"
        board.answered(place)
        if self.request.sequence is not None:
            await self.on.sequences.answered(self.request, version=self.version)

    def _form_of(self, backend: Backend) -> Form:
        """How `backend` is asked the task."""
        form = self.task.contract.forms.get(backend.speaks)
        if form is None:
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message="this kind of backend lacks the task"))
        return form

    def _expect_begun(self) -> None:
        if not self.has_begun:
            raise BackendError(Fault(kind=FaultKind.BROKEN, message="ended without an answer"))

    async def _wait(self, gate: Gate, form: Form) -> Waited | None:
        """Wait at the gate; what is waited there in vain counts too. Raises `BackendError`."""
        try:
            return await gate.enter(
                self.step.place.replica,
                tenant=self.request.caller.tenant,
                priority=self.request.priority,
                within_us=self.step.begin_within_us,
                work=lambda: self._expected_work(form),
            )
        finally:  # whatever ends the wait, a caller that leaves too
            self.gate_us = self.on.clock() - self.began_us

    def _leave(self, gate: Gate, waited: Waited | None) -> None:
        """It is over, whichever way: its place at the gate is free again."""
        self.ended_us = self.on.clock()
        self.is_over = True
        if self._asked_us is not None:
            self._last_wait_us = self.ended_us - self._asked_us
            self.backend_us += self._last_wait_us
        stayed_us = self.ended_us - self.began_us - self.gate_us
        try:
            self._end()
        finally:
            gate.leave(self.step.place.replica, stayed_us=stayed_us, waited=waited, took=self._tokens_used)

    def _expected_work(self, form: Form) -> int:
        """What tenants share a full server by: tokens of an LLM, else items."""
        payload = self._payload = form.payload(self.request.input)
        if isinstance(payload, TensorPayload):
            return items_of(payload)
        self.work = self.work or tokens.work_of(payload)
        return self.work.input_tokens + self.work.output_tokens

    @property
    def _tokens_used(self) -> int | None:
        """What it used of an LLM; None where it failed, for which it is charged what was expected of it."""
        if self._generative is None or self.usage == NOTHING_USED or self.has_failed:
            return None
        return (self.usage.input_tokens or 0) + (self.usage.output_tokens or 0)

    async def _sent(self, backend: Backend, form: Form) -> _Events:
        """Send it; what comes back. Raises what speaks against it by now."""
        request, step, place = self.request, self.step, self.step.place
        payload: Payload = self._payload or form.payload(request.input)
        if isinstance(payload, OpenAIPayload):
            payload = self.plan.payload_for(place, payload)
        call = BackendCall(
            request_id=request.id,
            model=place.model,
            version=place.version,
            replica=place.replica,
            payload=payload,
            sequence=None if request.sequence is None else await self.on.sequences.bind(request, place),
            trace=() if request.trace is None else self._trace(request.trace),
        )
        self.check()
        self.is_sent = True
        now_us = self.on.clock()
        if isinstance(payload, OpenAIPayload):
            work = self.work or tokens.work_of(payload)
            sending = self.on.loads.sent(place, tokens=work.input_tokens + work.output_tokens, now_us=now_us)
            keeps_events = request.trace is not None and request.trace.has_content
            self._generative = _Generative(payload=payload, work=work, sending=sending, keeps_events=keeps_events)
        # What comes whole has begun when it ends: the backend's own bound does. A stream may go on for longer.
        if payload.stream:
            self._begin_by_us = self.began_us + step.begin_within_us
        end_by_us = self.began_us + (step.timeout_us if payload.stream else step.begin_within_us)
        return backend.infer(call, timeout_us=end_by_us - now_us)

    def _trace(self, trace: Trace) -> Headers:
        """What the place is told of the trace: our span of this attempt where it is recorded, else as it came."""
        if trace.is_recorded:
            self.span_id = new_span_id()
        return trace.headers(self.span_id)

    def forget(self) -> None:
        """Let go of the walk, which has this attempt: a cycle would be left to the garbage collection."""
        self.check = _nothing

    def traced(self, now_us: int) -> TracedAttempt:
        """How it went, for traces."""
        generative, first_us = self._generative, self.first_part_us
        return TracedAttempt(
            place=self.step.place,
            began_us=self.began_us or now_us,
            ended_us=self.ended_us or now_us,
            span_id=self.span_id,
            version=self.version,
            gate_us=self.gate_us,
            queue_us=self.queue_us,
            first_part_us=None if first_us is None else first_us + self.request.received_us - self.began_us,
            usage=self.usage,
            fault=self.fault,
            is_dropped=self.is_dropped,
            payload=generative.payload if generative else None,
            body=generative.body if generative else b"",
            events=tuple(generative.events) if generative else (),
        )

    def _begin(self, part: Part, now_us: int) -> None:
        """The first part has come. It works: others need not wait for the end."""
        self.has_begun = True
        self.board.began(self.step.place)
        is_stream = isinstance(part, STREAMED)
        if is_stream:
            self.first_part_us = now_us - self.request.received_us
        if self._generative is not None:
            self.on.loads.began(self._generative.sending, now_us=now_us, is_stream=is_stream)

    def _end(self) -> None:
        """However it ended: what it used is counted, by us where the backend did not tell."""
        generative = self._generative
        if generative is None:
            return
        share_us = self.on.loads.ended(generative.sending, now_us=self.ended_us)
        if self.has_failed and not self.has_begun:
            return  # a refusal, or no answer at all
        self.usage = self._priced(generative.counted(self.usage), share_us)
        spent, made = self.usage.cost_nano_usd, self.usage.output_tokens
        if spent is not None and made:
            self.on.loads.paid(self.step.place, nano_usd=spent, tokens=made)

    def _priced(self, usage: Usage, share_us: int) -> Usage:
        """`usage` with its cost, where the place has a price: by the token, or by its server's time."""
        place = self.step.place
        if usage == NOTHING_USED:
            return usage
        per_hour = self.on.usd_per_hour.get(place.backend)
        if per_hour is not None:
            return replace(usage, cost_nano_usd=cost.share_nano_usd(per_hour, share_us))
        price = self.on.prices.of(place.backend, place.model)
        return usage if price is None else replace(usage, cost_nano_usd=cost.cost_nano_usd(price, usage))

    def _part(self, form: Form, event: BackendEvent) -> Part | None:
        """An event in the task's own form; None where it is for our books alone."""
        if isinstance(event, Deltas):  # of an LLM's stream, which none but the task of chats asks for
            if self._generative is not None:
                self._generative.heard(event)
            return event
        if isinstance(event, Metered):
            self.usage = event.usage
            return None
        if isinstance(event, Tensors):
            self.version, self.queue_us = event.version, event.queue_us
        elif self._generative is not None:
            event = self._told(event, self._generative)
        part = form.answer(event, self.request.input)
        if isinstance(part, Answer | Message):
            self.usage = part.usage
        return part

    def _told(self, event: Message | Delta, generative: "_Generative") -> Message | Delta:
        """A part of a generative answer, counted, and with its cost where it tells what was used."""
        if isinstance(event, Message):
            generative.body = event.body
            return event
        generative.heard(event)
        if event.usage is None:
            return event
        self.usage = event.usage
        share_us = self.on.loads.share(generative.sending, now_us=self.on.clock())
        return replace(event, usage=self._priced(event.usage, share_us))

    async def _in_time(self, events: _Events, form: Form, by_us: int) -> Part | None:
        """As `_begun`, until `by_us` at the latest."""
        try:
            async with asyncio.timeout((by_us - self.on.clock()) / 1e6):
                return await self._begun(events, form)
        except TimeoutError:
            raise BackendError(Fault(kind=FaultKind.TIMEOUT, message="did not begin to answer in time")) from None

    async def _begun(self, events: _Events, form: Form) -> Part | None:
        """The first part of the answer; None where it ends without. Only this waiting is the backend's time."""
        asked_us = self._asked_us = self.on.clock()
        async for event in events:
            now_us = self.on.clock()
            self.backend_us += now_us - asked_us
            self._asked_us = None
            part = self._part(form, event)
            if part is not None:
                self._begin(part, now_us)
                return part
            asked_us = self._asked_us = now_us
        return None

    def _judge(self, failed: BackendError) -> None:
        """Whose fault it is; the fault's words become those of the task's own input."""
        request, place, board = self.request, self.step.place, self.board
        fault = replace(failed.fault, place=place)
        names_tensors = bool(request.model) and "tensors" in self.task.contract.speaks
        if names_tensors or (request.model and place.model == request.model):
            fault = attempts.named_by_caller(fault)
        if self._form is not None and self._form is not self.task.contract and fault.kind is FaultKind.REFUSED_INPUT:
            # An LLM's answer to another task: the refused body was ours, and not the caller's.
            fault = replace(fault, kind=FaultKind.FAILED, status=0)
        failed.fault = self.fault = located(fault, self.task.contract.tensor_fields)
        self.outcome = fault.kind.value
        self.is_turned_away = attempts.is_turned_away(fault, is_sent=self.is_sent)
        now_us = self.ended_us = self.on.clock()
        if self.is_sent and fault.kind is FaultKind.OVERLOADED and fault.retry_after_us is not None:
            board.cool(place, until_us=now_us + min(fault.retry_after_us, attempts.LONGEST_COOLING_US))
        if attempts.blames_backend(
            fault,
            waited_us=self._last_wait_us,
            attempt_timeout_us=self.task.attempt_timeout_us,
            is_named_by_caller=names_tensors,
        ):
            board.failed(place, now_us=now_us, fault=fault)
        else:
            board.released(place)


@dataclass(slots=True, kw_only=True)
class _Generative:
    """What is counted of a request to an LLM; `keeps_events`: and kept, for its trace."""

    payload: OpenAIPayload
    keeps_events: bool
    work: Work
    sending: Sending
    count: tokens.StreamCount = field(default_factory=tokens.StreamCount)
    body: bytes = b""
    events: list[bytes] = field(default_factory=list)
    kept_bytes: int = 0

    def heard(self, event: Delta | Deltas) -> None:
        """Count what has come, and remember it where the trace tells what was said."""
        if isinstance(event, Deltas):
            self.count.add_all(event.wire)
        else:
            self.count.add(event.data, event.event)
        if self.keeps_events:
            for one in event.each() if isinstance(event, Deltas) else (event,):
                self._keep(one.data)

    def _keep(self, data: bytes) -> None:
        """Remember an event for the trace, as long as there is room."""
        self.kept_bytes += len(data)
        if self.kept_bytes <= MAX_EVENT_BYTES:
            self.events.append(data)

    def counted(self, told: Usage) -> Usage:
        """What was told, or an estimate of what was not."""
        has_output = told.output_tokens is not None or self.payload.api == "embeddings"
        if told.input_tokens is not None and has_output:
            return told
        made = tokens.of_answer(self.body, self.payload.api) if self.body else self.count.tokens
        return replace(
            told,
            input_tokens=self.work.input_tokens if told.input_tokens is None else told.input_tokens,
            output_tokens=told.output_tokens if has_output else made,
            is_estimated=True,
        )
