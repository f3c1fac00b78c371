"""The HTTP server below the application: heads without end, offers of h2c, connections that say nothing."""

import asyncio
import contextlib
import json
import socket
from types import SimpleNamespace

import pytest
import uvloop

from gateway.backends.scripted import Pause, ScriptedBackend
from gateway.core.types import Delta
from gateway.http import connection, server
from gateway.http.asgi import Asgi
from local_runtime.protocol.accepting import MOST_AT_ONCE
from tests.kit.app import KEY, embedding, running
from tests.kit.served import served
from tests.kit.wait import until

BODY = json.dumps({"input": {"text": "hello"}}).encode()
HEAD = (
    f"POST /v1/tasks/text-embedding HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n"
).encode()
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


async def talk(gw, *parts: bytes, until_closed: bool = True) -> bytes:
    """Send `parts`, each by itself, and read until the peer closes."""
    host, port = gw.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.005)
        async with asyncio.timeout(10):
            return await (reader.read(-1) if until_closed else reader.readuntil(b"}"))
    finally:
        writer.close()


def gateway():
    return running([ScriptedBackend("triton", [embedding()])])


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000,
        b"GET /" + b"a" * 300_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50_000,
    ],
    ids=["header", "path", "many"],
)
async def test_a_head_without_end_is_a_431(head):
    async with gateway() as gw:
        answer = await talk(gw, *(head[i : i + 30_000] for i in range(0, len(head), 30_000)))
        assert (await gw.http.get("/healthz/live")).status_code == 200
    assert b"431" in answer.split(b"\r\n")[0]


async def test_an_offer_of_h2c_is_ignored_and_the_body_kept():
    async with gateway() as gw:
        whole = await talk(gw, HEAD + H2C + b"\r\n" + BODY, until_closed=False)
        parts = await talk(gw, HEAD, H2C, b"\r\n", BODY[:5], BODY[5:], until_closed=False)
    assert whole.startswith(b"HTTP/1.1 200")
    assert parts.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("offer", [b"TLS/1.2", b"websocket", b"foo", b"HTTP/2.0"])
async def test_whatever_is_offered_it_stays_http(offer):
    upgrade = b"Connection: Upgrade\r\nUpgrade: " + offer + b"\r\n"
    async with gateway() as gw:
        once = await talk(gw, HEAD + upgrade + b"\r\n" + BODY, until_closed=False)
        last = HEAD + upgrade.replace(b"Upgrade\r\n", b"Upgrade, close\r\n", 1) + b"\r\n" + BODY
        again = await talk(gw, HEAD + b"\r\n" + BODY + last)
    assert once.startswith(b"HTTP/1.1 200")
    assert again.count(b"HTTP/1.1 200") == 2


async def test_requests_in_a_row_on_one_connection_cut_anywhere():
    request = HEAD + b"\r\n" + BODY
    last = HEAD + b"connection: close\r\n\r\n" + BODY
    stream = request * 3 + last
    async with gateway() as gw:
        near = range(len(request) - 4, len(request) + 5)
        for size in (1, 7, 100, *near, len(stream)):
            answer = await talk(gw, *(stream[i : i + size] for i in range(0, len(stream), size)))
            assert answer.count(b"HTTP/1.1 200") == 4


CODED = HEAD.replace(f"content-length: {len(BODY)}\r\n".encode(), b"")
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "lines",
    [
        b"transfer-encoding: gzip, chunked\r\n",
        b"Transfer-Encoding:GZIP,CHUNKED\r\n",
        b"transfer-encoding: \tgzip ,\tchunked \r\n",
        b"transfer-encoding: gzip, chunked \t\r\n",  # which the parser finds a fault with, too
        b"transfer-encoding: gzip\r\nx: y\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: deflate;q=1, gzip\r\ntransfer-encoding: Chunked\r\n",
        b"transfer-encoding: identity, chunked\r\n",
    ],
)
async def test_a_body_in_a_transfer_coding_that_is_not_known_is_a_501(lines):
    """RFC 9112, 6.1. Read as plain chunks it would be what nobody has sent."""
    async with gateway() as gw:
        alone = await talk(gw, CODED + lines + b"\r\n" + CHUNKS)
        behind = await talk(gw, HEAD + b"\r\n" + BODY + CODED + lines + b"\r\n" + CHUNKS)
        assert len(gw.backends["triton"].calls) == 1
    head, _, body = alone.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 501 Not Implemented\r\n")
    assert b"connection: close" in head
    assert (json.loads(body)["status"], json.loads(body)["code"]) == (501, "unsupported")
    assert (behind.count(b"HTTP/1.1 "), behind.count(b"HTTP/1.1 200")) == (1, 1)  # what came before it is answered


@pytest.mark.parametrize("coding", [b"chunked", b"CHUNKED", b" chunked "])
async def test_a_body_in_chunks_alone_is_read(coding):
    async with gateway() as gw:
        answer = await talk(gw, CODED + b"transfer-encoding:" + coding + b"\r\nconnection: close\r\n\r\n" + CHUNKS)
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("coding", [b"gzip", b"identity", b"gzip, xchunked", b"chunked, gzip", b"chunked, chunked"])
async def test_a_body_whose_end_nobody_knows_is_a_400(coding):
    async with gateway() as gw:
        answer = await talk(gw, CODED + b"transfer-encoding: " + coding + b"\r\n\r\n" + CHUNKS)
        assert not gw.backends["triton"].calls
    assert (answer.count(b"HTTP/1.1 "), answer.startswith(b"HTTP/1.1 400")) == (1, True)


@pytest.mark.parametrize("said", [b"", b"GET / HT"])
async def test_a_connection_that_says_nothing_is_closed(monkeypatch, said):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    async with gateway() as gw:
        assert await talk(gw, said) == b""


async def test_line_feeds_alone_end_a_head_too():
    async with gateway() as gw:
        answer = await talk(gw, b"GET /healthz/live HTTP/1.1\nhost: x\nconnection: close\n\n")
    assert answer == b"" or answer.split(b" ")[1] in (b"200", b"400")


def streaming(llm):
    return running([llm])


CHAT = json.dumps({"model": "general_llm", "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
CHAT_HEAD = (
    f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(CHAT)}\r\n\r\n"
).encode()


async def test_what_a_client_says_during_its_answer_does_not_cut_it(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    deltas = [Delta(data=b'{"choices": []}'), Pause(us=200_000), Delta(data=b'{"choices": []}')]
    for said in (b"\r\n", b"GET /he"):
        async with streaming(ScriptedBackend("llm", deltas)) as gw:
            answer = await talk(gw, CHAT_HEAD + CHAT, said)
        assert b"[DONE]" in answer


async def test_a_body_after_its_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    async with gateway() as gw:
        answer = await talk(gw, b"GET /healthz/live HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n", b"x")
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("size", [1, 200_000])
async def test_a_body_for_a_path_that_is_not_there_is_no_end_of_the_connection(size):
    live = b"GET /healthz/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with gateway() as gw:
        for line in (b"POST /nope", b"POST /v1/models"):
            head = line + b" HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
            answer = await talk(gw, head, b"x" * size, live)
            assert answer.count(b"HTTP/1.1 ") == 2
            assert answer.endswith(b'{"status":"live"}')


async def test_a_peer_that_takes_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 0.1)
    flood = [Delta(data=b'{"x": "' + b"y" * 100_000 + b'"}')] * 500
    llm = ScriptedBackend("llm", flood)
    async with streaming(llm) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(CHAT_HEAD + CHAT)
            await until(lambda: gw.seen.records)
    assert gw.seen.records[0].code == "client_closed"


@contextlib.asynccontextmanager
async def answering(*fields):
    """A server that answers everything with `ok`, its length and these headers."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2"), *fields]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with served(Asgi(app)) as url:
        yield SimpleNamespace(url=url)


@pytest.mark.parametrize("value", [b"a\r\nx-more: 1", b"a\nx-more: 1", b"a\rx-more: 1", b"a\0x-more: 1"])
async def test_no_value_of_a_header_brings_another_along(value):
    async with answering((b"x-one", value)) as gw:
        answer = await talk(gw, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer == b""  # that is a fault of our own: nothing of it is told


async def test_a_header_may_hold_a_tab_and_other_alphabets():
    async with answering((b"x-one", b"a\tb \xe4")) as gw:
        answer = await talk(gw, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        kept = await talk(gw, b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.0\r\n\r\n")
    assert b"\r\nx-one: a\tb \xe4\r\n" in answer
    assert answer.endswith(b"\r\n\r\nok")
    assert kept.count(b"\r\nx-one: a\tb \xe4\r\n") == kept.count(b"\r\n\r\nok") == 2


async def test_the_answer_to_a_head_has_its_length_and_no_body():
    async with answering() as gw:
        answer = await talk(gw, b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n")
    assert answer.count(b"content-length: 2\r\n") == 2
    assert answer.count(b"ok") == 1


LIVE = b"GET /healthz/live HTTP/1.1\r\nhost: x\r\n"


async def test_a_connection_that_is_idle_is_closed(monkeypatch):
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.05)
    async with gateway() as gw:
        answer = await talk(gw, (LIVE + b"\r\n") * 2)
    assert answer.count(b"HTTP/1.1 200") == 2


async def test_what_it_may_be_idle_for_begins_with_each_answer():
    closed = []
    transport = SimpleNamespace(
        get_extra_info=lambda _: None, write=closed.append, close=lambda: closed.append(True), is_closing=lambda: False
    )
    one = connection.Connection(Asgi(None), connection.State(), None)
    one.connection_made(transport)
    one._go_on()  # an answer has ended
    one._close_if_idle()
    assert not closed
    one._idle_since -= connection.KEEP_ALIVE_S
    one._close_if_idle()
    assert closed == [True]
    one.connection_lost(None)


async def test_trailers_are_no_headers_of_the_next_request():
    seen = []

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        seen.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-more: 1\r\n\r\n"
    async with served(Asgi(app)) as url:
        answer = await talk(SimpleNamespace(url=url), chunked + b"GET / HTTP/1.0\r\n\r\n")
    assert answer.count(b"HTTP/1.1 204") == 2
    assert [b"x-more" in headers for headers in seen] == [False, False]


async def test_a_stream_for_http_10_has_no_chunks():
    head = CHAT_HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
    async with streaming(ScriptedBackend("llm", [Delta(data=b'{"choices": []}')])) as gw:
        answer = await talk(gw, head + CHAT)
    fields, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in fields
    assert body == b'data: {"choices": []}\n\ndata: [DONE]\n\n'


async def test_what_is_no_request_gets_a_400():
    async with gateway() as gw:
        answer = await talk(gw, b"what is this\r\n\r\n")
        behind = await talk(gw, (HEAD + b"\r\n" + BODY) * 2 + b"what is this\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.endswith(b"Invalid HTTP request received.")
    assert behind.count(b"HTTP/1.1 200 OK\r\n") == 2  # whose places are theirs
    assert b"HTTP/1.1 400" not in behind


async def test_a_broken_body_gets_a_400():
    head = HEAD.replace(b"content-length: %d" % len(BODY), b"transfer-encoding: chunked") + b"\r\n"
    async with gateway() as gw:
        answer = await talk(gw, head, b"what is this\r\n")
        await until(lambda: gw.seen.at_the_door)
        behind = await talk(gw, HEAD + b"\r\n" + BODY + head + b"what is this\r\n")
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert behind.startswith(b"HTTP/1.1 200 OK\r\n")
    assert gw.seen.at_the_door[0].code == "client_closed"


async def test_a_body_is_asked_for_once_it_is_wanted():
    async with gateway() as gw:
        answer = await talk(gw, HEAD + b"expect: 100-continue\r\nconnection: close\r\n\r\n", b"", b"", BODY)
        refused = HEAD.replace(KEY.encode(), b"wrong") + b"expect: 100-continue\r\n\r\n"
        refusal = await talk(gw, refused)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert refusal.startswith(b"HTTP/1.1 401 Unauthorized\r\n")


async def test_no_request_is_begun_for_a_peer_that_takes_nothing():
    begun = []

    async def app(scope, receive, send):
        begun.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 2**22})

    async with served(Asgi(app)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall((LIVE + b"\r\n") * 200)
            await until(lambda: begun)
            await asyncio.sleep(0.1)
            assert len(begun) < 10


async def test_an_application_of_asgi_is_told_of_a_leaving_and_may_repeat_a_header():
    told = []

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1"), (b"x-a", b"2")]})
        await send({"type": "http.response.body", "body": b"}", "more_body": True})
        told.append((await receive())["type"])

    async with served(Asgi(app)) as url:
        answer = await talk(SimpleNamespace(url=url), LIVE + b"\r\n", until_closed=False)
        await until(lambda: told)
    assert b"x-a: 1\r\nx-a: 2\r\n" in answer
    assert told == ["http.disconnect"]


async def test_what_an_application_fails_on_is_a_500_and_the_end_of_the_connection():
    async def app(scope, receive, send):
        raise ValueError("this is not told")

    async with served(Asgi(app)) as url:
        answer = await talk(SimpleNamespace(url=url), LIVE + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert answer.endswith(b"\r\n\r\nInternal Server Error")


async def test_a_head_that_began_during_an_answer_has_its_time_too(monkeypatch):
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.02)
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    async with gateway() as gw:
        answer = await talk(gw, LIVE + b"\r\nGET /he")
    assert answer.count(b"HTTP/1.1 200") == 1


CHUNKED = HEAD.replace(b"content-length: %d" % len(BODY), b"transfer-encoding: chunked")
CHUNKS = b"5;a=b\r\n%b\r\n%X\r\n%b\r\n0\r\nx-after: 1\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])


async def test_requests_behind_chunked_bodies_cut_anywhere():
    offers = CHUNKED + H2C + b"\r\n" + CHUNKS + HEAD + H2C + b"\r\n" + BODY
    stream = offers + LIVE + b"connection: close\r\n\r\n"
    async with gateway() as gw:
        end = stream.index(CHUNKS) + len(CHUNKS)
        for at in range(end - 20, end + 20):
            answer = await talk(gw, stream[:at], stream[at:])
            assert answer.count(b"HTTP/1.1 200") == 3
        assert (await talk(gw, *(stream[i : i + 1] for i in range(len(stream))))).count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("flood", [b"a: b\r\n", b"a"], ids=["many", "one"])
@pytest.mark.parametrize("before", [b"1\r\nx\r\n0\r\n", b"1;", b"1"], ids=["trailers", "extensions", "size"])
async def test_what_is_around_chunks_is_bounded(before, flood):
    answer = b""
    async with gateway() as gw:
        with contextlib.suppress(ConnectionError):  # reset, where more came than was read
            answer = await talk(gw, CHUNKED + b"\r\n" + before, *[flood * (20_000 // len(flood))] * 10)
        await until(lambda: gw.seen.at_the_door)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert gw.seen.at_the_door[0].code == "client_closed"  # and not that its time is up


async def test_no_word_that_a_body_is_wanted_stands_in_an_answer():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await receive()
        await send({"type": "http.response.body", "body": b"ok"})

    async with served(Asgi(app)) as url:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
        answer = await talk(SimpleNamespace(url=url), head, b"x")
    assert b"100 Continue" not in answer
    assert answer.endswith(b"\r\n\r\nok")


async def test_a_socket_behind_an_answer_that_is_not_taken_yet_has_to_wait_too():
    said = []
    heir = SimpleNamespace(
        connection_made=lambda _: said.append("made"),
        pause_writing=lambda: said.append("paused"),
        data_received=said.append,
    )
    transport = SimpleNamespace(
        get_extra_info=lambda _: None,
        write=lambda _: None,
        abort=lambda: None,
        is_closing=lambda: False,
        set_protocol=lambda _: None,
        get_protocol=lambda: heir,
    )
    one = connection.Connection(Asgi(None), connection.State(), lambda: heir)
    one.connection_made(transport)
    one.pause_writing()
    one.data_received(LIVE + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n")
    assert said[:2] == ["made", "paused"]
    assert one._write_timer.cancelled()  # or it would cut the socket off, whatever its peer takes


def test_of_many_connections_at_once_none_waits_for_a_turn_of_its_own(monkeypatch):
    made, callers = [], [socket.socket() for _ in range(3 * MOST_AT_ONCE)]

    class Counted(connection.Connection):
        def connection_made(self, transport):
            made.append(self)
            super().connection_made(transport)

    async def turns() -> int:
        stop, count = asyncio.Event(), 0
        with server.bind("127.0.0.1", 0) as listener:
            serving = asyncio.create_task(server.serve_app(Asgi(None), [listener], stop, drain_s=1))
            await asyncio.sleep(0.05)
            for caller in callers:
                caller.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    caller.connect(listener.getsockname())
            while len(made) < len(callers) and count < len(callers):
                count += 1
                await asyncio.sleep(0)
            stop.set()
            await serving
        return count

    monkeypatch.setattr(server, "Connection", Counted)
    assert uvloop.run(turns()) < 20  # by itself it accepts one in each
    for caller in callers:
        caller.close()


async def test_a_stop_leaves_a_new_connection_the_time_for_its_first_request():
    async with gateway() as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(0.05)
        gw.stop.set()
        await asyncio.sleep(server.GRACE_S + 0.1)
        writer.write(LIVE + b"\r\n")
        async with asyncio.timeout(5):
            answer = await reader.read(-1)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer
