"""HTTP connections on raw sockets: turns, limits, and clients that leave at any moment."""

import asyncio
import contextlib
import logging
import random
import socket

import pytest

from local_runtime.protocol import http_connection as limits
from tests.kit.local_http import (
    CHUNKED,
    GET,
    MAX_BODY,
    POST,
    SEEDS,
    SLOW,
    Server,
    Transport,
    client,
    connected,
    mutated,
    serving,
)
from tests.kit.wait import until

# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [b"content-length: 5000000", b"transfer-encoding: chunked"])
async def test_a_refusal_reaches_a_client_that_is_still_sending(length):
    async with connected() as (server, one):
        await one.send(b"POST /echo HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % length)
        for _ in range(50):
            await one.send(b"186a0\r\n%b\r\n" % bytes(100_000))
        status, fields, body = await one.answer()
        assert (status, fields[b"connection"]) == (413, b"close")
        assert str(MAX_BODY).encode() in body
        one.writer.close()
        await until(lambda: not server.connections)


async def test_a_refused_client_that_does_not_close_is_closed():
    async with connected() as (server, one):
        await one.send(b"garbage\r\n\r\n")
        assert (await one.answer())[0] == 400
        assert await one.rest() == b""
        now = asyncio.get_running_loop().time()
        server.only.check(now + 1)
        assert server.connections
        server.only.check(now + limits.LINGER_SILENT_S + 1)
        await until(lambda: not server.connections)


async def test_a_refusal_comes_after_the_answers_to_what_came_before():
    async with connected() as (server, one):
        await one.send(SLOW + b"garbage\r\n\r\n")
        await until(lambda: server.seen)
        server.gate.set()
        first, second = await one.answer(), await one.answer()
        assert await one.rest() == b""
    assert (first[0], first[2], second[0]) == (200, b"slow slow", 400)
    assert b"connection" not in first[1]
    assert second[1][b"connection"] == b"close"


# --- 100-continue ---------------------------------------------------------------------------------


async def test_a_body_that_is_asked_about_is_asked_for_once():
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n"
    async with connected() as (_, one):
        await one.send(head)
        assert (await one.answer())[0] == 100
        await one.send(b"he")
        await one.send(b"llo")
        assert (await one.answer())[2].endswith(b"hello")
        await one.send(head + b"hello")
        assert (await one.answer())[0] == 200


async def test_a_body_behind_another_request_is_asked_for_in_its_turn():
    async with connected() as (server, one):
        await one.send(SLOW + b"POST /echo HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        await until(lambda: server.seen)
        server.gate.set()
        assert (await one.answer())[2] == b"slow slow"
        assert (await one.answer())[0] == 100
        await one.send(b"hello")
        assert (await one.answer())[0] == 200


async def test_a_body_beyond_the_limit_is_not_asked_for():
    async with connected() as (_, one):
        await one.send(b"POST /echo HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 500000\r\n\r\n")
        assert (await one.answer())[0] == 413


# --- one after the other --------------------------------------------------------------------------


async def test_requests_behind_a_slow_one_wait_for_their_turn():
    async with connected() as (server, one):
        await one.send(SLOW + POST + GET)
        await until(lambda: server.seen)
        await asyncio.sleep(0.01)
        assert len(server.seen) == 1
        server.gate.set()
        assert [(await one.answer())[2] for _ in range(3)] == [b"slow slow", b"POST /echo hello", b"GET /echo "]


async def test_thousands_of_requests_at_once_are_all_answered():
    async with connected() as (server, one):
        await one.send(GET * 5000)
        for _ in range(5000):
            assert (await one.answer())[0] == 200
        assert len(server.seen) == 5000


async def test_a_client_that_never_reads_is_not_read_from_and_let_go():
    async with connected() as (server, one):
        one.writer.transport.pause_reading()
        post = b"POST /echo HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (MAX_BODY, bytes(MAX_BODY))
        before = -1
        while before != len(server.seen):
            before = len(server.seen)
            for _ in range(20):
                one.writer.write(post)
            await asyncio.sleep(0.02)
        assert 0 < len(server.seen) < 200
        connection = server.only
        now = asyncio.get_running_loop().time()
        connection.check(now)
        connection.check(now + limits.WRITE_TIMEOUT_S - 1)
        assert server.connections
        connection.check(now + limits.WRITE_TIMEOUT_S + 1)
        await until(lambda: not server.connections)


async def test_a_client_that_reads_late_gets_everything():
    async with connected() as (server, one):
        one.writer.transport.pause_reading()
        body = bytes(MAX_BODY)
        sending = asyncio.create_task(
            one.send((b"POST /echo HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (MAX_BODY, body)) * 100)
        )
        await asyncio.sleep(0.05)
        one.writer.transport.resume_reading()
        for _ in range(100):
            assert (await one.answer())[2].endswith(body)
        await sending
        assert len(server.seen) == 100


# --- versions and methods -------------------------------------------------------------------------


async def test_http10_is_closed_unless_it_asks_otherwise():
    async with serving() as server:
        async with client(server) as one:
            await one.send(b"GET /echo HTTP/1.0\r\n\r\n")
            status, fields, _ = await one.answer()
            assert (status, fields[b"connection"], await one.rest()) == (200, b"close", b"")
        async with client(server) as one:
            for _ in range(2):
                await one.send(b"GET /echo HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
                status, fields, _ = await one.answer()
                assert (status, fields[b"connection"]) == (200, b"keep-alive")


async def test_what_follows_a_request_to_close_is_dropped():
    async with connected() as (server, one):
        await one.send(GET.replace(b"host", b"connection: close\r\nhost") + POST * 10)
        status, fields, _ = await one.answer()
        assert (status, fields[b"connection"], await one.rest()) == (200, b"close", b"")
        assert len(server.seen) == 1


async def test_head_gets_the_length_and_no_body():
    async with connected() as (_, one):
        await one.send(b"HEAD /echo HTTP/1.1\r\n\r\n" + GET)
        head = await one.answer(has_body=False)
        assert (head[0], head[1][b"content-length"]) == (200, str(len("HEAD /echo ")).encode())
        assert (await one.answer())[2] == b"GET /echo "


# --- streams --------------------------------------------------------------------------------------


def events(count, *, path=b"/events", version=b"HTTP/1.1"):
    body = b"%d" % count
    return b"POST %b %b\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path, version, len(body), body)


async def test_events_come_in_chunks_and_the_connection_goes_on():
    async with connected() as (_, one):
        await one.send(events(2) + events(0) + GET)
        first = await one.answer()
        assert (first[1][b"transfer-encoding"], b"connection" in first[1]) == (b"chunked", False)
        assert await one.reader.readuntil(b"0\r\n\r\n") == b"9\r\ndata: 0\n\n\r\n9\r\ndata: 1\n\n\r\n0\r\n\r\n"
        assert (await one.answer())[0] == 200
        assert await one.reader.readuntil(b"\r\n\r\n") == b"0\r\n\r\n"
        assert (await one.answer())[2] == b"GET /echo "


@pytest.mark.parametrize("extra", [b"", b"connection: keep-alive\r\n"])
async def test_http10_gets_events_up_to_the_end_of_the_connection(extra):
    async with connected() as (_, one):
        await one.send(events(2, version=b"HTTP/1.0").replace(b"host", extra + b"host"))
        _, fields, _ = await one.answer()
        assert (b"transfer-encoding" in fields, fields[b"connection"]) == (False, b"close")
        assert await one.rest() == b"data: 0\n\ndata: 1\n\n"


async def test_a_stream_that_breaks_has_no_clean_end():
    async with connected() as (server, one):
        await one.send(events(2, path=b"/broken"))
        await one.answer()
        with contextlib.suppress(ConnectionError):
            assert not (await one.rest()).endswith(b"0\r\n\r\n")
        await until(lambda: not server.connections)


async def test_a_stream_waits_for_its_reader_and_ends_with_it():
    async with connected() as (server, one):
        one.writer.transport.pause_reading()
        await one.send(events(10_000_000))
        before = -1
        while before != server.sent_events:
            before = server.sent_events
            await asyncio.sleep(0.02)
        assert 0 < before < 10_000_000
        one.writer.transport.abort()
        await until(lambda: server.cancelled and not server.connections)


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("sent", [b"", POST[:10], POST[:-2], POST + POST[:-2], SLOW, SLOW + POST, SLOW + POST[:-2]])
async def test_a_client_that_leaves_takes_its_requests_along(how, sent):
    async with connected() as (server, one):
        await one.send(sent)
        is_slow = sent.startswith(SLOW)
        await until(lambda: server.connections and (server.seen or not sent.startswith((POST, SLOW))))
        if how == "close":
            one.writer.close()
        else:
            one.writer.transport.abort()
        await until(lambda: not server.connections)
        await until(lambda: server.cancelled == is_slow)
        assert len(server.seen) == sent.startswith((POST, SLOW))


async def test_a_client_that_only_closes_its_side_is_answered():
    async with connected() as (server, one):
        await one.send(SLOW + POST)
        one.writer.write_eof()
        assert (await one.answer())[0] == 100
        await asyncio.sleep(0.03)
        server.only.check(asyncio.get_running_loop().time())
        server.gate.set()
        assert (await one.answer())[2] == b"slow slow"
        status, fields, body = await one.answer()
        assert (status, fields[b"connection"], body) == (200, b"close", b"POST /echo hello")
        assert await one.rest() == b""
        await until(lambda: not server.connections)
        assert not server.cancelled


async def test_a_client_of_http10_that_only_closes_its_side_gets_nothing_but_its_answer():
    async with connected() as (server, one):
        await one.send(SLOW.replace(b"HTTP/1.1", b"HTTP/1.0"))
        one.writer.write_eof()
        await until(lambda: server.seen)
        await asyncio.sleep(0.03)
        server.gate.set()
        assert (await one.rest()).endswith(b"slow slow")


async def test_a_request_that_is_cut_short_by_the_end_gets_no_answer():
    async with connected() as (server, one):
        await one.send(POST[:-1])
        one.writer.write_eof()
        assert await one.rest() == b""
        assert server.seen == []


# --- clients that are slow ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "limit_s", "status"),
    [
        (b"", limits.KEEP_ALIVE_S, None),
        (GET, limits.KEEP_ALIVE_S, None),
        (POST[:20], limits.HEAD_TIMEOUT_S, 408),
        (GET + POST[:20], limits.HEAD_TIMEOUT_S, 408),
        (POST[:-1], limits.BODY_TIMEOUT_S, 408),
        (CHUNKED + b"3\r\nab", limits.BODY_TIMEOUT_S, 408),
    ],
)
async def test_slow_and_idle_clients_are_let_go(sent, limit_s, status):
    async with connected() as (server, one):
        await one.send(sent)
        if sent.startswith(GET):
            await one.answer()
        await until(lambda: server.connections)
        await asyncio.sleep(0.01)
        connection, now = server.only, asyncio.get_running_loop().time()
        connection.check(now + limit_s - 1)
        assert len(server.connections) == 1
        connection.check(now + limit_s + 1)
        if status is not None:
            assert (await one.answer())[0] == status
        assert await one.rest() == b""
        one.writer.close()
        await until(lambda: not server.connections)


async def test_a_head_has_its_time_from_its_first_byte():
    async with connected() as (server, one):
        await one.send(POST[:5])
        await until(lambda: server.connections)
        await asyncio.sleep(0.01)
        begun = asyncio.get_running_loop().time()
        await one.send(POST[5:10])
        await asyncio.sleep(0.03)
        server.only.check(begun + limits.HEAD_TIMEOUT_S + 0.01)
        assert (await one.answer())[0] == 408


async def test_time_that_an_answer_takes_is_not_the_clients():
    async with connected() as (server, one):
        await one.send(SLOW)
        await until(lambda: server.seen)
        now = asyncio.get_running_loop().time()
        server.only.check(now + 10 * limits.KEEP_ALIVE_S)
        await asyncio.sleep(0.03)
        server.gate.set()
        assert (await one.answer())[0] == 200
        server.only.check(now + 0.02 + limits.KEEP_ALIVE_S)
        await one.send(GET)
        assert (await one.answer())[0] == 200


# --- the end --------------------------------------------------------------------------------------


async def test_a_stop_answers_what_has_begun_and_says_that_it_is_the_end():
    async with connected() as (server, one), client(server) as idle, client(server) as partial, client(server) as late:
        await one.send(SLOW + POST)
        await partial.send(POST[:10])
        await late.send(POST[:-1])
        await until(lambda: server.seen and len(server.connections) == 4)
        await asyncio.sleep(0.01)
        for connection in tuple(server.connections):
            connection.stop()
        assert (await idle.rest(), await partial.rest()) == (b"", b"")
        await late.send(POST[-1:])
        server.gate.set()
        first, second, third = await one.answer(), await one.answer(), await late.answer()
        assert (first[2], b"connection" in first[1]) == (b"slow slow", False)
        assert [(told[2], told[1][b"connection"]) for told in (second, third)] == [(b"POST /echo hello", b"close")] * 2
        assert (await one.rest(), await late.rest()) == (b"", b"")
        await until(lambda: not server.connections)


# --- anything at all ------------------------------------------------------------------------------


async def test_garbage_on_sockets_leaves_a_server_that_answers(caplog):
    chance = random.Random(300)  # noqa: S311 - the same garbage every time
    async with serving() as server:
        for _ in range(300):
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", server.port)) as raw:
                raw.sendall(mutated(chance, chance.choice(SEEDS)))
            await asyncio.sleep(0)
        async with client(server) as one:
            await one.send(POST)
            assert (await one.answer())[2] == b"POST /echo hello"
            await until(lambda: len(server.connections) == 1)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_pipeline_of_quick_requests_lets_others_have_their_turn():
    server = Server()
    connection, transport = server.connection(), Transport()
    connection.connection_made(transport)
    connection.data_received(GET * 3000)
    assert len(server.seen) < 100
    await asyncio.sleep(0)
    assert 100 < len(server.seen) < 200
    await until(lambda: len(server.seen) == 3000)
    assert transport.written.count(b"200 OK") == 3000


async def test_a_client_that_leaves_a_pipeline_is_answered_no_more():
    server = Server()
    connection, transport = server.connection(), Transport()
    connection.connection_made(transport)
    connection.data_received(GET * 3000)
    begun = len(server.seen)
    transport.close()
    connection.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(server.seen) == begun
