"""The faults that providers show, as one table: what each becomes is told in docs/llm.md, which this holds us to."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.backends.llm.backend import Limits
from gateway.core.sse import DEFAULT_MAX_EVENT_BYTES
from tests.kit.llm_plane import CHAT, Endpoint, llm_plane
from tests.kit.relayed import asked, broken_off, is_stream, refusal, said, script, served_by, text_of
from tests.kit.upstream import (
    HOLD,
    LAST_CHUNK,
    RST,
    Pause,
    Script,
    Upstream,
    chunk,
    completion,
    delta,
    error_reply,
    event,
    head,
    json_reply,
    reply,
    sse_head,
)

MANUAL = (Path(__file__).parents[2] / "docs" / "llm.md").read_text()
SHORT_US, LONG_US = 150_000, 30_000_000
PATIENT = Limits()
IMPATIENT = Limits(first_token_us=SHORT_US, idle_us=SHORT_US)

Where = Callable[[bool], contextlib.AbstractAsyncContextManager[Endpoint]]
"""An endpoint with a fault, for a request that is streamed or not."""


def scripted(whole: Script, streamed: Script | None = None, *, limits: Limits = PATIENT) -> Where:
    @contextlib.asynccontextmanager
    async def where(stream: bool) -> AsyncIterator[Endpoint]:
        yield Endpoint(upstreams=(Upstream(streamed if stream and streamed is not None else whole),), limits=limits)

    return where


def at(url: str) -> Where:
    @contextlib.asynccontextmanager
    async def where(stream: bool) -> AsyncIterator[Endpoint]:
        yield Endpoint(base_urls=(url,))

    return where


def tls_answered_with(answer: bytes) -> Where:
    """An `https` address where the client's greeting is answered by these bytes."""

    @contextlib.asynccontextmanager
    async def where(stream: bool) -> AsyncIterator[Endpoint]:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            yield Endpoint(base_urls=(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1",))

    return where


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of the table.

    Attributes:
        row: how its row in the manual begins.
        later: what may follow the first tokens of a stream; each is one way for the fault to come then.
        own_code: the endpoint's own word, which the caller is told.
        says: status, code and blame where the manual's row points to another one.
    """

    row: str
    where: Where
    later: Sequence[Script] = ()
    retry_after: str | None = None
    is_late: bool = False
    own_code: str | None = None
    says: tuple[int, str, bool] | None = None


NO = {"message": "no", "type": "t", "param": None, "code": None}
BUSY = NO | {"code": "rate_limit_exceeded"}
HEAD = head(200, {"Content-Type": "application/json", "Content-Length": "999"})
PART = json.dumps(completion())[:50].encode()
PAGE = reply(200, b"<html>Sign in</html>", content_type="text/html")
HUGE = chunk(b"data: {" + b" " * (DEFAULT_MAX_EVENT_BYTES + 1))
AGAIN = [head(307, {"Location": "/v1/chat/completions", "Content-Length": "0"})]

FAULTS = {
    "refused": Fault(row="connection refused", where=at("http://127.0.0.1:1/v1")),
    "tls garbage": Fault(row="TLS fails", where=tls_answered_with(b"\x15\x03\x01 this is no handshake at all")),
    "tls plain": Fault(row="TLS fails", where=tls_answered_with(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
    "dns": Fault(row="its name is not found", where=at("http://name.invalid/v1")),
    "429": Fault(row="429 without", where=scripted(error_reply(429, NO)), retry_after="1"),
    "429 with": Fault(
        row="429 with `Retry-After`", where=scripted(error_reply(429, NO, {"Retry-After": "7"})), retry_after="7"
    ),
    "503": Fault(row="503", where=scripted(error_reply(503, NO)), retry_after="1"),
    "503 with": Fault(row="503", where=scripted(error_reply(503, NO, {"Retry-After": "7"})), retry_after="7"),
    "401": Fault(row="401, 402, 403", where=scripted(error_reply(401, NO | {"code": "invalid_api_key"}))),
    "500": Fault(row="500 with an error object", where=scripted(error_reply(500, NO))),
    "500 page": Fault(row="500 with anything else", where=scripted(reply(500, b"<html>", content_type="text/html"))),
    "slow headers": Fault(row="slow headers", where=scripted([HOLD], limits=IMPATIENT), is_late=True),
    "stalled": Fault(
        row="stalled",
        where=scripted([HEAD, PART, HOLD], [sse_head(), chunk(b": ping\n\n"), HOLD], limits=IMPATIENT),
        later=([HOLD], [chunk(b"data: {"), HOLD]),
    ),
    "cut": Fault(
        row="cut",
        where=scripted([HEAD, PART, Pause(0.02), RST], [sse_head(), chunk(b"data: {"), Pause(0.02), RST]),
        later=([Pause(0.02), RST], [chunk(b"data: {"), Pause(0.02), RST], [LAST_CHUNK]),
    ),
    "garbage": Fault(row="garbage", where=scripted([b"\x00\x01garbage\r\n\r\n"]), later=([b"zz\r\n"], [event("zz")])),
    "truncated json": Fault(
        row="truncated JSON",
        where=scripted(reply(200, PART), [sse_head(), event('{"choices": [{'), HOLD]),
        later=([event('{"choices": [{')],),
    ),
    "content type": Fault(row="wrong content type", where=scripted(PAGE, json_reply(200, completion()))),
    "page": Fault(row="wrong content type", where=scripted(PAGE)),
    "empty": Fault(row="empty 200", where=scripted(reply(200, b""), reply(200, b"", content_type="text/event-stream"))),
    "error inside": Fault(
        row="error inside of a 200",
        where=scripted(json_reply(200, {"error": NO}), [sse_head(), event({"error": NO}), HOLD]),
        later=([event({"error": NO}), event("[DONE]"), LAST_CHUNK],),
        says=(502, "backend_error", False),
    ),
    "busy inside": Fault(
        row="error inside of a 200",
        where=scripted(json_reply(200, {"error": BUSY}), [sse_head(), event({"error": BUSY}), HOLD]),
        later=([event({"error": BUSY})],),
        retry_after="1",
        own_code="rate_limit_exceeded",
        says=(429, "queue_full", False),
    ),
    "redirects": Fault(row="redirect", where=scripted(AGAIN)),
    "oversized": Fault(
        row="oversized",
        where=scripted([b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000], [sse_head(), HUGE, HOLD]),
        later=([HUGE],),
    ),
}


def rows() -> dict[str, list[str]]:
    """The manual's table, by the fault's name there."""
    _, _, after = MANUAL.partition("### What a fault of an endpoint becomes")
    lines = [line for line in after.split("\n## ")[0].splitlines() if line.startswith("| ")]
    return {
        cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:])
    }


def told(fault: Fault) -> tuple[int, str, bool]:
    """What the manual says of it: status, code, and whether it counts against the endpoint."""
    (row,) = [cells for name, cells in rows().items() if name.startswith(fault.row)]
    if fault.says is not None:  # the row refers to that of another fault
        return fault.says
    outcome = re.fullmatch(r"(\d+) `(\w+)`", row[0])
    assert outcome is not None, row
    assert (fault.retry_after is None) == (row[1] == "-")
    assert fault.retry_after in (None, "7") or row[1].endswith(fault.retry_after)
    return int(outcome[1]), outcome[2], row[2].startswith("yes")


def test_every_fault_of_the_manual_is_shown():
    for name in rows():
        assert any(name.startswith(fault.row) for fault in FAULTS.values()), name


both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
every = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


@both
@every
async def test_a_fault_without_another_candidate(fault, stream):
    status, code, is_blamed = told(fault)
    limits = {"timeout_us": 400_000, "attempt_timeout_us": 200_000} if fault.is_late else {}
    async with fault.where(stream) as endpoint, llm_plane(endpoint, **limits) as gw:
        answer = await gw.post(CHAT, asked(stream=stream))
        assert [breaker.failures for breaker in gw.board.all().values()] == ([1] if is_blamed else [])
        assert (gw.loads, gw.seen.in_flight) == ({}, 0)
    assert refusal(answer) == (status, fault.own_code or code, fault.retry_after)
    assert gw.seen.records[0].code == code
    for up in endpoint.upstreams:
        assert len(up.requests) == 1


@both
@every
async def test_a_fault_before_the_first_token_goes_to_the_next_candidate(fault, stream):
    up2 = Upstream(script("other", stream=stream))
    limits = {"attempt_timeout_us": SHORT_US} if fault.is_late else {}
    async with fault.where(stream) as endpoint, llm_plane(endpoint, up2, **limits) as gw:
        answer = await gw.post(CHAT, asked(stream=stream))
        assert [breaker.failures for breaker in gw.board.all().values()] == ([1] if told(fault)[2] else [])
        assert (gw.loads, gw.seen.in_flight) == ({}, 0)
    assert is_stream(answer) is stream
    assert (text_of(answer), served_by(answer)) == ("other", ("up2", 2))
    assert len(up2.requests) == 1
    (record,) = gw.seen.records
    assert (record.code, len(record.faults)) == ("ok", 1)


LATER = {f"{name} {number}": after for name, fault in FAULTS.items() for number, after in enumerate(fault.later)}


@pytest.mark.parametrize("after", LATER.values(), ids=LATER)
async def test_a_fault_after_the_first_token_ends_the_stream_and_nobody_else_is_asked(after):
    up1 = Upstream([sse_head(), event(delta("a")), event(delta("b")), *after])
    up2 = Upstream(script("other", stream=True))
    async with llm_plane(Endpoint(upstreams=(up1,), limits=Limits(idle_us=SHORT_US)), up2) as gw:
        answer = await gw.post(CHAT, asked(stream=True))
        if LAST_CHUNK not in after:  # else the connection is in order, and kept
            await asyncio.wait_for(up1.requests[0].left.wait(), 5)
        assert (gw.loads, gw.seen.in_flight) == ({}, 0)
    parts, error = broken_off(answer)
    assert (said(parts), error["code"]) == ("ab", "backend_error")
    assert served_by(answer) == ("up1", 1)
    assert not up2.requests
    (record,) = gw.seen.records
    assert (record.code, record.usage.is_estimated, record.usage.output_tokens) == ("backend_error", True, 2)
