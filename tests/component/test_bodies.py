"""Bodies that are too large, too slow, or never come whole, on a real socket."""

import asyncio
import contextlib
import json

import pytest

from gateway.backends.scripted import ScriptedBackend
from tests.kit.app import KEY, embedding, running
from tests.kit.wait import until

LIMIT = 1_000_000
HEAD = (
    "POST /v1/tasks/text-embedding HTTP/1.1\r\nhost: x\r\n"
    "authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
)


async def raw(gw, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send `parts` on a socket of its own and read all that comes back until the peer closes."""
    host, port = gw.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(10):
            return await reader.read(65536)
    finally:
        writer.close()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("size", [LIMIT + 1, 3 * LIMIT, 50 * LIMIT])
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_over_the_limit_is_a_413(size, chunked):  # SC-07
    async def pieces():
        left = size
        while left:
            yield b"x" * min(left, 65536)
            left -= min(left, 65536)

    async with running([ScriptedBackend("triton", [embedding()])], max_body_bytes=LIMIT) as gw:
        headers = {"content-type": "application/json"} | ({} if chunked else {"content-length": str(size)})
        if size < 2 * LIMIT:  # drained, so that any client hears of it; beyond, the connection may be closed first
            answer = await gw.http.post("/v1/tasks/text-embedding", content=pieces(), headers=headers)
            assert answer.status_code == 413
            assert answer.json()["code"] == "body_too_large"
            assert answer.json()["errors"][0]["field"] == "body"
        length = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
        head = f"{HEAD.format(key=KEY)}{length}\r\nexpect: 100-continue\r\n\r\n".encode()
        if not chunked:
            assert status_of(await raw(gw, head)) == 413
    assert not gw.backends["triton"].calls


async def test_a_slow_body_is_a_408():  # SC-07
    async with running([ScriptedBackend("triton", [embedding()])], body_timeout_s=0.1) as gw:
        answer = await raw(gw, f"{HEAD.format(key=KEY)}content-length: 100\r\n\r\n".encode(), b"{")
    assert status_of(answer) == 408


async def test_the_key_is_checked_before_the_body():  # SC-07
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        head = f"{HEAD.format(key='wrong')}content-length: 900000\r\nexpect: 100-continue\r\n\r\n".encode()
        answer = await raw(gw, head)
    assert status_of(answer) == 401


async def test_a_refused_body_is_not_read_for_ever():  # SC-07
    async with running([ScriptedBackend("triton", [embedding()])], max_body_bytes=10_000) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{HEAD.format(key='wrong')}content-length: 100000000\r\n\r\n".encode())
        sent = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while sent < 50_000_000:
                    writer.write(b"x" * 65536)
                    await writer.drain()
                    sent += 65536
        writer.close()
    assert sent < 20_000_000  # twice the bound, and what the kernel holds on both sides


@pytest.mark.parametrize(
    "head",
    [
        "content-length: 5\r\ntransfer-encoding: chunked\r\n",
        "content-length: 5\r\ncontent-length: 6\r\n",
        "content-length: -1\r\n",
        "content-length: x\r\n",
        "transfer-encoding: nonsense\r\n",
    ],
)
async def test_ambiguous_framing_is_refused(head):  # SC-11
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        body = b'5\r\n{"a":\r\n0\r\n\r\n'
        answer = await raw(gw, f"{HEAD.format(key=KEY)}{head}\r\n".encode() + body)
    assert answer == b"" or 400 <= status_of(answer) < 500
    assert not gw.backends["triton"].calls


async def test_one_byte_at_a_time_is_as_good_as_whole():  # SC-07
    body = json.dumps({"input": {"text": "数🙂é"}}).encode()
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        head = f"{HEAD.format(key=KEY)}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        answer = await raw(gw, head, *(body[i : i + 1] for i in range(len(body))))
        sent = gw.backends["triton"].calls[0].call.payload.inputs[0].data
    assert status_of(answer) == 200
    assert bytes(sent)[4:].decode() == "数🙂é"


async def test_a_client_that_leaves_while_sending_costs_nothing():
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{HEAD.format(key=KEY)}content-length: 100\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()
        await until(lambda: gw.seen.at_the_door)
    assert gw.seen.at_the_door[0].code == "client_closed"
