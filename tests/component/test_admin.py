"""The whole control plane over a real Redis, with real workers that follow it."""

import asyncio
import json
from dataclasses import fields
from typing import Any

import httpx
import pytest

from gateway.admin.access.door import MAX_BODY_BYTES
from gateway.admin.app import create_admin_app
from gateway.admin.plane import Plane
from gateway.admin.routing.shown_rules import RuleOut
from gateway.admin_ports import Change
from gateway.core.errors import StaleRevision
from gateway.core.rules import Rule, RuleSet, check_targets, parse_rules
from gateway.core.rules.policies import FIELDS
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.redis_rules import RedisRuleSource
from gateway.stores.redis_script import connect
from tests.kit.admin_plane import Asked, declared
from tests.kit.redis_switch import RedisSwitch

pytest_plugins = ["tests.kit.redis"]

TOKEN = "admin-secret"  # noqa: S105 - made up here
KNOWN = {"backends": ("triton", "local"), "tasks": ("embed",)}


def rule(name: str, **fields: Any) -> dict[str, Any]:
    split = [{"backend": "triton", "model": "m", "version": "1", "weight": 1}]
    whole = {
        "name": name,
        "match": {"task": "embed", "tenant": "*", "model": "*"},
        "split": split,
        "strategy": "weighted",
    }
    return {**whole, "sticky_by": "request", "fallback": [], "enabled": True, **fields}


SEED = RuleSet(revision=0, rules=parse_rules([rule("first"), rule("second")]))


@pytest.fixture
def store(redis_client, redis_prefix) -> RedisRuleStore:
    return RedisRuleStore(redis_client, redis_prefix, timeout_s=5)


@pytest.fixture
async def workers(redis_client, redis_prefix):
    made = [
        RedisRuleSource(redis_client, redis_prefix, SEED, lambda r: check_targets(r, **KNOWN), f"w{n}") for n in (1, 2)
    ]
    for worker in made:
        await worker.start()
    yield made
    for worker in made:
        await worker.close()


def over(store, token: str = TOKEN, sent: str | None = TOKEN) -> httpx.AsyncClient:
    app = create_admin_app(Plane(rules=store, check=lambda r: check_targets(r, **KNOWN), tasks=KNOWN["tasks"]), token)
    headers = {"authorization": f"Bearer {sent}"} if sent is not None else {}
    transport = Asked(app)
    return httpx.AsyncClient(transport=transport, base_url="http://admin/admin/v1", headers=headers)


@pytest.fixture
async def admin(store):
    async with over(store) as client:
        yield client


def is_problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert (body["status"], body["code"], body["type"]) == (status, code, "about:blank")
    assert body["title"]
    assert "Traceback" not in body["detail"]
    return body


# --- the door -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xfc"]
)
@pytest.mark.parametrize("path", ["/rules", "/workers", "/openapi.json", "/nowhere"])
async def test_without_the_token_nothing_can_be_learned(store, header, path):
    async with over(store, sent=None) as client:
        headers = {} if header is None else {"authorization": header.encode("latin-1")}
        answer = await client.get(path, headers=headers)
    is_problem(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_an_empty_token_lets_nobody_in(store):
    async with over(store, token="", sent="") as client:
        is_problem(await client.get("/rules"), 401, "unauthorized")


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_has_a_bound(admin, declared):
    async def pieces():
        for _ in range(20):
            yield b"x" * (MAX_BODY_BYTES // 16)

    content = b"x" * (MAX_BODY_BYTES + 1) if declared else pieces()
    is_problem(await admin.put("/rules", content=content), 413, "body_too_large")


async def test_paths_and_methods(admin):
    is_problem(await admin.get("/nowhere"), 404, "not_found")
    is_problem(await admin.delete("/rules"), 405, "method_not_allowed")
    paths = (await admin.get("/openapi.json")).json()["paths"]
    assert set(paths) >= {"/admin/v1/rules", "/admin/v1/rules/validate", "/admin/v1/workers"}
    for page in ("/docs", "/redoc"):
        assert (await admin.get(f"http://admin{page}")).status_code == 404


@pytest.mark.parametrize("path", ["/rules/", "/keys//", "/openapi.json/", "/rules/revisions/"])
async def test_no_path_leads_to_where_a_host_header_says(admin, path):
    answer = await admin.get(path, headers={"host": "evil.example"})
    assert answer.status_code in (404, 405)
    assert "location" not in answer.headers


async def test_every_operation_tells_its_refusals(admin):
    """As problems, with their codes; FastAPI's own form of an invalid body is never sent."""
    document = (await admin.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]

    def told(method: str, path: str) -> dict[str, str]:
        responses = document["paths"][path][method]["responses"]
        return {status: one["description"] for status, one in responses.items() if status >= "400"}

    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for status, codes in told(method, path).items():
                one_of_them = {"properties": {"code": {"enum": codes.split(", ")}}}
                schema = {"allOf": [{"$ref": "#/components/schemas/Problem"}, one_of_them]}
                content = operation["responses"][status]["content"]
                assert content == {"application/problem+json": {"schema": schema}}, (method, path)
    everywhere = {"401": "unauthorized", "403": "forbidden", "408": "request_timeout", "413": "body_too_large"}
    everywhere |= {"422": "invalid_input", "429": "rate_limited", "500": "internal", "503": "store_unavailable"}
    assert told("get", "/admin/v1/rules") == everywhere
    assert told("put", "/admin/v1/rules") == everywhere | {
        "400": "malformed_request",
        "409": "frozen",
        "412": "revision_stale",
        "422": "invalid_input, invalid_rules",
        "428": "revision_required",
    }
    assert told("get", "/healthz/live") == {"500": "internal"}
    assert "HTTPValidationError" not in schemas
    refused = (await admin.put("/rules", json={"rules": {}})).json()
    assert refused.keys() <= schemas["Problem"]["properties"].keys()


async def test_a_refusal_that_is_not_declared_fails_the_tests(store, monkeypatch):
    """What all tests of the control plane go by; see `tests.kit.admin_plane.Asked`."""
    undeclared = [(method, pattern, refusals - {(404, "unknown_rule")}) for method, pattern, refusals in declared()]
    monkeypatch.setattr("tests.kit.admin_plane.declared", lambda: undeclared)
    async with over(store) as client:
        with pytest.raises(AssertionError, match="unknown_rule"):
            await client.patch("/rules/nope", json={"enabled": True})


async def test_health_needs_no_token(store):
    async with over(store, sent=None) as client:
        for page in ("live", "ready"):
            assert (await client.get(f"http://admin/healthz/{page}")).status_code == 200


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("workers")
async def test_get_shows_the_rules_with_their_revision_as_etag(admin):
    answer = await admin.get("/rules")
    assert answer.headers["etag"] == '"1"'
    body = answer.json()
    assert body["revision"] == 1
    assert [r["name"] for r in body["rules"]] == ["first", "second"]


@pytest.mark.parametrize("if_match", ["1", '"1"', 'W/"1"'])
async def test_put_replaces_the_set_and_all_workers_run_it(admin, workers, if_match):
    answer = await admin.put("/rules", json={"rules": [rule("new")]}, headers={"if-match": if_match})
    assert answer.status_code == 200
    body = answer.json()
    assert (body["revision"], body["rules"], answer.headers["etag"]) == (2, [rule("new")], '"2"')
    assert (body["applied"]["workers"], body["applied"]["of"]) == (2, 2)
    assert [w.current().revision for w in workers] == [2, 2]
    assert (await admin.get("/rules")).json() == {"revision": 2, "rules": [rule("new")], "frozen": None}


@pytest.mark.usefixtures("workers")
async def test_what_get_shows_put_takes(admin):
    shown = (await admin.get("/rules")).json()
    answer = await admin.put("/rules", json={"rules": shown["rules"]}, headers={"if-match": "1"})
    assert answer.json()["rules"] == shown["rules"]


@pytest.mark.usefixtures("workers")
async def test_all_that_a_rule_may_say_is_shown_and_can_be_put_back(admin):
    said = {
        "retries": 2,
        "hedge": True,
        "ordering": {"mode": "release", "max_queue_size": 7, "max_wait_ms": 5, "on_store_down": "local"},
        "cache": {"ttl_s": 60, "shared_by": "all", "single_flight": True},
        "on_store_down": "closed",
        "idempotency": "wait",
    }
    put = await admin.put("/rules", json={"rules": [rule("a", **said), rule("b")]}, headers={"if-match": "1"})
    shown = (await admin.get("/rules")).json()["rules"]
    assert put.json()["rules"] == shown
    assert {name: shown[0][name] for name in said} == said
    assert not said.keys() & shown[1].keys()
    again = await admin.put("/rules", json={"rules": shown}, headers={"if-match": "2"})
    assert again.json()["rules"] == shown
    there_are = {field.name for field in fields(Rule)} - {"policies"} | {*FIELDS}
    assert {*RuleOut.model_fields} == there_are


@pytest.mark.usefixtures("workers")
async def test_a_change_names_the_revision_it_was_made_from(admin):
    body = {"rules": [rule("new")]}
    is_problem(await admin.put("/rules", json=body), 428, "revision_required")
    stale = is_problem(await admin.put("/rules", json=body, headers={"if-match": "7"}), 412, "revision_stale")
    assert "current revision is 1" in stale["detail"]
    is_problem(await admin.put("/rules", json=body, headers={"if-match": "x"}), 400, "malformed_request")
    assert (await admin.get("/rules")).json()["revision"] == 1


@pytest.mark.usefixtures("workers")
async def test_of_many_replacements_one_wins(admin):
    answers = await asyncio.gather(
        *(admin.put("/rules", json={"rules": [rule(f"r{n}")]}, headers={"if-match": "1"}) for n in range(8))
    )
    assert sorted(a.status_code for a in answers) == [200] + [412] * 7
    won = next(a.json() for a in answers if a.status_code == 200)
    assert (await admin.get("/rules")).json()["rules"] == won["rules"]


BAD = [  # CF-06
    (rule("(["), "rules[0]: name"),
    (rule("r", match={"task": "(a+)+$"}), "rule 'r': match.task"),
    (rule("r", split=[{"backend": "trton", "model": "m"}]), "rule 'r': split[0].backend: unknown backend 'trton'"),
    (rule("r", match={"task": "embd"}), "rule 'r': match.task: unknown task 'embd' (did you mean 'embed'?)"),
    (rule("r", split=[{"backend": "triton", "model": "m", "weight": -1}]), "rule 'r': split[0].weight"),
    (rule("r", split=[{"backend": "triton", "model": "m", "weight": "x"}]), "rule 'r': split[0].weight"),
    (rule("first"), "rule 'first': name is used twice"),
    (rule("m" * 10_000), "rules[0]: name"),
    ("text", "rules[0]: must be a mapping"),
]


@pytest.mark.parametrize(("bad", "text"), BAD)
async def test_a_bad_set_is_refused_whole_and_the_old_one_serves(admin, workers, bad, text):
    body = {"rules": [bad, rule("first")]}
    for answer in (
        await admin.put("/rules", json=body, headers={"if-match": "1"}),
        await admin.post("/rules/validate", json=body),
    ):
        told = is_problem(answer, 422, "invalid_rules")
        assert text in told["detail"]
        assert told["errors"][0]["pointer"] == "#/rules"
    assert [w.current().rules for w in workers] == [SEED.rules] * 2
    good = await admin.put("/rules", json={"rules": [rule("good")]}, headers={"if-match": "1"})
    assert good.json()["applied"]["workers"] == 2


async def test_what_was_read_can_be_put_back_as_it_is(admin, workers):
    read = (await admin.get("/rules")).json()
    put = await admin.put("/rules", json=read)
    assert put.status_code == 200
    stale = await admin.put("/rules", json={**read, "revision": read["revision"] + 5})
    is_problem(stale, 412, "revision_stale")


async def test_a_task_left_without_a_rule_is_warned_of(admin, workers):
    told = (await admin.post("/rules/validate", json={"rules": []})).json()
    assert told["warnings"] == [
        f"no enabled rule takes the task '{t}': its requests are refused" for t in KNOWN["tasks"]
    ]


async def test_validate_takes_nothing(admin, workers):
    answer = await admin.post("/rules/validate", json={"rules": [rule("new")]})
    told = answer.json()
    assert (told["valid"], told["rules"]) == (True, [rule("new")])
    assert [w.current().revision for w in workers] == [1, 1]


@pytest.mark.parametrize(
    ("content", "status", "code", "pointer"),
    [
        ("{", 400, "malformed_request", None),
        ("", 422, "invalid_input", "#/"),
        ("[]", 422, "invalid_input", "#/"),
        ("{}", 422, "invalid_input", "#/rules"),
        ('{"rules": {}}', 422, "invalid_input", "#/rules"),
        ('{"rules": [], "rule": 1}', 422, "invalid_input", "#/rule"),
    ],
)
async def test_a_body_of_another_shape(admin, content, status, code, pointer):
    headers = {"if-match": "1", "content-type": "application/json"}
    told = is_problem(await admin.put("/rules", content=content, headers=headers), status, code)
    if pointer:
        assert told["errors"][0]["pointer"] == pointer


async def test_patch_switches_one_rule(admin, workers):
    answer = await admin.patch("/rules/first", json={"enabled": False})
    body = answer.json()
    assert (answer.status_code, body["revision"], body["rule"]["enabled"]) == (200, 2, False)
    assert body["applied"]["workers"] == 2
    assert answer.headers["etag"] == '"2"'
    assert [[r.enabled for r in w.current().rules] for w in workers] == [[False, True]] * 2


@pytest.mark.usefixtures("workers")
async def test_patch_refusals(admin):
    is_problem(await admin.patch("/rules/third", json={"enabled": False}), 404, "unknown_rule")
    is_problem(await admin.patch("/rules/first", json={"enabled": "no"}), 422, "invalid_input")
    is_problem(await admin.patch("/rules/first", json={"enabled": True, "name": "x"}), 422, "invalid_input")
    stale = await admin.patch("/rules/first", json={"enabled": False}, headers={"if-match": "7"})
    is_problem(stale, 412, "revision_stale")
    assert (await admin.get("/rules")).json()["revision"] == 1


@pytest.mark.usefixtures("workers")
async def test_a_name_with_a_slash_can_be_switched(admin):
    await admin.put("/rules", json={"rules": [rule("team/a")]}, headers={"if-match": "1"})
    for path in ("/rules/team/a", "/rules/team%2Fa"):
        assert (await admin.patch(path, json={"enabled": False})).status_code == 200


class Contended:
    """A store where another writer is faster so many times."""

    def __init__(self, store: RedisRuleStore, times: int) -> None:
        self._store, self._times = store, times
        self.get, self.applied, self.revision = store.get, store.applied, store.revision

    async def put(self, rules, *, expected_revision: int, change: Change) -> int:
        if self._times:
            self._times -= 1
            raise StaleRevision(expected=expected_revision, current=expected_revision + 1)
        return await self._store.put(rules, expected_revision=expected_revision, change=change)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(("times", "status"), [(19, 200), (20, 412)])
async def test_patch_tries_again_after_a_conflict_but_not_for_ever(store, times, status):
    async with over(Contended(store, times)) as client:
        assert (await client.patch("/rules/first", json={"enabled": False})).status_code == status


@pytest.mark.usefixtures("workers")
async def test_patch_that_names_a_revision_does_not_try_again(store):
    async with over(Contended(store, 1)) as client:
        answer = await client.patch("/rules/first", json={"enabled": False}, headers={"if-match": "1"})
    is_problem(answer, 412, "revision_stale")


@pytest.mark.usefixtures("workers")
async def test_workers_are_listed(admin):
    body = (await admin.get("/workers")).json()
    assert [(w["id"], w["revision"], w["state"]) for w in body["items"]] == [("w1", 1, "serving"), ("w2", 1, "serving")]
    assert body["next"] is None


# --- failures -------------------------------------------------------------------------------------


async def test_without_redis_every_call_is_a_503(redis_server, redis_prefix):
    async with RedisSwitch(redis_server.port) as switch:
        client = connect(switch.url)
        await switch.refuse()
        async with over(RedisRuleStore(client, redis_prefix, timeout_s=0.2)) as admin:
            for answer in (
                await admin.get("/rules"),
                await admin.put("/rules", json={"rules": []}, headers={"if-match": "1"}),
                await admin.patch("/rules/first", json={"enabled": True}),
                await admin.get("/workers"),
                await admin.get("http://admin/healthz/ready"),
            ):
                told = is_problem(answer, 503, "store_unavailable")
                assert str(switch.port) not in json.dumps(told)
            assert (await admin.post("/rules/validate", json={"rules": []})).status_code == 200
            assert (await admin.get("http://admin/healthz/live")).status_code == 200
        await client.aclose()


async def test_a_fault_of_our_own_tells_nothing(caplog):
    class Broken:
        async def get(self) -> RuleSet:
            raise KeyError("secret place")

    async with over(Broken()) as client:
        told = is_problem(await client.get("/rules"), 500, "internal")
    assert "secret" not in json.dumps(told)
    assert "admin_failed" in caplog.messages
