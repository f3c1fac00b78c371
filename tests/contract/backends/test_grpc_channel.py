"""Our gRPC client against gRPC's own server."""

import asyncio
import itertools
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
import uvloop

from gateway.backends.grpc import stream as grpc_stream
from gateway.backends.grpc.channel import GrpcChannel, GrpcError
from tests.kit.wait import until, until_async

LONG_S = 20.0
BIG = 20_000_000
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Service(grpc.GenericRpcHandler):
    """`/test/NAME` is the method NAME; messages are bytes."""

    def __init__(self):
        self.arrived = 0
        self.cancelled = asyncio.Event()
        self.produced = 0
        self.go = asyncio.Event()
        self.metadata = {}
        self.time_remaining = 0.0

    def service(self, call):
        name = call.method.removeprefix("/test/")
        if name in ("echo", "fail", "hang", "wait"):
            return grpc.unary_unary_rpc_method_handler(getattr(self, name))
        if name in ("thrice", "flood", "breaks"):
            return grpc.stream_stream_rpc_method_handler(getattr(self, name))
        return None

    async def echo(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        self.time_remaining = context.time_remaining()
        return request

    async def fail(self, request, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, request.decode())

    async def hang(self, request, context):
        self.arrived += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def wait(self, request, context):
        self.arrived += 1
        await self.go.wait()
        return request

    async def thrice(self, requests, context):
        async for request in requests:
            for _ in range(3):
                yield request

    async def breaks(self, requests, context):
        yield b"first"
        await context.abort(grpc.StatusCode.DATA_LOSS, "the rest is gone")

    async def flood(self, requests, context):
        context.add_done_callback(lambda _: self.cancelled.set())
        for number in range(64):
            self.produced += 1
            yield bytes((number,)) * 256 * 1024


@asynccontextmanager
async def served(address="127.0.0.1:0"):
    service = Service()
    server = grpc.aio.server(options=UNLIMITED)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port(address)
    await server.start()
    channel = GrpcChannel(address if address.startswith("unix:") else f"127.0.0.1:{port}")
    try:
        yield channel, service, server
    finally:
        await channel.close()
        await server.stop(0)


async def failure(call):
    with pytest.raises(GrpcError) as caught:
        await call
    return caught.value


async def messages(channel, name, *sent):
    return [one async for one in channel.stream(b"/test/" + name, sent, timeout_s=LONG_S)]


async def test_a_call_with_its_metadata_and_its_time():
    async with served() as (channel, service, _):
        metadata = ((b"x-one", b"1"), (b"x-two", b"2 "))
        assert await channel.unary(b"/test/echo", b"hello", timeout_s=LONG_S, metadata=metadata) == b"hello"
        assert (service.metadata["x-one"], service.metadata["x-two"]) == ("1", "2 ")
        assert LONG_S / 2 < service.time_remaining <= LONG_S * 1.1  # gRPC rounds
        assert await channel.unary(b"/test/echo", b"", timeout_s=1e6) == b""
        assert 5e5 < service.time_remaining <= 1.1e6


@pytest.mark.parametrize("name", [b"Upper", b"grpc-timeout", b":path", b"a b", b""])
async def test_metadata_that_cannot_be_sent(name):
    with pytest.raises(ValueError, match="cannot be sent"):
        await GrpcChannel("127.0.0.1:1").unary(b"/x/y", b"", timeout_s=1, metadata=((name, b"v"),))


@pytest.mark.parametrize("text", ["no such thing", "häßlich: 100 % \N{SNOWMAN}\n", "x" * 5000])
async def test_an_error_with_its_text(text):
    async with served() as (channel, _, _):
        for _ in range(3):
            error = await failure(channel.unary(b"/test/fail", text.encode(), timeout_s=LONG_S))
            assert (error.code, error.details, error.is_reply, error.never_sent) == ("NOT_FOUND", text, True, False)
        assert await channel.unary(b"/test/echo", b"x", timeout_s=LONG_S) == b"x"


async def test_a_method_that_is_not_there():
    async with served() as (channel, _, _):
        assert (await failure(channel.unary(b"/test/none", b"", timeout_s=LONG_S))).code == "UNIMPLEMENTED"


async def test_streams():
    async with served() as (channel, _, _):
        assert await messages(channel, b"thrice") == []
        assert await messages(channel, b"thrice", b"a", b"", b"c" * 300_000) == [
            *(b"a", b"a", b"a", b"", b"", b""),
            *[b"c" * 300_000] * 3,
        ]
        reader = channel.stream(b"/test/breaks", [b"x"], timeout_s=LONG_S)
        assert await anext(reader) == b"first"
        error = await failure(anext(reader))
        assert (error.code, error.details) == ("DATA_LOSS", "the rest is gone")


async def test_many_at_a_time_share_one_connection():
    async with served() as (channel, _, _):
        sizes = [(number * 7919) % 200_000 for number in range(200)]
        sent = [bytes((number % 256,)) * size for number, size in enumerate(sizes)]
        assert await asyncio.gather(*(channel.unary(b"/test/echo", one, timeout_s=LONG_S) for one in sent)) == sent
        assert len(channel._open) == 1


@pytest.mark.parametrize("size", [1, 100, 16_384, 300_000])
async def test_a_message_may_be_given_in_parts(size):
    async with served() as (channel, _, _):
        parts = (b"a", memoryview(b"b" * size), b"", memoryview(b"c"))
        assert await channel.unary(b"/test/echo", *parts, timeout_s=LONG_S) == b"".join(parts)


async def test_large_messages_both_ways():
    async with served() as (channel, _, _):
        big = bytes(range(256)) * (BIG // 256)
        assert await channel.unary(b"/test/echo", big, timeout_s=LONG_S) == big
        for back in await messages(channel, b"thrice", big):
            assert back == big


def test_the_same_on_uvloop():
    async def scenario():
        async with served() as (channel, service, _):
            big = bytes(range(256)) * (BIG // 256)
            assert await channel.unary(b"/test/echo", big, timeout_s=LONG_S) == big
            assert await messages(channel, b"thrice", b"a") == [b"a"] * 3
            task = asyncio.ensure_future(channel.unary(b"/test/hang", b"", timeout_s=LONG_S))
            await until(lambda: service.arrived)
            task.cancel()
            await service.cancelled.wait()
            assert (await failure(channel.unary(b"/test/hang", b"", timeout_s=0.01))).code == "DEADLINE_EXCEEDED"

    uvloop.run(scenario())


async def test_a_cancelled_wait_cancels_at_the_server():
    async with served() as (channel, service, _):
        task = asyncio.ensure_future(channel.unary(b"/test/hang", b"", timeout_s=LONG_S))
        await until(lambda: service.arrived)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await service.cancelled.wait()


async def test_a_closed_iterator_cancels_at_the_server():
    async with served() as (channel, service, _):
        reader = channel.stream(b"/test/flood", [b""], timeout_s=LONG_S)
        assert len(await anext(reader)) == 256 * 1024
        await reader.aclose()
        async with asyncio.timeout(5):
            await service.cancelled.wait()
        assert service.produced < 64


async def test_a_deadline_ends_the_call_on_both_sides():
    async with served() as (channel, service, _):
        error = await failure(channel.unary(b"/test/hang", b"", timeout_s=0.05))
        assert (error.code, error.is_reply) == ("DEADLINE_EXCEEDED", False)
        async with asyncio.timeout(5):
            await service.cancelled.wait()


async def test_a_reader_that_does_not_read_stops_the_server():
    async with served() as (channel, service, _):
        reader = channel.stream(b"/test/flood", [b""], timeout_s=LONG_S)
        got = [await anext(reader)]
        for _ in range(50):  # others are not held up
            await channel.unary(b"/test/echo", bytes(100_000), timeout_s=LONG_S)
        assert service.produced * len(got[0]) <= grpc_stream.WINDOW + 4 * len(got[0])
        got += [one async for one in reader]
        assert got == [bytes((number,)) * 256 * 1024 for number in range(64)]


async def test_a_unix_socket(tmp_path):
    async with served(f"unix:{tmp_path}/s") as (channel, _, _):
        assert await channel.unary(b"/test/echo", b"x", timeout_s=LONG_S) == b"x"


async def test_a_server_that_stops_gracefully_finishes_what_it_has_under_load():
    async with served() as (channel, service, server):
        waiting = [asyncio.ensure_future(channel.unary(b"/test/wait", b"w", timeout_s=LONG_S)) for _ in range(20)]
        await until(lambda: service.arrived == 20)
        outcomes = []

        async def load():
            while True:
                try:
                    outcomes.append(await channel.unary(b"/test/echo", b"x", timeout_s=LONG_S))
                except GrpcError as error:
                    outcomes.append(error)
                    return

        loads = [asyncio.ensure_future(load()) for _ in range(8)]
        await until(lambda: len(outcomes) > 100)
        stopping = asyncio.ensure_future(server.stop(LONG_S))
        await asyncio.gather(*loads)
        service.go.set()
        assert await asyncio.gather(*waiting) == [b"w"] * 20
        await stopping
        errors = [outcome for outcome in outcomes if outcome != b"x"]
        # gRPC's Python server says CANCELLED of what it has taken from the wire and not begun, to its own client too.
        assert {error.code for error in errors} <= {"UNAVAILABLE", "CANCELLED"}
        assert len(errors) == 8


async def test_it_comes_back_when_the_server_does():
    async with served() as (channel, _, server):
        await channel.unary(b"/test/echo", b"x", timeout_s=LONG_S)
        await server.stop(0)
        error = await failure(channel.unary(b"/test/echo", b"x", timeout_s=LONG_S))
        assert error.code == "UNAVAILABLE"
        again = grpc.aio.server()
        again.add_generic_rpc_handlers((Service(),))
        again.add_insecure_port(channel._target)
        await again.start()
        failed = []

        async def is_back():
            try:
                return await channel.unary(b"/test/echo", b"x", timeout_s=LONG_S) == b"x"
            except GrpcError as late:
                failed.append((late.code, late.never_sent))

        await until_async(is_back)
        assert set(failed) <= {("UNAVAILABLE", True)}
        await again.stop(0)


async def test_closing_ends_calls_in_flight():
    async with served() as (channel, service, _):
        calls = [asyncio.ensure_future(channel.unary(b"/test/hang", b"", timeout_s=LONG_S)) for _ in range(3)]
        await until(lambda: service.arrived == 3)
        await channel.close()
        assert {(await failure(call)).code for call in calls} == {"UNAVAILABLE"}
        error = await failure(channel.unary(b"/test/echo", b"", timeout_s=LONG_S))
        assert (error.code, error.never_sent) == ("UNAVAILABLE", True)


async def test_an_answer_that_is_too_large():
    async with served() as (channel, _, _):
        bounded = GrpcChannel(channel._target, max_receive_bytes=1000)
        assert await bounded.unary(b"/test/echo", bytes(1000), timeout_s=LONG_S) == bytes(1000)
        error = await failure(bounded.unary(b"/test/echo", bytes(1001), timeout_s=LONG_S))
        assert error.code == "RESOURCE_EXHAUSTED"
        assert "CLIENT: Received message larger than max (1001 vs. 1000)" in error.details
        await bounded.close()


@pytest.mark.parametrize("target", ["", "host", ":1", "host:port", "host:1:", "hôte:1"])
def test_no_address(target):
    with pytest.raises(ValueError, match="neither"):
        GrpcChannel(target)


@pytest.mark.parametrize(("target", "parts"), [("h:1", ("h", 1)), ("[::1]:2", ("::1", 2)), ("unix:/a:b", ("", 0))])
def test_addresses(target, parts):
    channel = GrpcChannel(target)
    assert (channel._host, channel._port) == parts


@pytest.mark.parametrize("sizes", [(1, 2, 3), (0, 0), (70_000, 1), (1, 70_000, 5)])
async def test_requests_of_several_messages(sizes):
    sent = [bytes((number + 1,)) * size for number, size in enumerate(sizes)]
    async with served() as (channel, _, _):
        back = await messages(channel, b"thrice", *sent)
    assert back == list(itertools.chain.from_iterable([one] * 3 for one in sent))
