"""Callers that leave: the work ends at the endpoint, everything taken is given back, and nobody is blamed."""

import asyncio
import contextlib
import gc
import json
import logging
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.app import KEY, Harness
from tests.kit.llm_plane import CHAT, Endpoint, llm_plane
from tests.kit.relayed import asked, script, text_of
from tests.kit.upstream import HOLD, Pause, Script, Seen, Upstream, chunk, delta, event, head, sse_head
from tests.kit.wait import until

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
WORDS = [step for number in range(100) for step in (event(delta(f"w{number} ")), Pause(0.2))]  # for 20 s


class Client:
    """One caller on a raw socket, who can leave at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, gw: Harness, *, stream: bool) -> "Client":
        """Connect, and send a chat request."""
        host, port = gw.url.removeprefix("http://").split(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        body = json.dumps(asked(stream=stream)).encode()
        lines = (f"POST {CHAT} HTTP/1.1", "Host: x", "Connection: close", f"Authorization: Bearer {KEY}")
        top = "\r\n".join((*lines, "Content-Type: application/json", f"Content-Length: {len(body)}", "", ""))
        client.writer.write(top.encode() + body)
        return client

    def leave(self, *, reset: bool = False) -> None:
        if reset:
            self.writer.transport.abort()
        else:
            self.writer.close()


@pytest.fixture
def quiet(caplog):
    """Nothing may be logged as a warning or worse."""
    with caplog.at_level(logging.WARNING):
        yield
    assert not caplog.records


async def nothing_is_left(gw: Harness, *, records: int = 1) -> None:
    """All is given back, and each leaving has one record which says so."""
    await until(lambda: len(gw.seen.records) == records)
    assert {record.code for record in gw.seen.records} == {"client_closed"}
    assert (gw.loads, gw.seen.in_flight, dict(gw.board.all())) == ({}, 0, {})


@both
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("whole", "streamed", "begins"),
    [
        ([HOLD], [HOLD], False),
        ([b"HTTP/1.1 200 OK\r\n", HOLD], [sse_head(), HOLD], False),
        ([head(200, {"Content-Length": "999"}), b"{", HOLD], [sse_head(), chunk(b": ping\n\n"), HOLD], False),
        (None, [sse_head(), *WORDS], True),
        (None, [sse_head(), event(delta("a")), HOLD], True),
    ],
    ids=["silent", "head", "before the first token", "mid-stream", "mid-stream, silent"],
)
async def test_the_endpoint_sees_its_caller_leave(whole, streamed, begins, reset, stream, quiet):
    up = Upstream(streamed if stream or whole is None else whole)
    async with llm_plane(up) as gw:
        client = await Client.of(gw, stream=stream or whole is None)
        seen = await up.request()
        if begins:
            await client.reader.readuntil(b"data: ")
        client.leave(reset=reset)
        await asyncio.wait_for(seen.left.wait(), 1)
        await nothing_is_left(gw)
        (record,) = gw.seen.records
        assert record.route.backend == "up1"
        assert record.usage.is_estimated
        assert (record.usage.output_tokens or 0) >= begins


@both
async def test_one_who_leaves_while_waiting_for_its_turn_never_reaches_the_endpoint(stream, quiet):
    up = Upstream([HOLD], script(stream=stream))
    async with llm_plane(up, max_in_flight=1, timeout_us=60_000_000, attempt_timeout_us=60_000_000) as gw:
        first = await Client.of(gw, stream=stream)
        await up.request()
        second = await Client.of(gw, stream=stream)
        await until(lambda: gw.loads == {"up1": 2})
        second.leave()
        await until(lambda: gw.loads == {"up1": 1})
        assert len(up.requests) == 1
        first.leave()
        await nothing_is_left(gw, records=2)
        assert gw.seen.records[0].usage.output_tokens is None  # it was never sent
        assert text_of(await gw.post(CHAT, asked(stream=stream))) == "hi"


@both
async def test_one_who_leaves_while_the_connection_is_made_ends_that(stream, quiet):
    greeted, left = asyncio.Event(), asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeted.set()  # and never a word of TLS
        await reader.read()
        left.set()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        async with llm_plane(Endpoint(base_urls=(url,))) as gw:
            client = await Client.of(gw, stream=stream)
            await asyncio.wait_for(greeted.wait(), 2)
            client.leave()
            await asyncio.wait_for(left.wait(), 1)
            await nothing_is_left(gw)


@both
async def test_the_next_caller_is_served_after_many_have_left(stream, quiet):
    up = Upstream(*[[HOLD]] * 10, script(stream=stream))
    async with llm_plane(up, max_in_flight=10) as gw:
        callers = [await Client.of(gw, stream=stream) for _ in range(10)]
        await up.request(9)
        for caller in callers:
            caller.leave()
        await nothing_is_left(gw, records=10)
        assert text_of(await gw.post(CHAT, asked(stream=stream))) == "hi"


# --- a thousand of them ------------------------------------------------------------------------------------

LEAVES, TOGETHER = 1000, 50
MAX_GROWTH = 500_000  # bytes: a thousand that each left as little as one object of 500 bytes behind would be over it


class Answering(Upstream):
    """Answers in the form that is asked for, in some turns of the loop."""

    def script_for(self, seen: Seen) -> Script:
        self.requests.append(seen)
        steps = script("hi", stream=bool(seen.json().get("stream")))
        return [part for step in steps for part in (Pause(0.001), step)]


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Gives a function that tells how many bytes more are held than at the beginning."""
    tracemalloc.start()
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()

    def grown() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    try:
        yield grown
    finally:
        tracemalloc.stop()


@contextlib.asynccontextmanager
async def counted() -> AsyncIterator[None]:
    """What is open before is all that is open after."""
    tasks, files = asyncio.all_tasks(), open_files()
    yield
    await until(lambda: asyncio.all_tasks() <= tasks and open_files() <= files)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def leave_at_random(gw: Harness, chance: random.Random) -> None:
    """A caller who leaves before, while or after anything comes; some stay to the end."""
    client = await Client.of(gw, stream=chance.random() < 0.5)
    moment = chance.choice(["at once", "soon", "at the head", "later", "never"])
    if moment == "soon":
        for _ in range(chance.randrange(12)):  # turns of the loop, and no time
            await asyncio.sleep(0)
    elif moment == "at the head":
        await client.reader.readuntil(b"\r\n\r\n")
    elif moment == "later":
        await client.reader.readuntil(b"\r\n\r\n")
        await client.reader.read(chance.randrange(1, 900))
    elif moment == "never":
        await client.reader.read()
    client.leave(reset=chance.random() < 0.5)
    with contextlib.suppress(OSError):
        await client.writer.wait_closed()


async def many_leave(gw: Harness, count: int, chance: random.Random) -> None:
    async def some() -> None:
        for _ in range(count // TOGETHER):
            await leave_at_random(gw, chance)

    await asyncio.gather(*(some() for _ in range(TOGETHER)))
    await until(lambda: not gw.loads and not gw.seen.in_flight)


async def test_a_thousand_random_leavings_leave_nothing_behind(quiet):
    chance = random.Random(5)  # noqa: S311 - a repeatable order of events
    up = Answering()
    async with counted(), llm_plane(up, max_in_flight=20) as gw:
        await many_leave(gw, 100, chance)  # what is kept for good is made by then
        forget(gw, up)
        with traced() as grown:
            await many_leave(gw, LEAVES, chance)
            assert {record.code for record in gw.seen.records} == {"ok", "client_closed"}
            assert len(gw.seen.records) > LEAVES / 2
            forget(gw, up)
            assert grown() < MAX_GROWTH
        assert dict(gw.board.all()) == {}
        assert gw.pipeline.gates["up1"].waiting() == {}
        (client,) = gw.backends["up1"]._clients.values()
        assert not client._busy
        await until(lambda: len(up.live) == len(client._idle))
        assert text_of(await gw.post(CHAT, asked(stream=True))) == "hi"


def forget(gw: Harness, up: Upstream) -> None:
    """What the kit itself keeps of each request."""
    gw.seen.records.clear()
    gw.seen.began_tasks.clear()
    gw.seen.at_the_door.clear()
    up.requests.clear()
    for connection in up.live:
        connection._seen.clear()
