"""What a codec of an LLM protocol offers. Pure: bytes and payloads in, bytes and core events out."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from gateway.backends.llm.openai_faults import Waiting
from gateway.core.errors import Fault
from gateway.core.types import Delta, Deltas, Message, Metered, OpenAIPayload
from gateway.core.values import quick_value


class Stream(Protocol):
    """Reads of one streamed answer in, its events out.

    `is_done`: the protocol's own end of the stream has come.
    """

    is_done: bool

    def feed(self, read: bytes) -> Iterable[Delta | Deltas | Metered]:
        """The events completed by this read, to be used up before the next is fed. Raises `BackendError`."""
        ...

    def end(self) -> Iterable[Delta | Deltas | Metered]:
        """The body has ended: what is still to be said (where the body's end is the protocol's own end of a stream).

        Raises `BackendError` BROKEN if that was too early.
        """
        ...


@quick_value
class Encoded:
    """A request ready to send, and how its answer is read.

    Attributes:
        path: behind the endpoint's base URL.
        message: a whole answer's body as core event; raises `BackendError` for what is none.
        stream: makes the reader of a streamed answer; None where a whole one was asked for.
    """

    path: str
    body: bytes
    message: Callable[[bytes], Message]
    stream: Callable[[], Stream] | None = None


class Codec(Protocol):
    """One protocol's two-way form. Implementations hold only their options.

    `probe_path` is what a GET of, behind the base URL, tells whether the endpoint is there.
    """

    probe_path: str

    def headers(self, api_key: str | None) -> Mapping[str, str]:
        """What goes with every request, the key included."""
        ...

    def encode(self, payload: OpenAIPayload, model: str) -> Encoded:
        """The caller's body for the endpoint's model `model`. Raises `BackendError`.

        UNSUPPORTED where the protocol lacks the API, or a field that changes the answer's meaning; REFUSED_INPUT for
        what cannot be written.
        """
        ...

    def fault(self, status: int, body: bytes, waiting: Waiting) -> Fault:
        """The fault behind a status that is not 200."""
        ...
