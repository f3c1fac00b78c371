"""Which pages' scripts may read the answers: preflights, every kind of answer, sockets."""

import json

import pytest
from websockets.asyncio.client import connect as websocket
from websockets.exceptions import InvalidStatus

from gateway.backends.scripted import ScriptedBackend
from gateway.core.types import Delta
from tests.component.test_stream import told
from tests.kit import stateful
from tests.kit.app import KEY, LIMITED_KEY, embedding, running
from tests.kit.keys import EMBED, TEXT
from tests.kit.stateful import StatefulBackend

PAGE, OTHER = "https://app.example", "https://evil.example"
CHAT = {"model": "general_llm", "stream": True, "messages": [{"role": "user", "content": "x"}]}
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-own"}


def gateway(*origins: str, **options):
    deltas = [Delta(data=b'{"choices":[{"index":0,"delta":{"content":"a"}}]}')]
    backends = [ScriptedBackend("triton", [embedding()]), ScriptedBackend("llm", deltas)]
    return running(backends, cors_origins=origins or (PAGE,), **options)


def exposed(answer) -> set[str]:
    return set(answer.headers.get("access-control-expose-headers", "").split(", "))


@pytest.mark.parametrize("path", [EMBED, "/v1/chat/completions", "/v2/models/m/infer", "/no/such/path"])
async def test_a_preflight_needs_no_key(path):
    async with gateway() as gw:
        answer = await gw.http.options(path, headers={"origin": PAGE, "authorization": "", **PREFLIGHT})
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-headers"] == "authorization,x-own"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert int(answer.headers["access-control-max-age"]) > 0
    assert answer.headers.get_list("vary", split_commas=True) == ["Origin", "Access-Control-Request-Headers"]
    assert "access-control-allow-credentials" not in answer.headers
    assert not gw.seen.at_the_door


@pytest.mark.parametrize("origin", [OTHER, "null", PAGE + ".evil.example", PAGE + ":8443", "http://app.example"])
async def test_other_pages_are_not_let_in(origin):
    async with gateway() as gw:
        asked = await gw.http.options(EMBED, headers={"origin": origin, **PREFLIGHT})
        answer = await gw.post(EMBED, TEXT, origin=origin)
    for one in (asked, answer):
        assert "access-control-allow-origin" not in one.headers
        assert "Origin" in one.headers.get_list("vary", split_commas=True)
    assert answer.status_code == 200  # it is the browser that keeps it from the page's script


async def test_every_answer_can_be_read():
    async with gateway(body_timeout_s=5, max_body_bytes=2000) as gw:
        kept = {"x-request-id"}
        limited = {"authorization": f"Bearer {LIMITED_KEY}"}
        calls = [
            (200, gw.post(EMBED, TEXT, origin=PAGE), kept | {"x-gateway-backend", "x-gateway-rule"}),
            (200, gw.post("/v1/chat/completions", CHAT, origin=PAGE), kept | {"x-gateway-model"}),
            (200, gw.http.get("/v1/models", headers={"origin": PAGE}), kept),
            (401, gw.post(EMBED, TEXT, origin=PAGE, authorization="Bearer x"), kept | {"www-authenticate"}),
            (404, gw.http.get("/no/such/path", headers={"origin": PAGE}), kept),
            (405, gw.http.delete(EMBED, headers={"origin": PAGE}), kept | {"allow"}),
            (413, gw.post(EMBED, {"input": "x" * 3000}, origin=PAGE), kept),
            (422, gw.post(EMBED, {"input": {}}, origin=PAGE), kept),
            (404, gw.http.get("/v2/models/m", headers={"origin": PAGE}), kept),
            (200, gw.http.get("/healthz/live", headers={"origin": PAGE}), set()),
            *((200, gw.post(EMBED, TEXT, origin=PAGE, **limited), {"x-ratelimit-remaining-requests"}) for _ in "abc"),
            (429, gw.post(EMBED, TEXT, origin=PAGE, **limited), kept | {"retry-after", "x-ratelimit-limit-requests"}),
            (405, gw.http.options(EMBED, headers={"origin": PAGE}), kept),  # no preflight: it asks for no method
        ]
        for status, call, names in calls:
            answer = await call
            assert answer.status_code == status, answer.request.url
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "Origin" in answer.headers.get_list("vary", split_commas=True)
            assert names <= exposed(answer)
            assert "content-length" not in exposed(answer)


async def test_a_cache_is_told_also_where_no_page_asks():
    async with gateway() as gw:
        answer = await gw.post(EMBED, TEXT)
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in answer.headers


async def test_any_page_may_be_let_in():
    async with gateway("*") as gw:
        answer = await gw.post(EMBED, TEXT, origin=OTHER)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "vary" not in answer.headers


async def test_without_origins_in_the_configuration_nothing_is_said():
    async with running([ScriptedBackend("triton", [embedding()])]) as gw:
        answer = await gw.post(EMBED, TEXT, origin=PAGE)
        asked = await gw.http.options(EMBED, headers={"origin": PAGE, **PREFLIGHT})
    for one in (answer, asked):
        assert not [name for name in one.headers if name.startswith("access-control") or name == "vary"]
    assert asked.status_code == 405


async def opened(origin: str | None, *origins: str) -> dict:
    """What a socket answers to its first chunk."""
    options = {"rules": stateful.RULES, "more_tasks": stateful.TASKS, "cors_origins": origins}
    shown = {"authorization": f"Bearer {KEY}"}
    async with running([StatefulBackend("triton", "a")], **options) as gw:
        url = gw.url.replace("http", "ws") + "/v1/tasks/total/stream"
        async with websocket(url, additional_headers=shown, origin=origin, proxy=None) as socket:
            await socket.send(json.dumps({"input": {"number": 1}}))
            return await told(socket)


@pytest.mark.parametrize(
    ("origin", "origins"),
    [
        (PAGE, (PAGE,)),
        (None, (PAGE,)),  # no browser
        (OTHER, ("*",)),
        (OTHER, ()),  # no origins are configured: the key alone decides
    ],
)
async def test_a_socket_opens_for_the_pages_that_may(origin, origins):
    assert (await opened(origin, *origins))["output"] == {"total": 1}


async def test_a_socket_does_not_open_for_other_pages():
    with pytest.raises(InvalidStatus) as refused:
        await opened(OTHER, PAGE)
    assert refused.value.response.status_code == 403
