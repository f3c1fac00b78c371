"""`/admin/v1/keys` and `gateway keys`, over a real Redis."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from typer.testing import CliRunner

from gateway.__main__ import app as cli
from gateway.admin.app import create_admin_app
from gateway.admin.plane import Plane
from gateway.core.errors import RulesUnavailable
from gateway.core.keys import split_key
from gateway.stores.redis_key_store import RedisKeyStore
from gateway.stores.redis_script import connect
from tests.kit.keys import TASKS, TOKEN, made
from tests.kit.redis import HOST
from tests.kit.serving import free_port

pytest_plugins = ["tests.kit.redis", "tests.kit.key_fixtures"]


async def test_a_key_is_shown_whole_but_for_its_secret(admin):
    wanted = {
        "tasks": ["text-embedding"],
        "models": ["org/m"],
        "admin": True,
        "limits": [{"requests": 60, "per": "minute", "burst": 5}, {"usd": 2.5, "per": "month"}, {"concurrent": 3}],
        "priority": "batch",
        "origins": ["https://app.example"],
        "expires_at": "2100-01-01T00:00:00Z",
    }
    key = await made(admin, **wanted)
    text = key.pop("key")
    assert split_key(text)[0] == key["id"]
    limits = [{**limit, "shared_by": "key"} for limit in wanted["limits"]]
    assert key == {
        **wanted,
        "limits": limits,
        "id": key["id"],
        "tenant": "acme",
        "name": "web",
        "scopes": ["task:text-embedding", "model:org/m", "admin"],
        "created_at": key["created_at"],
        "disabled": False,
        "old_secret_until": None,
        "revision": 1,
    }
    answer = await admin.get(f"/keys/{key['id']}")
    assert answer.json() == key
    assert answer.headers["etag"] == '"1"'
    assert (await admin.get("/keys")).json() == {"items": [key], "next": None}


async def test_limits_of_every_kind_are_shown_as_they_were_given(admin):
    limits = [
        *({kind: 60, "per": per} for kind in ("requests", "tokens") for per in ("second", "minute", "hour", "day")),
        *({kind: 60, "per": "day", "burst": burst} for kind in ("requests", "tokens") for burst in (1, 90)),
        *({"usd": 0.1, "per": per, "shared_by": "tenant"} for per in ("day", "month")),
        {"concurrent": 3, "task": "total", "model": "org/m", "priority": "batch"},
    ]
    shown = (await made(admin, limits=limits))["limits"]
    assert shown == [{"shared_by": "key", **limit} for limit in limits]


@pytest.mark.parametrize("shared_by", ["key", "tenant"])
async def test_the_largest_limits_are_shown_as_they_were_given(admin, shared_by):
    limits = [
        {"requests": 10**9, "per": "second", "burst": 10**12, "task": "total", "priority": "batch"},
        {"tokens": 10**12, "per": "day", "model": "org/m"},
        {"usd": 1e6, "per": "month"},
        {"concurrent": 10**6},
    ]
    wanted = [{**limit, "shared_by": shared_by} for limit in limits]
    key = await made(admin, limits=wanted, expires_at="9999-12-31T23:59:59Z")
    assert key["limits"] == wanted
    [listed] = (await admin.get("/keys")).json()["items"]
    assert (listed["limits"], listed["expires_at"]) == (wanted, "9999-12-31T23:59:59Z")


@pytest.mark.parametrize(
    "limit",
    [
        *({kind: 5, "per": per} for kind in ("requests", "tokens") for per in ("second", "minute", "hour", "day")),
        {"usd": 5.25, "per": "day"},
        {"usd": 1e-9, "per": "month"},
        {"concurrent": 5},
    ],
)
async def test_every_kind_of_limit_is_shown_as_it_was_given(admin, limit):
    wanted = [{**limit, "shared_by": "key"}]
    key = await made(admin, limits=[limit])
    assert key["limits"] == wanted
    assert [one["limits"] for one in (await admin.get("/keys")).json()["items"]] == [wanted]


async def test_the_answer_with_the_secret_is_not_to_be_stored(admin):
    answer = await admin.post("/keys", json={"tenant": "acme", "name": "web"})
    assert answer.headers["cache-control"] == "no-store"
    answer = await admin.post(f"/keys/{answer.json()['id']}/rotate")
    assert answer.headers["cache-control"] == "no-store"


async def test_a_change_changes_what_it_names(admin):
    key = await made(admin, tasks=["total"], origins=["https://app.example"], expires_at="2100-01-01T00:00:00Z")
    changed = await admin.patch(f"/keys/{key['id']}", json={"name": "new", "tasks": None, "limits": []})
    del key["key"]
    expected = {**key, "name": "new", "tasks": None, "scopes": [], "limits": [], "revision": 2}
    assert changed.json() == expected
    assert (await admin.get(f"/keys/{key['id']}")).json() == expected


async def test_a_change_may_name_the_revision_that_it_was_made_from(admin):
    key = await made(admin)
    path = f"/keys/{key['id']}"
    assert (await admin.patch(path, json={"name": "a"}, headers={"if-match": '"1"'})).status_code == 200
    refused = await admin.patch(path, json={"name": "b"}, headers={"if-match": '"1"'})
    assert (refused.status_code, refused.json()["code"]) == (412, "revision_stale")
    assert (await admin.get(path)).json()["name"] == "a"
    assert (await admin.patch(path, json={"name": "c"}, headers={"if-match": 'W/"2"'})).status_code == 200  # as rules
    refused = await admin.patch(path, json={"name": "d"}, headers={"if-match": "x"})
    assert (refused.status_code, refused.json()["code"]) == (400, "malformed_request")


@pytest.mark.parametrize(
    ("scopes", "tasks", "models", "is_admin"),
    [
        (["total"], ["total"], None, False),
        (["task:total", "model:org/m", "admin"], ["total"], ["org/m"], True),
        (["admin"], None, None, True),
    ],
)
async def test_scopes_are_tasks_models_and_admin_in_one_list(admin, scopes, tasks, models, is_admin):
    key = await made(admin, scopes=scopes)
    assert (key["tasks"], key["models"], key["admin"]) == (tasks, models, is_admin)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"name": "x"}, "#/tenant"),
        ({"tenant": "acme"}, "#/name"),
        ({"tenant": "a b", "name": "x"}, "#/tenant"),
        ({"tenant": "a{b}", "name": "x"}, "#/tenant"),
        ({"tenant": "acme", "name": ""}, "#/name"),
        ({"tenant": "acme", "name": "a\nb"}, "#/name"),
        ({"tenant": "acme", "name": None}, "#/name"),
        ({"tenant": "acme", "name": "x", "tasks": ["no-such-task"]}, "#/tasks/0"),
        ({"tenant": "acme", "name": "x", "tasks": []}, "#/tasks"),
        ({"tenant": "acme", "name": "x", "scopes": ["total", "task:no-such-task"]}, "#/scopes/1"),
        ({"tenant": "acme", "name": "x", "scopes": ["model:a b"]}, "#/scopes"),
        ({"tenant": "acme", "name": "x", "scopes": []}, "#/scopes"),
        ({"tenant": "acme", "name": "x", "scopes": ["admin"], "admin": False}, "#/scopes"),
        ({"tenant": "acme", "name": "x", "models": ["a b"]}, "#/models/0"),
        ({"tenant": "acme", "name": "x", "limits": [{"requests": 1}]}, "#/limits/0"),
        ({"tenant": "acme", "name": "x", "limits": [{"requests": 1, "per": "day", "shared_by": "all"}]}, "#/limits/0"),
        (
            {"tenant": "acme", "name": "x", "limits": [{"concurrent": 1, "task": "nope"}]},
            "#/limits/0/task: there is no",
        ),
        ({"tenant": "acme", "name": "x", "priority": "urgent"}, "#/priority: must be"),
        ({"tenant": "acme", "name": "x", "origins": ["https://a.example/"]}, "#/origins/0: must be as"),
        ({"tenant": "acme", "name": "x", "expires_at": "2100-01-01T00:00:00"}, "#/expires_at"),
        ({"tenant": "acme", "name": "x", "expires_at": "1900-01-01T00:00:00Z"}, "#/expires_at"),
        ({"tenant": "acme", "name": "x", "expires_at": "9999-12-31T23:59:59-12:00"}, "#/expires_at"),
        ({"tenant": "acme", "name": "x", "surprise": 1}, "#/surprise: unknown field"),
    ],
)
async def test_a_body_that_is_no_key_is_refused_by_name(admin, body, named):
    refused = await admin.post("/keys", json=body)
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_input")
    assert named in refused.text
    assert refused.headers["content-type"] == "application/problem+json"
    assert (await admin.get("/keys")).json()["items"] == []


@pytest.mark.parametrize(
    "body", [{"name": None}, {"tenant": "other"}, {"id": "x"}, {"disabled": None}, {"key": "gw_x"}]
)
async def test_a_change_that_cannot_be_is_refused_by_name(admin, body):
    key = await made(admin)
    refused = await admin.patch(f"/keys/{key['id']}", json=body)
    assert refused.status_code == 422
    assert f"#/{next(iter(body))}" in refused.text


@pytest.mark.parametrize("body", [{"grace_s": -1}, {"grace_s": 10**9}, {"grace": 1}])
async def test_a_rotation_that_cannot_be_is_refused(admin, body):
    key = await made(admin)
    assert (await admin.post(f"/keys/{key['id']}/rotate", json=body)).status_code == 422


async def test_what_is_not_there_is_told(admin):
    for method, path in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/rotate")):
        answer = await admin.request(
            method, f"/keys/abcdefghijklm{path}", json={} if method in ("PATCH", "POST") else None
        )
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_key")


async def test_pages(admin):
    ids = [(await made(admin, tenant="acme" if n % 2 else "other"))["id"] for n in range(7)]
    found, cursor = [], ""
    for _ in range(4):
        page = (await admin.get("/keys", params={"limit": 2, "cursor": cursor} if cursor else {"limit": 2})).json()
        found += [item["id"] for item in page["items"]]
        cursor = page["next"]
    assert cursor is None
    assert sorted(found) == sorted(ids)
    assert len((await admin.get("/keys", params={"tenant": "acme"})).json()["items"]) == 3
    for wrong in ({"limit": 0}, {"limit": 501}, {"cursor": "x"}):
        assert (await admin.get("/keys", params=wrong)).status_code == 422


async def test_no_token_no_keys(admin):
    for headers in ({"authorization": ""}, {"authorization": "Bearer x"}):
        assert (await admin.get("/keys", headers=headers)).status_code == 401
        assert (await admin.post("/keys", json={}, headers=headers)).status_code == 401


async def test_a_store_out_of_reach_is_told(redis_client, redis_prefix, admin, monkeypatch):
    async def away(*_, **__):
        raise OSError

    monkeypatch.setattr(redis_client, "evalsha", away)
    refused = await admin.post("/keys", json={"tenant": "acme", "name": "x"})
    assert (refused.status_code, refused.json()["code"]) == (503, RulesUnavailable.code)


# --- the commands --------------------------------------------------------------------------------


@pytest.fixture
def plane(redis_server, redis_prefix) -> Iterator[str]:
    """The address of a control plane on a real socket."""
    port, servers = free_port(), []

    async def serve() -> None:
        client = connect(redis_server.url)
        app = create_admin_app(Plane(tasks=TASKS, keys=RedisKeyStore(client, redis_prefix)), TOKEN)
        servers.append(uvicorn.Server(uvicorn.Config(app, host=HOST, port=port, log_level="error", lifespan="off")))
        await servers[0].serve()
        await client.aclose()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    until = time.monotonic() + 10
    while not (servers and servers[0].started) and time.monotonic() < until:
        time.sleep(0.01)
    yield f"http://{HOST}:{port}"
    servers[0].should_exit = True
    thread.join()


@pytest.fixture
def run(plane, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def called(*args: str, code: int = 0, typed: str | None = None):
        options = ["--admin-url", plane, "--admin-token", TOKEN]
        result = CliRunner().invoke(cli, ["keys", *args, *options], input=typed)
        assert result.exit_code == code, result.output
        return result

    return called


def test_a_keys_life_by_commands(run):
    text = run("create", "acme", "web [shop]", "--task", "total", "--limit", "requests=60/minute").stdout.strip()
    key_id = split_key(text)[0]
    shown = run("list").stdout
    assert key_id in shown
    assert "web [shop]" in shown
    assert "task:total" in shown
    assert "requests=60/minute" in shown
    assert text not in shown
    run("disable", key_id)
    assert "disabled" in run("list").stdout
    run("enable", key_id)
    assert json.loads(run("show", key_id, "--json").stdout)["disabled"] is False
    rotated = run("rotate", key_id, "--grace", "60").stdout.strip()
    assert split_key(rotated)[0] == key_id
    assert rotated != text
    assert "acme" in run("show", key_id).stdout
    assert run("delete", key_id, code=1, typed="n\n")
    run("delete", key_id, "--yes")
    assert "no keys" in run("list").stdout
    assert "no such key" in run("show", key_id, code=1).stderr


def test_a_key_with_everything(run):
    key = json.loads(
        run(
            *("create", "acme", "all", "--model", "m", "--origin", "https://app.example", "--batch", "--admin"),
            *(
                "--limit",
                "usd=2.5/month",
                "--limit",
                "concurrent=3",
                "--limit",
                "tokens=1e6/day",
                "--days",
                "1",
                "--json",
            ),
        ).stdout
    )
    assert (key["models"], key["origins"], key["priority"], key["admin"]) == (
        ["m"],
        ["https://app.example"],
        "batch",
        True,
    )
    assert key["limits"] == [
        {"usd": 2.5, "per": "month", "shared_by": "key"},
        {"concurrent": 3, "shared_by": "key"},
        {"tokens": 1_000_000, "per": "day", "shared_by": "key"},
    ]
    shown = run("list", "--tenant", "acme").stdout
    assert "batch only" in shown
    assert "usd=2.5/month" in shown
    assert json.loads(run("list", "--tenant", "other", "--json").stdout)["items"] == []


@pytest.mark.parametrize(
    "args",
    [
        ("create", "acme", "x", "--limit", "60/minute"),
        ("create", "acme", "x", "--limit", "requests=many/day"),
        ("create", "acme", "x", "--limit", "requests=inf/day"),
        ("create", "acme", "x", "--limit", "usd=nan/day"),
        ("show", "gw_x"),
    ],
)
def test_what_cannot_be_meant_is_told_before_it_is_sent(run, args):
    assert len(run(*args, code=2).stderr.splitlines()) == 1


def test_a_time_that_no_calendar_has_is_refused(run):
    assert "--days" in run("create", "acme", "x", "--days", "1000000000", code=2).stderr


def test_a_refusal_names_the_field(run):
    assert "no-such-task" in run("create", "acme", "x", "--task", "no-such-task", code=1).stderr


def test_an_id_is_whole_in_the_narrowest_table(run, monkeypatch):
    text = run("create", "acme", "a name that is long", "--limit", "requests=60/minute", "--task", "total").stdout
    monkeypatch.setenv("COLUMNS", "60")
    assert split_key(text.strip())[0] in run("list").stdout


def test_pages_are_one_list(run, monkeypatch):
    monkeypatch.setattr("gateway.cli.keys.PAGE", 2)
    for n in range(5):
        run("create", "acme", f"key-{n}")
    assert len(json.loads(run("list", "--json").stdout)["items"]) == 5


@pytest.mark.parametrize("command", ["create", "list", "show", "rotate", "disable", "enable", "delete"])
def test_every_command_has_an_example(command):
    shown = CliRunner().invoke(cli, ["keys", command, "--help"]).stdout
    assert f"gateway keys {command}" in shown
