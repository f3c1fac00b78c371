"""The connection of our own beside the library's: what it says, and when it leaves a call to the library."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvloop

from gateway.stores import redis_link
from gateway.stores.redis_cluster import ClusterClient
from gateway.stores.redis_link import Link
from gateway.stores.redis_script import connect
from tests.kit.redis import RedisServer
from tests.kit.redis_said import said
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until, until_async

pytest_plugins = ["tests.kit.redis"]

BOUND_S = 5.0  # no test waits for this


@pytest.fixture
async def switch(redis_server) -> AsyncIterator[RedisSwitch]:
    async with RedisSwitch(redis_server.port) as switch:
        yield switch


@pytest.fixture
async def link(switch) -> AsyncIterator[Link]:
    client = connect(switch.url)
    link = Link(client)
    yield link
    await link.close()
    await client.aclose()


async def answers(link: Link) -> bool:
    link.open()
    return await link.call("PING", timeout_s=BOUND_S) == b"PONG"


async def opened(link: Link) -> None:
    await until_async(lambda: answers(link))


async def test_before_it_is_opened_it_leaves_calls_to_the_library(link):
    assert await link.call("PING", timeout_s=BOUND_S) is None
    await opened(link)
    assert await link.call("ECHO", "wörd", timeout_s=BOUND_S) == "wörd".encode()
    assert await link.call("EVAL", "return {1, {'a', ARGV[1]}, false}", 0, b"\x00\r\n", timeout_s=BOUND_S) == [
        1,
        [b"a", b"\x00\r\n"],
        None,
    ]


async def test_an_error_is_for_the_library_and_its_connection_is_left(link, switch):
    await opened(link)
    before = switch.accepted
    assert await link.call("EVALSHA", "0" * 40, 0, timeout_s=BOUND_S) is None
    assert await link.call("PING", timeout_s=BOUND_S) is None
    await opened(link)
    assert switch.accepted == before + 1


async def test_a_connection_that_breaks_under_a_call_or_between_two_is_made_anew(link, switch):
    await opened(link)
    switch.cut_after(1, b"PING")
    assert await link.call("PING", timeout_s=BOUND_S) is None
    await opened(link)
    await switch.refuse()
    assert await link.call("PING", timeout_s=BOUND_S) is None
    await switch.restore()
    await opened(link)


async def test_a_connection_that_breaks_before_it_is_taken_over_is_not(link, switch, monkeypatch):
    monkeypatch.setattr(redis_link, "PAUSE_S", 0.0)
    pool = link._client.connection_pool
    make = pool.make_connection

    def doomed():
        connection = make()
        connect_it = connection.connect

        async def and_cut() -> None:
            await connect_it()
            await switch.refuse()
            await until(connection._reader.at_eof)

        connection.connect = and_cut
        return connection

    monkeypatch.setattr(pool, "make_connection", doomed)
    link.open()
    await until(lambda: link._opening is None)
    assert await link.call("PING", timeout_s=BOUND_S) is None
    monkeypatch.setattr(pool, "make_connection", make)
    await switch.restore()
    await opened(link)


async def test_one_that_hangs_is_late_and_not_used_again(link, switch):
    await opened(link)
    switch.pause()
    with pytest.raises(TimeoutError):
        await link.call("PING", timeout_s=0.02)
    assert await link.call("PING", timeout_s=BOUND_S) is None
    await switch.restore()
    await opened(link)


async def test_a_call_that_is_given_up_leaves_no_reply_to_the_next(link, switch):
    await opened(link)
    switch.pause()
    call = asyncio.create_task(link.call("ECHO", "first", timeout_s=BOUND_S))
    await asyncio.sleep(0.01)
    assert await link.call("PING", timeout_s=BOUND_S) is None  # one at a time
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await switch.restore()
    await opened(link)
    assert await link.call("ECHO", "second", timeout_s=BOUND_S) == b"second"


async def test_who_cannot_be_reached_is_left_alone_for_a_while(link, switch, monkeypatch):
    monkeypatch.setattr(redis_link, "PAUSE_S", BOUND_S)
    await opened(link)
    await switch.refuse()
    assert await link.call("PING", timeout_s=BOUND_S) is None
    link.open()
    assert link._opening is not None
    await link._opening
    link.open()
    assert link._opening is None


async def test_what_is_no_redis_is_left():
    async with said(lambda words: b"?\r\n" if words[0] == b"ECHO" else b"+PONG\r\n") as node:
        client = connect(f"redis://127.0.0.1:{node.port}/0")
        link = Link(client)
        link.open()
        assert link._opening is not None
        await link._opening
        assert await link.call("ECHO", "a", timeout_s=BOUND_S) is None
        await link.close()
        await client.aclose()


async def test_the_password_and_the_database_are_the_clients():
    with RedisServer("--requirepass", "secret") as server:
        client = connect(f"redis://:secret@127.0.0.1:{server.port}/3")
        link = Link(client)
        await opened(link)
        assert await link.call("SET", "here", 1, timeout_s=BOUND_S) == b"OK"
        assert await client.get("here") == b"1"
        await link.close()
        await client.aclose()


async def test_a_cluster_has_none():
    client = ClusterClient([("127.0.0.1", 1)], lambda host, port: connect(f"redis://{host}:{port}/0"))
    link = Link(client)
    link.open()
    assert link._opening is None
    await client.aclose()


@pytest.mark.parametrize("make_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_a_connection_that_ends_between_two_calls_is_not_used(redis_server, make_loop):
    async def ended() -> None:
        client = connect(redis_server.url)
        link = Link(client)
        await opened(link)
        socket = link._socket
        await client.client_kill_filter(_type="normal", skipme=True)
        await until(lambda: socket.is_over)
        assert await link.call("PING", timeout_s=BOUND_S) is None
        await opened(link)
        await link.close()
        await client.aclose()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(ended())
