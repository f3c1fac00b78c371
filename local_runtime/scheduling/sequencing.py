"""Triton's sequence batcher as arithmetic: which sequence has which slot, and when its next request may run. Pure.

A sequence begins with a START request and gets a slot of one instance, or waits in the backlog for one. It keeps the
slot until it has ended and nothing of it runs. Three things end it: its END request has run, it was silent for
`max_sequence_idle_microseconds`, or one of its requests was cancelled or came too late (then the model would see a
sequence with a hole, so what waits behind the hole is dropped, up to the next START). A batch that fails ends
nothing.

Source of the rules: triton-inference-server/core `src/sequence_batch_scheduler.cc`. On purpose different:

- A correlation id that is used anew waits until the former sequence of that name is over. (Triton may run both at
  once, in two slots.)
- Silence counts from the end of the last batch, not from the last arrival, so a slow model costs nobody a slot.
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Sequence

import msgspec

from local_runtime.repository.model_config import DirectStrategy, SequenceBatching
from local_runtime.scheduling.decisions import (
    Admission,
    CorrelationId,
    Decision,
    Dispatch,
    Dropped,
    DropReason,
    Idle,
    QueuedRequest,
    WaitUntil,
)
from local_runtime.scheduling.sequence_batches import DirectHeads, Heads, OldestHeads, Place

# Entries of requests and sequences that have left may outnumber the live ones by so many before they are swept.
_SLACK = 64


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """A sequence from its START until it is over; `is_closed` when no request can join it any more.

    It has a place, or else it waits: for one (in the backlog), or for its predecessor of the same name.
    """

    correlation_id: CorrelationId
    arrival: int
    waiting: collections.deque[QueuedRequest] = dataclasses.field(default_factory=collections.deque)
    place: Place | None = None
    is_running: bool = False
    is_closed: bool = False


class Sequencer:
    """The queue of one sequence model (a `Policy`), and which slot belongs to whom.

    Args:
        max_batch_size: as configured; slots per instance for the strategy `direct`.
        config: the `sequence_batching` block.
        instances: how many there are; they are numbered from 0.
        max_queue_size: requests that may wait; 0 for any number. A request refused for it leaves its sequence as it is.
    """

    def __init__(
        self, *, max_batch_size: int, config: SequenceBatching, instances: int, max_queue_size: int = 0
    ) -> None:
        strategy = config.strategy
        self._heads: Heads
        if isinstance(strategy, DirectStrategy):
            slots = max(1, max_batch_size)
            self._heads = DirectHeads(strategy=strategy, slots=slots, instances=instances)
        else:
            slots = max(1, strategy.max_candidate_sequences)
            self._heads = OldestHeads(strategy=strategy, max_batch_size=max_batch_size, instances=instances)
        self._idle_timeout_us = config.max_sequence_idle_microseconds
        self._max_queue_size = max_queue_size
        # A heap, as sorted lists are.
        self._free_places = [Place(slot=slot, instance=i) for slot in range(slots) for i in range(instances)]
        # By correlation id, in order of arrival: the first has a place or is in the backlog, the others wait for it.
        self._sequences: dict[CorrelationId, collections.deque[_Sequence]] = {}
        # (arrival, sequence); entries of sequences that are over are dropped when they surface.
        self._backlog: list[tuple[int, _Sequence]] = []
        # By request.
        self._waiting: dict[int, _Sequence] = {}
        self._running: dict[int, _Sequence] = {}
        # (deadline, request); entries of requests that have left are dropped when they surface.
        self._deadlines: list[tuple[int, int]] = []
        # Silent sequences and since when, longest first.
        self._silent: dict[_Sequence, int] = {}
        self._ended: dict[CorrelationId, None] = {}
        self._arrivals = 0
        self._now_us = 0

    @property
    def needs_timer(self) -> bool:
        """Always: a silent sequence loses its slot even while every instance is busy."""
        return True

    def __len__(self) -> int:
        """Requests waiting now."""
        return len(self._waiting)

    def enqueue(self, request: QueuedRequest) -> Admission:
        """Take the request to the end of its sequence. Its rows must be 1 and its id new."""
        self._now_us = request.enqueued_us
        self._sweep()
        self._end_silent()
        if not request.correlation_id:
            return Admission.NO_CORRELATION_ID
        sequence = self._open_sequence(request.correlation_id)
        if sequence is None and not request.is_start:
            return Admission.NOT_STARTED
        if 0 < self._max_queue_size <= len(self._waiting):
            return Admission.QUEUE_FULL
        if sequence is None:
            sequence = self._begin(request.correlation_id)
        self._append(request, sequence)
        return Admission.ACCEPTED

    def cancel(self, request_id: int) -> tuple[Dropped, ...]:
        """Drop a waiting request and what waits behind it in its sequence, up to the next START.

        Without such a START the sequence is over when what ran or waited before the request has run. Empty if the
        request is not waiting (any more).
        """
        return self._drop(request_id, DropReason.CANCELLED)

    def decide(self, now_us: int, *, free: Sequence[int]) -> Decision:
        """The batch of the first free instance that has one to run now, else when to ask again; see `Policy`.

        Requests whose deadline has come are dropped, but not waited for: who set a deadline cancels the request.
        """
        self._now_us = now_us
        dropped = self._drop_late()
        self._end_silent()
        wakes = [since_us + self._idle_timeout_us for since_us in itertools.islice(self._silent.values(), 1)]
        for instance in free:
            decision = self._heads.decide(instance, now_us=now_us)
            if isinstance(decision, Dispatch):
                self._start(decision)
                return msgspec.structs.replace(decision, dropped=dropped) if dropped else decision
            if isinstance(decision, WaitUntil):
                wakes.append(decision.at_us)
        return WaitUntil(at_us=min(wakes), dropped=dropped) if wakes else Idle(dropped=dropped)

    def finished(self, dispatch: Dispatch, *, now_us: int, compute_us: int) -> None:
        """The sequences of that batch may go on, or are over if that was their last request."""
        self._now_us = now_us
        self._heads.finished(dispatch, now_us=now_us, compute_us=compute_us)
        for request_id in dispatch.ids:
            sequence = self._running.pop(request_id)
            sequence.is_running = False
            self._go_on(sequence)

    def drain(self) -> tuple[int, ...]:
        """Empty the queue and name what was in it. Every sequence is over when what runs of it has ended."""
        ids = tuple(self._waiting)
        self._waiting.clear()
        self._deadlines.clear()
        self._silent.clear()
        sequences = [sequence for same_name in self._sequences.values() for sequence in same_name]
        for sequence in sequences:
            if sequence.place is not None and sequence.waiting and not sequence.is_running:
                self._heads.withdraw(sequence.waiting[0].id, place=sequence.place)
            sequence.waiting.clear()
            sequence.is_closed = True
        for sequence in sequences:
            if not sequence.is_running:
                self._end(sequence)
        return ids

    def take_ended(self) -> tuple[CorrelationId, ...]:
        """Name the sequences that have ended since this was last asked, so that their state can be given up.

        Nothing of them runs or waits. An id that is in use again is left out: its START needs no state of the past.
        Ask after `finished`, after `cancel`, and after `decide`.
        """
        if not self._ended:
            return ()
        ended = tuple(name for name in self._ended if name not in self._sequences)
        self._ended.clear()
        return ended

    def _open_sequence(self, correlation_id: CorrelationId) -> _Sequence | None:
        """The sequence of that name that requests can still join."""
        same_name = self._sequences.get(correlation_id)
        return None if same_name is None or same_name[-1].is_closed else same_name[-1]

    def _begin(self, correlation_id: CorrelationId) -> _Sequence:
        self._arrivals += 1
        sequence = _Sequence(correlation_id=correlation_id, arrival=self._arrivals)
        same_name = self._sequences.setdefault(correlation_id, collections.deque())
        same_name.append(sequence)
        if len(same_name) == 1:
            heapq.heappush(self._backlog, (sequence.arrival, sequence))
        return sequence

    def _append(self, request: QueuedRequest, sequence: _Sequence) -> None:
        self._waiting[request.id] = sequence
        self._silent.pop(sequence, None)
        sequence.waiting.append(request)
        sequence.is_closed = request.is_end
        if request.deadline_us is not None:
            heapq.heappush(self._deadlines, (request.deadline_us, request.id))
        if sequence.place is None:
            self._fill_places()
        elif len(sequence.waiting) == 1:
            self._offer(sequence)

    def _sweep(self) -> None:
        """Keep the heaps in proportion to the queue although entries leave it without a search."""
        bound = 2 * len(self._waiting) + _SLACK
        if len(self._deadlines) > bound:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._waiting]
            heapq.heapify(self._deadlines)
        if len(self._backlog) > bound:
            self._backlog = [entry for entry in self._backlog if entry[1].waiting]
            heapq.heapify(self._backlog)

    def _fill_places(self) -> None:
        """Give free places to the sequences that wait for one, in order of arrival."""
        while self._free_places and self._backlog:
            _, sequence = heapq.heappop(self._backlog)
            if sequence.waiting:
                sequence.place = heapq.heappop(self._free_places)
                self._offer(sequence)

    def _offer(self, sequence: _Sequence) -> None:
        """Let the next request run, if there is one and nothing before it runs."""
        if sequence.place is not None and sequence.waiting and not sequence.is_running:
            self._heads.offer(sequence.waiting[0], place=sequence.place, now_us=self._now_us)

    def _start(self, dispatch: Dispatch) -> None:
        for request_id in dispatch.ids:
            sequence = self._waiting.pop(request_id)
            sequence.waiting.popleft()
            sequence.is_running = True
            self._running[request_id] = sequence

    def _go_on(self, sequence: _Sequence) -> None:
        """Nothing of the sequence runs: on with its next request, its end, or silence."""
        if sequence.waiting:
            self._offer(sequence)
        elif sequence.is_closed:
            self._end(sequence)
        else:
            self._silent[sequence] = self._now_us

    def _end(self, sequence: _Sequence) -> None:
        """The sequence is over: its place goes to another, and its name to the next sequence that has it."""
        self._ended[sequence.correlation_id] = None
        same_name = self._sequences[sequence.correlation_id]
        was_first = same_name[0] is sequence
        same_name.remove(sequence)
        if not same_name:
            del self._sequences[sequence.correlation_id]
        elif was_first:
            heapq.heappush(self._backlog, (same_name[0].arrival, same_name[0]))
        if sequence.place is not None:
            heapq.heappush(self._free_places, sequence.place)
        self._fill_places()

    def _drop(self, request_id: int, reason: DropReason) -> tuple[Dropped, ...]:
        sequence = self._waiting.get(request_id)
        if sequence is None:
            return ()
        waiting = list(sequence.waiting)
        first = next(at for at, request in enumerate(waiting) if request.id == request_id)
        end = next((at for at in range(first + 1, len(waiting)) if waiting[at].is_start), len(waiting))
        if first == 0 and sequence.place is not None and not sequence.is_running:
            self._heads.withdraw(request_id, place=sequence.place)
        sequence.waiting = collections.deque(waiting[:first] + waiting[end:])
        if end == len(waiting):
            sequence.is_closed = True
        for request in waiting[first:end]:
            del self._waiting[request.id]
        if first == 0 and not sequence.is_running:
            self._go_on(sequence)
        later = [Dropped(id=request.id, reason=DropReason.SEQUENCE_CANCELLED) for request in waiting[first + 1 : end]]
        return (Dropped(id=request_id, reason=reason), *later)

    def _drop_late(self) -> tuple[Dropped, ...]:
        """Drop the requests whose deadline has come, with what cannot run without them."""
        dropped: list[Dropped] = []
        while self._deadlines and (self._deadlines[0][0] <= self._now_us or self._deadlines[0][1] not in self._waiting):
            _, request_id = heapq.heappop(self._deadlines)
            dropped.extend(self._drop(request_id, DropReason.DEADLINE))
        return tuple(dropped)

    def _end_silent(self) -> None:
        """End the sequences that have been silent for too long."""
        while self._silent:
            sequence, since_us = next(iter(self._silent.items()))
            if self._now_us < since_us + self._idle_timeout_us:
                return
            del self._silent[sequence]
            self._end(sequence)
