"""Triton's dynamic batcher as it is: it forms batches ahead, where the runtime's forms each when an instance is free.

Pure, as every policy. Without priorities and queue policies Triton's batcher thread puts what waits into a payload that
stands before the instances; the payload takes up more requests until it is full or an instance has it. With a delay,
and where all inputs have fixed shapes, the thread sleeps while less waits than would make a preferred size: what
comes then stays behind, and the payload leaves without it. Batches are smaller for that than the runtime's.

Source: triton-inference-server/core `src/dynamic_batch_scheduler.cc` (Enqueue, BatcherThread, GetDynamicBatch),
`src/rate_limiter.cc` (PayloadSlotAvailable) and `src/instance_queue.cc` (Dequeue, which joins payloads).
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from local_runtime.repository.model_config import DynamicBatching, ModelConfig
from local_runtime.scheduling.decisions import (
    Admission,
    CorrelationId,
    Decision,
    Dispatch,
    DispatchReason,
    Dropped,
    DropReason,
    Idle,
    Policy,
    QueuedRequest,
    WaitUntil,
)
from local_runtime.scheduling.policies import policy_of

PAYLOADS_AHEAD: Final = 2
"""That stand before each instance at most."""
LONGEST_SLEEP_US: Final = 500_000
"""Of the batcher's thread, where nobody wakes it."""


def triton_policy(config: ModelConfig, *, instances: int, max_queue_size: int) -> Policy:
    """What Triton does with such a model; where it forms nothing ahead, that is what the runtime does.

    Triton knows nothing of adaptive batching. Its stalls under priorities and queue policies are not there.
    """
    batching = config.dynamic_batching
    if config.sequence_batching is not None or batching is None or not config.max_batch_size or _is_bound(batching):
        return policy_of(config, instances=instances, max_queue_size=max_queue_size)
    is_any_shape = any(-1 in spec.dims and not spec.allow_ragged_batch for spec in config.inputs)
    return BatcherAhead(
        batching, max_batch_size=config.max_batch_size, instances=instances, looks_at_shapes=is_any_shape
    )


def _is_bound(batching: DynamicBatching) -> bool:
    """Whether there are priorities or a queue policy."""
    policy = batching.default_queue_policy
    bounds = policy.default_timeout_microseconds or policy.max_queue_size or policy.allow_timeout_override
    return bool(bounds or batching.priority_levels or batching.priority_queue_policy)


@dataclass(slots=True)
class _Payload:
    """A batch in the making; `is_closed`: the next request has another shape; `is_out`: an instance has it."""

    requests: list[QueuedRequest] = field(default_factory=list)
    rows: int = 0
    is_standing: bool = False
    is_closed: bool = False
    is_out: bool = False

    @property
    def batch_key(self) -> Hashable:
        """Of its first request."""
        return self.requests[0].batch_key


class BatcherAhead:
    """See the module. What is in a payload runs, whether its caller still waits or not.

    Args:
        config: of the model; it has neither priorities nor queue policies.
        max_batch_size: rows, at least 1.
        instances: of the model.
        looks_at_shapes: whether an input's shape may vary: then every request wakes the batcher's thread.
    """

    def __init__(self, config: DynamicBatching, *, max_batch_size: int, instances: int, looks_at_shapes: bool) -> None:
        self._delay_us = config.max_queue_delay_microseconds
        self._preferred = sorted(set(config.preferred_batch_size) or {max_batch_size})
        self._max_rows = max_batch_size
        self._most_ahead = PAYLOADS_AHEAD * instances
        self._looks_at_shapes = looks_at_shapes
        self._queue: deque[QueuedRequest] = deque()
        self._ahead: deque[_Payload] = deque()
        self._growing = _Payload()
        self._is_saturated = False
        self._next_preferred = 0
        self._is_woken = True
        self._sleeps_until_us = 0

    @property
    def needs_timer(self) -> bool:
        """The thread wakes up while all instances are busy, too."""
        return True

    def __len__(self) -> int:
        """In the queue, and ahead of the instances."""
        return len(self._queue) + sum(len(one.requests) for one in self._ahead)

    def enqueue(self, request: QueuedRequest) -> Admission:
        """Its queue has no bound."""
        self._queue.append(request)
        if len(self._ahead) < self._most_ahead:
            self._is_woken |= (
                self._looks_at_shapes
                or self._is_saturated
                or self._growing.is_out
                or sum(one.rows for one in self._queue) >= self._next_preferred
            )
        return Admission.ACCEPTED

    def cancel(self, request_id: int) -> tuple[Dropped, ...]:
        """Take it out, unless it is in a payload."""
        for request in self._queue:
            if request.id == request_id:
                self._queue.remove(request)
                return (Dropped(id=request_id, reason=DropReason.CANCELLED),)
        return ()

    def decide(self, now_us: int, *, free: Sequence[int]) -> Decision:
        """The thread has its turn, then an instance that is free takes what stands first."""
        if self._is_woken or now_us >= self._sleeps_until_us:
            self._is_woken = False
            self._form(now_us)
        if free and self._ahead:
            return self._taken(free[0], now_us)
        if not self._queue or len(self._ahead) >= self._most_ahead:
            return Idle()
        return WaitUntil(at_us=self._sleeps_until_us)

    def finished(self, dispatch: Dispatch, *, now_us: int, compute_us: int) -> None:
        """Nothing to learn."""

    def take_ended(self) -> tuple[CorrelationId, ...]:
        """None: there are no sequences here."""
        return ()

    def drain(self) -> tuple[int, ...]:
        """Empty all of it."""
        waiting = (*(request for one in self._ahead for request in one.requests), *self._queue)
        self._queue.clear()
        self._ahead.clear()
        return tuple(request.id for request in waiting)

    def _taken(self, instance: int, now_us: int) -> Dispatch:
        """The first payload, with those that may join it; this wakes the thread."""
        first = self._ahead.popleft()
        first.is_out = self._is_woken = True
        requests, rows = first.requests, first.rows
        while self._delay_us and self._ahead and not first.is_closed:
            other = self._ahead[0]
            if other.is_closed or now_us - other.requests[0].enqueued_us <= self._delay_us:
                break
            other.is_out = True  # whether it fits or not: one that does not stays as small as it is
            if rows + other.rows > self._max_rows:
                break
            requests = requests + self._ahead.popleft().requests
            rows += other.rows
        ids = tuple(request.id for request in requests)
        reason = DispatchReason.FULL if rows >= self._preferred[-1] else DispatchReason.NO_DELAY
        return Dispatch(instance=instance, ids=ids, rows=rows, reason=reason)

    def _form(self, now_us: int) -> None:
        """The thread, until it sleeps."""
        while True:
            if self._is_saturated or self._growing.is_out:
                self._growing = _Payload()
                self._is_saturated, self._next_preferred = False, 0
            if not self._queue:
                self._sleeps_until_us = now_us + LONGEST_SLEEP_US
                return
            if len(self._ahead) >= self._most_ahead:
                return  # until an instance takes one
            count, wait_us = self._batch(now_us)
            if wait_us:
                self._sleeps_until_us = now_us + wait_us
                return
            self._move(count)

    def _move(self, count: int) -> None:
        """The first `count` of the queue into the payload, which stands before the instances from then on."""
        growing = self._growing
        for _ in range(count):
            request = self._queue.popleft()
            growing.requests.append(request)
            growing.rows += request.rows
        if count and not growing.is_standing:
            growing.is_standing = True
            self._ahead.append(growing)

    def _batch(self, now_us: int) -> tuple[int, int]:
        """GetDynamicBatch: how many join the payload now, and else how long to sleep, in microseconds."""
        held, largest = self._growing.rows, self._preferred[-1]
        count, rows, best, is_stopped = self._scanned()
        age_us = now_us - self._queue[0].enqueued_us
        is_due = 0 < self._delay_us <= age_us
        if best and not is_due:
            self._is_saturated |= not self._delay_us
            return best, 0
        if not count:
            return 0, 0
        if is_stopped or held + rows >= largest:
            self._is_saturated = True
            return count, 0
        if is_due or not self._delay_us:
            return count, 0
        self._next_preferred = self._preferred[bisect_right(self._preferred, held + rows)] - held
        if not self._is_saturated and held and held not in self._preferred:
            return count, 0
        return 0, self._delay_us - age_us

    def _scanned(self) -> tuple[int, int, int, bool]:
        """From the front: requests that fit and their rows, those up to a preferred size, and whether one does not."""
        growing, largest = self._growing, self._preferred[-1]
        count = rows = best = 0
        for request in self._queue:
            if growing.requests or count:
                key = growing.batch_key if growing.requests else self._queue[0].batch_key
                whole = growing.rows + rows + request.rows
                if whole > largest and not best:
                    best, self._is_saturated = count, True
                if whole > self._max_rows:
                    return count, rows, best, True
                if request.batch_key != key:
                    growing.is_closed = self._is_saturated = True
                    return count, rows, best, True
            rows += request.rows
            count += 1
            if growing.rows + rows in self._preferred:
                best = count
        return count, rows, best, False
