"""Requests to decoupled models: any number of answers, made in the model's threads, taken on the event loop."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from local_runtime.errors import InferenceError, deadline_passed, decoupled_needs_stream, too_slow
from local_runtime.loader import ServedModel, monotonic_us
from local_runtime.messages import Annotated, InferAnswer, InferRequest, Tensors

# Answers of one decoupled request that its caller has not taken yet. A model that makes more is not held up by one
# slow caller: that caller's stream ends.
_MAX_UNTAKEN_ANSWERS = 4096


class DecoupledCall:
    """One request to a decoupled model and the answers that come back from the model's threads."""

    def __init__(self, served: ServedModel, request: InferRequest) -> None:
        self._served = served
        self._loop = asyncio.get_running_loop()
        self._made: asyncio.Queue[InferAnswer] = asyncio.Queue()
        self._checked = served.checker.check(request, respond=self._respond)

    async def answers(self, *, deadline_us: int | None) -> AsyncGenerator[InferAnswer, None]:
        """Queue the request, then hand out its answers up to the final one."""
        scheduler = self._served.scheduler
        if scheduler is None:
            raise decoupled_needs_stream(self._served.config.name)
        timeout_at = None if deadline_us is None else self._loop.time() + (deadline_us - monotonic_us()) / 1_000_000
        execution = asyncio.create_task(scheduler.infer(self._checked, deadline_us=deadline_us))
        execution.add_done_callback(self._executed)
        try:
            while True:
                try:
                    async with asyncio.timeout_at(timeout_at):
                        answer = await self._made.get()
                except TimeoutError as error:
                    raise deadline_passed(self._served.config.name) from error
                if self._made.qsize() >= _MAX_UNTAKEN_ANSWERS:
                    raise too_slow(self._served.config.name)
                yield answer
                if answer.is_final:
                    return
        finally:
            self._checked.cancellation.is_cancelled = True
            execution.cancel()

    def _respond(self, outcome: Tensors | Annotated | InferenceError | None, is_final: bool) -> None:  # noqa: FBT001 - a callback's shape: `Respond`
        """From any thread: one answer of the model."""
        self._loop.call_soon_threadsafe(self._take, outcome, is_final)

    def _take(self, outcome: Tensors | Annotated | InferenceError | None, is_final: bool) -> None:  # noqa: FBT001 - as above
        if self._checked.cancellation.is_cancelled:
            return
        error = outcome if isinstance(outcome, InferenceError) else None
        annotated = _annotated(outcome)
        answer = InferAnswer(
            model=self._served.config.name,
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

    def _executed(self, execution: "asyncio.Task[Any]") -> None:
        """The model's `execute` has ended: answers may still come, unless it failed."""
        error = None if execution.cancelled() else execution.exception()
        if isinstance(error, InferenceError):
            self._take(error, is_final=True)


def _annotated(outcome: Tensors | Annotated | InferenceError | None) -> Annotated:
    if isinstance(outcome, Annotated):
        return outcome
    return Annotated(outputs={} if outcome is None or isinstance(outcome, InferenceError) else outcome, parameters={})
