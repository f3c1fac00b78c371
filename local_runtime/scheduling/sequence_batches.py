"""Which sequences run together on an instance: Triton's strategies `direct` and `oldest`, as arithmetic. Pure.

Both see only heads: the next request of each sequence that has a slot, offered as soon as nothing else of that
sequence runs. So neither can run two requests of a sequence at once or out of order. What happens before (who gets a
slot) and after (who loses it) is in `sequencing`.

Source of the rules: triton-inference-server/core `src/sequence_batch_scheduler.cc`, DirectSequenceBatch and
OldestSequenceBatch.
"""

import dataclasses
import operator
from typing import Protocol

import msgspec

from local_runtime.repository.model_config import DirectStrategy, DynamicBatching, OldestStrategy
from local_runtime.scheduling.batching import Batcher
from local_runtime.scheduling.decisions import (
    Decision,
    Dispatch,
    DispatchReason,
    Idle,
    QueuedRequest,
    Slot,
    WaitUntil,
)

_FILLER = Slot(request=None)

# The config file holds a 32-bit float: a third is a little more there than 1 / 3 is here.
_UTILIZATION_ERROR = 1e-6

_arrived = operator.attrgetter("enqueued_us")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """Where a sequence lives. The smallest free place is taken first, so that the instances fill evenly."""

    slot: int
    instance: int


class Heads(Protocol):
    """The requests that may run now, at most one for each place."""

    def offer(self, request: QueuedRequest, *, place: Place, now_us: int) -> None:
        """The request is the next of the sequence at that place."""

    def withdraw(self, request_id: int, *, place: Place) -> None:
        """The request that was offered there was dropped."""

    def decide(self, instance: int, *, now_us: int) -> Decision:
        """What that free instance does now; what is dispatched is no longer offered. `dropped` is not used."""

    def finished(self, dispatch: Dispatch, *, now_us: int, compute_us: int) -> None:
        """That batch has ended."""


class DirectHeads:
    """`direct`: the slot is the row. Batches have holes where a sequence below the last row has nothing to run.

    A batch waits for `minimum_slot_utilization` of the slots, for `max_queue_delay_microseconds` from the arrival of
    its oldest request at most; if either is 0 it never waits. Requests of other shapes than the oldest one's are left
    for a later batch (Triton takes the shape of the lowest slot, which can starve the others).
    """

    def __init__(self, *, strategy: DirectStrategy, slots: int, instances: int) -> None:
        self._strategy = strategy
        self._heads: list[list[QueuedRequest | None]] = [[None] * slots for _ in range(instances)]

    def offer(self, request: QueuedRequest, *, place: Place, now_us: int) -> None:  # noqa: ARG002 - the port
        """See `Heads`."""
        self._heads[place.instance][place.slot] = request

    def withdraw(self, request_id: int, *, place: Place) -> None:  # noqa: ARG002 - the port
        """See `Heads`."""
        self._heads[place.instance][place.slot] = None

    def decide(self, instance: int, *, now_us: int) -> Decision:
        """See `Heads`."""
        heads = self._heads[instance]
        ready = [head for head in heads if head is not None]
        if not ready:
            return Idle()
        oldest = min(ready, key=_arrived)
        due_us = oldest.enqueued_us + self._strategy.max_queue_delay_microseconds
        reason = self._reason(utilization=len(ready) / len(heads), is_due=now_us >= due_us)
        if reason is None:
            return WaitUntil(at_us=due_us)
        return self._take(instance, oldest, reason)

    def finished(self, dispatch: Dispatch, *, now_us: int, compute_us: int) -> None:
        """See `Heads`. Nothing to learn."""

    def _reason(self, *, utilization: float, is_due: bool) -> DispatchReason | None:
        if self._strategy.max_queue_delay_microseconds == 0:
            return DispatchReason.NO_DELAY
        if utilization >= self._strategy.minimum_slot_utilization - _UTILIZATION_ERROR:
            return DispatchReason.SLOTS_FILLED
        return DispatchReason.DELAY_REACHED if is_due else None

    def _take(self, instance: int, oldest: QueuedRequest, reason: DispatchReason) -> Dispatch:
        heads = self._heads[instance]
        slots: list[Slot] = []
        ids: list[int] = []
        rows = 0
        for index, head in enumerate(heads):
            if head is None or head.batch_key != oldest.batch_key:
                slots.append(_FILLER)
                continue
            heads[index] = None
            slots.append(_slot(head))
            ids.append(head.id)
            rows = index + 1
        return Dispatch(instance=instance, ids=tuple(ids), rows=rows, reason=reason, slots=tuple(slots[:rows]))


class OldestHeads:
    """`oldest`: a dynamic batcher for each instance, fed with the heads of its candidates.

    As in Triton, a request's delay counts from when it was offered, not from its arrival. Unlike Triton, a sequence
    of one request keeps its place until that has run, so the next sequence does not queue behind it.
    """

    def __init__(self, *, strategy: OldestStrategy, max_batch_size: int, instances: int) -> None:
        config = DynamicBatching(
            preferred_batch_size=strategy.preferred_batch_size,
            max_queue_delay_microseconds=strategy.max_queue_delay_microseconds,
        )
        self._batchers = [Batcher(max_batch_size=max_batch_size, config=config) for _ in range(instances)]
        self._offered: dict[int, QueuedRequest] = {}

    def offer(self, request: QueuedRequest, *, place: Place, now_us: int) -> None:
        """See `Heads`."""
        self._offered[request.id] = request
        # Deadlines are watched for the whole sequence, see `sequencing`.
        head = QueuedRequest(id=request.id, rows=request.rows, batch_key=request.batch_key, enqueued_us=now_us)
        self._batchers[place.instance].enqueue(head)

    def withdraw(self, request_id: int, *, place: Place) -> None:
        """See `Heads`."""
        del self._offered[request_id]
        self._batchers[place.instance].cancel(request_id)

    def decide(self, instance: int, *, now_us: int) -> Decision:
        """See `Heads`."""
        decision = self._batchers[instance].decide(now_us, free=(instance,))
        if not isinstance(decision, Dispatch):
            return decision
        slots = tuple(_slot(self._offered.pop(request_id)) for request_id in decision.ids)
        return msgspec.structs.replace(decision, slots=slots)

    def finished(self, dispatch: Dispatch, *, now_us: int, compute_us: int) -> None:
        """See `Heads`."""
        self._batchers[dispatch.instance].finished(dispatch, now_us=now_us, compute_us=compute_us)


def _slot(request: QueuedRequest) -> Slot:
    return Slot(
        request=request.id,
        correlation_id=request.correlation_id,
        is_start=request.is_start,
        is_end=request.is_end,
    )
