"""One gRPC call on a connection: its messages out as far as windows allow, its messages in one by one."""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from struct import Struct
from typing import Final, Protocol

import numpy as np

from gateway.backends.grpc.headers import GrpcError, http_error, status_error
from gateway.backends.grpc.http2 import ErrorCode, Http2Error

WINDOW: Final = 1024 * 1024  # bytes that a server may send of one call unread
MAX_MESSAGE: Final = 2**31 - 1 - WINDOW  # the window opens for a whole message, and no window may be larger than 2^31-1
# A request that is cancelled, or whose time is over, while Triton takes it on or sends its answer can crash Triton
# (2.51: signal 11 after some thousands). So a call is given this long, within which most that are as short have ended,
# before the server hears that nobody waits for it.
SETTLE_S: Final = 0.02
LARGE: Final = 64 * 1024  # bytes of a message still to come: worth a read of their own, straight to their place
PREFIX: Final = Struct(">BL")  # of a message: whether compressed, and its length
_PREFIX_BYTES: Final = PREFIX.size


Message = bytes | memoryview
"""One that has come, to be read only."""


class Wire(Protocol):
    """What a stream needs of its connection."""

    def grant(self, stream_id: int, size: int) -> None:
        """Let the server send `size` bytes more."""
        ...

    def leave(self, stream: "Stream", code: ErrorCode) -> None:
        """Forget the stream. NO_ERROR: the server has ended it, and is told only if we have not sent all."""
        ...


class Stream:
    """One call. The connection feeds it; the caller awaits `only` or `next_message`, then calls `end`, always.

    A server may be ahead of the reader by `WINDOW` bytes and the one message that is read next: the window opens again
    for each message when it becomes the next, for a large one as soon as its length is known.
    """

    __slots__ = (
        "_body",
        "_error",
        "_filled",
        "_granted",
        "_has_head",
        "_is_quitting",
        "_is_unary",
        "_loop",
        "_max_message",
        "_messages",
        "_prefix",
        "_sent_at",
        "_timer",
        "_to_grant",
        "_unsent",
        "_waiter",
        "_wire",
        "has_sent_all",
        "id",
        "is_ended",
        "send_window",
    )

    def __init__(self, wire: Wire, *, is_unary: bool, max_message: int, deadline: float) -> None:
        self.id = 0
        self.is_ended = False
        self.send_window = 0
        self.has_sent_all = False
        self._wire = wire
        self._sent_at = 0.0
        self._is_quitting = False  # nobody waits any more, and the server is yet to be told
        self._is_unary = is_unary
        self._max_message = max_message
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[memoryview] = deque()
        self._messages: deque[Message] = deque()
        self._prefix = b""  # of the message that is on its way, as far as it has come
        self._body: memoryview | None = None  # the place of that message, once its length is known
        self._filled = 0  # bytes that have come of it
        self._granted = WINDOW  # bytes that the server may still send
        self._to_grant = 0  # bytes it may send but has not been told of
        self._has_head = False
        self._error: GrpcError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer = self._loop.call_at(deadline, self._expire)

    # --- the caller's side ------------------------------------------------------------------------

    async def only(self) -> Message:
        """The one message of a unary call, once its status has come. Raises `GrpcError`."""
        if not self.is_ended and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error.again()
        if len(self._messages) != 1:
            raise GrpcError("INTERNAL", f"{len(self._messages)} messages in the answer to a unary call")
        return self._messages[0]

    async def next_message(self) -> Message | None:
        """The next message; None after the last one. Raises `GrpcError` once all that came has been read."""
        while not self._messages:
            if self._error is not None:
                raise self._error.again()
            if self.is_ended:
                return None
            await self._wait()
        message = self._messages.popleft()
        if self._messages:
            self._account(len(self._messages[0]))
        elif self._body is not None:
            self._account(len(self._body))
        return message

    def end(self) -> None:
        """The caller is done: a server that is not, is told so once it has had the request for `SETTLE_S`."""
        if self._is_quitting:
            return
        self._timer.cancel()
        if not self.is_ended:
            self._quit()

    # --- the connection's side --------------------------------------------------------------------

    def take_head(self, headers: Mapping[bytes, bytes], *, is_last: bool) -> None:
        """Headers: the first ones, or trailers."""
        if self._has_head or b"grpc-status" in headers:
            if not is_last:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "headers in the middle of an answer")
            self._finish(status_error(headers))
            return
        status = headers.get(b":status", b"")
        if len(status) == 3 and status[0] == ord("1"):  # noqa: PLR2004 - 1xx: an interim answer, the real one follows
            return
        self._has_head = True
        if status != b"200" or not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            self.fail(http_error(status))
        elif is_last:
            self._finish(status_error(headers))

    def place(self, size: int) -> memoryview | None:
        """Where the next `size` bytes of the body may be read to, if they are of a large message; less may come."""
        if self._body is None or self._is_quitting:
            return None
        size = min(size, len(self._body) - self._filled)
        return self._body[self._filled : self._filled + size] if size >= LARGE else None

    def take_data(self, part: memoryview, *, padding: int, is_last: bool, is_placed: bool = False) -> None:
        """A part of the body; `padding` bytes that came with it count for the window alone.

        It is copied, unless `is_placed`: then it lies where `place` said.
        """
        if not self._has_head:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "data before headers")
        size = len(part)
        self._granted -= size + padding
        if self._granted < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window allows")
        if padding:
            self._grant(padding)
        if is_placed:
            self._fill(size)
        elif size and not self._is_quitting and not self._take_whole(part):
            self._take_part(part)
        if is_last and not self.is_ended:
            self.fail(GrpcError("INTERNAL", "the answer ended without a status"))

    def queue(self, parts: Iterable[bytes | memoryview]) -> None:
        """What is to be sent as windows allow, in parts."""
        self._unsent.extend(map(memoryview, parts))

    def take_unsent(self, size: int) -> tuple[int, list[memoryview]]:
        """Up to `size` bytes of what is to be sent, without copying: how many, and the parts."""
        parts: list[memoryview] = []
        taken = 0
        while self._unsent and taken < size:
            part = self._unsent.popleft()
            if len(part) > size - taken:
                self._unsent.appendleft(part[size - taken :])
                part = part[: size - taken]
            taken += len(part)
            parts.append(part)
        if not self._unsent:
            self.mark_sent()
        return taken, parts

    def mark_sent(self) -> None:
        """All of the request has been written."""
        self.has_sent_all = True
        self._sent_at = self._loop.time()

    def fail(self, error: GrpcError, code: ErrorCode = ErrorCode.CANCEL) -> None:
        """End with this error, and tell the server."""
        if not self.is_ended:
            self._finish(error, code)

    def lose(self, error: GrpcError) -> None:
        """End with this error where there is nobody left to be told."""
        self.is_ended = True
        self._end_with(error)

    # --- inside -----------------------------------------------------------------------------------

    def _take_whole(self, part: memoryview) -> bool:
        """Take a part that is one good message and no more, as most are; false for any other."""
        if self._body is not None or self._prefix or len(part) < _PREFIX_BYTES:
            return False
        compressed, size = PREFIX.unpack_from(part)
        if compressed or size != len(part) - _PREFIX_BYTES or size > self._max_message:
            return False
        if not self._messages:
            self._account(size)
        self._came(bytes(part[_PREFIX_BYTES:]))
        return True

    def _take_part(self, part: memoryview) -> None:
        """Take what may be a part of a message, or of several."""
        while part:
            if self._body is None:
                missing = _PREFIX_BYTES - len(self._prefix)
                self._prefix += part[:missing]
                part = part[missing:]
                self._body = self._begun() if len(self._prefix) == _PREFIX_BYTES else None
                if self._body is None:
                    return
            at = self._filled
            taken = part[: len(self._body) - at]
            self._body[at : at + len(taken)] = taken
            part = part[len(taken) :]
            self._fill(len(taken))

    def _begun(self) -> memoryview | None:
        """The place of the message whose prefix has come; None if that ends the call."""
        compressed, size = PREFIX.unpack(self._prefix)
        if compressed:
            self.fail(GrpcError("INTERNAL", "a compressed message, which was not asked for"))
            return None
        if size > self._max_message:
            text = f"CLIENT: Received message larger than max ({size} vs. {self._max_message})"
            self.fail(GrpcError("RESOURCE_EXHAUSTED", text))
            return None
        try:
            place = np.empty(size, np.uint8).data
        except MemoryError:
            self.fail(GrpcError("RESOURCE_EXHAUSTED", f"CLIENT: no memory for a message of {size} bytes"))
            return None
        if not self._messages:
            self._account(size)
        return place

    def _fill(self, size: int) -> None:
        """So much more of the message has come."""
        body = self._body
        self._filled += size
        if body is not None and self._filled == len(body):
            self._prefix, self._body, self._filled = b"", None, 0
            self._came(body.toreadonly())

    def _came(self, message: Message) -> None:
        self._messages.append(message)
        if not self._is_unary:
            self._wake()

    def _account(self, body_size: int) -> None:
        """The message of this size is the next to be read: what it takes of the window is given back."""
        self._grant(_PREFIX_BYTES + body_size)

    def _grant(self, size: int) -> None:
        self._to_grant += size
        if self._to_grant >= WINDOW // 2 and not self.is_ended:
            self._wire.grant(self.id, self._to_grant)
            self._granted += self._to_grant
            self._to_grant = 0

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        if not self.is_ended:
            self._error = GrpcError("DEADLINE_EXCEEDED", "Deadline Exceeded")
            self._quit()
            self._wake()

    def _quit(self) -> None:
        """What comes now is for nobody. A request that is not all sent is none yet, and ends at once."""
        self._timer.cancel()  # one that has run keeps what it ran, and so us, who have it
        self._is_quitting = True
        self._body = None
        left_s = self._sent_at + SETTLE_S - self._loop.time() if self.has_sent_all else 0
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._drop)
        else:
            self._drop()

    def _drop(self) -> None:
        self._timer.cancel()
        if not self.is_ended:
            self._finish(None, ErrorCode.CANCEL)

    def _finish(self, error: GrpcError | None, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        self.is_ended = True
        self._end_with(error)
        self._wire.leave(self, code)

    def _end_with(self, error: GrpcError | None) -> None:
        if not self._is_quitting:
            self._error = error
        self._body = None
        self._unsent.clear()
        self._wake()
