"""Triton's dynamic batcher as arithmetic: when which waiting requests run together.

Pure: it is told the time and told when an instance is free; it reads no clock and wakes nobody. The
rules are those of triton-inference-server/core `src/dynamic_batch_scheduler.cc` (GetDynamicBatch) without
priorities and queue policies, and with batches formed only when an instance can run them. (Triton prefetches
in this case; forming late gives the same or larger batches and lets a cancelled request leave the queue.)

A request is never split, never overtaken, and never runs after its deadline or after `cancel`.
"""

import dataclasses
import enum
import heapq
from collections import OrderedDict
from collections.abc import Hashable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchingRules:
    """How one model batches.

    Args:
        max_batch_size: most rows in one execution; 0 means that the model has no batch dimension.
        dynamic: False without `dynamic_batching` in the config: every request runs alone.
        preferred_batch_sizes: rows at which a batch is sent without waiting on; empty means {max_batch_size}.
        max_queue_delay_us: how long the oldest request may wait for company.
        max_queue_size: requests that may wait; 0 means without limit.
    """

    max_batch_size: int
    dynamic: bool
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    max_queue_size: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """What the batcher knows of a request: its rows and whether it may share a batch, never its tensors.

    `batch_key` is equal for requests that may be concatenated (same input names and inner shapes).
    """

    id: int
    rows: int
    batch_key: Hashable
    enqueued_us: int
    deadline_us: int | None = None


class Admission(enum.StrEnum):
    """Whether a request was taken into the queue."""

    ACCEPTED = "accepted"
    QUEUE_FULL = "queue_full"


class DispatchReason(enum.StrEnum):
    """Why a batch leaves now."""

    UNBATCHED = "unbatched"
    PREFERRED_SIZE = "preferred_size"
    FULL = "full"
    NEXT_DOES_NOT_FIT = "next_does_not_fit"
    NO_DELAY = "no_delay"
    DELAY_REACHED = "delay_reached"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Run these requests as one batch, in this order. They have left the queue."""

    ids: tuple[int, ...]
    rows: int
    reason: DispatchReason
    expired: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WaitUntil:
    """Nothing to run yet: ask again at `at_us`, or when a request arrives."""

    at_us: int
    expired: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """The queue is empty: ask again when a request arrives."""

    expired: tuple[int, ...] = ()


Decision = Dispatch | WaitUntil | Idle

# Deadlines of requests that have left may outnumber those in the queue by so many before they are swept.
_DEADLINE_SLACK = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Prefix:
    """The first `count` requests of the queue, `rows` rows together."""

    count: int
    rows: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Scan:
    """What a look along the queue found.

    `all` is the longest prefix that may run together, `preferred` the longest one that Triton sends without
    waiting (None if there is none), `stopped` whether a waiting request did not fit behind `all`.
    """

    all: _Prefix
    preferred: _Prefix | None
    stopped: bool


class Batcher:
    """The queue of one model and the decision what runs next."""

    def __init__(self, rules: BatchingRules) -> None:
        self._rules = rules
        self._preferred = frozenset(rules.preferred_batch_sizes or (rules.max_batch_size,))
        self._largest_preferred = max(self._preferred)
        self._queue: OrderedDict[int, QueuedRequest] = OrderedDict()
        # (deadline, id); entries of requests that have left are dropped when they surface.
        self._deadlines: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Requests waiting now, expired ones included until a decision or `expire` drops them."""
        return len(self._queue)

    def enqueue(self, request: QueuedRequest) -> Admission:
        """Take the request to the end of the queue, unless the queue is at its bound.

        The rows must have been checked against max_batch_size, and the id must be new.
        """
        if 0 < self._rules.max_queue_size <= len(self._queue):
            return Admission.QUEUE_FULL
        self._queue[request.id] = request
        if request.deadline_us is not None:
            self._forget_old_deadlines()
            heapq.heappush(self._deadlines, (request.deadline_us, request.id))
        return Admission.ACCEPTED

    def cancel(self, request_id: int) -> bool:
        """Remove a waiting request; False if it is not waiting (any more)."""
        return self._queue.pop(request_id, None) is not None

    def expire(self, now_us: int) -> tuple[int, ...]:
        """Drop and name the waiting requests whose deadline has come."""
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now_us or self._deadlines[0][1] not in self._queue):
            _, request_id = heapq.heappop(self._deadlines)
            if self._queue.pop(request_id, None) is not None:
                expired.append(request_id)
        return tuple(expired)

    def drain(self) -> tuple[int, ...]:
        """Empty the queue and name what was in it, for a runtime that stops."""
        ids = tuple(self._queue)
        self._queue.clear()
        self._deadlines.clear()
        return ids

    def decide(self, now_us: int) -> Decision:
        """What a free instance shall do now. Ask only when one is free.

        `expired` in the answer names requests that were dropped because their deadline has come.
        """
        expired = self.expire(now_us)
        if not self._queue:
            return Idle(expired=expired)
        oldest = next(iter(self._queue.values()))
        if not self._rules.dynamic or self._rules.max_batch_size == 0:
            alone = _Prefix(count=1, rows=oldest.rows)
            return self._take(alone, DispatchReason.UNBATCHED, expired)
        due_us = oldest.enqueued_us + self._rules.max_queue_delay_us
        choice = self._choose(self._scan(oldest), is_due=now_us >= due_us)
        if choice is not None:
            return self._take(*choice, expired)
        if self._deadlines:
            due_us = min(due_us, self._deadlines[0][0])
        return WaitUntil(at_us=due_us, expired=expired)

    def _forget_old_deadlines(self) -> None:
        """Keep the heap in proportion to the queue although requests leave it without a search."""
        if len(self._deadlines) > 2 * len(self._queue) + _DEADLINE_SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._queue]
            heapq.heapify(self._deadlines)

    def _scan(self, oldest: QueuedRequest) -> _Scan:
        """Look along the queue from the front, as far as one batch may reach."""
        count = rows = 0
        preferred: _Prefix | None = None
        for request in self._queue.values():
            too_many = rows + request.rows > self._rules.max_batch_size
            if count and (too_many or request.batch_key != oldest.batch_key):
                return _Scan(all=_Prefix(count=count, rows=rows), preferred=preferred, stopped=True)
            if count and preferred is None and rows + request.rows > self._largest_preferred:
                # Going on would skip over every preferred size, so what is there counts as preferred.
                preferred = _Prefix(count=count, rows=rows)
            count += 1
            rows += request.rows
            if rows in self._preferred:
                preferred = _Prefix(count=count, rows=rows)
        return _Scan(all=_Prefix(count=count, rows=rows), preferred=preferred, stopped=False)

    def _choose(self, scan: _Scan, *, is_due: bool) -> tuple[_Prefix, DispatchReason] | None:
        """The prefix to run now, or None to wait for the rest of the oldest request's delay."""
        has_no_delay = self._rules.max_queue_delay_us == 0
        if scan.preferred is not None and (has_no_delay or not is_due):
            return scan.preferred, DispatchReason.PREFERRED_SIZE
        if scan.all.rows >= self._largest_preferred:
            return scan.all, DispatchReason.FULL
        if scan.stopped:
            return scan.all, DispatchReason.NEXT_DOES_NOT_FIT
        if has_no_delay:
            return scan.all, DispatchReason.NO_DELAY
        if is_due:
            return scan.all, DispatchReason.DELAY_REACHED
        return None

    def _take(self, prefix: _Prefix, reason: DispatchReason, expired: tuple[int, ...]) -> Dispatch:
        """Remove the first requests from the queue and send them."""
        ids = tuple(self._queue.popitem(last=False)[0] for _ in range(prefix.count))
        return Dispatch(ids=ids, rows=prefix.rows, reason=reason, expired=expired)
