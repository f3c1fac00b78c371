"""The pool of connections: what is kept, what never is."""

import asyncio
import contextlib
import gzip
import socket

import pytest
import uvloop

from gateway.backends.llm import http_client, http_connection
from gateway.backends.llm.http_client import HttpClient
from gateway.backends.llm.http_connection import HttpError, Trouble
from tests.kit.upstream import FIN, HOLD, Pause, Upstream, head, json_reply, reply

LONG_US = 5_000_000


async def get(client, *, max_bytes=10_000_000, timeout_us=LONG_US):
    async with client.exchange("GET", "/x", timeout_us=timeout_us) as response:
        return await response.read_all(max_bytes)


@pytest.fixture
def client_for():
    return lambda up, **options: HttpClient(up.base_url, headers={}, **options)


async def test_a_connection_is_kept(client_for):
    async with Upstream(json_reply(200, 1)) as up:
        client = client_for(up)
        for _ in range(3):
            assert await get(client) == b"1"
        await client.close()
    assert up.connections == 1


async def test_calls_at_the_same_time_have_their_own(client_for):
    async with Upstream([Pause(0.01), *json_reply(200, 1)]) as up:
        client = client_for(up)
        await asyncio.gather(*(get(client) for _ in range(4)))
        assert up.connections == 4
        await asyncio.gather(*(get(client) for _ in range(4)))
        assert up.connections == 4
        await client.close()


@pytest.mark.parametrize(
    "script",
    [
        reply(200, b"1", headers={"Connection": "close"}),
        [head(200), b"1", FIN],
        [reply(200, b"1")[0] + b"surplus"],
        [reply(200, b"1")[0] + reply(200, b"2")[0]],
        [*reply(200, b"1"), b"HTTP/1.1 200 OK\r\n"],
        [b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n1"],
    ],
)
async def test_a_connection_that_cannot_be_trusted_is_not_kept(script, client_for):
    async with Upstream(script) as up:
        client = client_for(up)
        for _ in range(2):
            assert await get(client) == b"1"
            await asyncio.sleep(0.005)  # for what comes unasked after an answer
        await client.close()
    assert up.connections == 2


async def test_a_connection_with_an_unread_body_is_not_kept(client_for):
    async with Upstream([head(200, {"Content-Length": "2"}), b"a", HOLD], json_reply(200, 1)) as up:
        client = client_for(up)
        async with client.exchange("GET", "/x", timeout_us=LONG_US) as response:
            assert response.status == 200
        assert await get(client) == b"1"
        await client.close()
    assert up.connections == 2


async def test_a_connection_that_the_peer_closed_while_idle_is_not_used(client_for):
    async with Upstream([*json_reply(200, 1), FIN], json_reply(200, 2)) as up:
        client = client_for(up)
        assert await get(client) == b"1"
        await asyncio.wait_for(up.requests[0].left.wait(), 1)
        assert await get(client) == b"2"
        await client.close()


async def test_idle_connections_are_let_go(client_for, monkeypatch):
    monkeypatch.setattr(http_client, "IDLE_US", 10_000)
    async with Upstream(json_reply(200, 1)) as up:
        client = client_for(up)
        await get(client)
        await asyncio.wait_for(up.requests[0].left.wait(), 1)
        await get(client)
        await client.close()
    assert up.connections == 2


async def test_an_idle_connection_that_is_too_old_is_not_used(client_for, monkeypatch):
    async with Upstream(json_reply(200, 1)) as up:
        client = client_for(up)
        await get(client)
        monkeypatch.setattr(http_client, "IDLE_US", -1)
        await get(client)
        await client.close()
    assert up.connections == 2


async def test_no_more_than_so_many_are_kept(client_for, monkeypatch):
    monkeypatch.setattr(http_client, "MAX_IDLE", 1)
    async with Upstream([Pause(0.005), *json_reply(200, 1)]) as up:
        client = client_for(up)
        await asyncio.gather(get(client), get(client))
        await asyncio.gather(get(client), get(client))
        await client.close()
    assert up.connections == 3


async def test_a_large_body_waits_for_its_reader(client_for, monkeypatch):
    monkeypatch.setattr(http_connection, "PAUSE_BYTES", 64 * 1024)
    body = bytes(30_000_000)
    async with Upstream(reply(200, body)) as up:
        client = client_for(up)
        async with client.exchange("GET", "/x", timeout_us=LONG_US) as response:
            await asyncio.sleep(0.03)
            assert response._answer.buffered < 1_000_000
            assert len(await response.read_all(len(body))) == len(body)
        assert up.connections == 1
        await get(client, max_bytes=len(body))
        assert up.connections == 1
        await client.close()


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}])
async def test_others_have_their_turn_while_a_body_is_read(headers, client_for):
    body = bytes(20_000_000)
    turns = 0

    async def another() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with Upstream(reply(200, gzip.compress(body) if headers else body, headers=headers)) as up:
        client, sizes, between = client_for(up), [], []
        async with client.exchange("GET", "/x", timeout_us=LONG_US) as response:
            task = asyncio.create_task(another())
            while (part := await response.read()) is not None:
                sizes.append(len(part))
                between.append(turns)
            task.cancel()
        await client.close()
    assert sum(sizes) == len(body)
    assert max(sizes) <= http_connection.PART_BYTES
    assert len(set(between)) >= len(sizes) // 2  # some parts come after a wait, which is a turn as well


async def test_what_follows_a_compressed_body_is_no_part_of_it(client_for):
    async with Upstream(reply(200, gzip.compress(b"x") + b"y", headers={"Content-Encoding": "gzip"})) as up:
        client = client_for(up)
        with pytest.raises(HttpError) as caught:
            await get(client)
        await client.close()
    assert caught.value.trouble is Trouble.GARBLED


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}])
async def test_a_body_over_the_bound_is_refused(headers, client_for):
    body = gzip.compress(bytes(50_000_000)) if headers else bytes(2_000_000)
    async with Upstream(reply(200, body, headers=headers)) as up:
        client = client_for(up)
        with pytest.raises(HttpError) as caught:
            await get(client, max_bytes=1_500_000)
        await client.close()
    assert caught.value.trouble is Trouble.TOO_LARGE


@contextlib.contextmanager
def deaf():
    """The URL of a peer that does not accept."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for filler in (first, second):  # now its backlog is full: the kernel drops the next SYN
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def trouble_at(url, *, connect_us, timeout_us):
    client = HttpClient(url, headers={}, connect_timeout_us=connect_us)
    with pytest.raises(HttpError) as caught:
        await get(client, timeout_us=timeout_us)
    await client.close()
    return caught.value.trouble


@pytest.mark.parametrize(
    ("connect_us", "timeout_us", "trouble"),
    [(20_000, LONG_US, Trouble.UNREACHABLE), (LONG_US, 20_000, Trouble.TIMED_OUT)],
)
async def test_a_peer_that_does_not_accept(connect_us, timeout_us, trouble):
    with deaf() as url:
        assert await trouble_at(url, connect_us=connect_us, timeout_us=timeout_us) is trouble


def test_a_callers_short_time_is_never_taken_for_an_unreachable_peer():
    # uvloop's timers count whole milliseconds: many fire before the fraction of one has passed.
    async def troubles(url):
        return {await trouble_at(url, connect_us=LONG_US, timeout_us=10_000 + 137 * i) for i in range(16)}

    with deaf() as url:
        assert uvloop.run(troubles(url)) == {Trouble.TIMED_OUT}
