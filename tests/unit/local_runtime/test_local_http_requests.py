"""HTTP requests out of bytes: however they are cut, whatever is wrong with them."""

import asyncio
import json
import logging
import random

import pytest

from local_runtime.protocol.http_requests import MAX_HEAD_BYTES, RequestReader
from tests.kit.local_http import CHUNKED, GET, MAX_BODY, POST, SEEDS, Server, Transport, mutated, received


@pytest.mark.parametrize(
    "text",
    [
        POST + GET,
        b"\r\n\r\n" + POST + b"\r\n" + POST,
        CHUNKED + b"2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\nt: u\r\nv: w\r\n\r\n" + POST,
        CHUNKED + b"0\r\n\r\n" + CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
        POST.replace(b"host", b"connection: upgrade\r\nupgrade: h2c\r\nhost") + GET,
        b"GET /echo HTTP/1.1\r\nconnection: upgrade\r\nUpGrade: websocket\r\n\r\n" + POST,
        POST.replace(b"host: x", b"connection: close") + GET,
        POST + b"garbage\r\n\r\n",
        POST.replace(b"content-length: 5", b"content-length: 5\r\ncontent-length: 5"),
        CHUNKED + b"5\r\nhelloXX\r\n",
    ],
)
async def test_a_cut_at_any_byte_changes_nothing(text):
    whole = received(text)
    assert whole[0] or whole[2]
    for at in range(1, len(text)):
        assert received(text[:at], text[at:]) == whole
    assert received(*(text[at : at + 1] for at in range(len(text)))) == whole


async def test_a_chunked_body_is_the_sum_of_its_chunks_without_trailers():
    sent = CHUNKED + b"2\r\nhe\r\n003 ; a=b\r\nllo\r\n0\r\ncontent-encoding: gzip\r\n\r\n"
    seen, written, is_closed = received(sent + GET)
    assert seen == [(b"POST", b"/echo", b"hello"), (b"GET", b"/echo", b"")]
    assert written.count(b"200 OK") == 2
    assert not is_closed


async def test_offers_of_other_protocols_are_ignored():
    offer = POST.replace(b"host", b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\nhost")
    assert received(offer + offer)[0] == [(b"POST", b"/echo", b"hello")] * 2


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://host:80/v2/models?x=http://y/", b"/v2/models"),
        (b"http://host", b"/"),
        (b"/v2?a=b?c", b"/v2"),
        (b"/a%20b", b"/a%20b"),
        (b"//x/y", b"//x/y"),
        (b"*", b"*"),
    ],
)
async def test_targets(target, path):
    seen, _, _ = received(b"OPTIONS %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
    assert seen == [(b"OPTIONS", path, b"")]


# --- what is not taken ----------------------------------------------------------------------------


def head_with(*lines, start=b"POST /echo HTTP/1.1"):
    return b"\r\n".join((start, b"host: x", *lines, b"", b"abc"))


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (head_with(b"content-length: 3", b"content-length: 3"), 400),
        (head_with(b"content-length: 3", b"content-length: 4"), 400),
        (head_with(b"content-length: 3, 3"), 400),
        (head_with(b"content-length: +3"), 400),
        (head_with(b"content-length: "), 400),
        (head_with(b"content-length : 3"), 400),
        (head_with(b"content-length: 99999999999999999999999"), 400),
        (head_with(b"content-length: 3", b"transfer-encoding: chunked"), 400),
        (head_with(b"transfer-encoding: chunked", b"content-length: 3"), 400),
        (head_with(b"transfer-encoding: chunked, identity"), 400),
        (head_with(b"transfer-encoding: identity"), 400),
        (head_with(b"transfer-encoding: xchunked"), 400),
        (head_with(b"transfer-encoding: gzip, chunked"), 501),
        (head_with(b"transfer-encoding: identity", b"transfer-encoding: chunked"), 501),
        (head_with(b"transfer-encoding:", b" chunked"), 400),
        (head_with(b"transfer-encoding: chunked", start=b"POST /echo HTTP/1.0"), 400),
        (head_with(b"a: b", b" folded"), 400),
        (head_with(b"no colon"), 400),
        (head_with(b"a: \0"), 400),
        (b"GET /echo HTTP/1.1\nhost: x\n\n", 400),
        (b"GET /echo HTTP/1.1\nhost: x\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nhost: x\n\n", 400),
        (b"GET /echo HTTP/1.1\nhost: x\n\nGET / HTTP/1.1\r\n\r\n", 400),
        (b"get /echo HTTP/1.1\r\n\r\n", 400),
        (b"BREW /echo HTTP/1.1\r\n\r\n", 400),
        (b"GET /echo HTTP/2.0\r\n\r\n", 505),
        (b"GET /echo HTTP/0.9\r\n\r\n", 505),
        (b"GET /echo\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", 501),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400),  # a TLS client
        (CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"3\nabc\n0\n\n", 400),
        (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", 400),
        (CHUNKED + b"3\r\nabc\r\n0\r\ntrailer\r\n\r\n", 400),
        (CHUNKED + b"FFFFFFFFFFFFFFFFF\r\n", 400),
        (CHUNKED + b"3;" + b"x" * 10_000, 400),
        (CHUNKED + b"0\r\n" + b"t: u\r\n" * 20_000, 400),
        (CHUNKED + (b"1;%b\r\nx\r\n" % (b"x" * 1000)) * 100, 400),
        (CHUNKED + b"%x\r\n" % (MAX_BODY + 1), 413),
        (CHUNKED + (b"4e20\r\n%b\r\n" % bytes(20_000)) * 6, 413),
        (head_with(b"content-length: %d" % (MAX_BODY + 1)), 413),
        (head_with(b"content-length: %d" % (MAX_BODY + 1), b"expect: 100-continue"), 413),
        (b"GET /echo HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, 431),
        (b"GET /echo HTTP/1.1\r\na: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
    ],
)
async def test_what_is_refused(text, status):
    seen, written, is_closed = received(POST + text)
    assert seen == [(b"POST", b"/echo", b"hello")]
    _, _, refusal = written.partition(b"hello")
    head, _, body = refusal.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    assert json.loads(body)["error"]
    assert is_closed
    if status == 413:
        assert str(MAX_BODY) in json.loads(body)["error"]


async def test_a_head_is_bounded_however_slowly_it_comes():
    line = b"a: b\r\n"
    seen, written, is_closed = received(b"GET /echo HTTP/1.1\r\n", *([line] * (MAX_HEAD_BYTES // len(line) + 1)))
    assert (seen, is_closed) == ([], True)
    assert b" 431 " in written


# --- anything at all ------------------------------------------------------------------------------


async def test_garbage_harms_nobody_else(caplog):
    chance = random.Random(20_000)  # noqa: S311 - the same garbage every time
    caplog.set_level(logging.WARNING)
    server = Server()
    ends = set()
    for number in range(20_000):
        connection, transport = server.connection(), Transport()
        connection.connection_made(transport)
        text = mutated(chance, chance.choice(SEEDS))
        at = chance.randint(0, len(text))
        for piece in (text[:at], text[at:]):
            if not transport.is_closed:
                connection.data_received(piece)
        if number % 100 == 0:
            await asyncio.sleep(0)  # let streams run
        is_open = connection.eof_received() and not transport.is_closed
        transport.close()
        connection.connection_lost(None)
        ends.add((transport.written[9:12], is_open))
    assert {status for status, _ in ends} >= {b"", b"200", b"400", b"501", b"505"}
    assert not server.connections
    assert received(POST)[1].endswith(b"POST /echo hello")
    assert caplog.records == []


class Copies(bytes):
    """Received bytes that count how many of them are copied."""

    copied = 0

    def __getitem__(self, key):
        part = super().__getitem__(key)
        if isinstance(key, slice):
            Copies.copied += len(part)
        return part

    def partition(self, separator):
        Copies.copied += len(self)
        return super().partition(separator)


@pytest.mark.parametrize("text", [GET * 5000, CHUNKED + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n"], ids=["heads", "chunks"])
def test_no_part_of_what_was_received_costs_a_copy_of_what_is_behind_it(text, monkeypatch):
    monkeypatch.setattr(Copies, "copied", 0)
    reader = RequestReader(max_body_bytes=MAX_BODY)
    reader.put(Copies(text))
    taken = 0
    while reader.take() is not None:
        taken += 1
    assert taken == (5000 if text.startswith(GET) else 1)
    assert 0 < Copies.copied <= 2 * len(text)
