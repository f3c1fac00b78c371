"""No secret in any answer of either plane, in any page, metric or command line of the stack, whoever asks and however.

Its logs and files are looked through when the session ends (tests/kit/leaks.py).
"""

import re
from pathlib import Path

import httpx
import pytest

from tests.kit.compose import SECRETS
from tests.kit.wait import until_async

pytestmark = pytest.mark.stack("up", "compose")

CHAT = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PAGES = (
    "overview",
    "rules",
    "rollouts",
    "shadows",
    "models",
    "backends",
    "requests",
    "explain",
    "usage",
    "keys",
    "audit",
)
WRONG = "canary-of-a-stranger-9317"


def secrets_of(stack, made: str, token: str) -> dict[str, str]:
    """By what they are. Of a key that was made the part that is secret; its id is public."""
    return {
        "client key": stack.key,
        "admin token": stack.admin_token,
        "key made at run time": made.rpartition("_")[2],
        "client token": token.rpartition(".")[2],
        "redis password": SECRETS["GATEWAY_REDIS_PASSWORD"],
        "grafana password": SECRETS["GRAFANA_ADMIN_PASSWORD"],
        "a stranger's": WRONG,
    }


def paths_of(document: dict) -> list[tuple[str, str]]:
    return [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]


def filled(path: str, values: dict[str, str]) -> str:
    return re.sub(r"\{([^}:]+)[^}]*\}", lambda found: values.get(found[1], "none"), path)


async def answers_of_admin(stack, values: dict[str, str]):
    """Every GET, and every other method with a body that is refused."""
    async with stack.admin() as admin:
        document = (await admin.get("/openapi.json")).json()
        for method, path in paths_of(document):
            url = stack.admin_url + filled(path, values)
            if "/events" in path or "/stream" in path or (method, path.rpartition("/")[2]) == ("DELETE", "session"):
                continue
            body = None if method == "GET" else {"nonsense": WRONG}
            if method != "DELETE":
                yield f"{method} {path}", await admin.request(method, url, json=body)
        for headers in ({"authorization": f"Bearer {WRONG}"}, {"authorization": ""}):
            yield "refused", await admin.get("/rules", headers=headers)
        yield "no session", await admin.post("/session", json={"token": WRONG})


async def answers_of_data(stack, token: str):
    """Every path: with the key, with what is wrong with it, and with what it is not meant for."""
    async with stack.http() as http:
        document = (await http.get("/openapi.json")).json()
        yield "the document", await http.get("/openapi.json")
        for method, path in paths_of(document):
            url = filled(path, {"task": "text-embedding", "model": "text_embedding", "version": "1"})
            for body in ({}, {"input": "x", "model": "none"}):
                given = None if method == "GET" else body
                if not path.endswith(("/unload", "/load")):
                    yield f"{method} {path}", await http.request(method, url, json=given)
        for shown in (WRONG, token + "x", stack.key + "x"):
            headers = {"authorization": f"Bearer {shown}"}
            yield "refused", await http.post("/v1/chat/completions", json=CHAT, headers=headers)
        yield "by a token", await http.post("/v1/infer", json={}, headers={"authorization": f"Bearer {token}"})


async def pages_of(stack):
    """The console's, and what is shown to somebody who is not logged in."""
    async with httpx.AsyncClient(base_url=stack.admin_url, trust_env=False, timeout=60, follow_redirects=True) as http:
        yield "log-in page", await http.get("/console")
        entered = await http.post("/admin/v1/session", json={"token": stack.admin_token})
        yield "log-in", entered
        for page in PAGES:
            yield f"page {page}", await http.get(f"/console/{page}")


async def newest_request(stack) -> str:
    """The id of one that is recorded, which takes a moment."""
    found: list[str] = []

    async def look() -> bool:
        async with stack.admin() as admin:
            found[:] = [one["id"] for one in (await admin.get("/requests")).json()["items"]]
        return bool(found)

    await until_async(look)
    return found[0]


async def test_no_answer_no_page_and_no_metric_holds_a_secret(stack):
    async with stack.admin() as admin:
        made = (await admin.post("/keys", json={"name": "canary", "tenant": "canary"})).json()
    async with stack.http(key=made["key"]) as http:
        token = (await http.post("/v1/client-tokens", json={"tasks": ["general_llm"]})).json()["token"]
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    secrets, asked = secrets_of(stack, made["key"], token), 0
    newest = await newest_request(stack)
    values = {"id": made["id"], "key_id": made["id"], "request_id": newest, "revision": "1", "backend": "triton"}

    def look(what: str, text: str) -> None:
        nonlocal asked
        asked += 1
        for name, secret in secrets.items():
            assert secret not in text, f"{name} in {what}: {text[:300]}"

    async for what, answer in answers_of_admin(stack, values):
        if "rotate" not in what:
            look(what, answer.text + str(answer.headers))
    async for what, answer in answers_of_data(stack, token):
        look(what, answer.text + str(answer.headers))
    async for what, answer in pages_of(stack):
        look(what, answer.text)
    for page in await stack.metrics():
        look("metrics", page)
    for command in ("keys list --json", "requests list --json", "audit list --json", "overview", "workers", "doctor"):
        done = stack.cli(*command.split())
        look(command, done.stdout + done.stderr)
    assert asked > 100, asked


def test_no_process_tells_a_secret_by_its_arguments(stack):
    secrets = {stack.key, stack.admin_token, *SECRETS.values()}
    shown = 0
    for process in Path("/proc").iterdir():
        try:
            line = (process / "cmdline").read_bytes().decode(errors="replace") if process.name.isdigit() else ""
        except OSError:
            continue
        shown += "gateway" in line
        assert not [one for one in secrets if one in line], line.split("\0")[0]
    assert shown >= 2
