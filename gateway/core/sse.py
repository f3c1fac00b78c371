"""Server-sent events, sans I/O: network reads in, the data payload of each event out, with its name where that matters.

Follows the WHATWG HTML standard, section 9.2.6 "Interpreting an event stream", except that `id` and `retry` are
ignored: nobody reconnects to a generated answer.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

BOM: Final = b"\xef\xbb\xbf"
DEFAULT_MAX_EVENT_BYTES: Final = 4 * 1024 * 1024  # an image answer in base64 fits; a runaway upstream does not

_END: Final = b"\n\n"
_FIRST: Final = b"data: {"
_LAST: Final = b"}\n\n"
_NEXT: Final = _LAST + _FIRST
_Event = TypeVar("_Event")


class SseTooLarge(Exception):
    """One event is over the bound. `complete` holds what the same read had completed before it."""

    def __init__(self, limit: int, complete: list[Any]) -> None:
        super().__init__(f"one event is over {limit} bytes")
        self.complete = complete


class SseParser:
    """Feed it reads cut anywhere; it gives back whole payloads.

    Works on bytes, so that a cut inside a UTF-8 character cannot hurt. All scanning is done by `bytes` methods.
    """

    def __init__(self, *, max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._tail = bytearray()  # line ends are "\n" here; never starts with one
        self._head: bytes | None = b""  # what may yet become a BOM; None once the stream has begun
        self._after_cr = False  # the last read ended in CR: an LF at the start of the next belongs to it

    @property
    def at_boundary(self) -> bool:
        """Whether nothing of an unfinished event has come: a stream that ends here ended cleanly."""
        return not self._tail and not self._head

    def takes_whole(self, read: bytes) -> bool:
        """Take a read that is nothing but whole events, each an object of JSON in one line; whether it was one.

        Nearly every read is, and may be passed on as it is.
        """
        is_plain = (
            not self._tail
            and not self._after_cr
            and read.startswith(_FIRST)
            and read.endswith(_LAST)
            and read.find(b"\r") < 0  # faster than `in`, which takes its word for a number first
            and read.count(b"\n") == 2 * read.count(_NEXT) + 2
        )
        if is_plain:
            self._head = None
        return is_plain

    def feed(self, read: bytes) -> list[bytes]:
        """The payloads completed by this read (several `data` lines joined by newlines), whatever their names.

        Raises `SseTooLarge` once an event is over the bound; the parser must not be used after.
        """
        return self._feed(read, _payload)

    def feed_named(self, read: bytes) -> list[tuple[bytes, bytes]]:
        """As `feed`, each payload behind its event's name (empty where it has none)."""
        return self._feed(read, _named)

    def _feed(self, read: bytes, interpret: Callable[[bytes], _Event | None]) -> list[_Event]:
        read = self._newlines(self._without_bom(read))
        if not read:
            return []
        tail = self._tail
        if not tail and read.endswith(_END):  # nearly every read is whole events
            return self._events(read[: -len(_END)], interpret)
        searched = max(0, len(tail) - 1)
        tail += read
        end = tail.rfind(_END, searched)
        if end < 0:
            self._trim([])
            return []
        block = bytes(tail[:end])
        del tail[: end + len(_END)]
        events = self._events(block, interpret)
        self._trim(events)
        return events

    def _events(self, block: bytes, interpret: Callable[[bytes], _Event | None]) -> list[_Event]:
        events: list[_Event] = []
        for text in block.split(_END):
            if len(text) > self._max_event_bytes and len(text.strip(b"\n")) > self._max_event_bytes:
                raise SseTooLarge(self._max_event_bytes, events)
            event = interpret(text)
            if event is not None:
                events.append(event)
        return events

    def _trim(self, events: list[Any]) -> None:
        """Drop blank lines before the next event and hold the bound on what has come of it."""
        tail = self._tail
        if tail[:1] == b"\n":
            tail[:] = tail.lstrip(b"\n")
        # A last newline may be half of the end mark, which is not part of the event.
        if len(tail) - tail.endswith(b"\n") > self._max_event_bytes:
            raise SseTooLarge(self._max_event_bytes, events)

    def _without_bom(self, read: bytes) -> bytes:
        if self._head is None:
            return read
        read = self._head + read
        if len(read) < len(BOM) and BOM.startswith(read):
            self._head = read
            return b""
        self._head = None
        return read.removeprefix(BOM)

    def _newlines(self, read: bytes) -> bytes:
        """The read with every CRLF, CR and LF as one LF, pairs cut between two reads included."""
        if not read:
            return read
        if self._after_cr and read[:1] == b"\n":
            read = read[1:]
            self._after_cr = False
            if not read:
                return read
        self._after_cr = read[-1:] == b"\r"
        if b"\r" in read:
            read = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return read


def _payload(text: bytes) -> bytes | None:
    """The data of one event, or None if it has none (comments, other fields)."""
    if text.startswith(b"data: ") and b"\n" not in text:  # what nearly every server sends
        return text[6:]
    event = _named(text)
    return None if event is None else event[1]


def _named(text: bytes) -> tuple[bytes, bytes] | None:
    """Name and data of one event, or None if it has no data. Of several names the last one counts."""
    name = b""
    lines: list[bytes] = []
    for line in text.split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"data":
            lines.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return (name, b"\n".join(lines)) if lines else None
