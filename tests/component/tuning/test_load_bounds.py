"""Load against servers that never come to an end: each request ends with a code, and no more is read than may be."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.tuning.load import http_wire, runner, targets
from gateway.tuning.load.asks import Ask, AskError
from gateway.tuning.load.http_wire import ANSWER_BYTES, HEAD_BYTES, HttpPool
from gateway.tuning.load.statistics import GatewayStatistics
from gateway.tuning.traffic import TrafficClass
from tests.kit.upstream import chunk, delta, event, head, sse_head

BUFFERS = 16 * 2**20  # of the two sockets and of the server's side: sent, and never read
CHUNKED = head(200, {"transfer-encoding": "chunked"})


@contextlib.asynccontextmanager
async def endless(begin: bytes, again: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that answers with `begin`, and `again` for as long as it gets rid of it; how much that was each time."""
    sent: list[int] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            place = len(sent)
            sent.append(len(begin))
            writer.write(begin)
            while True:
                writer.write(again)
                await writer.drain()
                sent[place] += len(again)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", sent
        for writer in writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def codes(url, **ask):
    traffic = TrafficClass(trace=(0.0, 0.01))
    async with targets.clients() as clients:
        target = await clients.target(Ask(url=url, **ask), traffic)
        report = await runner.run(target, [traffic], duration_s=0.05, grace_s=60)
    assert report.whole.sent == 2
    return report.whole.codes


TASK = {"task": "t", "input": {"text": "a"}}


@pytest.mark.parametrize(
    ("begin", "again", "most"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"a" * 65_536, HEAD_BYTES),
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 10_000, HEAD_BYTES),
        (head(100), head(100) * 1000, HEAD_BYTES),
        (head(200), b"x" * 2**18, 2**22),
        (CHUNKED, chunk(b"x" * 2**18), 2**22),
        (CHUNKED, chunk(b"x") * 1000, 2**22),
        (CHUNKED + b"1;", b"x" * 65_536, 2**22),
        (CHUNKED + b"0\r\nx: ", b"y" * 65_536, 2**22),
    ],
    ids=["a header", "headers", "interim answers", "a body", "chunks", "bytes", "an extension of a chunk", "a trailer"],
)
async def test_what_never_ends_is_cut_off(monkeypatch, begin, again, most):
    monkeypatch.setattr(http_wire, "ANSWER_BYTES", 2**22)
    async with endless(begin, again) as (url, sent):
        assert await codes(url, **TASK) == {"too_large": 2}
    assert max(sent) < most + BUFFERS


async def test_a_stream_that_never_ends_is_cut_off(monkeypatch):
    monkeypatch.setattr(http_wire, "ANSWER_BYTES", 2**22)
    async with endless(sse_head(), event(delta("a")) * 100) as (url, sent):
        assert await codes(url, chat="hello") == {"too_large": 2}
    assert max(sent) < 2**22 + BUFFERS


async def test_the_bound_of_an_answer():
    async with endless(head(200), b"x" * 2**18) as (url, sent):
        assert await codes(url, **TASK) == {"too_large": 2}
    assert ANSWER_BYTES <= max(sent) < ANSWER_BYTES + BUFFERS


async def test_garbage_without_end_is_no_answer():
    async with endless(b"", b"\x00\xff" * 65_536) as (url, sent):
        assert await codes(url, **TASK) == {"not_http": 2}
    assert max(sent) < BUFFERS


async def test_all_answers_together_have_a_bound(monkeypatch):
    monkeypatch.setattr(http_wire, "HELD_BYTES", 2**20)
    async with endless(head(200), b"x" * 65_536) as (url, sent):
        pool = HttpPool("127.0.0.1", int(url.rpartition(":")[2]))
        answers = await asyncio.gather(*(pool.exchange(b"GET / HTTP/1.1\r\n\r\n") for _ in range(4)))
        await pool.close()
    assert [one.trouble for one in answers] == ["too_large"] * 4
    assert all(one.body == b"" for one in answers)
    assert pool.held == 0
    assert sum(sent) < 4 * (2**20 + BUFFERS)


async def test_a_configuration_that_never_ends_is_told_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr(http_wire, "ANSWER_BYTES", 2**22)
    async with endless(head(200), b"x" * 65_536) as (url, _):
        with pytest.raises(AskError, match="/v2/models/m/config: too_large"):
            await codes(url, tensor="m")


async def test_a_metrics_page_that_never_ends_is_none():
    async with endless(head(200), b"x 1\n" * 65_536) as (url, sent):
        with pytest.raises(AskError, match="no metrics at"):
            await GatewayStatistics(url).begin()
    assert max(sent) < 2 * BUFFERS
