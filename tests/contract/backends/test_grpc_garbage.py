"""A connection that has ended is freed at once, and its buffer: servers come and go, a search for garbage is rare."""

import asyncio
import contextlib
import gc
import weakref

import pytest

from gateway.backends.grpc import channel as grpc_channel
from gateway.backends.grpc import connection as grpc_connection
from gateway.backends.grpc.channel import GrpcChannel, GrpcError
from tests.kit.raw_http2 import RawServer
from tests.kit.wait import until

TIMES = 3


@pytest.fixture
def ended(monkeypatch):
    """What has become of all connections that a test makes."""
    made, create = [], grpc_connection.Connection.__init__

    def init(self, *args, **options):
        made.append(weakref.ref(self))
        create(self, *args, **options)

    monkeypatch.setattr(grpc_connection.Connection, "__init__", init)
    gc.collect()
    gc.disable()
    yield made
    gc.enable()


async def failed(channel: GrpcChannel, timeout_s: float = 5.0) -> None:
    with contextlib.suppress(GrpcError):
        await channel.unary(b"/test/any", b"request", timeout_s=timeout_s)


async def all_gone(made, count: int) -> None:
    assert len(made) == count
    await until(lambda: not [one for one in made if one() is not None])


async def test_one_whose_server_goes_away_under_a_call(ended):
    async with RawServer(None) as server:
        channel = GrpcChannel(server.target)
        for number in range(TIMES):
            calling = [asyncio.ensure_future(failed(channel)) for _ in range(2)]
            await until(lambda: len(server.requests) == 2)
            assert len(server.connections) == number + 1
            server.requests.clear()
            server.connections[-1].abort()
            await asyncio.gather(*calling)
        calling.clear()
        await all_gone(ended, TIMES)
        await channel.close()


async def test_one_that_is_closed(ended):
    async with RawServer() as server:
        for _ in range(TIMES):
            channel = GrpcChannel(server.target)
            await failed(channel)
            await channel.close()
    await all_gone(ended, TIMES)


async def test_one_whose_server_says_nothing(ended, monkeypatch):
    monkeypatch.setattr(grpc_channel, "CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(grpc_channel, "FIRST_BACKOFF_S", 0.0)
    taken = []
    server = await asyncio.start_server(lambda _reader, writer: taken.append(writer), "127.0.0.1", 0)
    channel = GrpcChannel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for _ in range(TIMES):
        await failed(channel)
    await all_gone(ended, TIMES)
    await channel.close()
    server.close()
    for writer in taken:
        writer.close()


async def test_one_that_ends_as_soon_as_it_is_made(ended, monkeypatch):
    monkeypatch.setattr(grpc_channel, "FIRST_BACKOFF_S", 0.0)
    server = await asyncio.start_server(lambda _reader, writer: writer.transport.abort(), "127.0.0.1", 0)
    channel = GrpcChannel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for _ in range(TIMES):
        await failed(channel)
    await all_gone(ended, TIMES)
    await channel.close()
    server.close()


async def test_one_that_does_not_answer_in_time(ended):
    async with RawServer(None) as server:
        channel = GrpcChannel(server.target)
        await failed(channel, timeout_s=0.05)
        await channel.close()
    await all_gone(ended, 1)
