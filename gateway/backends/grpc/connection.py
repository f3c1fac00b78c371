"""One HTTP/2 connection to a gRPC server: many calls at a time, on asyncio's protocol interface.

A call that is small goes out as one write, at once. Larger ones take turns as the windows of the server and the
socket's buffer allow, without being copied. A few lines longer than others: its windows and its end are one story.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, cast

from gateway.backends.grpc import http2
from gateway.backends.grpc.headers import GrpcError, RequestHeaders, reset_error
from gateway.backends.grpc.http2 import ErrorCode, Http2Error
from gateway.backends.grpc.stream import SETTLE_S, WINDOW, Stream

READ_BYTES: Final = 256 * 1024  # in one read, of all that is not a large message
MAX_FRAME: Final = 1024 * 1024  # of the server's: fewer, larger parts
REGRANT: Final = 2**30  # received on the whole connection before its window, the largest there is, is made whole again
WHOLE_BYTES: Final = 64 * 1024  # a request up to this size is copied into one write
TURN_BYTES: Final = 256 * 1024  # what one large request may send before another has its turn
BUFFER_BYTES: Final = 512 * 1024  # written but not yet taken by the kernel
SILENCE_S: Final = 20.0  # without a byte from the server, with calls in flight, before it is asked whether it lives
# Triton (and every gRPC server by default) counts pings within 300 s as strikes unless it sent something of a call
# in between, and hangs up at the third.
PING_APART_S: Final = 310.0
PING_ANSWER_S: Final = 5.0
VANISHED_MS: Final = 5_000  # unanswered bytes for so long, and the kernel gives the connection up (TCP_USER_TIMEOUT)
MAX_STREAM_ID: Final = 2**31 - 1


class Connection(asyncio.BufferedProtocol):
    """A connection; `ready` is set once the server has said what it takes (its SETTINGS).

    Args:
        authority: what the server is called in requests.
        max_message: bytes that one message of an answer may have.
        on_unusable: called once, when no new call may be started here any more; calls in flight may go on.
    """

    def __init__(self, authority: bytes, *, max_message: int, on_unusable: Callable[["Connection"], None]) -> None:
        self.is_usable = True
        self.is_closed = False
        self.failure = "the connection was closed"  # why it ended, in words
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._requests = RequestHeaders(authority)
        self._max_message = max_message
        self._on_unusable = on_unusable
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._reader = http2.FrameReader(MAX_FRAME)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._place: memoryview | None = None  # where the last read went, if not there
        self._answers = http2.HeaderDecoder()
        self._streams: dict[int, Stream] = {}
        self._next_id = 1
        self._sending: deque[Stream] = deque()  # those with something unsent, in the order of their turns
        self._waiting: deque[asyncio.Future[None]] = deque()  # calls for which there is no room
        self._max_streams = MAX_STREAM_ID
        self._send_window = http2.DEFAULT_WINDOW
        self._stream_window = http2.DEFAULT_WINDOW
        self._max_frame = http2.DEFAULT_MAX_FRAME
        self._received = 0  # bytes of data since the connection's window was last made whole
        self._heard_at = self._loop.time()
        self._may_ping_at = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    # --- the channel's side -----------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a call can be started now."""
        return self.is_usable and len(self._streams) < self._max_streams

    @property
    def is_queued_for(self) -> bool:
        """Whether calls wait for room."""
        return bool(self._waiting)

    @property
    def is_free(self) -> bool:
        """Whether a call can be started now without passing others."""
        return self.is_usable and not self._waiting and len(self._streams) < self._max_streams

    async def room(self) -> None:
        """Return when a call may find room, or when the connection has become unusable; first come, first served."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self._admit()  # the room that was for us is another's
            raise

    def start(
        self,
        path: bytes,
        parts: Sequence[bytes | memoryview],
        *,
        deadline: float,
        is_unary: bool,
        metadata: bytes,
    ) -> Stream:
        """Begin a call, for which there must be room: `parts` are its messages with their prefixes, all in order.

        `metadata` are headers, encoded.
        """
        stream = Stream(self, is_unary=is_unary, max_message=self._max_message, deadline=deadline)
        stream.id = self._next_id
        self._next_id += 2
        if self._next_id > MAX_STREAM_ID:
            self._retire()
        stream.send_window = self._stream_window
        self._streams[stream.id] = stream
        if self._alarm is None:
            self._heard_at = self._loop.time()
            self._alarm = self._loop.call_later(SILENCE_S, self._watch)
        # The server may hear of an end only through us (see `SETTLE_S`); its own deadline is for when we are gone.
        block = self._requests.block(path, int((deadline - self._loop.time() + SETTLE_S) * 1e6), metadata)
        size = sum(map(len, parts))
        is_whole = size <= min(WHOLE_BYTES, self._max_frame, self._send_window, stream.send_window)
        is_whole = is_whole and not self._is_paused and not self._sending and len(block) <= self._max_frame
        if is_whole:
            self._send_whole(stream, block, parts, size)
        else:
            self._write(http2.header_frames(stream.id, block, ends_stream=False, max_frame=self._max_frame))
            stream.queue(parts)
            self._sending.append(stream)
            self._pump()
        return stream

    def close(self, text: str) -> None:
        """Close at once; calls in flight end as UNAVAILABLE."""
        self.failure = text
        if self._transport is not None:
            self._transport.abort()
        self._lose_all()

    # --- a stream's side --------------------------------------------------------------------------

    def grant(self, stream_id: int, size: int) -> None:
        """Let the server send `size` bytes more on a stream."""
        self._write(http2.window_update(stream_id, size))

    def leave(self, stream: Stream, code: ErrorCode) -> None:
        """Forget a stream. NO_ERROR: the server has ended it, and is told only if we have not sent all."""
        if self._streams.pop(stream.id, None) is None:
            return
        if code or not stream.has_sent_all:
            self._write(http2.rst_stream(stream.id, code))
        self._admit()
        if not self.is_usable and not self._streams:
            self.close("the connection was given up")

    # --- asyncio's side ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say who we are and what we take."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is none by inheritance
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        _watch_peer(self._transport.get_extra_info("socket"))
        ours = {
            http2.ENABLE_PUSH: 0,
            http2.INITIAL_WINDOW_SIZE: WINDOW,
            http2.MAX_FRAME_SIZE: MAX_FRAME,
            http2.MAX_HEADER_LIST_SIZE: http2.MAX_BLOCK,
        }
        opening = http2.window_update(0, http2.MAX_WINDOW - http2.DEFAULT_WINDOW)
        self._write(http2.PREFACE + http2.settings_frame(ours) + opening)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's form
        """Where the next read goes: to the place of a large message that is on its way, or to be looked through."""
        stream_id, left = self._reader.awaits
        stream = self._streams.get(stream_id) if left else None
        self._place = stream.place(left) if stream is not None else None
        return self._place or self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take what came, frame by frame."""
        self._heard_at = self._loop.time()
        is_placed = self._place is not None
        data = (self._place or self._buffer)[:nbytes]
        try:
            for kind, flags, stream_id, payload in self._reader.feed(data):
                if kind == http2.DATA:
                    self._on_data(flags, stream_id, payload, is_placed=is_placed)
                elif kind == http2.HEADERS:
                    self._on_headers(flags, stream_id, payload)
                else:
                    self._CONTROL[kind](self, flags, stream_id, payload)
                if self.is_closed:
                    return
        except Http2Error as error:
            self._write(http2.goaway(error.code))
            self.close(f"the server broke HTTP/2: {error}")

    def pause_writing(self) -> None:
        """The kernel does not take more now."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """It does again."""
        self._is_paused = False
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, expected or not."""
        if exc is not None and not self.is_closed:
            self.failure = f"the connection was lost: {exc}"
        self._lose_all()
        if not self.gone.done():
            self.gone.set_result(None)

    # --- frames -----------------------------------------------------------------------------------

    def _on_data(self, flags: int, stream_id: int, payload: memoryview, *, is_placed: bool) -> None:
        size = len(payload)
        self._may_ping_at = 0.0
        self._received += size
        if self._received >= REGRANT:
            self._write(http2.window_update(0, self._received))
            self._received = 0
        if flags & http2.PADDED:
            payload = http2.unpadded(payload)
        stream = self._stream(stream_id)
        if stream is not None:
            is_last = bool(flags & http2.END_STREAM)
            stream.take_data(payload, padding=size - len(payload), is_last=is_last, is_placed=is_placed)

    def _on_headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        self._may_ping_at = 0.0
        headers = self._answers.decode(bytes(payload))  # of a forgotten stream too: they change the table
        stream = self._stream(stream_id)
        if stream is not None:
            stream.take_head(headers, is_last=bool(flags & http2.END_STREAM))

    def _on_reset(self, _: int, stream_id: int, payload: memoryview) -> None:
        stream = self._stream(stream_id)
        if stream is not None:
            del self._streams[stream_id]
            stream.lose(reset_error(http2.word(payload)))
            self._admit()

    def _on_settings(self, flags: int, _: int, payload: memoryview) -> None:
        if flags & http2.ACK:
            return
        values = http2.settings(payload)
        self._max_frame = values.get(http2.MAX_FRAME_SIZE, self._max_frame)
        self._max_streams = values.get(http2.MAX_CONCURRENT_STREAMS, self._max_streams)
        window = values.get(http2.INITIAL_WINDOW_SIZE, self._stream_window)
        for stream in self._streams.values() if window != self._stream_window else ():
            stream.send_window = http2.widened(stream.send_window, window - self._stream_window)
        self._stream_window = window
        self._write(http2.frame_head(http2.SETTINGS, http2.ACK, 0, 0))
        if not self.ready.done():
            self.ready.set_result(None)
        self._admit()
        self._pump()

    def _on_ping(self, flags: int, _: int, payload: memoryview) -> None:
        if not flags & http2.ACK:
            self._write(http2.frame_head(http2.PING, http2.ACK, 0, len(payload)) + payload)

    def _on_goaway(self, _: int, __: int, payload: memoryview) -> None:
        """Calls that the server will not look at end now; the others go on, and the connection ends with the last."""
        last = http2.word(payload) & http2.MAX_WINDOW
        self._retire()
        for stream in [stream for stream in self._streams.values() if stream.id > last]:
            del self._streams[stream.id]
            stream.lose(GrpcError("UNAVAILABLE", "the server is going away", never_sent=True))
        if not self._streams:
            self.close("the server went away")

    def _on_window(self, _: int, stream_id: int, payload: memoryview) -> None:
        size = http2.word(payload) & http2.MAX_WINDOW
        if not stream_id:
            self._send_window = http2.widened(self._send_window, size)
        else:
            stream = self._stream(stream_id)
            if stream is None:
                return
            stream.send_window = http2.widened(stream.send_window, size)
        self._pump()

    # Of the class: bound methods in an object's own table are a cycle, which only a search for garbage would free.
    _CONTROL: ClassVar[Mapping[int, Callable[["Connection", int, int, memoryview], None]]] = {
        http2.RST_STREAM: _on_reset,
        http2.SETTINGS: _on_settings,
        http2.PING: _on_ping,
        http2.GOAWAY: _on_goaway,
        http2.WINDOW_UPDATE: _on_window,
    }

    def _stream(self, stream_id: int) -> Stream | None:
        """None for a stream that has ended on our side, about which the server did not know yet."""
        stream = self._streams.get(stream_id)
        if stream is None and (stream_id >= self._next_id or not stream_id % 2):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a frame for stream {stream_id}, which was never begun")
        return stream

    # --- inside -----------------------------------------------------------------------------------

    def _send_whole(self, stream: Stream, block: bytes, parts: Sequence[bytes | memoryview], size: int) -> None:
        """A small call in one write."""
        stream.mark_sent()
        stream.send_window -= size
        self._send_window -= size
        head = http2.frame_head(http2.HEADERS, http2.END_HEADERS, stream.id, len(block))
        self._write(b"".join((head, block, http2.frame_head(http2.DATA, http2.END_STREAM, stream.id, size), *parts)))

    def _pump(self) -> None:
        """Send what the windows and the socket take, in turns."""
        blocked: list[Stream] = []
        while self._sending and not self._is_paused and self._send_window > 0:
            stream = self._sending.popleft()
            if stream.is_ended:
                continue
            self._send_turn(stream)
            if not stream.has_sent_all:
                (self._sending if stream.send_window > 0 else blocked).append(stream)
        self._sending.extend(blocked)

    def _send_turn(self, stream: Stream) -> None:
        """Up to `TURN_BYTES` of one call, as frames that are written together."""
        left = min(TURN_BYTES, self._send_window, stream.send_window)
        frames: list[bytes | memoryview] = []
        sent = 0
        while left > 0 and not stream.has_sent_all:
            size, parts = stream.take_unsent(min(left, self._max_frame))
            left -= size
            sent += size
            flags = http2.END_STREAM if stream.has_sent_all else 0
            frames.append(http2.frame_head(http2.DATA, flags, stream.id, size))
            frames += parts
        stream.send_window -= sent
        self._send_window -= sent
        if frames and self._transport is not None:
            self._transport.writelines(frames)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self.is_closed:
            self._transport.write(data)

    def _admit(self) -> None:
        """Wake as many waiting calls as there is room for; all of them when they must look elsewhere."""
        room = self._max_streams - len(self._streams) if self.is_usable else len(self._waiting)
        while self._waiting and room > 0:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                room -= 1

    def _retire(self) -> None:
        """Take no new call."""
        if self.is_usable:
            self.is_usable = False
            self._on_unusable(self)
            self._admit()

    def _lose_all(self) -> None:
        self.is_closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(self.failure))
            self.ready.exception()  # nobody may be waiting any more
        self._retire()
        streams = list(self._streams.values())
        self._streams.clear()
        self._sending.clear()
        for stream in streams:
            stream.lose(GrpcError("UNAVAILABLE", self.failure))

    def _watch(self) -> None:
        """With calls in flight and long silence, ask whether the server lives."""
        self._alarm = None
        if not self._streams:
            return  # the next call sets the alarm again
        now = self._loop.time()
        if now < max(self._heard_at + SILENCE_S, self._may_ping_at):
            self._alarm = self._loop.call_at(max(self._heard_at, now - SILENCE_S / 2) + SILENCE_S, self._watch)
            return
        self._may_ping_at = now + PING_APART_S
        self._write(http2.frame_head(http2.PING, 0, 0, 8) + bytes(8))
        self._alarm = self._loop.call_later(PING_ANSWER_S, self._judge, now)

    def _judge(self, asked_at: float) -> None:
        if self._heard_at < asked_at:
            self.close("the server does not answer")
        else:
            self._watch()


def _watch_peer(connected: socket.socket | None) -> None:
    """Have the kernel find a peer that vanished; a Unix socket has no such peer."""
    if connected is None or connected.family == socket.AF_UNIX or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    with contextlib.suppress(OSError):  # where the kernel has no such thing, deadlines are left
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_MS)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, VANISHED_MS // 1000)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, VANISHED_MS // 1000)
