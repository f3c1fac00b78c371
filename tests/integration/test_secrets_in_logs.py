"""No secret and no body in any line that a data plane writes, whatever goes wrong; and what a line does tell."""

import json
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.kit.llm_plane import CHAT
from tests.kit.relayed import script
from tests.kit.serving import KEY, free_port, serving
from tests.kit.upstream import RST, Upstream, completion, error_reply, json_reply, sse_head
from tests.kit.wait import until

PROMPT, ANSWER = "canary-prompt-7151", "canary-answer-7151"
WRONG, QUERY, ENDPOINT = "canary-wrong-key-7151", "canary-query-key-7151", "canary+endpoint+7151"
REDIS, SIGNING = "canary-redis-password-7151", "canary-signing-secret-7151-0123456789"
GOOD = {"authorization": f"Bearer {KEY}"}


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def of_requests(log):
    return [line for line in lines(log) if line["logger"] == "gateway.access"]


def error(status, words):
    return error_reply(status, {"message": words, "type": "invalid_request_error", "param": None, "code": None})


WORDS = f"Incorrect API key provided: {ENDPOINT}."
ABOUT_INPUT = f"The message {PROMPT!r} of {ENDPOINT} is not allowed."
UPSTREAM = {  # a task each: what its endpoint answers, and whether a stream is asked for
    "whole": (script(ANSWER, stream=False), False),
    "streamed": (script(ANSWER, stream=True), True),
    "refused-key": (error(401, WORDS), False),
    "refused-input": (error(400, ABOUT_INPUT), True),
    "overloaded": (error(429, WORDS), True),
    "failed": (error(500, WORDS), False),
    "garbage": (json_reply(200, {"said": ANSWER, "key": ENDPOINT}), False),
    "cut": ([sse_head(), RST], True),
}
BROKEN = (
    b'{"model": "' + PROMPT.encode(),
    json.dumps({"model": PROMPT, "task": PROMPT}).encode(),
    json.dumps({"model": "whole", "messages": PROMPT}).encode(),
    json.dumps({"model": "whole", "messages": [{"role": PROMPT}]}).encode(),
    json.dumps({"task": "whole", "input": PROMPT}).encode(),
    json.dumps({"input": {PROMPT: PROMPT}, "requests": PROMPT}).encode(),
)
PATHS = (CHAT, "/v1/infer", "/v1/infer/batch", "/v1/client-tokens", "/v1/tasks/whole", "/v1/responses")


@asynccontextmanager
async def plane(folder):
    """A gateway with an endpoint for each task, and a Redis that is away; and the endpoints."""
    async with AsyncExitStack() as stack:
        ups = {name: await stack.enter_async_context(Upstream(json_reply(200, completion()))) for name in UPSTREAM}
        fixed = {"kind": "openai", "api_key_env": "CANARY_ENDPOINT", "hosted": True}
        sections = {
            "backends": {name: fixed | {"base_url": up.base_url} for name, up in ups.items()},
            "tasks": {name: {"contract": "chat"} for name in ups},
            "rules": [
                {"name": name, "match": {"task": name}, "split": [{"backend": name, "model": "m"}]} for name in ups
            ],
            "redis": {"url": f"redis://gateway:{REDIS}@127.0.0.1:{free_port()}/0"},
        }
        yield await stack.enter_async_context(serving(folder, "", **sections)), ups


async def test_no_secret_and_no_body_is_in_any_line_and_a_line_tells_all_else(tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY_ENDPOINT", ENDPOINT)
    monkeypatch.setenv("GATEWAY_CLIENT_TOKEN_SECRET", SIGNING)
    async with (
        plane(tmp_path) as (gateway, ups),
        httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30) as http,
    ):
        statuses = {}
        for name, (steps, stream) in UPSTREAM.items():
            ups[name].scripts = [steps]
            body = {"model": name, "stream": stream, "messages": [{"role": "user", "content": PROMPT}]}
            statuses[name] = (await http.post(CHAT, json=body, headers=GOOD)).status_code
        for wrong in ({"authorization": f"Bearer {WRONG}"}, {"x-api-key": WRONG}, {}):
            answer = await http.post(CHAT, params={"api_key": QUERY, "key": KEY}, json={}, headers=wrong)
            assert answer.status_code == 401
        for path in PATHS:
            for broken in BROKEN:
                headers = GOOD | {"content-type": "application/json"}
                assert (await http.post(path, content=broken, headers=headers)).status_code in (400, 404, 422)
        token = (await http.post("/v1/client-tokens", json={"tasks": ["whole"]}, headers=GOOD)).json()["token"]
        body = {"model": "whole", "messages": [{"role": "user", "content": PROMPT}]}
        shown = [
            (await http.post(CHAT, json=body, headers={"authorization": f"Bearer {one}"})).status_code
            for one in (token, token + "x")
        ]
        url = gateway.url.replace("http", "ws") + f"/v1/tasks/whole/stream?key={QUERY}"
        with pytest.raises(InvalidStatus):
            async with connect(url, additional_headers={"authorization": f"Bearer {WRONG}"}, proxy=None):
                pass
        assert shown == [200, 401]
        count = len(UPSTREAM) + 3 + len(PATHS) * len(BROKEN) + 3  # what is no inference has a line where it is refused
        await until(lambda: len(of_requests(gateway.log)) == count)
    text, told = gateway.log.read_text(), of_requests(gateway.log)
    for secret in (KEY, WRONG, QUERY, ENDPOINT, REDIS, SIGNING, token, token.partition(".")[2], PROMPT, ANSWER):
        assert secret not in text, next(line for line in text.splitlines() if secret in line)
    assert any(line["event"] == "rules_store_unreachable" for line in lines(gateway.log))
    assert all({"request_id", "task", "tenant", "key", "code", "status", "total_ms"} <= line.keys() for line in told)
    by_task = {line["task"]: line for line in told[: len(UPSTREAM)]}
    assert (by_task["whole"]["code"], by_task["streamed"]["code"], statuses["refused-input"]) == ("ok", "ok", 400)
    for name in ("whole", "streamed"):
        wanted = {"route", "rule", "revision", "attempts", "backend_ms", "input_tokens", "output_tokens"}
        assert wanted <= by_task[name].keys()
    assert by_task["streamed"]["first_token_ms"] > 0
    assert by_task["refused-input"]["reasons"] == ["attempt at refused-input/m: refused_input"]
    assert "detail" not in by_task["refused-input"]
    assert by_task["failed"]["reasons"][0].endswith("failed: status 500: Incorrect API key provided: ***.")
    assert all(line["reasons"] for name, line in by_task.items() if name not in ("whole", "streamed"))
