"""The audit log: every change is in it with who, what and why; a flood of refusals is not, and no secret ever."""

import asyncio
import json
import logging

import pytest

from gateway.admin.access.actors import Actor, Visit
from gateway.admin.access.auditing import MAX_AUDITED, MAX_DETAIL_BYTES, Auditing
from gateway.admin.access.door import MAX_BODY_BYTES, CurrentVisit
from gateway.admin_ports import AuditEntry
from gateway.core.errors import RulesUnavailable
from gateway.stores.control.audit import RedisAuditLog
from gateway.stores.redis_key_store import RedisKeyStore
from gateway.telemetry.logs import JsonLines
from tests.kit.admin_plane import SECRETS, bearing, client, logged_in, whole_app

pytest_plugins = ["tests.kit.redis"]

KEY = {"tenant": "acme", "name": "batch jobs"}


@pytest.fixture
def log(redis_client, redis_prefix) -> RedisAuditLog:
    return RedisAuditLog(redis_client, redis_prefix)


@pytest.fixture
def app(redis_client, redis_prefix):
    return whole_app(redis_client, redis_prefix, keys=RedisKeyStore(redis_client, redis_prefix))


async def written(log: RedisAuditLog) -> list[AuditEntry]:
    """The oldest first."""
    return [entry async for entry in log.all()]


async def test_a_change_is_written_with_who_what_why_and_from_where(app, log):
    async with bearing(app, SECRETS["admin"], address="192.0.2.7") as admin:
        made = await admin.post("/keys", json=KEY, headers={"x-change-reason": "für Ana".encode()})
        key_id = made.json()["id"]
        await admin.patch(f"/keys/{key_id}", json={"disabled": True}, headers={"x-change-reason": "leaked"})
        await admin.post(f"/keys/{key_id}/rotate", json={"grace_s": 5})
        await admin.delete(f"/keys/{key_id}")
    create, change, rotate, delete = await written(log)
    for entry in (create, change, rotate, delete):
        assert (entry.actor, entry.role, entry.address) == ("key-admin", "admin", "192.0.2.7")
        assert (entry.target, entry.outcome) == (key_id, "ok")
    assert (create.action, create.reason, create.before, create.after["tenant"]) == (
        "key.create",
        "für Ana",
        None,
        "acme",
    )
    assert (change.action, change.reason) == ("key.change", "leaked")
    assert (change.before, change.after) == ({"disabled": False, "revision": 1}, {"disabled": True, "revision": 2})
    assert (rotate.action, rotate.after) == ("key.rotate", {"grace_s": 5, "revision": 3})
    assert (delete.action, delete.before["name"], delete.after) == ("key.delete", "batch jobs", None)


@pytest.mark.parametrize(
    ("request_line", "content", "action", "target", "outcome"),
    [
        ("POST /keys", b"{}", "key.create", "", "invalid_input"),
        ("POST /keys", b"[" * 100_000, "key.create", "", "malformed_request"),
        ("PATCH /keys/none", b"{}", "key.change", "none", "unknown_key"),
        ("PATCH /rules/team/a", b'{"enabled": true}', "rules.change", "team/a", "store_unavailable"),
        ("PUT /rules", b"x" * (MAX_BODY_BYTES + 1), "rules.put", "", "body_too_large"),
        ("DELETE /rules", b"", "DELETE /admin/v1/rules", "", "method_not_allowed"),
        ("POST /nowhere", b"", "POST /admin/v1/nowhere", "", "not_found"),
    ],
)
async def test_a_change_that_came_to_nothing_is_written_too(app, log, request_line, content, action, target, outcome):
    method, path = request_line.split(" ")
    async with bearing(app, SECRETS["admin"]) as admin:
        answer = await admin.request(method, path, content=content, headers={"content-type": "application/json"})
    assert answer.json()["code"] == outcome
    (entry,) = await written(log)
    assert (entry.actor, entry.action, entry.target, entry.outcome) == ("key-admin", action, target, outcome)


@pytest.mark.parametrize("path", ["/rules/validate", "/rules/dry-run"])
async def test_what_changes_nothing_is_not_written(app, log, path):
    async with bearing(app, SECRETS["viewer"]) as viewer:
        for answer in (await viewer.get("/keys"), await viewer.post(path, json={"rules": []})):
            assert answer.status_code not in (401, 403, 404)
    assert await written(log) == []


async def test_the_reason_of_a_body_is_kept(app, log):
    async with bearing(app, SECRETS["admin"]) as admin:
        await admin.post("/rollouts/7/abort", json={"note": "too\nslow"})
        await admin.post("/switches", json={"reason": "maintenance"}, headers={"x-change-reason": "the header's"})
        too_long = await admin.delete("/keys/x", headers={"x-change-reason": "x" * 501})
    assert [entry.reason for entry in await written(log)][:2] == ["too slow", "the header's"]
    assert (too_long.status_code, too_long.json()["errors"][0]["field"]) == (422, "x-change-reason")


async def test_the_entry_is_there_before_the_answer(app, log):
    class Slow(RedisAuditLog):
        async def add(self, entry: AuditEntry) -> None:
            await asyncio.sleep(0)
            await super().add(entry)

    sent: list[str] = []

    async def send(message) -> None:
        sent.append(message["type"])
        counts.append(len(await written(log)))

    async def receive():
        return {"type": "http.request", "body": json.dumps(KEY).encode(), "more_body": False}

    counts: list[int] = []
    headers = [(b"authorization", f"Bearer {SECRETS['admin']}".encode()), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/admin/v1/keys",
        "raw_path": b"/admin/v1/keys",
        "query_string": b"",
        "headers": headers,
        "client": ("192.0.2.1", 1),
        "server": ("gateway", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    await app(scope, receive, send)
    assert (sent[0], counts[0]) == ("http.response.start", 1)


async def test_log_ins_are_written_and_failures_folded(app, log):
    async with logged_in(app, SECRETS["viewer"]) as browser:
        assert (await browser.delete("/session")).status_code == 204
    async with client(app, address="192.0.2.9") as guesser:
        for n in range(15):
            await guesser.post("/session", json={"token": f"guess-{n}"})
            await guesser.post("/session", content=b"not even JSON")
            await guesser.put("/rules", json={}, headers={"authorization": f"Bearer guess-{n}"})
            await guesser.get("/rules", headers={"authorization": f"Bearer guess-{n}"})
    entries = [(e.actor, e.role, e.action, e.outcome, e.address) for e in await written(log)]
    assert entries == [
        ("key-viewer", "viewer", "session.begin", "ok", "192.0.2.1"),
        ("key-viewer", "viewer", "session.end", "ok", "192.0.2.1"),
        ("", "", "session.refused", "unauthorized", "192.0.2.9"),
    ]


async def test_who_may_not_is_written_once_a_minute(app, log):
    async with bearing(app, SECRETS["viewer"]) as viewer:
        for _ in range(5):
            assert (await viewer.put("/rules", json={"rules": []})).status_code == 403
            assert (await viewer.get("/audit/export")).status_code == 403
    async with logged_in(app, SECRETS["operator"]) as browser:
        await browser.put("/rules", json={"rules": []}, headers={"x-csrf-token": "x"})
    entries = [(e.actor, e.role, e.action, e.outcome) for e in await written(log)]
    assert entries == [
        ("key-viewer", "viewer", "rules.put", "forbidden"),
        ("key-operator", "operator", "session.begin", "ok"),
        ("key-operator", "operator", "rules.put", "forbidden"),
    ]


async def test_a_path_orders_nothing_where_the_log_is_shown(app, log):
    async with bearing(app, SECRETS["viewer"]) as http:
        assert (await http.patch("/rules/%C2%9b2J%1b%5b31m", json={})).status_code == 403
    async with bearing(app, SECRETS["operator"]) as http:
        assert (await http.post("/nowhere%0a%E2%80%AEx", json={})).status_code == 403
    told = [(entry.action, entry.target) async for entry in log.all()]
    assert told == [("rules.change", "2J [31m"), ("POST /admin/v1/nowhere  x", "")]


async def test_a_flood_from_everywhere_does_not_fill_the_log():
    kept: list[AuditEntry] = []

    class Log:
        async def add(self, entry: AuditEntry) -> None:
            kept.append(entry)

    auditing = Auditing(Log())
    for n in range(5000):
        address = f"10.0.{n // 250}.{n % 250}"
        await auditing.write(Visit(actor=Actor(id="", role="viewer", kind="session", address=address)), "unauthorized")
    assert len(kept) == MAX_AUDITED


class Full:
    """A log that cannot be written."""

    async def add(self, entry: AuditEntry) -> None:
        raise RulesUnavailable("gone")


async def test_a_change_that_cannot_be_written_down_is_answered_and_logged(redis_client, redis_prefix, caplog):
    app = whole_app(redis_client, redis_prefix, keys=RedisKeyStore(redis_client, redis_prefix), audit=Full())
    async with bearing(app, SECRETS["admin"]) as admin:
        made = await admin.post("/keys", json=KEY, headers={"x-change-reason": "why not"})
    assert made.status_code == 201
    (record,) = [record for record in caplog.records if record.message == "audit_unwritten"]
    entry = json.loads(JsonLines().format(record))["entry"]
    assert (entry["action"], entry["target"], entry["reason"]) == ("key.create", made.json()["id"], "why not")


async def test_a_fault_of_our_own_is_written(redis_client, redis_prefix, log):
    class Broken:
        async def delete(self, key_id: str) -> None:
            raise KeyError(key_id)

        async def get(self, key_id: str) -> None:
            raise RulesUnavailable("unreadable")

    app = whole_app(redis_client, redis_prefix, keys=Broken())
    async with bearing(app, SECRETS["admin"]) as admin:
        assert (await admin.delete("/keys/k")).status_code == 500
    (entry,) = await written(log)
    assert (entry.action, entry.target, entry.outcome) == ("key.delete", "k", "internal")


async def test_a_change_that_was_cut_off_is_written(app, log):
    @app.put("/admin/v1/slow")
    async def _slow(visit: CurrentVisit) -> None:
        visit.tell("slow.put", "s", after=1)
        entered.set()
        await asyncio.Event().wait()

    entered = asyncio.Event()
    async with bearing(app, SECRETS["admin"]) as admin:
        asking = asyncio.create_task(admin.put("/slow"))
        await entered.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    (entry,) = await written(log)
    assert (entry.action, entry.target, entry.after, entry.outcome) == ("slow.put", "s", 1, "interrupted")


async def test_what_is_too_long_to_keep_is_left_out(log):
    visit = Visit(actor=Actor(id="a", role="admin", kind="key"), action="rules.put")
    visit.before, visit.after = "x" * MAX_DETAIL_BYTES, {"rules": 3}
    await Auditing(log).write(visit, "ok")
    (entry,) = await written(log)
    assert (entry.before, entry.after) == ({"left_out": f"{MAX_DETAIL_BYTES + 2} bytes of JSON"}, {"rules": 3})


# --- reading it -------------------------------------------------------------------------------------


async def filled(log: RedisAuditLog, count: int) -> None:
    for n in range(count):
        actor, action = ("ana", "rules.put") if n % 3 == 0 else ("ben", "switch.add")
        entry = AuditEntry(actor=actor, role="admin", action=action, at_ms=1_700_000_000_000 + n, target=f"t{n % 2}")
        await log.add(entry)


async def test_pages_are_the_newest_first(app, log):
    await filled(log, 25)
    async with bearing(app, SECRETS["viewer"]) as viewer:
        first = (await viewer.get("/audit", params={"limit": 10})).json()
        assert [item["at"][-5:] for item in first["items"]] == [f".{n:03}Z"[-5:] for n in range(24, 14, -1)]
        assert first["items"][0] == {
            "id": first["items"][0]["id"],
            "at": "2023-11-14T22:13:20.024Z",
            "actor": "ana",
            "role": "admin",
            "from": "",
            "action": "rules.put",
            "target": "t0",
            "before": None,
            "after": None,
            "reason": "",
            "outcome": "ok",
        }
        found, cursor = list(first["items"]), first["next"]
        while cursor:
            page = (await viewer.get("/audit", params={"limit": 10, "cursor": cursor})).json()
            found, cursor = found + page["items"], page["next"]
        assert len({item["id"] for item in found}) == 25
        assert (await viewer.get("/audit", params={"cursor": "x"})).status_code == 422


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"actor": "ana"}, 9),
        ({"action": "switch.add"}, 16),
        ({"action": "rules."}, 9),
        ({"action": "rules"}, 0),
        ({"target": "t1"}, 12),
        ({"actor": "ana", "target": "t1"}, 4),
        ({"actor": "nobody"}, 0),
    ],
)
async def test_it_can_be_searched_page_by_page(app, log, asked, count):
    await filled(log, 25)
    async with bearing(app, SECRETS["viewer"]) as viewer:
        found, cursor = [], ""
        while cursor is not None:
            page = (
                await viewer.get(
                    "/audit", params={**asked, "limit": 4, "cursor": cursor} if cursor else {**asked, "limit": 4}
                )
            ).json()
            assert len(page["items"]) <= 4
            found, cursor = found + page["items"], page["next"]
    assert len(found) == len({item["id"] for item in found}) == count


async def test_the_export_is_all_of_it_the_oldest_first(app, log):
    await filled(log, 1203)
    async with bearing(app, SECRETS["admin"]) as admin:
        answer = await admin.get("/audit/export")
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert len(lines) == 1203
    assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
    assert lines[0].keys() >= {"id", "at", "actor", "role", "from", "action", "target", "outcome"}


async def test_an_export_that_cannot_be_is_an_error(redis_client, redis_prefix):
    class Away(Full):
        async def all(self):
            raise RulesUnavailable("gone")
            yield

    app = whole_app(redis_client, redis_prefix, audit=Away())
    async with bearing(app, SECRETS["admin"]) as admin:
        assert (await admin.get("/audit/export")).status_code == 503


# --- secrets ----------------------------------------------------------------------------------------


async def test_no_secret_is_in_the_log_the_audit_log_an_error_or_a_repr(
    app, log, redis_client, redis_prefix, caplog, capfd
):  # SC-01
    caplog.set_level(logging.DEBUG)
    planted = [*SECRETS.values()]
    answers = []
    async with logged_in(app, SECRETS["admin"]) as browser:
        planted += [*browser.cookies.values(), browser.headers["x-csrf-token"]]
        made = await browser.post("/keys", json=KEY)
        planted.append(made.json()["key"])
        rotated = await browser.post(f"/keys/{made.json()['id']}/rotate", json={"grace_s": 60})
        planted.append(rotated.json()["key"])
        await browser.patch(f"/keys/{made.json()['id']}", json={"disabled": True})
        await browser.delete(f"/keys/{made.json()['id']}")
        config = {"parameters": {"token": {"string_value": "planted-in-a-model-configuration"}}}
        planted.append("planted-in-a-model-configuration")
        answers += [
            await browser.post("/models/m/load", json={"config": config}),
            await browser.post("/session", json={"token": planted[0], "extra": planted[0]}),
            await browser.post("/session", json={"token": [planted[0]]}),
            await browser.post("/session", content=planted[0]),
            await browser.put("/rules", json={}, headers={"x-csrf-token": "wrong"}),
            await browser.get("/audit"),
            await browser.get("/audit/export"),
        ]
    async with bearing(app, SECRETS["viewer"]) as viewer:
        answers += [await viewer.put("/rules", json={}), await viewer.get("/keys")]
    async with bearing(app, "planted-as-a-token-that-is-wrong") as guesser:
        planted.append("planted-as-a-token-that-is-wrong")
        answers += [await guesser.get("/rules"), await guesser.post("/session", json={"token": planted[-1]})]
    told = [answer.text for answer in answers]
    told += [
        str(vars(record)) + caplog.handler.format(record) for record in caplog.records if "httpx" not in record.name
    ]
    told += [repr(entry) for entry in await written(log)]
    told += [str(await redis_client.xrange(f"{redis_prefix}audit")), *capfd.readouterr()]
    everything = "\n".join(told)
    assert len(await written(log)) >= 8
    for secret in planted:
        assert secret not in everything, secret[:12]
