"""Switches in Redis: set, ended, followed by workers, lost and found again; and what workers report."""

import asyncio
import json
import logging
import time
from typing import Any

import pytest

from gateway.core.errors import RulesUnavailable, TooManySwitches, UnknownSwitch
from gateway.core.switches import NO_SWITCHES, Scope, Switch, switches_document
from gateway.stores import redis_rules
from gateway.stores.control import rule_store
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.redis_script import connect
from tests.kit.redis import RedisServer
from tests.kit.redis_switch import RedisSwitch
from tests.kit.rule_workers import BOUND_S, SEED, rules
from tests.kit.wait import until, until_async

pytest_plugins = ["tests.kit.redis", "tests.kit.rule_fixtures"]


def now_ms() -> int:
    return round(time.time() * 1000)


def block(name: str, *, ms: int = 60_000, tenant: str = "t") -> Switch:
    return Switch(
        id=name,
        action="block",
        scope=Scope(kind="tenant", name=tenant),
        reason="too many",
        owner="ana",
        created_ms=now_ms(),
        expires_ms=now_ms() + ms,
    )


# --- set and ended --------------------------------------------------------------------------------


async def test_there_are_none_at_first(store):
    assert await store.switches() == NO_SWITCHES
    with pytest.raises(UnknownSwitch):
        await store.end_switch("s1")


async def test_they_are_set_and_ended(store):
    first, second = block("s1"), block("s2")
    assert [await store.add_switch(one) for one in (first, second)] == [1, 2]
    assert (await store.switches()).items == (first, second)
    assert await store.end_switch("s1") == (first, 3)
    left = await store.switches()
    assert (left.revision, left.items) == (3, (second,))
    with pytest.raises(UnknownSwitch, match="s1"):
        await store.end_switch("s1")
    assert (await store.get()).switches == left


async def test_of_many_writers_none_is_lost(store):
    revisions = await asyncio.gather(*(store.add_switch(block(f"s{n}")) for n in range(8)))
    assert sorted(revisions) == list(range(1, 9))
    assert {one.id for one in (await store.switches()).items} == {f"s{n}" for n in range(8)}


async def test_a_switch_that_is_set_again_is_there_once(store):
    await store.add_switch(block("s1", tenant="a"))
    await store.add_switch(block("s1", tenant="b"))
    assert [one.scope.name for one in (await store.switches()).items] == ["b"]


async def test_a_change_that_is_sent_again_is_not_a_conflict(store, redis_client, redis_prefix):
    run, keys = store._switches_script.run, [f"{redis_prefix}{{rules}}"]
    assert await run(redis_client, keys, [0, "[]", 0, "c"]) == [1, 1]
    assert await run(redis_client, keys, [0, "[]", 0, "c"]) == [1, 1]
    assert await run(redis_client, keys, [0, "[1]", 0, "c"]) == [0, 1]


async def test_those_that_have_ended_are_dropped_with_the_next_change(store, redis_client, redis_prefix):
    await store.add_switch(block("gone", ms=-1))
    assert (await store.switches()).items == ()
    with pytest.raises(UnknownSwitch):
        await store.end_switch("gone")
    await store.add_switch(block("s1"))
    stored = json.loads(await redis_client.hget(f"{redis_prefix}{{rules}}", "switches"))
    assert [one["id"] for one in stored] == ["s1"]


async def test_there_may_not_be_too_many(store, monkeypatch):
    monkeypatch.setattr(rule_store, "MAX_SWITCHES", 2)
    await store.add_switch(block("gone", ms=-1))
    await store.add_switch(block("s1"))
    await store.add_switch(block("s2"))
    with pytest.raises(TooManySwitches, match="2 switches"):
        await store.add_switch(block("s3"))
    await store.end_switch("s1")
    assert await store.add_switch(block("s3")) == 5


# --- followed -------------------------------------------------------------------------------------


async def test_all_workers_follow_and_say_so(started, store, redis_server, redis_prefix):
    workers = [await started(redis_server.url, redis_prefix, f"w{n}") for n in range(3)]
    before = [worker.current() for worker in workers]
    switch = block("s1")
    revision = await store.add_switch(switch)
    applied = await store.applied(revision, timeout_s=BOUND_S, of_switches=True)
    assert (applied.workers, applied.of) == (3, 3)
    assert {worker.current().switches.items for worker in workers} == {(switch,)}
    assert {one.switches for one in await store.workers()} == {1}
    for worker, was in zip(workers, before, strict=True):
        assert worker.current().rules is was.rules  # not read anew
    _, revision = await store.end_switch("s1")
    assert (await store.applied(revision, timeout_s=BOUND_S, of_switches=True)).workers == 3
    assert {worker.current().switches.items for worker in workers} == {()}


async def test_rules_that_change_stay_under_the_switches(started, store, redis_server, redis_prefix):
    worker = await started(redis_server.url, redis_prefix)
    await store.add_switch(block("s1"))
    await store.put(rules("new"), expected_revision=1)
    await until(lambda: worker.current().revision == 2)
    assert [one.id for one in worker.current().switches.items] == ["s1"]


async def test_rules_that_wait_for_their_instant_come_under_the_switches_of_then(
    started, store, redis_server, redis_prefix, monkeypatch
):
    now = [1_000_000.0]
    monkeypatch.setattr(redis_rules.time, "time", lambda: now[0])
    worker = await started(redis_server.url, redis_prefix)
    await store.put(rules("new"), expected_revision=1, at_ms=1_000_002_000)
    await store.applied(2, timeout_s=BOUND_S)
    await store.add_switch(block("s1"))
    await until(lambda: worker.current().switches.items)
    assert worker.current().revision == 1
    now[0] += 2
    assert (worker.current().revision, worker.current().switches.revision) == (2, 1)


# --- what cannot be read --------------------------------------------------------------------------


def document(**fields: Any) -> str:
    return json.dumps([{**switches_document([block("s2")])[0], **fields}])


@pytest.mark.parametrize(
    "stored",
    [
        {"switches_revision": 5, "switches": "{not json"},
        {"switches_revision": 5, "switches": b"\xff\xfe"},
        {"switches_revision": 5, "switches": "[" * 100_000},
        {"switches_revision": 5, "switches": '["s"]'},
        {"switches_revision": 5, "switches": "7"},
        {"switches_revision": "five", "switches": "[]"},
        {"switches_revision": 5, "switches": document(action="explode")},
        {"switches_revision": 5, "switches": document(scope={"kind": "moon", "name": "x"})},
        {"switches_revision": 5, "switches": document(scope={"kind": "tenant", "name": 7})},
        {"switches_revision": 5, "switches": document(expires_ms="soon")},
        {"switches_revision": 5, "switches": document(expires_ms=True)},
        {"switches_revision": 5, "switches": document(reason=None)},
        {"switches_revision": 5, "switches": document(more="x")},
    ],
)
async def test_switches_that_cannot_be_read_are_refused_and_the_last_stay(
    started, store, redis_server, redis_client, redis_prefix, caplog, stored
):
    worker = await started(redis_server.url, redis_prefix)
    await store.applied(await store.add_switch(block("s1")), timeout_s=BOUND_S, of_switches=True)
    await redis_client.hset(f"{redis_prefix}{{rules}}", mapping=stored)
    await store.put(rules("new"), expected_revision=1)  # rules are followed all the same
    await until(lambda: worker.current().revision == 2)
    assert [one.id for one in worker.current().switches.items] == ["s1"]

    async def is_told() -> bool:
        (told,) = await store.workers()
        return told.state == "refused" and told.detail.startswith("switches: ") and told.switches == 1

    await until_async(is_told)
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == ["switches_refused"]
    with pytest.raises(RulesUnavailable, match="switches cannot be read"):
        await store.switches()
    assert (await store.get()).rules == rules("new")
    revision = await store.add_switch(block("s3"))  # in an emergency
    assert (await store.applied(revision, timeout_s=BOUND_S, of_switches=True)).workers == 1
    # Where the revision itself could not be read they are counted anew, and the worker's 1 of before is taken for it.
    await until(lambda: [one.id for one in worker.current().switches.items] == ["s3"])

    async def serves() -> bool:
        return [one.state for one in await store.workers()] == ["serving"]

    await until_async(serves)


# --- a Redis that is away, or has lost everything ---------------------------------------------------


@pytest.mark.usefixtures("eager")
async def test_without_redis_the_last_switches_stay_and_end_by_themselves(started, store, redis_server, redis_prefix):
    async with RedisSwitch(redis_server.port) as away:
        worker = await started(away.url, redis_prefix)
        await store.add_switch(block("short", ms=20_000))
        await store.add_switch(block("long", ms=60_000))
        await until(lambda: worker.current().switches.revision == 2)
        await away.refuse()
        await until(lambda: not worker._reachable)
        switches = worker.current().switches
        assert [one.id for one in switches.in_force(now_ms())] == ["short", "long"]
        assert [one.id for one in switches.in_force(now_ms() + 30_000)] == ["long"]
        await store.end_switch("long")
        await away.restore()
        await until(lambda: worker.current().switches.revision == 3)


@pytest.fixture
async def emptied(started, store, redis_server, redis_prefix, redis_client):
    """A worker with the third revision and a switch, which does not look again; and a Redis that has lost it all."""
    worker = await started(redis_server.url, redis_prefix)
    await store.put(rules("second"), expected_revision=1)
    await store.put(rules("third"), expected_revision=2)
    await store.add_switch(block("s1"))
    await until(lambda: (worker.current().revision, worker.current().switches.revision) == (3, 1))
    for task in worker._tasks:
        task.cancel()
    await redis_client.delete(f"{redis_prefix}{{rules}}", f"{redis_prefix}{{rules}}:history")
    return worker


async def test_a_worker_that_knows_more_seeds_after_one_that_has_just_begun(
    emptied, started, store, redis_server, redis_prefix
):
    fresh = await started(redis_server.url, redis_prefix, "w2")
    assert (fresh.current().revision, fresh.current().switches.items) == (1, ())
    await emptied._refresh()
    await fresh._refresh()
    for held in (await store.get(), emptied.current(), fresh.current()):
        assert (held.revision, [rule.name for rule in held.rules]) == (3, ["third"])
        assert [one.id for one in held.switches.items] == ["s1"]
    assert [one.revision for one in await store.revisions()] == [3, 1]
    assert await store.put(rules("fourth"), expected_revision=3) == 4
    await emptied._refresh()
    assert emptied.current().revision == 4


async def test_what_redis_has_forgotten_of_the_last_second_is_put_back(
    started, store, redis_server, redis_prefix, redis_client
):
    """As after a crash, with `appendfsync everysec`, or as a replica that takes over has it."""
    worker, key = await started(redis_server.url, redis_prefix), f"{redis_prefix}{{rules}}"
    await store.put(rules("second"), expected_revision=1)
    older = await redis_client.dump(key)
    await store.put(rules("third"), expected_revision=2)
    await store.add_switch(block("s1"))
    await until(lambda: (worker.current().revision, worker.current().switches.revision) == (3, 1))
    await redis_client.restore(key, 0, older, replace=True)
    await until_async(lambda: revision_is(store, 3))
    now = await store.get()
    assert (now, [one.id for one in now.switches.items]) == (worker.current(), ["s1"])
    assert [rule.name for rule in now.rules] == ["third"]


async def revision_is(store: RedisRuleStore, revision: int) -> bool:
    return (await store.get()).revision == revision


async def test_what_an_operator_has_changed_since_stands(emptied, started, store, redis_server, redis_prefix):
    await started(redis_server.url, redis_prefix, "w2")
    await store.put(rules("mine"), expected_revision=1)
    await emptied._refresh()
    assert [rule.name for rule in emptied.current().rules] == ["mine"]
    assert (await store.get()).revision == 2


async def test_a_switch_that_is_set_in_an_empty_redis_is_added(emptied, store, redis_client, redis_prefix):
    await store.add_switch(block("s2"))
    await emptied._refresh()
    switches = (await store.get()).switches
    assert ([one.id for one in switches.items], switches.revision) == (["s2", "s1"], 2)
    assert emptied.current() == await store.get()
    assert (await store.get()).revision == 3
    await store.end_switch("s1")
    await emptied._refresh()
    assert [one.id for one in emptied.current().switches.items] == ["s2"]


@pytest.mark.usefixtures("eager")
async def test_a_redis_that_lost_everything_gets_switches_and_freezes_back(started, redis_prefix):
    with RedisServer() as server:
        worker = await started(server.url, redis_prefix)
        client = connect(server.url)
        store = RedisRuleStore(client, redis_prefix, timeout_s=BOUND_S)
        freeze = Switch(
            id="f1",
            action="freeze",
            scope=Scope(kind="everything"),
            reason="r",
            owner="o",
            created_ms=now_ms(),
            expires_ms=now_ms() + 60_000,
        )
        for one in (block("s1"), block("gone", ms=-1), freeze):
            await store.add_switch(one)
        await until(lambda: worker.current().switches.revision == 3)
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)

        async def is_back() -> bool:
            return (await store.get()).revision == 1

        await until_async(is_back)
        switches = await store.switches()
        assert (switches.revision, [one.id for one in switches.items]) == (3, ["s1", "f1"])
        assert int(await client.hget(f"{redis_prefix}{{rules}}", "frozen_until_ms")) == freeze.expires_ms
        await client.aclose()


async def test_switches_that_were_set_before_any_rules_stay(started, store, redis_server, redis_prefix):
    await store.add_switch(block("s1"))
    assert (await store.get()).revision == 0
    worker = await started(redis_server.url, redis_prefix)
    assert worker.current().revision == 1
    assert [one.id for one in worker.current().switches.items] == ["s1"]
    assert (await store.get()).rules == SEED.rules


# --- what workers report ----------------------------------------------------------------------------


async def test_a_worker_reports_what_it_does(started, store, redis_server, redis_prefix):
    await started(redis_server.url, redis_prefix, report=lambda: {"drains": {"s1": 3}, "at_ms": 7})
    (told,) = await store.workers()
    assert told.report == {"drains": {"s1": 3}, "at_ms": 7}
    assert (told.state, told.switches) == ("serving", 0)


@pytest.mark.usefixtures("eager")
async def test_a_report_is_made_no_more_often_than_it_may_be(started, store, redis_server, redis_prefix, monkeypatch):
    monkeypatch.setattr(redis_rules, "REPORT_S", 1000.0)
    asked: list[int] = []
    worker = await started(redis_server.url, redis_prefix, report=lambda: asked.append(1) or {"n": len(asked)})
    for n in range(1, 4):
        await store.put(rules(f"r{n}"), expected_revision=n)
        await until(lambda n=n: worker.current().revision == n + 1)
    assert len(asked) == 1
    monkeypatch.setattr(redis_rules, "REPORT_S", 0.0)

    async def is_newer() -> bool:
        return (await store.workers())[0].report["n"] > 2

    await until_async(is_newer)


@pytest.mark.usefixtures("eager")
async def test_a_report_that_fails_keeps_nobody_from_following(started, store, redis_server, redis_prefix, caplog):
    def fail() -> dict[str, Any]:
        raise KeyError("of ours")

    worker = await started(redis_server.url, redis_prefix, report=fail)
    await store.put(rules("new"), expected_revision=1)
    await until(lambda: worker.current().revision == 2)
    assert "report_failed" in caplog.messages
    assert (await store.workers())[0].report == {}


@pytest.mark.parametrize("stored", ["{not json", "[]", "7", b"\xff"])
async def test_a_report_that_cannot_be_read_is_empty(store, redis_client, redis_prefix, stored):
    said = {"pid": 1, "revision": 1, "started": 1, "state": "serving", "detail": "", "report": stored}
    await redis_client.hset(f"{redis_prefix}{{rules}}:worker:w1", mapping=said)
    await redis_client.sadd(f"{redis_prefix}{{rules}}:workers", "w1")
    assert [(one.id, one.report, one.switches) for one in await store.workers()] == [("w1", {}, 0)]
