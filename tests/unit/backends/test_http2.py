"""HTTP/2 as bytes: what comes out of any pieces, and what is refused."""

import contextlib
import itertools

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.backends.grpc import http2
from gateway.backends.grpc.http2 import ErrorCode, FrameReader, HeaderDecoder, Http2Error

MAX_FRAME = 20_000
PADDED_DATA = http2.PADDED | http2.END_STREAM


def frame(kind, flags=0, stream=0, payload=b""):
    return http2.frame_head(kind, flags, stream, len(payload)) + payload


def read(*pieces):
    """Frames with their payloads; of each stream's data what came in all and the flags; an error, if there is one."""
    reader, frames, bodies = FrameReader(MAX_FRAME), [], {}
    try:
        for piece in pieces:
            for kind, flags, stream, payload in reader.feed(piece):
                if kind == http2.DATA and not flags & http2.PADDED:
                    body, ends = bodies.get(stream, (b"", 0))
                    bodies[stream] = (body + bytes(payload), ends | flags)
                else:
                    frames.append((kind, flags, stream, bytes(payload)))
    except Http2Error as error:
        frames.append(error.code)
    return frames, bodies


RECORDED = b"".join(
    (
        frame(http2.SETTINGS, payload=bytes(12)),
        frame(http2.HEADERS, http2.END_HEADERS, 1, b"block"),
        frame(http2.DATA, 0, 1, bytes(range(256)) * 40),
        frame(99, 0xFF, 7, b"unknown"),
        frame(http2.DATA, PADDED_DATA, 3, b"\x02body\x00\x00"),
        frame(http2.DATA, 0, 1),
        frame(http2.HEADERS, http2.END_STREAM, 1, b"one "),
        frame(http2.CONTINUATION, 0, 1, b"two "),
        frame(http2.CONTINUATION, http2.END_HEADERS, 1, b"three"),
        frame(http2.HEADERS, http2.END_HEADERS | http2.PADDED | http2.WITH_PRIORITY, 3, b"\x03pppppblock\x00\x00\x00"),
        frame(http2.PRIORITY, 0, 3, bytes(5)),
        frame(http2.PING, 0, 0, b"12345678"),
        frame(http2.RST_STREAM, 0, 3, bytes(4)),
        frame(http2.WINDOW_UPDATE, 0, 0, bytes(4)),
        frame(http2.DATA, http2.END_STREAM, 5, b"end"),
        frame(http2.GOAWAY, 0, 0, bytes(8) + b"why"),
    )
)
FRAMES = [
    (http2.SETTINGS, 0, 0, bytes(12)),
    (http2.HEADERS, http2.END_HEADERS, 1, b"block"),
    (http2.DATA, PADDED_DATA, 3, b"\x02body\x00\x00"),
    (http2.HEADERS, http2.END_STREAM, 1, b"one two three"),
    (http2.HEADERS, http2.END_HEADERS | http2.PADDED | http2.WITH_PRIORITY, 3, b"block"),
    (http2.PING, 0, 0, b"12345678"),
    (http2.RST_STREAM, 0, 3, bytes(4)),
    (http2.WINDOW_UPDATE, 0, 0, bytes(4)),
    (http2.GOAWAY, 0, 0, bytes(8) + b"why"),
]
BODIES = {1: (bytes(range(256)) * 40, 0), 5: (b"end", http2.END_STREAM)}


@given(st.lists(st.integers(0, len(RECORDED)), max_size=30))
def test_any_pieces_give_the_same_frames(cuts):
    edges = [0, *sorted(cuts), len(RECORDED)]
    pieces = [RECORDED[a:b] for a, b in itertools.pairwise(edges)]
    assert read(*pieces) == (FRAMES, BODIES)


def test_single_octets():
    assert read(*(RECORDED[at : at + 1] for at in range(len(RECORDED)))) == (FRAMES, BODIES)


def test_data_is_passed_on_before_its_frame_is_whole_and_without_a_copy():
    reader = FrameReader(MAX_FRAME)
    piece = frame(http2.DATA, http2.END_STREAM, 1, bytes(100))[:50]
    ((kind, flags, stream, part),) = reader.feed(piece)
    assert (kind, flags, stream, len(part)) == (http2.DATA, 0, 1, 41)
    assert part.obj is piece
    ((_, flags, _, part),) = reader.feed(bytes(59))
    assert (flags, len(part)) == (http2.END_STREAM, 59)


@pytest.mark.parametrize(
    ("hostile", "code"),
    [
        (frame(http2.DATA, 0, 1, bytes(MAX_FRAME + 1)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(77, 0, 0, bytes(MAX_FRAME + 1)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(http2.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.HEADERS, http2.END_HEADERS, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.HEADERS, http2.END_HEADERS | http2.PADDED, 1, b"\x05ab"), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.HEADERS, http2.END_HEADERS | http2.PADDED, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.HEADERS, http2.END_HEADERS | http2.WITH_PRIORITY, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(http2.HEADERS, 0, 1) + frame(http2.DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.HEADERS, 0, 1) + frame(http2.HEADERS, http2.END_HEADERS, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.HEADERS, 0, 1) + frame(http2.CONTINUATION, 4, 3, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.HEADERS, 0, 1) + frame(http2.CONTINUATION, 0, 1), ErrorCode.ENHANCE_YOUR_CALM),
        (frame(http2.HEADERS, 0, 1) + frame(http2.CONTINUATION, 0, 1, bytes(9999)) * 7, ErrorCode.ENHANCE_YOUR_CALM),
        (frame(http2.CONTINUATION, 4, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.PRIORITY, 0, 1, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(http2.RST_STREAM, 0, 1, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(http2.RST_STREAM, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(http2.SETTINGS, 0, 1, bytes(6)), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(http2.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(http2.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(http2.WINDOW_UPDATE, 0, 1, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_what_breaks_the_protocol_is_refused_after_what_came_before_it(monkeypatch, hostile, code):
    monkeypatch.setattr(http2, "MAX_BLOCK", 64 * 1024)
    good = frame(http2.PING, 0, 0, bytes(8))
    assert read(good + hostile)[0] == [(http2.PING, 0, 0, bytes(8)), code]


@given(st.binary(max_size=300))
def test_nothing_but_our_error_comes_of_noise(noise):
    read(noise, noise)


def test_settings():
    values = {http2.MAX_FRAME_SIZE: 16_384, http2.INITIAL_WINDOW_SIZE: 2**31 - 1, 0xFE03: 1}
    sent = http2.settings_frame(values)
    assert http2.settings(memoryview(sent)[9:]) == values
    for wrong in ({http2.MAX_FRAME_SIZE: 1}, {http2.MAX_FRAME_SIZE: 2**24}, {http2.INITIAL_WINDOW_SIZE: 2**31}):
        with pytest.raises(Http2Error):
            http2.settings(memoryview(http2.settings_frame(wrong))[9:])


def test_windows_widen_within_their_bound():
    assert http2.widened(-5, 10) == 5
    assert http2.widened(5, -10) == -5
    for window, size in ((0, 0), (1, http2.MAX_WINDOW)):
        with pytest.raises(Http2Error):
            http2.widened(window, size)


@pytest.mark.parametrize("size", [0, 99, 100, 101, 250])
def test_a_block_longer_than_a_frame_is_continued(size):
    sent = http2.header_frames(3, bytes(size), ends_stream=True, max_frame=100)
    frames, _ = read(sent)
    ((kind, flags, stream, block),) = frames
    assert (kind, flags & http2.END_STREAM, stream, block) == (http2.HEADERS, http2.END_STREAM, 3, bytes(size))
    assert len(sent) == size + 9 * max(1, -(-size // 100))


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 254, 255, 20_000])
def test_our_headers_are_read_by_others(size):
    block = http2.NO_TABLE + http2.POST + http2.HTTP + http2.literal(b"name", b"v" * size)
    fields = hpack.Decoder().decode(block, raw=True)
    assert fields == [(b":method", b"POST"), (b":scheme", b"http"), (b"name", b"v" * size)]


NAMES = st.sampled_from([b":status", b"content-type", b"grpc-status", b"grpc-message", b"x"])
FIELDS = st.lists(
    st.tuples(NAMES, st.sampled_from([b"200", b"0", b"5", b"application/grpc", b"text \xff"])), max_size=4
)


@given(st.lists(FIELDS, max_size=12), st.integers(0, 200))
def test_blocks_are_read_right_whatever_the_table_does(blocks, table_size):
    encoder, decoder = hpack.Encoder(), HeaderDecoder()
    for number, fields in enumerate(blocks):
        if number == 6:
            encoder.header_table_size = table_size  # entries fall out, and indices mean others
        assert decoder.decode(encoder.encode(fields, huffman=bool(number % 2))) == dict(fields)


def test_an_answer_that_only_points_into_the_table_is_not_decoded_twice():
    encoder, decoder = hpack.Encoder(), HeaderDecoder()
    fields = [(b":status", b"200"), (b"content-type", b"application/grpc")]
    decoder.decode(encoder.encode(fields))
    block = encoder.encode(fields)
    assert decoder.decode(block) is decoder.decode(block)


@pytest.mark.parametrize(
    "block", [b"\xff\xff\xff\xff\xff\xff", b"\xbe", b"\x40\x05ab", b"\x80", b"\x3f\xff\xff\xff\x0f"]
)
def test_unreadable_headers(block):
    with pytest.raises(Http2Error) as caught:
        HeaderDecoder().decode(block)
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR


@given(st.binary(max_size=60))
def test_nothing_but_our_error_comes_of_noisy_headers(noise):
    decoder = HeaderDecoder()
    with contextlib.suppress(Http2Error):
        decoder.decode(noise)
        decoder.decode(noise)


def test_a_block_that_unfolds_is_refused(monkeypatch):
    monkeypatch.setattr(http2, "MAX_BLOCK", 64 * 1024)
    encoder = hpack.Encoder()
    big = encoder.encode([(b"x", b"v" * 4000)])
    decoder = HeaderDecoder()
    decoder.decode(big)
    with pytest.raises(Http2Error):
        decoder.decode(b"\xbe" * 20)
