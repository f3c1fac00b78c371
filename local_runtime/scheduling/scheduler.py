"""The acting side of batching: one queue, its free instances and its timer, on the event loop.

Everything here obeys `Batcher.decide`; nothing here decides. Requests that arrive in the same turn of the event
loop are all queued before the first decision, so a burst becomes a batch without any delay being configured.
"""

import asyncio
import collections
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from local_runtime.errors import InferenceError, deadline_passed, queue_full, stopped
from local_runtime.messages import BatchExecuted, Tensors
from local_runtime.scheduling.batching import Admission, Batcher, Dispatch, QueuedRequest, WaitUntil
from local_runtime.scheduling.collate import Outcome
from local_runtime.scheduling.stats import StatsRecorder
from local_runtime.scheduling.validation import CheckedRequest

_log = logging.getLogger(__name__)


class Executed(Protocol):
    """What an instance reports of a batch: one outcome per member, in order, and its time in microseconds."""

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Outputs or error of each member."""

    @property
    def compute_us(self) -> int:
        """How long the model took."""


class Instance(Protocol):
    """Something that runs one batch at a time."""

    def submit(self, members: Sequence[CheckedRequest], done: Callable[[Executed], None]) -> None:
        """Run the batch; call `done` exactly once, from any thread."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request's outputs; times in microseconds, `batch_size` in rows."""

    outputs: Tensors
    queue_us: int
    compute_us: int
    batch_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    request: CheckedRequest
    answer: asyncio.Future[Answered]
    enqueued_us: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Running:
    dispatch: Dispatch
    members: Sequence[_Pending]
    instance: Instance
    started_us: int


class ModelScheduler:
    """Owns the queue of one model version. Used from one event loop only.

    Args:
        model: the model's name, for errors and the observer.
        version: its version, for the observer.
        batcher: decides.
        instances: run; all are free now.
        stats: counts.
        clock_us: monotonic time in microseconds.
        observer: told of every execution.
    """

    def __init__(
        self,
        *,
        model: str,
        version: str,
        batcher: Batcher,
        instances: Iterable[Instance],
        stats: StatsRecorder,
        clock_us: Callable[[], int],
        observer: Callable[[BatchExecuted], None] | None = None,
    ) -> None:
        self._model = model
        self._version = version
        self._batcher = batcher
        self._free = collections.deque(instances)
        self._stats = stats
        self._clock_us = clock_us
        self._observer = observer
        self._ids = itertools.count()
        self._queued: dict[int, _Pending] = {}
        self._running: set[_Running] = set()
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

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
        queued = QueuedRequest(
            id=request_id,
            rows=request.rows,
            batch_key=request.batch_key,
            enqueued_us=now_us,
            deadline_us=deadline_us,
        )
        if self._batcher.enqueue(queued) is Admission.QUEUE_FULL:
            raise queue_full(request.request_id)
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._queued[request_id] = _Pending(request=request, answer=answer, enqueued_us=now_us)
        if self._free:
            self._decide_soon()
        try:
            return await answer
        except asyncio.CancelledError:
            if self._batcher.cancel(request_id):
                del self._queued[request_id]
                self._stats.failed()
            elif answer.done() and not answer.cancelled():
                answer.exception()  # seen, so that asyncio does not report it as lost
            raise

    def close(self) -> None:
        """Fail what is queued or running, at once. Draining first is the runtime's business."""
        self._is_closed = True
        self._cancel_wakes()
        self._batcher.drain()
        error = stopped(self._model)
        for pending in self._queued.values():
            self._fail(pending, error)
        self._queued.clear()
        for running in self._running:
            for pending in running.members:
                self._fail(pending, error)
        self._running.clear()

    def _decide_soon(self) -> None:
        """Ask for a decision after this turn of the event loop, when all that arrives in it is queued."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._dispatch)

    def _cancel_wakes(self) -> None:
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        self._soon = self._timer = None

    def _dispatch(self) -> None:
        """Give work to free instances for as long as the batcher has some."""
        self._cancel_wakes()
        while self._free:
            decision = self._batcher.decide(self._clock_us())
            for request_id in decision.expired:
                self._fail(self._queued.pop(request_id), deadline_passed(self._model))
            if isinstance(decision, Dispatch):
                self._run(decision)
                continue
            if isinstance(decision, WaitUntil):
                delay_us = decision.at_us - self._clock_us()
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(max(0, delay_us) / 1_000_000, self._dispatch)
            return

    def _run(self, dispatch: Dispatch) -> None:
        running = _Running(
            dispatch=dispatch,
            members=[self._queued.pop(request_id) for request_id in dispatch.ids],
            instance=self._free.popleft(),
            started_us=self._clock_us(),
        )
        self._running.add(running)
        done = functools.partial(self._done, asyncio.get_running_loop(), running)
        running.instance.submit([pending.request for pending in running.members], done)

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
        self._running.remove(running)
        self._free.append(running.instance)
        self._dispatch()
        failed = 0
        self._stats.executed(rows=running.dispatch.rows, compute_us=executed.compute_us)
        for pending, outcome in zip(running.members, executed.outcomes, strict=True):
            if isinstance(outcome, InferenceError):
                failed += 1
                self._fail(pending, outcome)
            else:
                self._answer(pending, outcome, running=running, compute_us=executed.compute_us)
        self._observe(running, compute_us=executed.compute_us, failed=failed)

    def _answer(self, pending: _Pending, outputs: Tensors, *, running: _Running, compute_us: int) -> None:
        queue_us = running.started_us - pending.enqueued_us
        self._stats.answered(rows=pending.request.rows, queue_us=queue_us)
        if not pending.answer.done():
            answered = Answered(
                outputs=outputs,
                queue_us=queue_us,
                compute_us=compute_us,
                batch_size=running.dispatch.rows,
            )
            pending.answer.set_result(answered)

    def _fail(self, pending: _Pending, error: InferenceError) -> None:
        self._stats.failed()
        if not pending.answer.done():
            # Each caller gets its own exception object: tracebacks and __context__ are written into it.
            pending.answer.set_exception(InferenceError(error.code, error.message))

    def _observe(self, running: _Running, *, compute_us: int, failed: int) -> None:
        if self._observer is None:
            return
        event = BatchExecuted(
            model=self._model,
            version=self._version,
            batch_size=running.dispatch.rows,
            requests=len(running.members),
            failed=failed,
            oldest_queue_us=running.started_us - running.members[0].enqueued_us,
            compute_us=compute_us,
            reason=running.dispatch.reason.value,
        )
        try:
            self._observer(event)
        except Exception:  # noqa: BLE001 - the observer is foreign code and must not stop the serving
            _log.exception("observer failed", extra={"model": self._model})
