"""Triton's dynamic batcher as arithmetic: when which waiting requests run together.

Pure: it is told the time and which instances are free; it reads no clock and wakes nobody. `request_queue` keeps the
order, `sizing` (or `adaptive`) says how many of the first ones leave now. Batches are formed only when an instance
can run them. (Triton without priorities and queue policies forms up to two per instance ahead; forming late gives the
same or larger batches and lets a cancelled request leave the queue.)
"""

from collections.abc import Sequence

from local_runtime.repository.model_config import DynamicBatching
from local_runtime.scheduling.decisions import (
    Admission,
    CorrelationId,
    Decision,
    Dispatch,
    DispatchReason,
    Dropped,
    DropReason,
    Idle,
    QueuedRequest,
    WaitUntil,
)
from local_runtime.scheduling.request_queue import Front, RequestQueue
from local_runtime.scheduling.sizing import Choice, QueueView, Send, Sizing, TritonSizing


class Batcher:
    """The policy of a model without sequences: the queue and the decision what runs next.

    A request is never split, never overtaken within its priority level (but see DELAY in `request_queue`), and never
    runs after its deadline, after its queue timeout under REJECT, or after `cancel`.

    Args:
        max_batch_size: most rows in one execution; 0 means that the model has no batch dimension: every request runs
            alone.
        config: the model's `dynamic_batching`; None runs every request alone, as it came.
        max_queue_size: requests that may wait, all priority levels together; 0 means without limit.
        sizing: what decides on the size of batches; None for Triton's rule.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        config: DynamicBatching | None,
        max_queue_size: int = 0,
        sizing: Sizing | None = None,
    ) -> None:
        rules = config or DynamicBatching()
        self._runs_alone = config is None or max_batch_size == 0
        max_rows = 0 if self._runs_alone else max_batch_size
        self._queue = RequestQueue(rules, max_rows=max_rows, max_queue_size=max_queue_size)
        self._sizing = sizing or TritonSizing(rules, max_batch_size=max_batch_size)
        self._running = 0
        self._needs_timer = self._queue.can_reject

    @property
    def needs_timer(self) -> bool:
        """Whether requests can be dropped for a queue timeout, also while no instance is free."""
        return self._needs_timer

    def __len__(self) -> int:
        """Requests waiting now, those included whose time is over until a decision drops them."""
        return len(self._queue)

    def enqueue(self, request: QueuedRequest) -> Admission:
        """Take the request, unless the queue or its level is full.

        The rows must have been checked against max_batch_size, and the id must be new.
        """
        admission = self._queue.add(request)
        if admission is Admission.ACCEPTED:
            self._sizing.arrived(rows=request.rows, now_us=request.enqueued_us)
        return admission

    def cancel(self, request_id: int) -> tuple[Dropped, ...]:
        """Take a waiting request out; empty if it is not waiting (any more)."""
        if not self._queue.cancel(request_id):
            return ()
        return (Dropped(id=request_id, reason=DropReason.CANCELLED),)

    def decide(self, now_us: int, *, free: Sequence[int]) -> Decision:
        """Run the next batch on the first free instance, or say how long to wait.

        Caller deadlines are kept but not waited for: who set one cancels the request.
        """
        dropped = self._queue.expire(now_us)
        if not len(self._queue):
            return Idle(dropped=dropped)
        at_us = self._queue.next_timeout_us()
        if free:
            front = self._queue.front()
            choice = self._choose(front, now_us)
            if isinstance(choice, Send):
                return self._send(choice, front, instance=free[0], dropped=dropped)
            at_us = choice.until_us if at_us is None else min(at_us, choice.until_us)
        return Idle(dropped=dropped) if at_us is None else WaitUntil(at_us=at_us, dropped=dropped)

    def finished(self, dispatch: Dispatch, *, now_us: int, compute_us: int) -> None:
        """That batch has ended; the sizing may learn from it."""
        self._running -= len(dispatch.ids)
        self._sizing.finished(rows=dispatch.rows, compute_us=compute_us, now_us=now_us)

    def take_ended(self) -> tuple[CorrelationId, ...]:
        """None: there are no sequences here."""
        return ()

    def drain(self) -> tuple[int, ...]:
        """Empty the queue and name what was in it, for a scheduler that stops."""
        return self._queue.drain()

    def _choose(self, front: Front, now_us: int) -> Choice:
        if self._runs_alone:
            return Send(count=1, reason=DispatchReason.UNBATCHED)
        view = QueueView(
            prefix_rows=front.prefix_rows,
            is_stopped=front.is_stopped,
            oldest_enqueued_us=front.oldest_enqueued_us,
            waiting=len(self._queue),
            running=self._running,
        )
        return self._sizing.choose(view, now_us)

    def _send(self, choice: Send, front: Front, *, instance: int, dropped: tuple[Dropped, ...]) -> Dispatch:
        self._running += choice.count
        return Dispatch(
            instance=instance,
            ids=self._queue.take(choice.count),
            rows=front.prefix_rows[choice.count - 1],
            reason=choice.reason,
            dropped=dropped,
        )
