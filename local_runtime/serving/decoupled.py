"""Requests to decoupled models: any number of answers, made in the model's threads, taken on the event loop."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator

from local_runtime.errors import (
    ErrorCode,
    InferenceError,
    deadline_passed,
    decoupled_needs_stream,
    queue_timeout,
    stopped,
    too_slow,
)
from local_runtime.messages import Annotated, InferAnswer, InferRequest, Tensors
from local_runtime.scheduling.scheduler import Answered
from local_runtime.scheduling.stats import FailureReason
from local_runtime.serving.loader import ServedModel, monotonic_us

# Answers of one decoupled request that its caller has not taken yet. A model that makes more waits for the caller.
_MAX_UNTAKEN_ANSWERS = 4096
# But it is not held up by a caller that takes none: after this time the caller's stream ends.
_PATIENCE_S = 5.0


class DecoupledCall:
    """One request to a decoupled model and the answers that come back from the model's threads."""

    def __init__(self, served: ServedModel, request: InferRequest) -> None:
        self._served = served
        self._model = served.config.name
        self._loop = asyncio.get_running_loop()
        self._began_us = monotonic_us()
        self._made: asyncio.Queue[InferAnswer] = asyncio.Queue()
        self._places = threading.Semaphore(_MAX_UNTAKEN_ANSWERS)
        self._loop_thread = threading.get_ident()
        self._is_over = False  # the final answer is made: what comes later is dropped
        self._failed: InferenceError | None = None
        self._checked = served.checker.check(request, respond=self._respond)

    async def answers(self, *, deadline_us: int | None) -> AsyncGenerator[InferAnswer, None]:
        """Queue the request, then hand out its answers up to the final one."""
        scheduler = self._served.scheduler
        if scheduler is None:
            raise decoupled_needs_stream(self._model)
        timeout_at = None if deadline_us is None else self._loop.time() + (deadline_us - monotonic_us()) / 1_000_000
        execution = asyncio.create_task(scheduler.infer(self._checked, deadline_us=deadline_us))
        execution.add_done_callback(self._executed)
        self._served.on_unload.add(self._stop)
        is_finished = False
        try:
            while not is_finished:
                try:
                    async with asyncio.timeout_at(timeout_at):
                        answer = await self._made.get()
                except TimeoutError as error:
                    raise deadline_passed(self._model) from error
                self._places.release()
                is_finished = answer.is_final
                if is_finished:
                    self._count(execution)
                yield answer
        finally:
            self._served.on_unload.discard(self._stop)
            if not is_finished:
                self._drop_the_rest()
                execution.cancel()
                self._served.stats.failed(FailureReason.CANCELED, after_us=monotonic_us() - self._began_us)

    def _count(self, execution: "asyncio.Task[Answered]") -> None:
        """The request has ended: as a failure, or as a success when `execute`, which may go on, has returned."""
        if self._failed is None:
            if execution.done():
                self._succeeded(execution)
            else:
                execution.add_done_callback(self._succeeded)
            return
        reason = FailureReason.CANCELED if self._failed.code is ErrorCode.CANCELLED else FailureReason.BACKEND
        if self._failed.code is ErrorCode.UNAVAILABLE and self._failed.message == queue_timeout().message:
            reason = FailureReason.REJECTED
        self._served.stats.failed(reason, after_us=monotonic_us() - self._began_us)

    def _succeeded(self, execution: "asyncio.Task[Answered]") -> None:
        if execution.cancelled() or execution.exception() is not None:
            return
        answered = execution.result()
        self._served.stats.answered(
            rows=self._checked.rows,
            queue_us=answered.queue_us,
            compute=answered.compute,
            at_ms=time.time_ns() // 1_000_000,
        )

    def _respond(self, outcome: Tensors | Annotated | InferenceError | None, is_final: bool) -> None:  # noqa: FBT001 - a callback's shape: `Respond`
        """From any thread: one answer of the model, which waits here for a caller that takes them less fast."""
        is_taken = is_final or self._has_place()
        if self._is_over or self._checked.cancellation.is_cancelled:
            return
        try:
            if is_taken:
                self._loop.call_soon_threadsafe(self._take, outcome, is_final)
            else:
                self._loop.call_soon_threadsafe(self._give_up)
        except RuntimeError:
            return  # the event loop has ended: nobody is left to be answered

    def _has_place(self) -> bool:
        """Wait for room for one more answer, which there always is when nobody wants any more."""
        if self._is_over or self._checked.cancellation.is_cancelled or self._loop.is_closed():
            return True
        # The event loop's own thread would wait for itself.
        is_waiting = threading.get_ident() != self._loop_thread
        return self._places.acquire(blocking=is_waiting, timeout=_PATIENCE_S if is_waiting else None)

    def _give_up(self) -> None:
        """The caller has not taken any answer for too long."""
        self._take(too_slow(self._model), is_final=True)
        self._drop_the_rest()

    def _drop_the_rest(self) -> None:
        """Nobody wants any more answers; whoever waits to send one need not."""
        self._checked.cancellation.is_cancelled = True
        self._places.release(_MAX_UNTAKEN_ANSWERS)

    def _take(self, outcome: Tensors | Annotated | InferenceError | None, is_final: bool) -> None:  # noqa: FBT001 - as above
        if self._is_over or self._checked.cancellation.is_cancelled:
            return
        self._is_over = is_final
        error = outcome if isinstance(outcome, InferenceError) else None
        if is_final:
            self._failed = error
        annotated = _annotated(outcome)
        answer = InferAnswer(
            model=self._model,
            version=self._served.version,
            outputs=annotated.outputs,
            parameters=annotated.parameters,
            queue_us=0,
            compute_us=0,
            batch_size=self._checked.rows,
            error=error,
            is_final=is_final,
        )
        self._made.put_nowait(answer)

    def _stop(self) -> None:
        """The model goes before the request has ended."""
        self._take(stopped(self._model), is_final=True)
        self._drop_the_rest()

    def _executed(self, execution: "asyncio.Task[Answered]") -> None:
        """The model's `execute` has ended: answers may still come, unless it failed."""
        error = None if execution.cancelled() else execution.exception()
        if isinstance(error, InferenceError):
            self._take(error, is_final=True)


def _annotated(outcome: Tensors | Annotated | InferenceError | None) -> Annotated:
    if isinstance(outcome, Annotated):
        return outcome
    return Annotated(outputs={} if outcome is None or isinstance(outcome, InferenceError) else outcome, parameters={})
