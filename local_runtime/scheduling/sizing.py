"""How large the next batch shall be, given what waits: Triton's rule. `adaptive` is our own answer to that."""

import bisect
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec

from local_runtime.repository.model_config import DynamicBatching
from local_runtime.scheduling.decisions import DispatchReason


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """The front of the queue while an instance is free.

    Args:
        prefix_rows: rows of the first 1, 2, ... requests together, as far as they may run as one batch. Not empty;
            a live list of the queue: not to be kept.
        is_stopped: whether another request waits behind them that may not join this batch.
        oldest_enqueued_us: when the longest waiting of them came.
        waiting: requests in the whole queue.
        running: requests that run on other instances now.
    """

    prefix_rows: Sequence[int]
    is_stopped: bool
    oldest_enqueued_us: int
    waiting: int
    running: int


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Run the first `count` requests now."""

    count: int
    reason: DispatchReason


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Wait for company until `until_us` at the latest, or until a request arrives."""

    until_us: int


Choice: TypeAlias = Send | Hold


class Sizing(Protocol):
    """Decides the size of batches, and may learn from what it is told."""

    def choose(self, view: QueueView, now_us: int) -> Choice:
        """Send some of what waits, or hold it."""

    def arrived(self, *, rows: int, now_us: int) -> None:
        """A request has been queued."""

    def finished(self, *, rows: int, compute_us: int, now_us: int) -> None:
        """A batch of so many rows kept its instance busy for so long."""


class TritonSizing:
    """The rule of triton-inference-server/core `src/dynamic_batch_scheduler.cc` (GetDynamicBatch). Learns nothing.

    Args:
        config: for `preferred_batch_size` (none means {max_batch_size}) and `max_queue_delay_microseconds`.
        max_batch_size: most rows in one execution.
    """

    def __init__(self, config: DynamicBatching, *, max_batch_size: int) -> None:
        self._preferred = sorted(set(config.preferred_batch_size) or {max_batch_size}, reverse=True)
        self._largest = self._preferred[0]
        self._delay_us = config.max_queue_delay_microseconds

    def choose(self, view: QueueView, now_us: int) -> Choice:
        """A preferred size as long as nobody has waited the delay; else all, unless waiting can bring more."""
        due_us = view.oldest_enqueued_us + self._delay_us
        has_no_delay = self._delay_us == 0
        if has_no_delay or now_us < due_us:
            count = self._preferred_count(view.prefix_rows)
            if count:
                return Send(count=count, reason=DispatchReason.PREFERRED_SIZE)
        everything = len(view.prefix_rows)
        if view.prefix_rows[-1] >= self._largest:
            return Send(count=everything, reason=DispatchReason.FULL)
        if view.is_stopped:
            return Send(count=everything, reason=DispatchReason.NEXT_DOES_NOT_FIT)
        if has_no_delay:
            return Send(count=everything, reason=DispatchReason.NO_DELAY)
        if now_us >= due_us:
            return Send(count=everything, reason=DispatchReason.DELAY_REACHED)
        return Hold(until_us=due_us)

    def arrived(self, *, rows: int, now_us: int) -> None:
        """Nothing to learn."""

    def finished(self, *, rows: int, compute_us: int, now_us: int) -> None:
        """Nothing to learn."""

    def _preferred_count(self, prefix_rows: Sequence[int]) -> int:
        """Requests in the longest prefix of a preferred size; 0 if there is none.

        If the requests skip over every preferred size, those before the one that does count as preferred.
        """
        for size in self._preferred:
            place = bisect.bisect_left(prefix_rows, size)
            if place < len(prefix_rows) and prefix_rows[place] == size:
                return place + 1
        if len(prefix_rows) > 1 and prefix_rows[-1] > self._largest:
            return max(1, bisect.bisect_right(prefix_rows, self._largest))
        return 0
