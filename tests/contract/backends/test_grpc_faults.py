"""Our gRPC client against servers that use the whole of HTTP/2, or break it."""

import asyncio
import socket

import hpack
import pytest

from gateway.backends.grpc import channel as grpc_channel
from gateway.backends.grpc import connection as grpc_connection
from gateway.backends.grpc import http2
from gateway.backends.grpc import stream as grpc_stream
from gateway.backends.grpc.channel import GrpcChannel, GrpcError
from gateway.backends.grpc.headers import MAX_DETAILS
from gateway.backends.grpc.http2 import ErrorCode
from tests.kit.raw_http2 import OK_END, OK_HEAD, RawServer, answer, frame, headers, message
from tests.kit.wait import until

LONG_S = 20.0
MAX_MESSAGE = grpc_stream.MAX_MESSAGE


def number(value):
    return value.to_bytes(4, "big")


def goaway(last, code=0):
    return frame(http2.GOAWAY, 0, 0, number(last) + number(code))


def call(channel, body=b"request", timeout_s=LONG_S):
    return asyncio.ensure_future(channel.unary(b"/test/any", body, timeout_s=timeout_s))


async def failure(awaitable):
    with pytest.raises(GrpcError) as caught:
        await awaitable
    return caught.value


async def outcome(reply, **settings):
    """What one call to a server that answers so comes to: the message, or the code and the text."""
    async with RawServer(reply, **settings) as server:
        channel = GrpcChannel(server.target)
        try:
            return await call(channel)
        except GrpcError as error:
            return error.code, error.details
        finally:
            await channel.close()


# --- answers --------------------------------------------------------------------------------------


def with_body(stream, body, end=OK_END):
    return headers(stream, *OK_HEAD) + frame(http2.DATA, 0, stream, body) + headers(stream, *end, is_last=True)


def split(stream):
    """All that HTTP/2 allows: interim headers, continuation, padding, empty and unknown frames, one octet at a time."""
    block = b"".join(http2.literal(*field) for field in OK_HEAD)
    return b"".join(
        (
            headers(stream, (b":status", b"103"), (b"link", b"</x>")),
            frame(http2.HEADERS, http2.PADDED, stream, b"\x02" + block[:5] + b"\x00\x00"),
            frame(http2.CONTINUATION, 0, stream, block[5:9]),
            frame(http2.CONTINUATION, http2.END_HEADERS, stream, block[9:]),
            frame(http2.DATA, 0, stream),
            frame(http2.DATA, http2.PADDED, stream, b"\x09" + bytes(9)),
            *(
                frame(http2.DATA, http2.PADDED, stream, b"\x01" + message(b"answer")[i : i + 1] + b"\x00")
                for i in range(11)
            ),
            frame(200, 0xFF, stream, b"what is this"),
            frame(http2.PRIORITY, 0, stream, bytes(5)),
            headers(stream, *OK_END, is_last=True),
        )
    )


async def test_an_answer_in_all_the_pieces_that_http2_allows():
    assert await outcome(split) == b"answer"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (lambda s: headers(s, *OK_HEAD, (b"grpc-status", b"5"), (b"grpc-message", b"a%20%C3%A9%zz"), is_last=True),
         ("NOT_FOUND", "a \xe9%zz")),
        (lambda s: headers(s, (b":status", b"200"), (b"grpc-status", b"14"), is_last=True), ("UNAVAILABLE", "")),
        (lambda s: with_body(s, message(b"x"), ((b"grpc-status", b"99"),)), ("UNKNOWN", "")),
        (lambda s: with_body(s, message(b"x"), ((b"grpc-status", b"?"),)), ("UNKNOWN", "")),
        (lambda s: with_body(s, message(b"x"), ((b"other", b"1"),)),
         ("UNKNOWN", "the answer ended without a grpc-status")),
        (lambda s: headers(s, *OK_HEAD, is_last=True), ("UNKNOWN", "the answer ended without a grpc-status")),
        (lambda s: headers(s, *OK_HEAD) + frame(http2.DATA, http2.END_STREAM, s, message(b"x")),
         ("INTERNAL", "the answer ended without a status")),
        (lambda s: headers(s, (b":status", b"503"), is_last=True),
         ("UNAVAILABLE", "an HTTP answer with status 503, which is not gRPC")),
        (lambda s: headers(s, (b":status", b"404"), (b"content-type", b"text/html")) + frame(http2.DATA, 1, s, b"<p>"),
         ("UNIMPLEMENTED", "an HTTP answer with status 404, which is not gRPC")),
        (lambda s: headers(s, (b":status", b"200"), (b"content-type", b"text/html")),
         ("UNKNOWN", "an HTTP answer with status 200, which is not gRPC")),
        (lambda s: with_body(s, message(b"x") * 2), ("INTERNAL", "2 messages in the answer to a unary call")),
        (lambda s: with_body(s, b""), ("INTERNAL", "0 messages in the answer to a unary call")),
        (lambda s: with_body(s, b"\x01\x00\x00\x00\x01x"),
         ("INTERNAL", "a compressed message, which was not asked for")),
        (lambda s: with_body(s, b"\x00\xff\xff\xff\xff"),
         ("RESOURCE_EXHAUSTED", f"CLIENT: Received message larger than max (4294967295 vs. {MAX_MESSAGE})")),
        (lambda s: frame(http2.RST_STREAM, 0, s, number(ErrorCode.CANCEL)),
         ("CANCELLED", "RST_STREAM with error code 8")),
        (lambda s: frame(http2.RST_STREAM, 0, s, number(ErrorCode.ENHANCE_YOUR_CALM)),
         ("RESOURCE_EXHAUSTED", "RST_STREAM with error code 11")),
        (lambda s: frame(http2.RST_STREAM, 0, s, number(777)), ("INTERNAL", "RST_STREAM with error code 777")),
    ],
)  # fmt: skip
async def test_how_a_call_ends(reply, expected):
    assert await outcome(reply) == expected


@pytest.mark.parametrize(
    "hostile",
    [
        lambda s: frame(http2.DATA, 0, s, message(b"x")),  # before headers
        lambda s: headers(s, *OK_HEAD) + headers(s, *OK_END),  # trailers that do not end
        lambda s: headers(s + 2, *OK_HEAD),  # a stream that was never begun
        lambda s: headers(2, *OK_HEAD),
        lambda s: frame(http2.WINDOW_UPDATE, 0, s, number(0)),
        lambda s: frame(http2.WINDOW_UPDATE, 0, 0, number(2**31 - 1)),
        lambda s: frame(http2.SETTINGS, 0, 0, b"\x00\x04" + number(2**31)),
        lambda s: frame(http2.HEADERS, http2.END_HEADERS, s, b"\xff\xff\xff\xff\xff"),
        lambda s: frame(http2.PUSH_PROMISE, http2.END_HEADERS, s, number(2)),
        lambda s: headers(s, *OK_HEAD) + 3 * frame(http2.DATA, 0, s, b"\x00\x00" + bytes(grpc_stream.WINDOW // 2)),
        lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n",
        lambda _: bytes(100_000),
    ],
)
async def test_a_server_that_breaks_http2_is_left(hostile):
    def reply(stream):
        return hostile(stream) if len(server.connections) == 1 else answer(stream)

    async with RawServer(reply) as server:
        channel = GrpcChannel(server.target)
        async with asyncio.timeout(5):
            errors = [await failure(one) for one in (call(channel), call(channel))]
        assert {(error.code, error.never_sent) for error in errors} <= {("UNAVAILABLE", False), ("UNAVAILABLE", True)}
        await until(lambda: server.kinds(http2.GOAWAY))
        assert await call(channel) == b"answer"  # on a new connection
        await channel.close()


async def test_an_error_of_any_length_is_its_own_calls_alone():
    """Models quote what they were sent: 3 MB of it, quoted, in frames as large as gRPC makes them."""

    def reply(stream):
        if stream != 3:
            return b""
        fields = (*OK_HEAD, (b"grpc-status", b"3"), (b"grpc-message", b"no: " + b"%C3%A9" * 500_000))
        block = b"".join(http2.literal(*field) for field in fields)
        return http2.header_frames(stream, block, ends_stream=True, max_frame=http2.DEFAULT_MAX_FRAME)

    async with RawServer(reply) as server:
        channel = GrpcChannel(server.target)
        neighbour = call(channel)
        await until(lambda: 1 in server.requests)
        error = await failure(call(channel))
        assert (error.code, error.is_reply) == ("INVALID_ARGUMENT", True)
        assert error.details.startswith("no: \xe9\xe9")
        assert len(error.details) <= MAX_DETAILS
        server.write(answer(1))
        assert await neighbour == b"answer"
        assert len(server.connections) == 1
        await channel.close()


# --- connecting -----------------------------------------------------------------------------------


async def test_nobody_there_and_then_somebody(monkeypatch):
    monkeypatch.setattr(grpc_channel, "FIRST_BACKOFF_S", 0.02)
    async with RawServer() as server:
        target = server.target
    channel = GrpcChannel(target)
    channel._backoff_s = 60.0
    for _ in range(3):  # the first tries, the others are told
        error = await failure(call(channel))
        assert (error.code, error.never_sent) == ("UNAVAILABLE", True)
        assert error.details.startswith(f"failed to connect to {target}: ")
    async with RawServer() as server:
        channel._host, channel._port = "127.0.0.1", int(server.target.rpartition(":")[2])
        assert (await failure(call(channel))).never_sent  # not yet
        assert server.connections == []
        channel._retry_at = 0.0
        assert await asyncio.gather(*(call(channel) for _ in range(5))) == [b"answer"] * 5
        assert len(server.connections) == 1
        await channel.close()


@pytest.mark.parametrize("target", ["unix:/no/such/socket", "unix:/" + "x" * 300, "a..b:1", "[::1]:1"])
async def test_no_connection(target):
    assert (await failure(call(GrpcChannel(target)))).code == "UNAVAILABLE"


async def test_a_server_that_accepts_and_says_nothing(monkeypatch):
    monkeypatch.setattr(grpc_channel, "CONNECT_TIMEOUT_S", 0.05)
    async with _silent() as target:
        channel = GrpcChannel(target)
        error = await failure(call(channel))
        assert (error.code, error.never_sent) == ("UNAVAILABLE", True)
        assert "no answer within 0.05 s" in error.details
        await channel.close()


async def test_a_server_that_leaves_while_we_connect():
    class Leaving(asyncio.Protocol):
        def connection_made(self, transport):
            transport.write(goodbye)
            transport.close()

    server = await asyncio.get_running_loop().create_server(Leaving, "127.0.0.1", 0)
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for goodbye in (b"", http2.settings_frame({}) + goaway(0), http2.settings_frame({})):
        channel = GrpcChannel(target)
        error = await failure(call(channel))
        assert error.code == "UNAVAILABLE"
        assert error.never_sent or goodbye == http2.settings_frame({})  # there it may have been sent
        await channel.close()
    server.close()


async def test_a_call_waits_for_a_connection_no_longer_than_its_time():
    async with _silent() as target:
        channel = GrpcChannel(target)
        error = await failure(call(channel, timeout_s=0.02))
        assert (error.code, error.never_sent) == ("DEADLINE_EXCEEDED", True)
        waiting = call(channel)
        await asyncio.sleep(0)
        await channel.close()
        assert (await failure(waiting)).code == "UNAVAILABLE"


def _silent():
    class Silent:
        async def __aenter__(self):
            self.server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
            return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

        async def __aexit__(self, *_):
            self.server.close()

    return Silent()


# --- the server ends things -----------------------------------------------------------------------


async def test_a_connection_that_is_cut():
    async with RawServer(None) as server:
        channel = GrpcChannel(server.target)
        calls = [call(channel) for _ in range(3)]
        await until(lambda: len(server.requests) == 3)
        server.connections[0].abort()
        errors = [await failure(one) for one in calls]
        assert {(error.code, error.never_sent, error.is_reply) for error in errors} == {("UNAVAILABLE", False, False)}
        server.reply = answer
        assert await call(channel) == b"answer"
        await channel.close()


async def test_a_server_that_goes_away_finishes_what_it_took():
    async with RawServer(None) as server:
        channel = GrpcChannel(server.target)
        taken, refused = call(channel), call(channel)
        await until(lambda: len(server.requests) == 2)
        server.write(goaway(1))
        error = await failure(refused)
        assert (error.code, error.never_sent) == ("UNAVAILABLE", True)
        server.reply = answer
        assert await call(channel) == b"answer"  # on a new connection
        server.write(answer(1, b"late"), connection=0)
        assert await taken == b"late"
        await until(server.connections[0].is_closing)
        assert len(server.connections) == 2
        await channel.close()


async def test_a_refused_stream_was_never_looked_at():
    async with RawServer(lambda s: frame(http2.RST_STREAM, 0, s, number(ErrorCode.REFUSED_STREAM))) as server:
        channel = GrpcChannel(server.target)
        error = await failure(call(channel))
        assert (error.code, error.never_sent) == ("UNAVAILABLE", True)
        await channel.close()


async def test_silence_is_asked_about_once_and_then_judged(monkeypatch):
    monkeypatch.setattr(grpc_connection, "SILENCE_S", 0.02)
    async with RawServer(None) as server:
        channel = GrpcChannel(server.target)
        waiting = call(channel)
        await until(lambda: server.kinds(http2.PING))
        server.write(frame(http2.PING, http2.ACK, 0, bytes(8)))
        connection = channel._connection
        heard_at = connection._heard_at
        await until(lambda: connection._heard_at > heard_at)
        now = connection._loop.time()
        assert connection._may_ping_at > now + 300  # sooner would be a strike at Triton
        connection._alarm.cancel()
        connection._judge(now - 60)
        connection._watch()
        assert len(server.kinds(http2.PING)) == 1
        server.write(headers(1, *OK_HEAD))  # a server that sent something of a call forgets its strikes
        await until(lambda: connection._may_ping_at == 0.0)
        monkeypatch.setattr(grpc_connection, "PING_ANSWER_S", 0.02)
        connection._alarm.cancel()
        connection._watch()
        error = await failure(waiting)
        assert (error.code, error.details) == ("UNAVAILABLE", "the server does not answer")
        assert len(server.kinds(http2.PING)) == 2
        await channel.close()


async def test_nobody_is_asked_when_no_call_waits():
    async with RawServer() as server:
        channel = GrpcChannel(server.target)
        await call(channel)
        connection = channel._connection
        connection._heard_at = -1e6
        connection._alarm.cancel()
        connection._watch()
        assert connection._alarm is None
        await call(channel)
        assert connection._alarm is not None
        assert server.kinds(http2.PING) == []
        await channel.close()


async def test_pings_of_the_server_are_answered():
    async with RawServer(lambda s: frame(http2.PING, 0, 0, b"12345678") + answer(s)) as server:
        channel = GrpcChannel(server.target)
        await call(channel)
        await until(lambda: server.kinds(http2.PING))
        assert server.kinds(http2.PING) == [(http2.PING, http2.ACK, 0, b"12345678")]
        await channel.close()


# --- the server holds us back ---------------------------------------------------------------------


async def test_calls_beyond_the_servers_number_wait_their_turn():
    async with RawServer(None, settings={http2.MAX_CONCURRENT_STREAMS: 1}) as server:
        channel = GrpcChannel(server.target)
        first, second, third, fourth = (call(channel, body) for body in (b"1", b"2", b"3", b"4"))
        await until(lambda: server.requests)
        second.cancel()
        late = await failure(call(channel, timeout_s=0.01))
        assert (late.code, late.never_sent) == ("DEADLINE_EXCEEDED", True)
        server.write(answer(1, b"one"))
        assert await first == b"one"
        await until(lambda: 3 in server.requests)
        assert not third.done()
        server.write(answer(3, b"three"))
        assert await third == b"three"
        await until(lambda: 5 in server.requests)
        assert [server.requests[stream][5:] for stream in (1, 3, 5)] == [b"1", b"3", b"4"]
        fourth.cancel()
        await channel.close()


async def test_room_that_comes_for_a_call_that_is_leaving_goes_to_the_next(monkeypatch):
    monkeypatch.setattr(grpc_stream, "SETTLE_S", 0)
    async with RawServer(None, settings={http2.MAX_CONCURRENT_STREAMS: 1}) as server:
        channel = GrpcChannel(server.target)
        first, second, third = (call(channel, body) for body in (b"1", b"2", b"3"))
        await until(lambda: server.requests)
        first.cancel()
        await asyncio.sleep(0)  # its room is given to the second now, which
        second.cancel()  # leaves before it hears of it
        await until(lambda: 3 in server.requests)
        assert server.requests[3] == message(b"3")
        third.cancel()
        await channel.close()


async def test_calls_that_wait_for_room_go_to_the_next_connection():
    async with RawServer(None, settings={http2.MAX_CONCURRENT_STREAMS: 1}) as server:
        channel = GrpcChannel(server.target)
        first, second = call(channel), call(channel)
        await until(lambda: server.requests)
        server.reply = answer
        server.write(goaway(1))
        assert await second == b"answer"
        server.write(answer(1), connection=0)
        assert await first == b"answer"
        await channel.close()


async def test_windows_are_kept_to_and_settings_followed():
    body = bytes(range(256)) * 400
    async with RawServer(None, settings={http2.INITIAL_WINDOW_SIZE: 10}) as server:
        channel = GrpcChannel(server.target)
        sending = call(channel, body)
        await until(lambda: _sent(server) == 10)
        server.write(frame(http2.WINDOW_UPDATE, 0, 1, number(5)))
        await until(lambda: _sent(server) == 15)
        server.write(http2.settings_frame({http2.INITIAL_WINDOW_SIZE: 30_010, http2.MAX_FRAME_SIZE: 20_000}))
        await until(lambda: _sent(server) == 30_015)
        assert [len(seen[3]) for seen in server.kinds(http2.DATA)] == [10, 5, 20_000, 10_000]
        server.write(http2.settings_frame({http2.INITIAL_WINDOW_SIZE: 0}))  # 30,010 below what was sent
        server.write(frame(http2.WINDOW_UPDATE, 0, 1, number(30_011)))
        await until(lambda: _sent(server) == 30_016)
        server.write(frame(http2.WINDOW_UPDATE, 0, 1, number(1_000_000)))
        await until(lambda: _sent(server) == http2.DEFAULT_WINDOW)  # that of the connection
        server.reply = answer
        server.write(frame(http2.WINDOW_UPDATE, 0, 0, number(1_000_000)))
        assert await sending == b"answer"
        assert server.requests[1] == message(body)
        await channel.close()


def _sent(server):
    return sum(len(payload) for _, _, _, payload in server.kinds(http2.DATA))


async def test_a_large_request_that_waits_holds_up_no_small_one():
    async with RawServer(None, settings={http2.INITIAL_WINDOW_SIZE: 100}) as server:
        channel = GrpcChannel(server.target)
        large = call(channel, bytes(1000))
        await until(lambda: _sent(server) == 100)
        server.reply = answer
        assert await call(channel, b"small") == b"answer"
        large.cancel()
        await until(lambda: server.kinds(http2.RST_STREAM))
        assert server.kinds(http2.RST_STREAM) == [(http2.RST_STREAM, 0, 1, number(ErrorCode.CANCEL))]
        server.write(frame(http2.WINDOW_UPDATE, 0, 1, number(5)) + answer(1))  # it did not know yet
        assert await call(channel, b"small") == b"answer"
        await channel.close()


async def test_large_answers_that_come_in_turns_and_one_that_nobody_waits_for_any_more(monkeypatch):
    monkeypatch.setattr(grpc_stream, "SETTLE_S", LONG_S)
    body = bytes(range(256)) * 2000
    async with RawServer(lambda stream: headers(stream, *OK_HEAD)) as server:
        channel = GrpcChannel(server.target)
        calls = [call(channel) for _ in range(3)]
        await until(lambda: len(server.requests) == 3)
        left = {stream: message(body) for stream in sorted(server.requests)}
        for size in (3, 70_000, 65_539, 1, 200_000, 500_000):
            for stream, rest in left.items():
                part, left[stream] = rest[:size], rest[size:]
                if not part:
                    continue
                whole = frame(http2.DATA, 0, stream, part)
                for at in range(0, len(whole), 90_000):  # some parts of a frame come by themselves
                    server.write(whole[at : at + 90_000])
                    await asyncio.sleep(0)
            if size == 65_539:
                await until(lambda: channel._connection._streams[1]._filled >= 70_000)
                calls[0].cancel()
        for stream in left:
            server.write(headers(stream, *OK_END, is_last=True))
        assert await asyncio.gather(*calls[1:]) == [body, body]
        await until(lambda: not channel._connection._streams)
        server.reply = answer
        assert await call(channel) == b"answer"
        await channel.close()


async def test_a_server_is_not_told_at_once_that_nobody_waits_any_more(monkeypatch):
    monkeypatch.setattr(grpc_stream, "SETTLE_S", LONG_S)
    async with RawServer() as server:
        channel = GrpcChannel(server.target)
        await call(channel)
        server.reply = None
        left, late, other = call(channel), call(channel, timeout_s=0.01), call(channel)
        await until(lambda: len(server.requests) == 4)
        left.cancel()
        assert (await failure(late)).code == "DEADLINE_EXCEEDED"
        server.write(answer(3) + answer(5, bytes(100_000)) + answer(7))  # as if all three were waited for
        assert await other == b"answer"
        assert left.cancelled()
        server.reply = answer
        assert await call(channel) == b"answer"
        assert not server.kinds(http2.RST_STREAM)
        await channel.close()


async def test_a_server_is_told_when_it_has_had_the_request_for_long_enough(monkeypatch):
    monkeypatch.setattr(grpc_stream, "SETTLE_S", 0.01)
    async with RawServer() as server:
        channel = GrpcChannel(server.target)
        await call(channel)
        server.reply = None
        left, late = call(channel), call(channel, timeout_s=0.005)
        await until(lambda: len(server.requests) == 3)
        left.cancel()
        assert (await failure(late)).code == "DEADLINE_EXCEEDED"
        await until(lambda: len(server.kinds(http2.RST_STREAM)) == 2)
        assert {one[3] for one in server.kinds(http2.RST_STREAM)} == {number(ErrorCode.CANCEL)}
        await channel.close()


async def test_an_answer_before_the_request_is_whole():
    async with RawServer(None, settings={http2.INITIAL_WINDOW_SIZE: 100}) as server:
        channel = GrpcChannel(server.target)
        sending = call(channel, bytes(1000))
        await until(lambda: _sent(server) == 100)
        server.write(headers(1, (b":status", b"200"), (b"grpc-status", b"8"), is_last=True))
        assert (await failure(sending)).code == "RESOURCE_EXHAUSTED"
        await until(lambda: server.kinds(http2.RST_STREAM))
        assert server.kinds(http2.RST_STREAM) == [(http2.RST_STREAM, 0, 1, number(ErrorCode.NO_ERROR))]
        await channel.close()


async def test_a_block_of_headers_longer_than_a_frame():
    async with RawServer() as server:
        channel = GrpcChannel(server.target)
        metadata = ((b"x-long", b"v" * 40_000),)
        assert await channel.unary(b"/test/any", b"", timeout_s=LONG_S, metadata=metadata) == b"answer"
        ((_, _, _, block),) = server.kinds(http2.HEADERS)
        assert b"v" * 40_000 in block
        await channel.close()


async def test_messages_are_granted_one_ahead_of_the_reader():
    size = grpc_stream.WINDOW // 4 * 3
    async with RawServer(None) as server:
        channel = GrpcChannel(server.target)
        reader = channel.stream(b"/test/any", [b""], timeout_s=LONG_S)
        reading = asyncio.ensure_future(anext(reader))
        await until(lambda: server.requests)
        whole = message(bytes(size))
        server.write(headers(1, *OK_HEAD) + frame(http2.DATA, 0, 1, whole))
        assert len(await reading) == size
        await until(lambda: len(_granted(server)) == 1)
        server.write(frame(http2.DATA, 0, 1, whole) + frame(http2.DATA, 0, 1, whole[: size // 4]))
        server.write(frame(http2.PING, 0, 0, bytes(8)))
        await until(lambda: server.kinds(http2.PING))  # all of it has been taken
        assert _granted(server) == [len(whole)] * 2  # the second is the next to be read, the third is not
        assert len(await anext(reader)) == size
        await until(lambda: len(_granted(server)) == 3)
        await reader.aclose()
        await channel.close()


def _granted(server):
    return [int.from_bytes(seen[3], "big") for seen in server.kinds(http2.WINDOW_UPDATE) if seen[2]]


# --- the connection as a whole --------------------------------------------------------------------


async def test_the_window_of_the_connection_is_made_whole_again(monkeypatch):
    monkeypatch.setattr(grpc_connection, "REGRANT", 30)
    async with RawServer() as server:
        channel = GrpcChannel(server.target)
        for _ in range(4):  # of 11 bytes each
            await call(channel)
        await until(lambda: len(server.kinds(http2.WINDOW_UPDATE)) == 2)
        assert [int.from_bytes(seen[3], "big") for seen in server.kinds(http2.WINDOW_UPDATE)] == [
            http2.MAX_WINDOW - http2.DEFAULT_WINDOW,
            33,
        ]
        await channel.close()


async def test_a_connection_whose_numbers_are_used_up_is_replaced(monkeypatch):
    monkeypatch.setattr(grpc_connection, "MAX_STREAM_ID", 4)
    async with RawServer() as server:
        channel = GrpcChannel(server.target)
        for _ in range(3):
            assert await call(channel) == b"answer"
        assert len(server.connections) == 2
        await until(server.connections[0].is_closing)
        await channel.close()


async def test_the_kernel_looks_for_a_peer_that_vanished():
    async with RawServer() as server:
        channel = GrpcChannel(server.target)
        await call(channel)
        connected = channel._connection._transport.get_extra_info("socket")
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == grpc_connection.VANISHED_MS
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await channel.close()


async def test_settings_are_acknowledged_and_headers_use_no_table():
    async with RawServer() as server:
        channel = GrpcChannel(server.target)
        await asyncio.gather(call(channel), call(channel))
        assert (http2.SETTINGS, http2.ACK, 0, b"") in server.seen
        first, second = (seen[3] for seen in server.kinds(http2.HEADERS))
        fields = hpack.Decoder().decode(first, raw=True)
        assert hpack.Decoder().decode(second, raw=True)[:-1] == fields[:-1]  # the last one is the time that is left
        assert fields[:-1] == [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/test/any"),
            (b":authority", server.target.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"hybrid-inference-gateway"),
        ]
        await channel.close()
