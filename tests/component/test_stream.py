"""The WebSocket of a task: its handshake, its order and bounds, and every way in which it ends."""

import asyncio
import contextlib
import json
import logging
import socket
from dataclasses import replace

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.api import stream
from gateway.core.errors import Fault, FaultKind
from gateway.http import websocket as http_websocket
from tests.kit import stateful
from tests.kit.app import EMBEDDING_KEY, KEY, LIMITED_KEY, running
from tests.kit.stateful import FACTS, StatefulBackend
from tests.kit.wait import until

PATH = "/v1/tasks/total/stream"
END = json.dumps({"type": "end"})


def gateway(*backends, **options):
    options.setdefault("rules", stateful.RULES)
    return running(backends, more_tasks=stateful.TASKS, **options)


def opened(gw, path: str = PATH, *, key: str | None = KEY, **options):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = gw.url.replace("http://", "ws://") + path
    return connect(url, additional_headers=headers, proxy=None, **options)


def chunk(number: int) -> bytes:
    return number.to_bytes(4, "little", signed=True)


async def told(ws) -> dict:
    async with asyncio.timeout(10):
        return json.loads(await ws.recv())


async def closed(ws) -> tuple[int, str]:
    """Read on to the close: its code and reason."""
    with contextlib.suppress(ConnectionClosed):
        async with asyncio.timeout(10):
            while True:
                await ws.recv()
    return ws.close_code, ws.close_reason


# --- the sequence ---------------------------------------------------------------------------------


async def test_chunks_are_one_sequence_answered_in_order():
    triton = StatefulBackend("triton", "a", "b")
    async with gateway(triton) as gw, opened(gw) as ws:
        assert "x-request-id" in ws.response.headers
        for number in range(1, 6):
            await ws.send(chunk(number))
        answers = [await told(ws) for _ in range(5)]
        await ws.send(json.dumps({"input": {"number": 10}, "id": "mine"}))
        named = await told(ws)
        await ws.send(END)
        assert await closed(ws) == (1000, "done")
    assert [a["output"]["total"] for a in answers] == [1, 3, 6, 10, 15]
    assert [a["number"] for a in answers] == [1, 2, 3, 4, 5]
    assert set(answers[0]) == {"number", "output", "timing"}
    assert (named["number"], named["id"], named["output"]) == (6, "mine", {"total": 25})
    steps = [call.sequence for call in triton.calls]
    assert [step.is_start for step in steps] == [True, *[False] * 5]
    assert len({(step.id, call.replica) for step, call in zip(steps, triton.calls, strict=True)}) == 1
    ids = [record.id for record in gw.seen.records]
    assert len(set(ids)) == 6


async def test_a_last_chunk_ends_the_sequence_at_the_server_too():
    triton = StatefulBackend("triton", "a")
    async with gateway(triton) as gw, opened(gw) as ws:
        await ws.send(json.dumps({"input": {"number": 1}}))
        await ws.send(json.dumps({"input": {"number": 2}, "end": True}))
        assert [(await told(ws))["output"]["total"] for _ in range(2)] == [1, 3]
        assert (await closed(ws))[0] == 1000
    assert triton.calls[-1].sequence.is_end
    assert triton.states["a"] == {}


async def test_sockets_do_not_meet():
    triton = StatefulBackend("triton", "a")
    async with gateway(triton) as gw, opened(gw) as one, opened(gw, key=LIMITED_KEY) as two:
        for number in (1, 2, 3):
            await one.send(chunk(number))
            await two.send(chunk(10 * number))
        assert [(await told(one))["output"]["total"] for _ in range(3)] == [1, 3, 6]
        assert [(await told(two))["output"]["total"] for _ in range(3)] == [10, 30, 60]


# --- the handshake --------------------------------------------------------------------------------


async def test_a_browser_gives_its_key_as_a_protocol(caplog):
    caplog.set_level(logging.DEBUG)
    async with gateway(StatefulBackend("triton")) as gw:
        async with opened(gw, key=None, subprotocols=["gateway.v1", f"bearer.{KEY}"]) as ws:
            assert ws.subprotocol == "gateway.v1"
            await ws.send(chunk(4))
            assert (await told(ws))["output"] == {"total": 4}
        async with opened(gw) as ws:
            assert ws.subprotocol is None
    ours = [r.getMessage() for r in caplog.records if not r.name.startswith(("websockets", "uvicorn"))]
    assert not any(KEY in line for line in ours)


@pytest.mark.parametrize(
    ("path", "key", "status", "code"),
    [
        (PATH, None, 401, "unauthorized"),
        (PATH, "wrong", 401, "unauthorized"),
        (PATH, EMBEDDING_KEY, 403, "forbidden"),
        ("/v1/tasks/nope/stream", KEY, 404, "unknown_task"),
        ("/v1/tasks/text-embedding/stream", KEY, 404, "not_found"),
        ("/v1/tasks", KEY, 405, "method_not_allowed"),
        ("/nope", KEY, 404, "not_found"),
        ("/v2/models/m/infer", KEY, 404, "not_found"),
    ],
)
async def test_who_may_not_enter_gets_a_plain_answer(caplog, path, key, status, code):
    async with gateway(StatefulBackend("triton")) as gw:
        with pytest.raises(InvalidStatus) as refused:
            await opened(gw, path, key=key)
        answer = refused.value.response
        assert answer.status_code == status
        assert json.loads(answer.body)["code"] == code
        assert answer.headers["content-type"] == "application/problem+json"
        assert (await gw.http.get("/healthz/live")).status_code == 200
        assert all(bool(record.key_id) == (status != 401) for record in gw.seen.at_the_door)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_wrong_key_as_a_protocol_is_refused_too():
    async with gateway(StatefulBackend("triton")) as gw:
        with pytest.raises(InvalidStatus) as refused:
            await opened(gw, key=None, subprotocols=["gateway.v1", "bearer.wrong"])
    assert refused.value.response.status_code == 401
    assert [record.code for record in gw.seen.at_the_door] == ["unauthorized"]


async def test_plain_http_is_told_that_the_path_is_a_websockets():
    async with gateway(StatefulBackend("triton")) as gw:
        for answer in (await gw.http.get(PATH), await gw.http.post(PATH, json={})):
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
            assert "WebSocket" in answer.json()["detail"]


async def test_bad_handshake_headers_are_told():
    async with gateway(StatefulBackend("triton")) as gw:
        headers = {"authorization": f"Bearer {KEY}", "x-timeout-ms": "soon"}
        with pytest.raises(InvalidStatus) as refused:
            await connect(gw.url.replace("http", "ws") + PATH, additional_headers=headers, proxy=None)
    assert refused.value.response.status_code == 400


OFFER = (
    f"GET {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: keep-alive, Upgrade\r\n"
    "upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
MASKED_CHUNK = b"\x82\x84\0\0\0\0" + chunk(7)


@pytest.mark.parametrize("cut", [1, 50, 1000])
async def test_what_follows_the_handshake_at_once_is_not_lost(cut):
    async with gateway(StatefulBackend("triton")) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = OFFER.encode() + b"\r\n" + MASKED_CHUNK
        for i in range(0, len(sent), cut):
            writer.write(sent[i : i + cut])
            await writer.drain()
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            answer = await reader.readuntil(b'"total":7}')
        writer.close()
    assert head.startswith(b"HTTP/1.1 101")
    assert answer


@pytest.mark.parametrize("more", ["content-length: 0\r\n", "transfer-encoding: chunked\r\n", "upgrade: h2c\r\n"])
async def test_an_offer_with_anything_else_stays_http(more):
    async with gateway(StatefulBackend("triton")) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(OFFER.encode() + more.encode() + b"\r\n" + (b"0\r\n\r\n" if "chunked" in more else b""))
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 404")


async def test_after_an_answer_the_same_connection_may_become_a_socket():
    async with gateway(StatefulBackend("triton")) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz/live HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            writer.write(OFFER.encode() + b"\r\n" + MASKED_CHUNK)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
            assert await reader.readuntil(b'"total":7}')
        writer.close()


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        ("{", "malformed_request", "body"),
        ("[]", "malformed_request", "body"),
        (json.dumps({"input": {"number": "x"}}), "invalid_input", "input.number"),
        (json.dumps({"input": {"number": 1}, "more": 1}), "malformed_request", "more"),
        (json.dumps({"input": {"number": 1}, "parameters": []}), "malformed_request", "parameters"),
        (json.dumps({"input": {"number": 1}, "end": 1}), "malformed_request", "end"),
        (json.dumps({"input": {"number": 1}, "id": []}), "malformed_request", "id"),
        (json.dumps({"type": "begin"}), "malformed_request", "type"),
        (b"123", "invalid_input", "input.audio"),
    ],
)
async def test_a_bad_chunk_is_refused_in_its_place_and_the_rest_goes_on(message, code, field):
    async with gateway(StatefulBackend("triton")) as gw, opened(gw) as ws:
        await ws.send(chunk(1))
        await ws.send(message)
        await ws.send(chunk(2))
        first, refused, second = [await told(ws) for _ in range(3)]
    assert (first["output"]["total"], second["output"]["total"]) == (1, 3)
    assert refused["error"]["code"] == code
    assert refused["error"]["errors"][0]["field"] == field


async def test_a_first_chunk_that_was_refused_has_not_begun_the_sequence():
    triton = StatefulBackend("triton")
    async with gateway(triton) as gw, opened(gw) as ws:
        triton.faults.append(Fault(kind=FaultKind.FAILED, message="x"))
        await ws.send(chunk(1))
        assert (await told(ws))["error"]["code"] == "backend_error"
        await ws.send(chunk(2))
        assert (await told(ws))["output"] == {"total": 2}


async def test_each_chunk_is_a_request_to_the_limits():
    async with gateway(StatefulBackend("triton")) as gw, opened(gw, key=LIMITED_KEY) as ws:
        for number in (1, 2, 3, 4):
            await ws.send(chunk(number))
        answers = [await told(ws) for _ in range(4)]
    assert [a["output"]["total"] for a in answers[:3]] == [1, 3, 6]
    assert answers[3]["error"]["code"] == "rate_limited"
    assert answers[3]["retry_after_ms"] > 0


async def test_a_client_that_does_not_listen_is_let_go():
    async with gateway(StatefulBackend("triton")) as gw, opened(gw) as ws:
        for _ in range(stream.MAX_REFUSED):
            await ws.send("nonsense")
        assert await closed(ws) == (1008, stream.POLICY.reason)


async def test_a_task_without_binary_input_closes():
    totals = stateful.Totals()
    totals.input_schema = {"type": "object", "properties": {"number": {"type": "integer"}}}
    tasks = {"more_tasks": {"total": totals}, "rules": stateful.RULES}
    async with running([StatefulBackend("triton")], **tasks) as gw, opened(gw) as ws:
        await ws.send(chunk(1))
        assert (await told(ws))["error"]["code"] == "unsupported_media_type"
        assert (await closed(ws))[0] == 1003


async def test_a_message_over_the_bound_closes():
    async with gateway(StatefulBackend("triton"), max_body_bytes=2000) as gw, opened(gw) as ws:
        await ws.send(b"x" * 2001)
        assert (await closed(ws))[0] == 1009


async def test_a_lost_sequence_closes():
    triton = StatefulBackend("triton", "a")
    async with gateway(triton) as gw, opened(gw) as ws:
        await ws.send(chunk(1))
        await told(ws)
        triton.restart("a")
        await ws.send(chunk(1))
        assert (await told(ws))["error"]["code"] == "sequence_lost"
        assert await closed(ws) == (4410, stream.LOST.reason)


async def test_a_sequence_that_was_silent_for_too_long_closes():
    triton = StatefulBackend("triton", "a", facts=replace(FACTS, sequence_idle_us=1))
    async with gateway(triton) as gw, opened(gw) as ws:
        await ws.send(chunk(1))
        await told(ws)
        triton.states["a"].clear()
        await ws.send(chunk(1))
        assert (await told(ws))["error"]["code"] == "sequence_unknown"
        assert (await closed(ws))[0] == 4410


async def test_nobody_there_closes():
    triton = StatefulBackend("triton", "a")
    triton.gone.add("a")
    async with gateway(triton) as gw, opened(gw) as ws:
        await ws.send(chunk(1))
        assert (await told(ws))["error"]["code"] == "no_healthy_backend"
        assert (await closed(ws))[0] == 1013


async def test_what_nobody_foresaw_closes():
    class Broken(stateful.Totals):
        def parse(self, given, parameters):
            raise ZeroDivisionError

    tasks = {"more_tasks": {"total": Broken()}, "rules": stateful.RULES}
    async with running([StatefulBackend("triton")], **tasks) as gw, opened(gw) as ws:
        await ws.send(chunk(1))
        error = (await told(ws))["error"]
        assert error["code"] == "internal"
        assert "ZeroDivision" not in json.dumps(error)
        assert (await closed(ws))[0] == 1011


async def test_a_silent_client_is_let_go(monkeypatch):
    monkeypatch.setattr(stream, "IDLE_S", 0.05)
    async with gateway(StatefulBackend("triton")) as gw, opened(gw) as ws:
        assert await closed(ws) == (4408, stream.IDLE.reason)


# --- bounds, leaving, stopping --------------------------------------------------------------------


async def test_beyond_the_bound_nothing_is_read_and_nothing_lost():
    triton = StatefulBackend("triton")
    triton.held = asyncio.Event()
    count, pad = 400, 5000
    message = json.dumps({"input": {"number": 1}, "parameters": {"x": "y" * pad}})
    async with gateway(triton, timeout_us=60_000_000) as gw, opened(gw) as ws:
        sock = ws.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        sending = asyncio.create_task(send_all(ws, [message] * count))
        await until(lambda: triton.calls)
        done, _ = await asyncio.wait({sending}, timeout=0.5)
        assert not done  # the client is held up: its 2 MB lie with nobody
        triton.held.set()
        answers = [await told(ws) for _ in range(count)]
        await sending
    assert [a["output"]["total"] for a in answers] == list(range(1, count + 1))


async def send_all(ws, messages) -> None:
    for message in messages:
        await ws.send(message)


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_client_that_leaves_cancels_what_is_under_way(how):
    triton = StatefulBackend("triton")
    triton.held = asyncio.Event()
    async with gateway(triton) as gw:
        ws = await opened(gw)
        await ws.send(chunk(1))
        await ws.send(chunk(2))
        await until(lambda: triton.calls)
        if how == "close":
            await ws.close()
        else:
            ws.transport.abort()
        await until(lambda: triton.cancelled == 1)
        await until(lambda: gw.seen.records)
        assert gw.seen.records[0].code == "client_closed"
        assert len(triton.calls) == 1
        with contextlib.suppress(ConnectionClosed):
            await ws.recv()


async def test_a_stop_says_so_first_and_finishes_what_was_taken():
    triton = StatefulBackend("triton")
    triton.held = asyncio.Event()
    async with gateway(triton, drain_s=10) as gw, opened(gw) as ws, opened(gw) as idle:
        for number in (1, 2, 3):
            await ws.send(chunk(number))
        async with asyncio.timeout(10):
            await (await ws.ping())  # what came before it has been taken
        gw.stop.set()
        assert await told(ws) == {"type": "going_away"}
        assert await told(idle) == {"type": "going_away"}
        assert (await closed(idle))[0] == 1001
        triton.held.set()
        assert [(await told(ws))["output"]["total"] for _ in range(3)] == [1, 3, 6]
        assert await closed(ws) == (1001, stream.GOING_AWAY.reason)


async def test_a_stop_does_not_wait_longer_than_it_may(caplog):
    triton = StatefulBackend("triton")
    triton.held = asyncio.Event()
    async with gateway(triton, drain_s=1, timeout_us=60_000_000) as gw, opened(gw) as ws:
        await ws.send(chunk(1))
        await until(lambda: triton.calls)
        gw.stop.set()
        assert await closed(ws) == (1001, stream.GOING_AWAY.reason)
        await until(lambda: triton.cancelled == 1)
    assert not any(record.exc_info for record in caplog.records)


async def test_a_peer_that_does_not_answer_pings_is_let_go(monkeypatch):
    monkeypatch.setattr("gateway.http.websocket.PING_S", 0.05)
    async with gateway(StatefulBackend("triton")) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(OFFER.encode() + b"\r\n")
        async with asyncio.timeout(10):
            await reader.readuntil(b"\r\n\r\n")
            frames = await reader.read(-1)
        writer.close()
    assert frames.startswith(b"\x89\x04")  # a ping
    assert b"\x03\xf3keepalive" in frames  # closed with 1011


async def test_a_peer_that_has_to_wait_is_not_taken_for_a_dead_one(monkeypatch):
    monkeypatch.setattr("gateway.http.websocket.PING_S", 0.1)
    triton = StatefulBackend("triton")
    triton.held = asyncio.Event()
    async with gateway(triton, timeout_us=60_000_000) as gw, opened(gw, ping_interval=None) as ws:
        await send_all(ws, [chunk(1)] * 40)
        await until(lambda: triton.calls)
        await asyncio.sleep(0.6)  # many times as long as a pong may take, and nobody reads it
        triton.held.set()
        assert [(await told(ws))["output"]["total"] for _ in range(40)] == list(range(1, 41))


async def test_an_answer_to_a_peer_that_was_just_let_go_is_no_error(monkeypatch, caplog):
    protocols = []
    begin = http_websocket.WebSocket.connection_made
    monkeypatch.setattr(
        http_websocket.WebSocket,
        "connection_made",
        lambda self, transport: (protocols.append(self), begin(self, transport)),
    )
    triton = StatefulBackend("triton")
    triton.held = asyncio.Event()
    async with gateway(triton) as gw, opened(gw, ping_interval=None) as ws:
        await ws.send(chunk(1))
        await until(lambda: triton.calls)
        (protocol,) = protocols
        with monkeypatch.context() as held:
            held.setattr(protocol.transport, "close", lambda: None)  # what was written before is still under way
            protocol.keepalive_timeout()
            triton.held.set()
            await until(lambda: gw.seen.records and not protocol.tasks)
        protocol.transport.close()
        assert (await closed(ws))[0] == 1011
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_peer_that_takes_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr("gateway.http.websocket.WRITE_TIMEOUT_S", 0.1)
    async with gateway(StatefulBackend("triton")) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(OFFER.encode() + b"\r\n")
            peer.settimeout(20)
            flood = (b"\x89\xfd\0\0\0\0" + b"x" * 125) * 500  # pings, whose pongs are not read
            with pytest.raises(ConnectionError):
                await asyncio.to_thread(send_for_ever, peer, flood)


async def test_a_read_full_of_frames_is_parsed_in_parts_between_others_turns(monkeypatch):
    parts = []
    parse = http_websocket.WebSocketsSansIOProtocol.data_received

    def watched(self, data):
        parts.append(len(data))
        parse(self, data)

    held = []
    take = http_websocket.WebSocket.data_received

    def watched_hold(self, data):
        held.append(len(self._unparsed))
        take(self, data)

    monkeypatch.setattr(http_websocket.WebSocketsSansIOProtocol, "data_received", watched)
    monkeypatch.setattr(http_websocket.WebSocket, "data_received", watched_hold)
    async with gateway(StatefulBackend("triton")) as gw:
        host, _, port = gw.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**24)
        writer.write(OFFER.encode() + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        parts.clear()
        # Empty pings, and 100 chunks of 1.
        frames = (b"\x89\x80\0\0\0\0" * 1000 + MASKED_CHUNK) * 100
        writer.write(frames)
        async with asyncio.timeout(20):
            await reader.readuntil(b'{"total":700}')
        writer.close()
    assert sum(parts) == len(frames)
    assert not any(held)  # nothing is read on top of what waits
    assert max(parts) <= http_websocket.WEBSOCKET_READ


@pytest.mark.parametrize("key", [KEY, "wrong"])
async def test_what_is_no_frame_behind_a_handshake_ends_the_connection_and_nothing_more(key, caplog):
    async with gateway(StatefulBackend("triton")) as gw:
        host, _, port = gw.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(OFFER.replace(KEY, key).encode() + b"\r\n" + b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                await reader.read()
        writer.close()
        await until(lambda: not gw.seen.in_flight)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def send_for_ever(peer: socket.socket, what: bytes) -> None:
    while True:
        peer.sendall(what)


@pytest.mark.parametrize("cut", [1, 3])
async def test_text_that_is_none_ends_the_socket_and_is_no_error_of_ours(cut, caplog):
    async with gateway(StatefulBackend("triton")) as gw, opened(gw) as ws:
        broken = b'{"type":"end"}' + b"\xff\xfe"
        at = [broken[begin : begin + cut] for begin in range(0, len(broken), cut)]
        await ws.send(at, text=True)
        assert (await closed(ws))[0] == 1007
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_message_of_endless_empty_parts_ends_the_socket(monkeypatch):
    monkeypatch.setattr(http_websocket, "MAX_FRAGMENTS", 100)

    async def parts():
        for _ in range(101):
            yield b""

    async with gateway(StatefulBackend("triton")) as gw, opened(gw) as ws:
        with contextlib.suppress(ConnectionClosed):
            await ws.send(parts())
        assert (await closed(ws))[0] == 1008


async def test_http_goes_on_beside_the_sockets():
    async with gateway(StatefulBackend("triton")) as gw, opened(gw) as ws:
        answers = await asyncio.gather(*(gw.http.get("/healthz/ready") for _ in range(5)))
        await ws.send(chunk(1))
        await told(ws)
    assert all(isinstance(answer, httpx.Response) and answer.status_code == 200 for answer in answers)
