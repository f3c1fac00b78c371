"""When the steps of a request's walk were, for traces. All instants are of the process's clock, in microseconds."""

from dataclasses import dataclass
from typing import Final

from gateway.core.errors import Fault
from gateway.core.types import NOTHING_USED, OpenAIPayload, Place, Usage

MAX_EVENT_BYTES: Final = 1_048_576  # some 5,000 events of one token each


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedAttempt:
    """One attempt, with when its steps were, and what was asked and answered.

    Attributes:
        span_id: that the place was told as its parent; empty where nothing was sent.
        gate_us / queue_us: waited in our own queue, and in the backend's, where it tells.
        first_part_us: from the attempt's begin to the first part of a streamed answer.
        fault: why it failed; `is_dropped`: neither that nor answered whole, as the caller left or another was faster.
        payload: what an LLM was asked; nobody's to write down but where content is recorded.
        body: its answer, where that came whole; the same holds for it.
        events: the payloads of a streamed answer's events, where content is recorded; the first `MAX_EVENT_BYTES`.
    """

    place: Place
    began_us: int
    ended_us: int
    span_id: str = ""
    version: str = ""
    gate_us: int = 0
    queue_us: int | None = None
    first_part_us: int | None = None
    usage: Usage = NOTHING_USED
    fault: Fault | None = None
    is_dropped: bool = False
    payload: OpenAIPayload | None = None
    body: bytes = b""
    events: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A request's.

    Attributes:
        tried: its attempts, in the order in which they began.
        routing_us / routed_us: begin and end of that step; None where it did not get so far.
        ended_us: when nothing was left but to settle.
    """

    received_us: int
    ended_us: int
    routing_us: int | None = None
    routed_us: int | None = None
    tried: tuple[TracedAttempt, ...] = ()
