"""What a scheduling policy is asked and what it answers: the words that batching, sequencing and the scheduler share.

A policy is pure: it is told the time (`now_us`, any monotonic clock) and which instances are free; it reads no clock
and wakes nobody. `batching.Batcher` and `sequencing.Sequencer` are the two policies.
"""

import enum
from collections.abc import Hashable, Sequence
from typing import Protocol, TypeAlias

import msgspec

# Triton's correlation ids: unsigned 64-bit integers or strings; 0 and "" mean that there is none.
CorrelationId: TypeAlias = int | str


class QueuedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy knows of a request: its rows and whether it may share a batch, never its tensors.

    Args:
        id: unique among the requests of this policy.
        rows: rows of the batch that it takes, at least 1.
        batch_key: equal for requests that may share a batch (same inputs present, same inner shapes).
        enqueued_us: when it came.
        deadline_us: when its caller stops to wait; None for never. It never runs after that.
        priority: Triton's request parameter; 0 for the model's default level.
        timeout_us: Triton's request parameter `timeout`, see `QueuePolicy.allow_timeout_override`; 0 for none.
        correlation_id: which sequence it belongs to.
        is_start: first of its sequence.
        is_end: last of its sequence.
    """

    id: int
    rows: int
    batch_key: Hashable
    enqueued_us: int
    deadline_us: int | None = None
    priority: int = 0
    timeout_us: int = 0
    correlation_id: CorrelationId = 0
    is_start: bool = False
    is_end: bool = False


class Admission(enum.StrEnum):
    """Whether a request was taken into the queue, or why not."""

    ACCEPTED = "accepted"
    QUEUE_FULL = "queue_full"
    NO_CORRELATION_ID = "no_correlation_id"
    NOT_STARTED = "not_started"


class DropReason(enum.StrEnum):
    """Why a waiting request left the queue without being run."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue_timeout"
    SEQUENCE_CANCELLED = "sequence_cancelled"  # an earlier request of its sequence was dropped
    SEQUENCE_IDLE = "sequence_idle"  # its sequence was silent for too long and lost its place


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has left the queue without being run."""

    id: int
    reason: DropReason


class DispatchReason(enum.StrEnum):
    """Why a batch leaves now."""

    UNBATCHED = "unbatched"
    PREFERRED_SIZE = "preferred_size"
    FULL = "full"
    NEXT_DOES_NOT_FIT = "next_does_not_fit"
    NO_DELAY = "no_delay"
    DELAY_REACHED = "delay_reached"
    ADAPTIVE = "adaptive"
    SLOTS_FILLED = "slots_filled"


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a sequence batch, as the control inputs tell it to the model.

    `request` is None for a slot with nothing to do, which the model must skip (READY false).
    """

    request: int | None
    correlation_id: CorrelationId = 0
    is_start: bool = False
    is_end: bool = False


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Run these requests as one batch, in this order, on that instance. They have left the queue.

    `slots` is set by sequence policies only: one for each row, those of `ids` in the same order among them.
    """

    instance: int
    ids: tuple[int, ...]
    rows: int
    reason: DispatchReason
    slots: tuple[Slot, ...] = ()
    dropped: tuple[Dropped, ...] = ()


class WaitUntil(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing to run yet: ask again at `at_us`, or when a request arrives or an instance becomes free."""

    at_us: int
    dropped: tuple[Dropped, ...] = ()


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Time alone will change nothing: ask again when a request arrives or an instance becomes free."""

    dropped: tuple[Dropped, ...] = ()


Decision: TypeAlias = Dispatch | WaitUntil | Idle


class Policy(Protocol):
    """Which waiting requests run next. The scheduler obeys; `gateway simulate` may, too."""

    @property
    def needs_timer(self) -> bool:
        """Whether time alone can drop waiting requests: then `decide` is to be asked while no instance is free, too.

        Deadlines do not count: their owner cancels the request.
        """

    def __len__(self) -> int:
        """Requests waiting now."""

    def enqueue(self, request: QueuedRequest) -> Admission:
        """Take the request into the queue, or say why not. `request.enqueued_us` is now."""

    def cancel(self, request_id: int) -> tuple[Dropped, ...]:
        """Take a waiting request out, with those that cannot go on without it; itself first.

        Empty if it is not waiting (any more): it runs, or has run, and that is not changed.
        """

    def decide(self, now_us: int, *, free: Sequence[int]) -> Decision:
        """What to do now, given the free instances, longest free first; with none free, only what to drop.

        After a `Dispatch` the caller asks again, without that instance. What is in `dropped` has left the queue.
        """

    def finished(self, dispatch: Dispatch, *, now_us: int, compute_us: int) -> None:
        """That batch has ended, well or not; `compute_us` is how long the instance was busy with it."""

    def take_ended(self) -> tuple[CorrelationId, ...]:
        """Sequences that have ended since this was last asked, with nothing of them left to run."""

    def drain(self) -> tuple[int, ...]:
        """Empty the queue and name what was in it, for a scheduler that stops."""
