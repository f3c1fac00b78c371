"""The paths about rules: changes told, history, taking back, trying on requests, and two operators at once."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from gateway.admin.app import create_admin_app
from gateway.admin.plane import Plane
from gateway.admin.routing import rules as rule_paths
from gateway.admin_ports import AuditEntry
from gateway.core.rules import RuleSet, check_targets, parse_rules
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.redis_rules import RedisRuleSource
from tests.kit.admin_plane import bearing, problem

pytest_plugins = ["tests.kit.redis"]

TOKEN = "admin-secret"  # noqa: S105 - made up here
KNOWN = {"backends": ("triton", "local"), "tasks": ("embed", "chat")}
SPLIT = [
    {"backend": "triton", "model": "m", "version": "1", "weight": 90},
    {"backend": "triton", "model": "m", "version": "2", "weight": 10},
]
RULES = [{"name": "canary", "match": {"task": "embed"}, "split": SPLIT}, {"name": "rest", "split": SPLIT[:1]}]


class Requests:
    """A `RequestLog` on a list, the newest first; pages are of two."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    async def page(self, *, before: str = "", size: int = 100) -> tuple[list[dict[str, Any]], str | None]:
        start = int(before or 0)
        end = start + min(size, 2)
        return self.items[start:end], str(end) if end < len(self.items) else None

    async def find(self, request_id: str) -> None:
        return None


class Audit:
    """An `AuditLog` on a list."""

    def __init__(self) -> None:
        self.entries: list[AuditEntry] = []

    async def add(self, entry: AuditEntry) -> None:
        self.entries.append(entry)


def recorded(**more: Any) -> dict[str, Any]:
    told = {"id": "r", "at_ms": 0, "task": "embed", "tenant": "t", "key": "k", "model": "", "version": ""}
    told |= {"priority": "interactive", "stream": False, "headers": {}, "input_bytes": 1, "input_tokens": None}
    return {**told, "session": "", "ordering_key": "", "code": "ok", **more}


@pytest.fixture
def store(redis_client, redis_prefix) -> RedisRuleStore:
    return RedisRuleStore(redis_client, redis_prefix, timeout_s=5)


@pytest.fixture
async def worker(redis_client, redis_prefix):
    seed = RuleSet(revision=0, rules=parse_rules(RULES))
    made = RedisRuleSource(redis_client, redis_prefix, seed, lambda rules: check_targets(rules, **KNOWN), "w1")
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def audit() -> Audit:
    return Audit()


@pytest.fixture
async def admin(store, requests, audit, worker):
    def check(rules: Sequence[Any]) -> None:
        check_targets(rules, **KNOWN)

    app = create_admin_app(Plane(rules=store, check=check, tasks=KNOWN["tasks"], requests=requests, audit=audit), TOKEN)
    async with bearing(app, TOKEN) as client:
        yield client


async def put(admin: httpx.AsyncClient, rules: list[Any], revision: int, **more: Any) -> httpx.Response:
    return await admin.put("/rules", json={"rules": rules, **more}, headers={"if-match": str(revision)})


async def freeze(admin: httpx.AsyncClient) -> str:
    body = {"action": "freeze", "scope": {"everything": True}, "reason": "the audit", "ttl_s": 60}
    answer = await admin.post("/switches", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def weighed(first: int, second: int) -> list[dict[str, Any]]:
    split = [{**SPLIT[0], "weight": first}, {**SPLIT[1], "weight": second}]
    return [{**RULES[0], "split": split}, RULES[1]]


# --- two operators --------------------------------------------------------------------------------


async def test_of_two_operators_the_second_hears_what_the_first_has_changed(admin):
    ours, theirs = weighed(50, 50), weighed(0, 100)
    answers = await asyncio.gather(put(admin, ours, 1), put(admin, theirs, 1))
    assert sorted(answer.status_code for answer in answers) == [200, 412]
    lost = next(answer for answer in answers if answer.status_code == 412)
    told = problem(lost, 412, "revision_stale")
    won = (50, 50) if lost is answers[1] else (0, 100)
    assert (told["expected"], told["current"]) == (1, 2)
    assert told["changes"] == [
        {
            "rule": "canary",
            "change": "changed",
            "fields": [
                {"field": "split[0].weight", "before": 90, "after": won[0]},
                {"field": "split[1].weight", "before": 10, "after": won[1]},
            ],
            "text": f"rule 'canary': split[0].weight: 90 -> {won[0]}; split[1].weight: 10 -> {won[1]}",
        }
    ]
    assert [t["weight"] for t in (await admin.get("/rules")).json()["rules"][0]["split"]] == list(won)


async def test_a_revision_that_is_not_kept_has_no_changes_to_tell(admin):
    assert problem(await put(admin, RULES, 77), 412, "revision_stale")["changes"] == []
    stale = await admin.patch("/rules/rest", json={"enabled": False}, headers={"if-match": "77"})
    assert problem(stale, 412, "revision_stale")["expected"] == 77


# --- one rule -------------------------------------------------------------------------------------


async def test_weights_are_changed_in_place(admin, worker):
    answer = await admin.patch("/rules/canary", json={"weights": [50, 50], "note": "half"})
    body = answer.json()
    assert answer.status_code == 200, answer.text
    assert [target["weight"] for target in body["rule"]["split"]] == [50, 50]
    assert (body["revision"], body["applied"]["workers"]) == (2, 1)
    assert [target.weight for target in worker.current().rules[0].split] == [50, 50]
    newest = (await admin.get("/rules/revisions")).json()["items"][0]
    assert (newest["action"], newest["note"], newest["by"]) == ("weights", "half", "admin")


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({"weights": [1]}, 422, "invalid_input", "has 2 targets"),
        ({"weights": [1, -1]}, 422, "invalid_rules", "rule 'canary': split[1].weight"),
        ({"weights": [0, 0]}, 422, "invalid_rules", "every weight is 0"),
        ({"weights": [1, "1"]}, 422, "invalid_input", "weights"),
        ({"weights": [1, True]}, 422, "invalid_input", "weights"),
        ({}, 422, "invalid_input", "enabled"),
        ({"note": "nothing"}, 422, "invalid_input", "enabled"),
        ({"enabled": True, "note": "n" * 501}, 422, "invalid_input", "note"),
    ],
)
async def test_what_cannot_become_of_a_rule(admin, body, status, code, words):
    assert words in problem(await admin.patch("/rules/canary", json=body), status, code)["detail"]
    assert (await admin.get("/rules")).json()["revision"] == 1


# --- history and taking back ----------------------------------------------------------------------


async def test_the_history_says_who_changed_what_and_why(admin):
    await put(admin, weighed(50, 50), 1, note="half")
    await admin.patch("/rules/rest", json={"enabled": False}, headers={"x-change-reason": "too slow"})
    listed = (await admin.get("/rules/revisions")).json()
    assert listed["next"] is None
    assert [(r["revision"], r["action"], r["note"], r["rules"], r["in_force"]) for r in listed["items"]] == [
        (3, "switch", "too slow", 2, True),
        (2, "put", "half", 2, False),
        (1, "seed", "", 2, False),
    ]
    assert all(r["at"].endswith("Z") and len(r["at"]) == len("2026-01-01T00:00:00.000Z") for r in listed["items"])
    first = (await admin.get("/rules/revisions/1")).json()
    assert [t["weight"] for t in first["rules"][0]["split"]] == [90, 10]
    problem(await admin.get("/rules/revisions/9"), 404, "unknown_revision")


async def test_the_history_comes_in_pages(admin):
    for revision in range(1, 5):
        await put(admin, weighed(revision, 1), revision)
    seen, cursor = [], None
    for _ in range(3):
        page = (
            await admin.get("/rules/revisions", params={"limit": 2, **({"cursor": cursor} if cursor else {})})
        ).json()
        seen.append([one["revision"] for one in page["items"]])
        cursor = page["next"]
    assert (seen, cursor) == ([[5, 4], [3, 2], [1]], None)
    problem(await admin.get("/rules/revisions?cursor=x"), 422, "invalid_input")


async def test_two_revisions_are_compared(admin):
    await put(admin, weighed(50, 50), 1)
    await put(admin, weighed(50, 50)[:1], 2)
    told = (await admin.get("/rules/diff?from=1")).json()
    assert (told["from"], told["to"]) == (1, 3)
    assert [(one["rule"], one["change"]) for one in told["changes"]] == [("canary", "changed"), ("rest", "removed")]
    back = (await admin.get("/rules/diff?from=3&to=2")).json()
    assert [one["text"] for one in back["changes"]] == ["rule 'rest': added as number 2"]
    problem(await admin.get("/rules/diff?from=9"), 404, "unknown_revision")
    problem(await admin.get("/rules/diff?from=1&to=9"), 404, "unknown_revision")


async def test_a_change_is_taken_back_in_one_step(admin, worker):
    await put(admin, weighed(0, 100), 1)
    answer = await admin.post("/rules/rollback")
    assert answer.status_code == 200, answer.text
    assert (answer.json()["revision"], answer.headers["etag"]) == (3, '"3"')
    assert answer.json()["applied"]["workers"] == 1
    assert [target.weight for target in worker.current().rules[0].split] == [90, 10]
    newest = (await admin.get("/rules/revisions")).json()["items"][0]
    assert (newest["action"], newest["note"], newest["in_force"]) == ("rollback", "back to revision 1", True)


async def test_any_revision_that_is_kept_can_be_put_back(admin):
    await put(admin, weighed(50, 50), 1)
    await put(admin, weighed(0, 100), 2)
    answer = await admin.post("/rules/rollback", json={"revision": 1, "note": "as before"})
    assert (answer.json()["revision"], answer.json()["rules"]) == (
        4,
        (await admin.get("/rules/revisions/1")).json()["rules"],
    )
    problem(await admin.post("/rules/rollback", json={"revision": 9}), 404, "unknown_revision")
    stale = await admin.post("/rules/rollback", json={"revision": 2}, headers={"if-match": "3"})
    assert [one["rule"] for one in problem(stale, 412, "revision_stale")["changes"]] == ["canary"]


async def test_what_no_longer_fits_is_not_put_back(admin, store, worker):
    await store.put(parse_rules([{"name": "x", "split": [{"backend": "gone", "model": "m"}]}]), expected_revision=1)
    await put(admin, RULES, 2)
    told = problem(await admin.post("/rules/rollback", json={"revision": 2}), 422, "invalid_rules")
    assert "unknown backend 'gone'" in told["detail"]
    assert worker.current().revision == 3


async def test_there_may_be_nothing_to_go_back_to(admin):
    problem(await admin.post("/rules/rollback"), 404, "unknown_revision")


# --- frozen ---------------------------------------------------------------------------------------


async def test_frozen_rules_are_not_changed(admin):
    await put(admin, weighed(50, 50), 1)
    switch = await freeze(admin)
    for answer in (
        await put(admin, RULES, 2),
        await admin.patch("/rules/rest", json={"enabled": False}),
        await admin.post("/rules/rollback"),
    ):
        assert switch in problem(answer, 409, "frozen")["detail"]
    shown = (await admin.get("/rules")).json()
    assert (shown["revision"], shown["frozen"]["id"], shown["frozen"]["reason"]) == (2, switch, "the audit")
    assert (await admin.post("/rules/validate", json={"rules": RULES})).status_code == 200
    await admin.delete(f"/switches/{switch}")
    assert (await put(admin, RULES, 2)).status_code == 200
    assert (await admin.get("/rules")).json()["frozen"] is None


# --- trying ---------------------------------------------------------------------------------------


async def test_validate_tells_what_would_change(admin):
    told = (await admin.post("/rules/validate", json={"rules": weighed(50, 50)[:1]})).json()
    assert [one["text"] for one in told["changes"]] == [
        "rule 'canary': split[0].weight: 90 -> 50; split[1].weight: 10 -> 50",
        "rule 'rest': removed from number 2",
    ]
    assert told["warnings"] == ["no enabled rule takes the task 'chat': its requests are refused"]


async def test_a_dry_run_says_how_many_of_the_last_requests_would_move(admin, requests):
    # Of the 10 newest, 6 embeds (5 written down, of which one stands for 2) and 4 chats.
    requests.items = [
        recorded(),
        recorded(stands_for=2),
        *[recorded()] * 3,
        *[recorded(task="chat")] * 4,
        recorded(task=""),
    ]
    requests.items += [recorded()] * 5
    rules = [
        weighed(50, 50)[0],
        {"name": "late", "match": {"task": "embed", "headers": {"x-beta": "1"}}, "split": SPLIT},
    ]
    answer = await admin.post("/rules/dry-run", json={"rules": rules, "last": 10})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "revision": 1,
        "requests": 10,
        "moved": 6.4,  # 40 % of 6, and 4 that nobody takes any more
        "refused_before": 0,
        "refused_after": 4,
        "moves": [
            {"from": "triton/m:1", "to": "refused", "requests": 4.0},
            {"from": "triton/m:1", "to": "triton/m:2", "requests": 2.4},
        ],
        "rules": [{"rule": "canary", "before": 6, "after": 6}, {"rule": "rest", "before": 4, "after": 0}],
        "unrecorded_headers": ["x-beta"],
        "warnings": ["no enabled rule takes the task 'chat': its requests are refused"],
    }
    assert (await admin.get("/rules")).json()["revision"] == 1


async def test_a_dry_run_that_takes_too_long_ends(admin, monkeypatch):
    monkeypatch.setattr(rule_paths, "DRY_RUN_S", -1.0)
    body = {"rules": RULES, "requests": [{"task": "chat"}] * 3}
    told = problem(await admin.post("/rules/dry-run", json=body), 422, "invalid_input")
    assert "0 of 3 requests" in told["detail"]


async def test_dry_runs_come_one_after_the_other(admin, monkeypatch):
    """Many at once would keep this process from its guards and rollouts."""
    begun, go_on = threading.Event(), threading.Event()
    tried = rule_paths.dry_run

    def held(*arguments, **named):
        begun.set()
        go_on.wait(10)
        return tried(*arguments, **named)

    monkeypatch.setattr(rule_paths, "dry_run", held)
    monkeypatch.setattr(rule_paths, "TURN_S", 0.01)
    body = {"rules": RULES, "requests": [{"task": "chat"}]}
    first = asyncio.create_task(admin.post("/rules/dry-run", json=body))
    try:
        await asyncio.to_thread(begun.wait, 10)
        refused = await admin.post("/rules/dry-run", json=body)
    finally:
        go_on.set()
    problem(refused, 429, "rate_limited")
    assert int(refused.headers["retry-after"]) > 0
    assert (await first).status_code == 200
    assert (await admin.post("/rules/dry-run", json=body)).status_code == 200


async def test_a_note_is_one_line_that_orders_nothing(admin):
    said = "line\nrule 'x': all well\x1b[2J\u202e"
    revision = (await admin.get("/rules")).json()["revision"]
    await admin.put("/rules", json={"rules": RULES, "revision": revision, "note": said})
    switch = {"action": "block", "scope": {"task": "chat"}, "reason": said, "ttl_s": 60}
    told = await admin.post("/switches", json=switch)
    line = "line rule 'x': all well [2J"
    assert told.json()["reason"] == line
    assert (await admin.get("/rules/revisions")).json()["items"][0]["note"] == line
    problem(await admin.post("/switches", json={**switch, "reason": "\x1b\n "}), 422, "invalid_input")


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        ({"at": "9999-12-31T23:59:59Z"}, "#/requests/0/at"),
        ({"at": "0001-01-01T00:00:00+14:00"}, "#/requests/0/at"),
        ({"input_tokens": 10**300}, "#/requests/0/input_tokens"),
        ({"headers": {f"h{i}": "" for i in range(101)}}, "#/requests/0/headers"),
        ({"model": "m" * 65_537}, "#/requests/0/model"),
    ],
)
async def test_a_given_request_is_one_that_may_come(admin, asked, at):
    """No time zone has an hour beyond the year 9999."""
    rule = {**RULES[1], "match": {"times": [{"days": ["mon"], "timezone": "Asia/Tokyo"}]}}
    body = {"rules": [rule], "requests": [{"task": "chat", **asked}]}
    told = problem(await admin.post("/rules/dry-run", json=body), 422, "invalid_input")
    assert told["errors"][0]["pointer"] == at


async def test_not_all_faults_of_a_body_are_told(admin):
    told = problem(await admin.post("/rules/validate", json={f"f{i}": 1 for i in range(5000)}), 422, "invalid_input")
    assert len(told["errors"]) == 100


async def test_parameters_that_are_taken_can_be_shown(admin):
    """An answer has bounds of its own: rules that could be put and not be read would lock all out."""
    deep: Any = 1
    for _ in range(95):
        deep = {"x": [deep]} if isinstance(deep, int) else {"x": deep}
    rule = {**RULES[1], "split": [{**SPLIT[0], "parameters": deep}]}
    revision = (await admin.get("/rules")).json()["revision"]
    assert (await admin.put("/rules", json={"rules": [rule], "revision": revision})).status_code == 200
    assert (await admin.get("/rules")).json()["rules"][0]["split"][0]["parameters"] == deep


async def test_a_dry_run_on_requests_that_are_given(admin):
    rules = [
        {"name": "beta", "match": {"headers": {"x-beta": "1"}, "times": [{"days": ["mon"]}]}, "split": SPLIT[1:]},
        RULES[1],
    ]
    given = [
        {"task": "chat", "headers": {"X-Beta": "1"}, "at": "2026-01-05T12:00:00Z"},
        {"task": "chat", "headers": {"x-beta": "1"}, "at": "2026-01-06T12:00:00+00:00"},
        {"task": "chat", "tenant": "t", "at": "2026-01-05T12:00:00Z"},
    ]
    told = (await admin.post("/rules/dry-run", json={"rules": rules, "requests": given})).json()
    assert told["moves"] == [{"from": "triton/m:1", "to": "triton/m:2", "requests": 1.0}]
    assert (told["requests"], told["moved"], told["unrecorded_headers"]) == (3, 1.0, [])


@pytest.mark.parametrize(
    "body",
    [
        {"rules": RULES, "last": 0},
        {"rules": RULES, "last": 10_001},
        {"rules": RULES, "requests": [{}]},
        {"rules": RULES, "requests": [{"task": "chat", "at": "noon"}]},
        {"rules": RULES, "requests": [{"task": "chat", "at": "2026-01-05T12:00:00"}]},
        {"rules": RULES, "requests": [{"task": "chat", "prompt": "x"}]},
    ],
)
async def test_what_cannot_be_tried(admin, body):
    problem(await admin.post("/rules/dry-run", json=body), 422, "invalid_input")


async def test_a_set_that_cannot_be_taken_is_not_tried(admin):
    problem(await admin.post("/rules/dry-run", json={"rules": [{"name": "x"}]}), 422, "invalid_rules")


async def test_without_a_log_of_requests_some_have_to_be_given(store, worker):
    app = create_admin_app(Plane(rules=store), TOKEN)
    async with bearing(app, TOKEN) as client:
        told = problem(await client.post("/rules/dry-run", json={"rules": RULES}), 422, "invalid_input")
        assert told["errors"][0]["pointer"] == "#/requests"
        some = await client.post("/rules/dry-run", json={"rules": RULES, "requests": [{"task": "chat"}]})
        assert some.json()["moved"] == 0.0


# --- CF-06: what is bad changes nothing ------------------------------------------------------------

HUGE = "m" * 10_240
BAD = [
    ([{"name": "x", "match": {"model": "(["}, "split": SPLIT}], "rule 'x': match.model"),
    ([{"name": "x", "match": {"model": "(a+)+$"}, "split": SPLIT}], "rule 'x': match.model"),
    ([{"name": "x", "match": {"tenant": "(["}, "split": SPLIT}], "rule 'x': match.tenant"),
    ([{"name": "x", "match": {"key": "(a+)+$"}, "split": SPLIT}], "rule 'x': match.key"),
    ([{"name": "x", "match": {"model": HUGE}, "split": SPLIT}], "rule 'x': match.model"),
    ([{"name": "x", "split": [{"backend": "trton", "model": "m"}]}], "rule 'x': split[0].backend: unknown backend"),
    ([{"name": "x", "split": [{**SPLIT[0], "weight": -1}]}], "rule 'x': split[0].weight"),
    ([{"name": "x", "split": [{**SPLIT[0], "weight": "x"}]}], "rule 'x': split[0].weight"),
    ([RULES[0], RULES[1], RULES[0]], "rule 'canary': name is used twice"),
]


@pytest.mark.parametrize(("rules", "words"), BAD)
async def test_one_bad_rule_changes_nothing_and_a_good_set_is_taken_after_it(
    admin, worker, audit, rules, words
):  # CF-06
    before = worker.current()
    for answer in (
        await put(admin, [RULES[1], *rules] if len(rules) == 1 else rules, 1),
        await admin.post("/rules/validate", json={"rules": rules}),
    ):
        assert words in problem(answer, 422, "invalid_rules")["detail"]
    assert worker.current() is before
    assert [one["revision"] for one in (await admin.get("/rules/revisions")).json()["items"]] == [1]
    good = await put(admin, weighed(50, 50), 1)
    assert (good.status_code, good.json()["applied"]["workers"]) == (200, 1)
    assert [(entry.action, entry.outcome) for entry in audit.entries] == [
        ("rules.put", "invalid_rules"),
        ("rules.put", "ok"),
    ]


async def test_a_huge_name_is_matched_like_any_other(admin):  # CF-06
    rules = [
        {"name": "some", "match": {"model": "mm*"}, "split": SPLIT[1:]},
        *({"name": f"r{n}", "match": {"model": f"a{n}*"}, "split": SPLIT[1:]} for n in range(200)),
        RULES[1],
    ]
    given = [{"task": "chat", "model": HUGE}, {"task": "chat", "model": "a" * 10_240 + "!"}]
    told = (await admin.post("/rules/dry-run", json={"rules": rules, "requests": given})).json()
    assert told["rules"] == [{"rule": "some", "before": 0, "after": 1}, {"rule": "rest", "before": 2, "after": 1}]


# --- audit ----------------------------------------------------------------------------------------


async def test_each_change_is_told_to_the_audit_log(admin, audit):
    await put(admin, weighed(50, 50), 1, note="half")
    await admin.patch("/rules/rest", json={"enabled": False}, headers={"x-change-reason": "slow"})
    await admin.post("/rules/rollback", json={"revision": 1})
    await put(admin, RULES, 1)
    await admin.post("/rules/validate", json={"rules": RULES})
    await admin.post("/rules/dry-run", json={"rules": RULES})
    put_, switched, rolled, stale = audit.entries
    assert (put_.action, put_.actor, put_.reason, put_.outcome) == ("rules.put", "admin", "half", "ok")
    assert put_.before == {"revision": 1}
    assert put_.after == {
        "revision": 2,
        "changes": ["rule 'canary': split[0].weight: 90 -> 50; split[1].weight: 10 -> 50"],
    }
    assert (switched.action, switched.target, switched.reason) == ("rules.switch", "rest", "slow")
    assert switched.after["changes"] == ["rule 'rest': enabled: true -> false"]
    assert (rolled.action, rolled.target, rolled.before) == ("rules.rollback", "revision 1", {"revision": 3})
    assert (stale.action, stale.outcome) == ("rules.put", "revision_stale")


@pytest.mark.usefixtures("worker")
async def test_of_many_who_change_the_newest_set_none_is_refused(admin, store):
    """Each at once, and each on top of the others' changes."""
    begun, many = (await store.get()).revision, 12
    answers = await asyncio.gather(
        *(admin.patch("/rules/canary", json={"weights": [n + 2, 1]}) for n in range(many)),
    )
    assert [answer.status_code for answer in answers] == [200] * many
    assert sorted(answer.json()["revision"] for answer in answers) == list(range(begun + 1, begun + many + 1))
    assert [one.revision for one in await store.revisions()] == list(range(begun + many, 0, -1))
