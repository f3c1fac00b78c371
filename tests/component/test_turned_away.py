"""What a worker that is behind turns away by the head alone: on real sockets, in each path's form."""

import asyncio
import json

import pytest
from websockets.asyncio.client import connect as websocket
from websockets.exceptions import InvalidStatus

from gateway.api.shedding import Shedding
from gateway.backends.scripted import ScriptedBackend
from gateway.core.types import Caller, Message
from gateway.http import connection
from tests.component.test_http import talk
from tests.component.test_stream import told
from tests.kit import stateful
from tests.kit.app import KEY, embedding, running
from tests.kit.keys import EMBED, TEXT
from tests.kit.stateful import StatefulBackend
from tests.kit.wait import until

NIGHTLY_KEY, PAGE = "secret-nightly", "https://app.example"
CHAT = {"model": "general_llm", "messages": [{"role": "user", "content": "x"}]}
BATCH = {"x-priority": "batch"}
LIVE = b"GET /healthz/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class Heart(Shedding):
    """One that is told what it feels, and by whom."""

    def __init__(self) -> None:
        self.counts = {"batch": 0, "interactive": 0}
        self.recorded = []
        super().__init__(0, lambda: 0, lambda: 0, self)

    def sheds(self, *priorities: str) -> None:
        self._most_us = {name: -1 if name in priorities else 0 for name in self.counts}
        self.is_behind = bool(priorities)

    def shed(self, priority) -> None:
        self.recorded.append(priority)

    def turned_away(self, priority, count) -> None:
        self.counts[priority] += count


@pytest.fixture
def heart():
    return Heart()


def gateway(heart, **options):
    backends = [ScriptedBackend("triton", [embedding()]), ScriptedBackend("llm", [Message(body=b"{}")])]
    nightly = {NIGHTLY_KEY: Caller(key_id="nightly", tenant="t1", priority="batch")}
    return running(backends, shedding=heart, more_callers=nightly, **options)


def posted(*more: str, path: str = EMBED, body: bytes = json.dumps(TEXT).encode(), version: str = "1.1") -> bytes:
    lines = (
        f"POST {path} HTTP/{version}",
        "host: x",
        f"authorization: Bearer {KEY}",
        "content-type: application/json",
        *more,
    )
    return "\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBED, TEXT),
        (f"{EMBED}?x=1", TEXT),
        ("/v1/infer", {"task": "text-embedding", **TEXT}),
        ("/v1/infer?x=1", {"task": "text-embedding", **TEXT}),
        ("/v1/chat/completions", CHAT),
        ("/v2/models/m/infer", {"inputs": []}),
    ],
)
async def test_it_says_what_the_door_says_in_the_paths_own_form(heart, path, body):
    async with gateway(heart) as gw:
        heart.sheds("interactive")  # by its key alone it is batch, as a head does not tell
        by_head = await gw.post(path, body)
        assert not gw.seen.at_the_door
        heart.sheds("batch")
        at_the_door = await gw.post(path, body, authorization=f"Bearer {NIGHTLY_KEY}")
        assert [one.code for one in gw.seen.at_the_door] == ["queue_full"]
    assert by_head.status_code == at_the_door.status_code == 429
    assert by_head.content == at_the_door.content
    differ = {"date": "", "x-request-id": ""}
    assert {**by_head.headers, **differ} == {**at_the_door.headers, **differ}
    assert by_head.headers["date"]
    assert len(by_head.headers["x-request-id"]) == len(at_the_door.headers["x-request-id"])
    assert by_head.headers["retry-after"]


@pytest.mark.parametrize(("given", "told"), [("mine-1", "mine-1"), ("not one", None), ("", None), ("x" * 129, None)])
async def test_its_answer_bears_the_callers_own_request_id_or_a_new_one(heart, given, told):
    heart.sheds("interactive")
    async with gateway(heart) as gw:
        ids = [(await gw.post(EMBED, TEXT, **{"x-request-id": given})).headers["x-request-id"] for _ in range(2)]
    assert ids == [told, told] if told else (len({*ids}) == 2 and all(len(one) == 32 for one in ids))


async def test_only_what_is_shed_is_turned_away(heart):
    async with gateway(heart) as gw:
        heart.sheds("batch")
        told = [(await gw.post(EMBED, TEXT, **headers)).status_code for headers in ({}, BATCH, {}, BATCH)]
        assert told == [200, 429, 200, 429]
        heart.sheds()
        assert (await gw.post(EMBED, TEXT, **BATCH)).status_code == 200
        assert [one.code for one in gw.seen.records] == ["ok"] * 3
    assert heart._turned_away == {"batch": 2}


@pytest.mark.parametrize("path", ["/healthz/live", "/v1/tasks", "/v1/models", "/openapi.json"])
async def test_what_asks_for_no_inference_is_answered(heart, path):
    heart.sheds("batch", "interactive")
    async with gateway(heart) as gw:
        assert (await gw.http.get(path)).status_code == 200
        assert (await gw.post("/no/such/path", {})).status_code == 404


async def test_the_connection_goes_on_however_its_bytes_are_cut(heart):
    heart.sheds("interactive")
    async with gateway(heart) as gw:
        for size in (1, 50, len(posted()) - 1, len(posted()), 10_000):
            stream = posted() * 2 + posted("x-priority: batch") + posted() + LIVE
            answer = await talk(gw, *(stream[i : i + size] for i in range(0, len(stream), size)))
            statuses = [line[:3] for line in answer.split(b"HTTP/1.1 ")[1:]]
            assert statuses[:3] == [b"429", b"429", b"200"]
            assert len(statuses) == 5  # the fourth waits for the third, and so for the door


@pytest.mark.parametrize(
    ("version", "more"), [("1.0", []), ("1.0", ["connection: keep-alive"]), ("1.1", ["connection: close"])]
)
async def test_who_wants_no_more_is_let_go(heart, version, more):
    heart.sheds("interactive")
    async with gateway(heart) as gw:
        answer = await talk(gw, posted(*more, version=version))
    assert answer.startswith(b"HTTP/1.1 429")


async def test_a_page_can_read_why(heart):
    heart.sheds("interactive")
    async with gateway(heart, cors_origins=[PAGE]) as gw:
        answer = await gw.post(EMBED, TEXT, origin=PAGE)
        assert (await gw.post(EMBED, TEXT)).status_code == 429
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (429, PAGE)
    assert heart.recorded == ["interactive"]
    assert heart._turned_away == {"interactive": 1}


@pytest.mark.parametrize("more", [["expect: 100-continue"], ["transfer-encoding: chunked"]])
async def test_whose_body_is_not_on_its_way_hears_it_before_sending_one(heart, more):
    heart.sheds("interactive")
    async with gateway(heart) as gw:
        request = posted(*more).partition(b"\r\n\r\n")[0].replace(b"content-length", b"x-length") + b"\r\n\r\n"
        if "expect" in more[0]:
            request = request.replace(b"x-length", b"content-length")
        answer = await talk(gw, request, until_closed=False)
    assert b"HTTP/1.1 429" in answer
    assert heart.recorded == ["interactive"]


async def test_a_large_body_is_not_read_to_its_end(heart, monkeypatch):
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    heart.sheds("interactive")
    async with gateway(heart) as gw:
        head = posted().replace(b"content-length: ", b"content-length: 9999999")
        answer = await talk(gw, head, b"x" * 100_000)
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"connection: close" in answer


async def test_a_body_that_does_not_come_ends_the_connection(heart, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    heart.sheds("interactive")
    async with gateway(heart) as gw:
        assert await talk(gw, posted()[:-1]) == b""


async def test_a_stop_waits_for_what_is_being_turned_away(heart):
    heart.sheds("interactive")
    async with gateway(heart) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(posted()[:-1])
        await until(lambda: heart._turned_away["interactive"] == 1)
        gw.stop.set()
        await asyncio.sleep(0.2)
        writer.write(posted()[-1:])
        async with asyncio.timeout(5):
            answer = await reader.read(-1)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 429")


async def test_no_socket_is_opened_and_the_open_ones_go_on(heart):
    options = {"rules": stateful.RULES, "more_tasks": stateful.TASKS, "shedding": heart}
    async with running([StatefulBackend("triton", "a")], **options) as gw:
        url, shown = gw.url.replace("http", "ws") + "/v1/tasks/total/stream", {"authorization": f"Bearer {KEY}"}
        async with websocket(url, additional_headers=shown, proxy=None) as socket:
            heart.sheds("batch", "interactive")
            with pytest.raises(InvalidStatus) as refused:
                await websocket(url, additional_headers=shown, proxy=None)
            assert refused.value.response.status_code == 429
            await socket.send(json.dumps({"input": {"number": 1}}))
            assert (await told(socket))["output"]
    assert heart.recorded == ["interactive"]
