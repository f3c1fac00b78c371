"""HTTP/2 (RFC 9113) as bytes: frames in, frames out, blocks of headers (RFC 7541). No I/O, no clock.

Only what a client needs: no push, no priorities, no table of headers of our own (every request spells its few headers
out, in a block built once for each path).
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from struct import Struct
from typing import Final, cast

import hpack

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_WINDOW: Final = 2**31 - 1
DEFAULT_WINDOW: Final = 65_535
DEFAULT_MAX_FRAME: Final = 16_384
MAX_MAX_FRAME: Final = 2**24 - 1
# One block of headers, packed and unpacked. A longer one ends the connection, and all calls on it: so it must have room
# for the longest text that a model can make an error of, a whole input of 32 MiB, quoted (three bytes for one).
MAX_BLOCK: Final = 128 * 1024 * 1024
MEMO_BLOCKS: Final = 64
HEAD_BYTES: Final = 9

# Kinds of frames: plain integers, because every frame is compared with them.
DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

# Flags.
ACK: Final = 1  # of SETTINGS and PING
END_STREAM: Final = 1  # of DATA and HEADERS
END_HEADERS: Final = 4
PADDED: Final = 8
WITH_PRIORITY: Final = 32
_NOT_PLAIN: Final = END_HEADERS | PADDED | WITH_PRIORITY
_PLAIN: Final = (0, END_HEADERS)  # of these, what DATA and HEADERS have that are their payload and no more

# Settings.
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

_FRAME = Struct(">HBBBL")  # the length in 16 + 8 bits, kind, flags, stream
_WORD = Struct(">L")
_SETTING = Struct(">HL")
_FIXED_LENGTHS: Final = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_OF_A_STREAM: Final = frozenset((DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION))
_OF_THE_CONNECTION: Final = frozenset((SETTINGS, PING, GOAWAY))

Frame = tuple[int, int, int, memoryview]  # kind, flags, stream, payload


class ErrorCode(IntEnum):
    """Why a stream or a connection was ended."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Http2Error(Exception):
    """The server broke the protocol: the connection is of no more use. `code` is what it is told."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class FrameReader:
    """Bytes in pieces of any size -> frames.

    A frame of data comes out in parts as they arrive (its flags with the last one), a padded one whole and with its
    padding; CONTINUATIONs are put together, so that HEADERS carry a whole block and nothing else; kinds that are not
    known are left out.

    Args:
        max_frame: the MAX_FRAME_SIZE that the server was told.
    """

    def __init__(self, max_frame: int) -> None:
        self._max_frame = max_frame
        self._held = bytearray()  # a frame's beginning
        self._needed = 0  # how long it must be before it can be read
        self._data_left = 0  # of the frame of data under way
        self._data_flags = 0
        self._data_stream = 0
        self._block: bytearray | None = None  # of HEADERS under way
        self._block_flags = 0
        self._block_stream = 0

    @property
    def awaits(self) -> tuple[int, int]:
        """The stream whose frame of data is on its way, and how much is still to come of that; nothing else is next."""
        return self._data_stream, self._data_left

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """The frames that `data` completes, whose payloads are parts of it.

        Raises `Http2Error` after those that came before the fault.
        """
        if self._held:
            self._held += data
            if len(self._held) < self._needed:
                return
            data = bytes(self._held)
            self._held.clear()
        view, unpack, most = memoryview(data), _FRAME.unpack_from, self._max_frame
        at, end = 0, len(data)
        while at < end:
            if self._data_left:
                part = view[at : at + self._data_left]
                at += len(part)
                self._data_left -= len(part)
                yield DATA, 0 if self._data_left else self._data_flags, self._data_stream, part
                continue
            if end - at < HEAD_BYTES:
                self._hold(view[at:], HEAD_BYTES)
                return
            high, low, kind, flags, stream = unpack(data, at)
            size = high << 8 | low
            past = at + HEAD_BYTES + size
            is_plain = kind <= HEADERS and flags & _NOT_PLAIN == _PLAIN[kind] and 0 < stream <= MAX_WINDOW
            if is_plain and past <= end and size <= most and self._block is None:
                yield kind, flags, stream, view[at + HEAD_BYTES : past]  # nearly every frame
                at = past
                continue
            if self._begins_data(kind, flags, stream, size):
                at += HEAD_BYTES
                continue
            if past > end:
                self._hold(view[at:], HEAD_BYTES + size)
                return
            frame = self._whole(kind, flags, stream & MAX_WINDOW, view[at + HEAD_BYTES : past])
            at = past
            if frame is not None:
                yield frame

    def _hold(self, rest: memoryview, needed: int) -> None:
        self._held += rest
        self._needed = needed

    def _begins_data(self, kind: int, flags: int, stream: int, size: int) -> bool:
        """Check a frame's head; whether it is data that can be passed on in parts."""
        if size > self._max_frame:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
        if self._block is not None and (kind != CONTINUATION or stream & MAX_WINDOW != self._block_stream):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "another frame within a block of headers")
        if kind != DATA or flags & PADDED or not size or not stream:
            return False
        self._data_left, self._data_flags, self._data_stream = size, flags, stream & MAX_WINDOW
        return True

    def _whole(self, kind: int, flags: int, stream: int, payload: memoryview) -> Frame | None:
        _check(kind, stream, len(payload))
        if kind == HEADERS:
            if flags & PADDED:
                payload = unpadded(payload)
            if flags & WITH_PRIORITY:
                if len(payload) < _FIXED_LENGTHS[PRIORITY]:
                    raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for their priority")
                payload = payload[_FIXED_LENGTHS[PRIORITY] :]
            if flags & END_HEADERS:
                return HEADERS, flags, stream, payload
            self._block, self._block_flags, self._block_stream = bytearray(payload), flags, stream
            return None
        if kind == CONTINUATION:
            return self._continued(flags, payload)
        return None if kind > CONTINUATION or kind == PRIORITY else (kind, flags, stream, payload)

    def _continued(self, flags: int, payload: memoryview) -> Frame | None:
        block = self._block
        if block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        block += payload
        if len(block) > MAX_BLOCK or (not payload and not flags & END_HEADERS):
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "an endless block of headers")
        if not flags & END_HEADERS:
            return None
        self._block = None
        return HEADERS, self._block_flags, self._block_stream, memoryview(bytes(block))


def _check(kind: int, stream: int, size: int) -> None:
    if size != _FIXED_LENGTHS.get(kind, size) or (kind == GOAWAY and size < 2 * _WORD.size):
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of kind {kind} with {size} bytes")
    if kind == SETTINGS and size % _SETTING.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS with {size} bytes")
    if (kind in _OF_A_STREAM and not stream) or (kind in _OF_THE_CONNECTION and stream):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a frame of kind {kind} on stream {stream}")
    if kind == PUSH_PROMISE:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a push, which was not allowed")


def unpadded(payload: memoryview) -> memoryview:
    """What a padded frame carries."""
    padding = payload[0] if payload else 0
    if padding >= len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - padding]


# --- what frames say ------------------------------------------------------------------------------


def word(payload: memoryview, at: int = 0) -> int:
    """A number of 32 bits."""
    value: int = _WORD.unpack_from(payload, at)[0]
    return value


def widened(window: int, size: int) -> int:
    """A window for what may be sent, `size` bytes wider. Raises `Http2Error` for one that cannot be."""
    if not size or window + size > MAX_WINDOW:
        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {window} bytes widened by {size}")
    return window + size


def settings(payload: memoryview) -> Mapping[int, int]:
    """The values of SETTINGS by number. Raises `Http2Error` for one that cannot be."""
    values = dict(_SETTING.iter_unpack(payload))
    if values.get(INITIAL_WINDOW_SIZE, 0) > MAX_WINDOW:
        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is too large")
    if not DEFAULT_MAX_FRAME <= values.get(MAX_FRAME_SIZE, DEFAULT_MAX_FRAME) <= MAX_MAX_FRAME:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of its range")
    return values


# --- frames to send -------------------------------------------------------------------------------


def frame_head(kind: int, flags: int, stream: int, size: int) -> bytes:
    """The nine bytes before a payload of `size` bytes."""
    return _FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream)


def settings_frame(values: Mapping[int, int]) -> bytes:
    """SETTINGS."""
    payload = b"".join(_SETTING.pack(number, value) for number, value in values.items())
    return frame_head(SETTINGS, 0, 0, len(payload)) + payload


def window_update(stream: int, size: int) -> bytes:
    """Allow the server `size` bytes more, on stream 0 for the whole connection."""
    return frame_head(WINDOW_UPDATE, 0, stream, _WORD.size) + _WORD.pack(size)


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    """End one stream."""
    return frame_head(RST_STREAM, 0, stream, _WORD.size) + _WORD.pack(code)


def goaway(code: ErrorCode) -> bytes:
    """The last word before a connection is closed by us; no stream of the server's was taken."""
    return frame_head(GOAWAY, 0, 0, 2 * _WORD.size) + _WORD.pack(0) + _WORD.pack(code)


def header_frames(stream: int, block: bytes, *, ends_stream: bool, max_frame: int) -> bytes:
    """HEADERS, with CONTINUATIONs where the block is longer than a frame."""
    flags = END_STREAM if ends_stream else 0
    if len(block) <= max_frame:
        return frame_head(HEADERS, flags | END_HEADERS, stream, len(block)) + block
    frames = [frame_head(HEADERS, flags, stream, max_frame), block[:max_frame]]
    for at in range(max_frame, len(block), max_frame):
        part = block[at : at + max_frame]
        flags = 0 if at + max_frame < len(block) else END_HEADERS
        frames += frame_head(CONTINUATION, flags, stream, len(part)), part
    return b"".join(frames)


# --- blocks of headers ----------------------------------------------------------------------------

# The first thing that a block of ours may say: "my table is empty", so that no size the server names is too small.
NO_TABLE: Final = b"\x20"
POST: Final = b"\x83"  # :method: POST, by its index in the static table
HTTP: Final = b"\x86"  # :scheme: http


def literal(name: bytes, value: bytes) -> bytes:
    """One header, spelled out, for no table."""
    return b"".join((b"\x00", _size(len(name)), name, _size(len(value)), value))


def _size(size: int) -> bytes:
    """An integer with a prefix of 7 bits."""
    if size < 0x7F:  # noqa: PLR2004 - all bits of the prefix: what comes above follows
        return bytes((size,))
    size -= 0x7F
    octets = bytearray((0x7F,))
    while size > 0x7F:  # noqa: PLR2004 - 7 bits in each octet
        octets.append(size & 0x7F | 0x80)
        size >>= 7
    octets.append(size)
    return bytes(octets)


class HeaderDecoder:
    """Blocks from the server, in the order in which they come (they share one table).

    A server's answers have the same few blocks over and over: those that only point into the table are remembered until
    the table changes.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MAX_BLOCK)
        self._memo: dict[bytes, Mapping[bytes, bytes]] = {}

    def decode(self, block: bytes) -> Mapping[bytes, bytes]:
        """Values by name; the last one, where a name comes more than once. Raises `Http2Error`."""
        known = self._memo.get(block)
        if known is not None:
            return known
        try:
            fields = self._decoder.decode(block, raw=True)
        except hpack.HPACKError as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, f"unreadable headers: {error}") from error
        headers = {bytes(name): bytes(value) for name, value in cast("Iterable[tuple[bytes, bytes]]", fields)}
        if not _only_points(block):
            self._memo.clear()
        elif len(self._memo) < MEMO_BLOCKS:
            self._memo[block] = headers
        return headers


def _only_points(block: bytes) -> bool:
    """Whether every octet is an index into the table (0xff would begin a longer one)."""
    return not block or (min(block) >= 0x80 and max(block) < 0xFF)  # noqa: PLR2004 - the bit of an index; see above
