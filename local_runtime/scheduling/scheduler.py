"""The acting side of a policy: one queue, its free instances and its timer, on the event loop.

Everything here obeys `Policy.decide`; nothing here decides. Requests that arrive in the same turn of the event
loop are all queued before the first decision, so a burst becomes a batch without any delay being configured.

A little longer than others: the queue, its instances and its timer change together, and are read together.
"""

import asyncio
import collections
import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from local_runtime.errors import (
    ErrorCode,
    InferenceError,
    deadline_passed,
    no_correlation_id,
    not_started,
    queue_full,
    queue_timeout,
    sequence_broken,
    stopped,
)
from local_runtime.messages import Annotated, BatchExecuted, Parameters, Tensors
from local_runtime.scheduling.decisions import (
    Admission,
    Dispatch,
    Dropped,
    DropReason,
    Policy,
    QueuedRequest,
    WaitUntil,
)
from local_runtime.scheduling.execution import Deferred, Executed, Instance, Outcome
from local_runtime.scheduling.sequence_inputs import SequenceInputs
from local_runtime.scheduling.stats import Compute, FailureReason, StatsRecorder
from local_runtime.scheduling.validation import CheckedRequest

_log = logging.getLogger(__name__)
# Event loops keep time in milliseconds; a shorter wait goes round the loop without sleeping.
TIMER_RESOLUTION_US = 1_000


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One request's outputs (none where they went through `respond`); `batch_size` in rows, times in microseconds."""

    outputs: Tensors
    queue_us: int
    compute: Compute
    batch_size: int
    parameters: Parameters


class _Pending:
    """A request on its way. `held` is its result while preserve_ordering makes it wait for earlier ones."""

    __slots__ = ("answer", "enqueued_us", "held", "request")

    def __init__(self, request: CheckedRequest, answer: "asyncio.Future[Answered]", enqueued_us: int) -> None:
        self.request = request
        self.answer = answer
        self.enqueued_us = enqueued_us
        self.held: Answered | InferenceError | None = None


class _Running:
    """A batch on an instance; `members` are the waiting callers, in the order of `dispatch.ids`."""

    __slots__ = ("dispatch", "members", "started_us")

    def __init__(self, dispatch: Dispatch, members: Sequence[_Pending], started_us: int) -> None:
        self.dispatch = dispatch
        self.members = members
        self.started_us = started_us


class ModelScheduler:
    """Owns the queue of one model version. Used from one event loop only.

    Args:
        stats: counts, and knows the model's name and version.
        policy: decides.
        instances: run; all are free now. The policy knows them by their position.
        clock_us: monotonic time in microseconds.
        observer: told of every execution.
        preserve_ordering: answers leave in the order in which requests came.
        sequence_inputs: for sequence models: makes control and state inputs, keeps state outputs.
        timer_resolution_us: what the event loop's timers are good for: a shorter wait goes round the loop instead.
    """

    def __init__(  # noqa: PLR0913 - all that a queue is made of
        self,
        *,
        stats: StatsRecorder,
        policy: Policy,
        instances: Sequence[Instance],
        clock_us: Callable[[], int],
        observer: Callable[[BatchExecuted], None] | None = None,
        preserve_ordering: bool = False,
        sequence_inputs: SequenceInputs | None = None,
        timer_resolution_us: int = TIMER_RESOLUTION_US,
    ) -> None:
        self._stats = stats
        self._model = stats.name
        self._policy = policy
        self._instances = instances
        self._free = collections.deque(range(len(instances)))
        self._clock_us = clock_us
        self._observer = observer
        self._in_order: collections.deque[_Pending] | None = collections.deque() if preserve_ordering else None
        self._sequence_inputs = sequence_inputs
        self._timer_resolution_us = timer_resolution_us
        self._ids = itertools.count()
        self._queued: dict[int, _Pending] = {}
        self._running: dict[_Running, None] = {}  # in the order in which they began
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __len__(self) -> int:
        """Requests waiting now."""
        return len(self._queued)

    @property
    def is_running(self) -> bool:
        """Whether an instance is at work."""
        return bool(self._running)

    async def infer(self, request: CheckedRequest, *, deadline_us: int | None) -> Answered:
        """Queue the request and wait for its answer.

        `deadline_us` is on this scheduler's clock; a request still queued then is never run. Cancelling the
        call takes a queued request out of the queue; one that runs already is not stopped, but its answer is
        dropped. Raises InferenceError.
        """
        if self._is_closed:
            raise stopped(self._model)
        request_id = next(self._ids)
        now_us = self._clock_us()
        admission = self._policy.enqueue(_queued(request, request_id, now_us=now_us, deadline_us=deadline_us))
        if admission is not Admission.ACCEPTED:
            raise self._refusal(admission, request)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answered] = loop.create_future()
        pending = _Pending(request, answer, now_us)
        self._queued[request_id] = pending
        if self._in_order is not None:
            self._in_order.append(pending)
        if self._soon is None and (self._free or self._policy.needs_timer):
            # After this turn of the event loop, when all that arrives in it is queued.
            self._soon = loop.call_soon(self._dispatch)
        try:
            return await answer
        except asyncio.CancelledError:
            self._left(request_id, pending)
            raise

    def close(self) -> None:
        """Fail what is queued or running, at once. Draining first is the runtime's business."""
        self._is_closed = True
        self._cancel_wakes()
        self._policy.drain()
        error = stopped(self._model)
        waiting = [*self._queued.values(), *(pending for running in self._running for pending in running.members)]
        self._queued.clear()
        self._running.clear()
        for pending in waiting:
            self._fail(pending, error, FailureReason.OTHER)

    def _refusal(self, admission: Admission, request: CheckedRequest) -> InferenceError:
        if admission is Admission.NO_CORRELATION_ID:
            return no_correlation_id(self._model)
        if admission is Admission.NOT_STARTED:
            return not_started(self._model, request.source.sequence_id)
        return queue_full(request.request_id)

    def _left(self, request_id: int, pending: _Pending) -> None:
        """The caller of this request has left."""
        pending.request.cancellation.is_cancelled = True
        dropped = self._policy.cancel(request_id)
        if dropped:
            self._drop(dropped)
            self._forget_sequences()
            if self._soon is None and (self._free or self._policy.needs_timer):
                self._soon = asyncio.get_running_loop().call_soon(self._dispatch)
        elif pending.answer.done() and not pending.answer.cancelled():
            pending.answer.exception()  # seen, so that asyncio does not report it as lost
        self._release()

    def _cancel_wakes(self) -> None:
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        self._soon = self._timer = None

    def _dispatch(self) -> None:
        """Give work to free instances for as long as the policy has some."""
        self._cancel_wakes()
        while self._free or self._policy.needs_timer:
            decision = self._policy.decide(self._clock_us(), free=self._free)
            if decision.dropped:
                self._drop(decision.dropped)
            self._forget_sequences()
            if isinstance(decision, Dispatch):
                self._run(decision)
                continue
            if isinstance(decision, WaitUntil):
                self._wake_at(decision.at_us)
            return

    def _wake_at(self, at_us: int) -> None:
        loop = asyncio.get_running_loop()
        delay_us = at_us - self._clock_us()
        if delay_us < self._timer_resolution_us:
            self._soon = loop.call_soon(self._dispatch)
        else:
            self._timer = loop.call_later(delay_us / 1_000_000, self._dispatch)

    def _drop(self, dropped: Sequence[Dropped]) -> None:
        """Answer those who left the queue without being run."""
        for left in dropped:
            pending = self._queued.pop(left.id)
            reason = FailureReason.CANCELED
            if left.reason is DropReason.QUEUE_TIMEOUT:
                error, reason = queue_timeout(), FailureReason.REJECTED
            elif left.reason is DropReason.DEADLINE:
                error = deadline_passed(self._model)
            else:
                error = sequence_broken(self._model, pending.request.source.sequence_id)
            self._fail(pending, error, reason)

    def _run(self, dispatch: Dispatch) -> None:
        self._free.remove(dispatch.instance)
        members = [self._queued.pop(request_id) for request_id in dispatch.ids]
        running = _Running(dispatch, members, self._clock_us())
        self._running[running] = None
        loop = asyncio.get_running_loop()
        try:
            batch = self._batch(running)
        except Exception:  # noqa: BLE001 - a fault of ours; the instance must not be lost with it
            _log.exception("a batch could not be put together", extra={"model": self._model})
            failed = [_internal(self._model)] * (len(dispatch.slots) or len(members))
            loop.call_soon(self._settle, running, Executed(outcomes=failed, compute=Compute()))
            return
        self._instances[dispatch.instance].submit(batch, functools.partial(self._done, loop, running))

    def _batch(self, running: _Running) -> Sequence[CheckedRequest]:
        """What the model gets: the requests, and for sequences one row for each slot."""
        requests = [pending.request for pending in running.members]
        if self._sequence_inputs is None:
            return requests
        return self._sequence_inputs.rows_of(running.dispatch.slots, requests)

    def _done(self, loop: asyncio.AbstractEventLoop, running: _Running, executed: Executed) -> None:
        """In the instance's thread: hand the outcome to the event loop."""
        try:
            loop.call_soon_threadsafe(self._settle, running, executed)
        except RuntimeError:
            # The loop was closed while the model ran: nobody is left to be answered.
            _log.info("batch ended after its event loop", extra={"model": self._model})

    def _settle(self, running: _Running, executed: Executed) -> None:
        """Back on the event loop: next batch first, so that the instance does not idle, then the answers."""
        if self._is_closed:
            return
        dispatch = running.dispatch
        outcomes = self._outcomes(dispatch, executed.outcomes)
        del self._running[running]
        now_us = self._clock_us()
        self._policy.finished(dispatch, now_us=now_us, compute_us=now_us - running.started_us)
        self._forget_sequences()
        self._free.append(dispatch.instance)
        self._dispatch()
        self._stats.executed(rows=dispatch.rows, compute=executed.compute)
        answered: list[_Pending] = []
        failed = 0
        for pending, outcome in zip(running.members, outcomes, strict=True):
            if isinstance(outcome, InferenceError):
                failed += 1
                canceled = outcome.code is ErrorCode.CANCELLED
                self._fail(pending, outcome, FailureReason.CANCELED if canceled else FailureReason.BACKEND)
                continue
            if not isinstance(outcome, Deferred):  # such a one has not ended: whoever hands out its answers counts
                answered.append(pending)
            self._answer(pending, outcome, running, executed.compute)
        if answered:
            self._stats.answered(
                requests=len(answered),
                rows=sum([pending.request.rows for pending in answered]),
                queue_us=sum([running.started_us - pending.enqueued_us for pending in answered]),
                compute=executed.compute,
                at_ms=time.time_ns() // 1_000_000,
            )
        self._observe(running, compute=executed.compute, failed=failed)

    def _outcomes(self, dispatch: Dispatch, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """The outcomes of real requests; of sequences, with the state outputs kept and taken off."""
        extra = self._sequence_inputs
        try:
            if extra is not None:
                outcomes = extra.without_states(dispatch.slots, outcomes)
            if len(outcomes) == len(dispatch.ids):
                return outcomes
            _log.error("a batch came back with another number of outcomes", extra={"model": self._model})
        except Exception:  # noqa: BLE001 - a fault of ours or of an executor; the instance must not be lost with it
            _log.exception("a batch could not be taken apart", extra={"model": self._model})
        return [_internal(self._model)] * len(dispatch.ids)

    def _forget_sequences(self) -> None:
        """Give up the state of sequences that have ended."""
        if self._sequence_inputs is not None:
            for correlation_id in self._policy.take_ended():
                self._sequence_inputs.drop(correlation_id)

    def _answer(
        self, pending: _Pending, outcome: Tensors | Annotated | Deferred, running: _Running, compute: Compute
    ) -> None:
        outputs, parameters = _parts(outcome)
        answered = Answered(
            outputs=outputs,
            parameters=parameters,
            queue_us=running.started_us - pending.enqueued_us,
            compute=compute,
            batch_size=running.dispatch.rows,
        )
        self._deliver(pending, answered)

    def _fail(self, pending: _Pending, error: InferenceError, reason: FailureReason) -> None:
        if pending.request.respond is None:  # else whoever hands out its answers counts
            self._stats.failed(reason, after_us=self._clock_us() - pending.enqueued_us)
        # An exception for each caller: tracebacks and __context__ are written into it.
        self._deliver(pending, InferenceError(error.code, error.message))

    def _deliver(self, pending: _Pending, result: Answered | InferenceError) -> None:
        """Hand the result to the caller, unless it has left; with preserve_ordering, when it is its turn."""
        if self._in_order is None:
            _resolve(pending.answer, result)
        else:
            pending.held = result
            self._release()

    def _release(self) -> None:
        """With preserve_ordering: hand out what has no unfinished request before it."""
        while self._in_order and (self._in_order[0].held is not None or self._in_order[0].answer.done()):
            pending = self._in_order.popleft()
            if pending.held is not None:
                _resolve(pending.answer, pending.held)

    def _observe(self, running: _Running, *, compute: Compute, failed: int) -> None:
        if self._observer is None:
            return
        event = BatchExecuted(
            model=self._model,
            version=self._stats.version,
            batch_size=running.dispatch.rows,
            requests=len(running.members),
            failed=failed,
            oldest_queue_us=running.started_us - min(pending.enqueued_us for pending in running.members),
            compute_us=compute.total_us,
            reason=running.dispatch.reason.value,
        )
        try:
            self._observer(event)
        except Exception:  # noqa: BLE001 - the observer is foreign code and must not stop the serving
            _log.exception("observer failed", extra={"model": self._model})


def _internal(model: str) -> InferenceError:
    return InferenceError(ErrorCode.INTERNAL, f"internal error while running model '{model}': the log has the reason")


def _parts(outcome: Tensors | Annotated | Deferred) -> tuple[Tensors, Parameters]:
    if isinstance(outcome, Deferred):
        return {}, {}
    if isinstance(outcome, Annotated):
        return outcome.outputs, outcome.parameters
    return outcome, {}


def _queued(request: CheckedRequest, request_id: int, *, now_us: int, deadline_us: int | None) -> QueuedRequest:
    source = request.source
    return QueuedRequest(
        id=request_id,
        rows=request.rows,
        batch_key=request.batch_key,
        enqueued_us=now_us,
        deadline_us=deadline_us,
        priority=source.priority,
        timeout_us=source.queue_timeout_us,
        correlation_id=source.sequence_id,
        is_start=source.sequence_start,
        is_end=source.sequence_end,
    )


def _resolve(answer: "asyncio.Future[Answered]", result: Answered | InferenceError) -> None:
    if answer.done():
        return
    if isinstance(result, InferenceError):
        answer.set_exception(result)
    else:
        answer.set_result(result)
