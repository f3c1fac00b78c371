"""Every `RuleSource`, and the rules in Redis: changes, refusals, failures and what workers report."""

import asyncio
import json
import logging
from collections.abc import Callable

import pytest

from gateway.core.errors import RulesUnavailable, StaleRevision
from gateway.core.rules import RuleSet
from gateway.core.rules.fields import RuleError
from gateway.stores import redis_rules
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.memory import MemoryRuleSource
from gateway.stores.redis_rules import RedisRuleSource
from gateway.stores.redis_script import connect
from tests.kit.redis import RedisServer
from tests.kit.redis_switch import RedisSwitch
from tests.kit.rule_workers import BOUND_S, SEED, rules, validate

pytest_plugins = ["tests.kit.redis", "tests.kit.rule_fixtures"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 - it is asked, not told
            await asyncio.sleep(0.005)


@pytest.fixture
async def worker(started, redis_server, redis_prefix) -> RedisRuleSource:
    return await started(redis_server.url, redis_prefix)


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_source_serves_its_seed_and_then_what_replaced_it(kind, started, store, redis_server, redis_prefix):
    if kind == "memory":
        source = MemoryRuleSource(SEED)
        assert source.current().rules == SEED.rules
        source.replace(RuleSet(revision=2, rules=rules("new")))
    else:
        source = await started(redis_server.url, redis_prefix)
        assert source.current().rules == SEED.rules
        await store.put(rules("new"), expected_revision=1)
        await until(lambda: source.current().revision == 2)
    assert source.current() == RuleSet(revision=2, rules=rules("new"))


# --- changes --------------------------------------------------------------------------------------


async def test_many_workers_seed_an_empty_redis_once(started, store, redis_server, redis_prefix):
    seeds = [RuleSet(revision=0, rules=rules(f"seed-{n}")) for n in range(6)]
    workers = await asyncio.gather(
        *(started(redis_server.url, redis_prefix, f"w{n}", seed=seed) for n, seed in enumerate(seeds))
    )
    first = await store.get()
    assert first.revision == 1
    assert first.rules in [seed.rules for seed in seeds]
    assert {w.current() for w in workers} == {first}


async def test_a_change_reaches_all_workers(started, store, redis_server, redis_prefix):
    workers = [await started(redis_server.url, redis_prefix, f"w{n}") for n in range(3)]
    revision = await store.put(rules("new"), expected_revision=1)
    applied = await store.applied(revision, timeout_s=BOUND_S)
    assert (revision, applied.workers, applied.of) == (2, 3, 3)
    assert all(w.current() == RuleSet(revision=2, rules=rules("new")) for w in workers)


@pytest.mark.usefixtures("eager")
async def test_a_change_is_found_without_any_announcement(worker, redis_client, redis_prefix):
    document = json.dumps([{"name": "quiet", "split": [{"backend": "local", "model": "m"}]}])
    await redis_client.hset(f"{redis_prefix}{{rules}}", mapping={"revision": 9, "rules": document})
    await until(lambda: worker.current().revision == 9)
    assert [r.name for r in worker.current().rules] == ["quiet"]


@pytest.mark.usefixtures("eager")
async def test_a_worker_knows_how_many_live(started, redis_server, redis_client, redis_prefix):
    await redis_client.sadd(f"{redis_prefix}{{rules}}:workers", "dead long ago")
    workers = [await started(redis_server.url, redis_prefix, f"w{n}") for n in range(3)]
    await until(lambda: [one.live_workers() for one in workers] == [3, 3, 3])
    await workers[2].close()
    await until(lambda: [one.live_workers() for one in workers[:2]] == [2, 2])
    assert await redis_client.smembers(f"{redis_prefix}{{rules}}:workers") == {b"w0", b"w1"}


@pytest.mark.usefixtures("worker")
async def test_put_is_compare_and_set(store):
    changes = await asyncio.gather(
        *(store.put(rules(f"r{n}"), expected_revision=1) for n in range(10)), return_exceptions=True
    )
    assert changes.count(2) == 1
    stale = [c for c in changes if isinstance(c, StaleRevision)]
    assert len(stale) == 9
    assert {s.current for s in stale} == {2}
    assert (await store.get()).revision == 2


async def test_a_put_that_is_sent_again_is_not_a_conflict(store):
    assert await store.put(rules("a"), expected_revision=0) == 1
    assert await store.put(rules("a"), expected_revision=0) == 1
    with pytest.raises(StaleRevision):
        await store.put(rules("b"), expected_revision=0)


async def test_an_empty_store_has_revision_0(store):
    assert await store.get() == RuleSet(revision=0, rules=())
    assert await store.workers() == []
    applied = await store.applied(1)
    assert (applied.workers, applied.of) == (0, 0)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"revision": 5, "rules": "{not json"}, "rules: not a revision and a JSON list"),
        ({"revision": 5, "rules": b"\xff\xfe"}, "rules: not a revision and a JSON list"),
        ({"revision": 5, "rules": "[" * 100_000}, "rules: not a revision and a JSON list"),
        ({"revision": "five", "rules": "[]"}, "rules: not a revision and a JSON list"),
        ({"rules": "[]"}, "rules: not a revision and a JSON list"),
        ({"other": "x"}, "rules: not a revision and a JSON list"),
        ({"revision": 5, "rules": '{"rules": []}'}, "rules: must be a list"),
        ({"revision": 5, "rules": '[{"name": "x", "split": []}]'}, "rule 'x': split: at least one"),
        (
            {"revision": 5, "rules": '[{"name": "x", "split": [{"backend": "trito", "model": "m"}]}]'},
            "rule 'x': split[0].backend: unknown backend 'trito'",
        ),
    ],
)
@pytest.mark.usefixtures("eager")
async def test_a_set_that_cannot_be_taken_is_refused_whole(
    worker, store, redis_client, redis_prefix, caplog, fields, detail
):
    before = worker.current()
    async with redis_client.pipeline() as pipeline:
        pipeline.delete(f"{redis_prefix}{{rules}}")
        pipeline.hset(f"{redis_prefix}{{rules}}", mapping=fields)
        await pipeline.execute()
    await until(lambda: worker._rules_fault)
    await asyncio.sleep(0.1)  # several looks at the same bad set
    assert worker.current() is before
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == ["rules_refused"]
    (report,) = await store.workers()
    assert (report.state, report.revision) == ("refused", before.revision)
    assert report.detail.startswith(detail)
    assert (await store.applied(before.revision + 1, timeout_s=0)).workers == 0


async def test_a_foreign_type_under_the_rules_name_is_refused_too(started, redis_server, redis_client, redis_prefix):
    worker = await started(redis_server.url, redis_prefix)
    before = worker.current()
    await redis_client.set(f"{redis_prefix}{{rules}}", "x")
    await until(lambda: worker._rules_fault)
    assert worker.current() is before


async def test_a_good_set_after_a_bad_one_is_taken(worker, store, redis_client, redis_prefix):
    await redis_client.hset(f"{redis_prefix}{{rules}}", mapping={"revision": 5, "rules": "bad"})
    with pytest.raises(RulesUnavailable, match="revision 5"):
        await store.get()
    revision = await store.put(rules("good"), expected_revision=5)
    assert (await store.applied(revision, timeout_s=BOUND_S)).workers == 1
    assert worker.current().rules == rules("good")
    assert [w.state for w in await store.workers()] == ["serving"]


async def test_a_worker_refuses_what_only_it_cannot_run(worker, store):
    revision = await store.put(rules("new", backend="elsewhere"), expected_revision=1)
    await until(lambda: worker._rules_fault)
    applied = await store.applied(revision, timeout_s=0.05)
    assert (applied.workers, applied.of) == (0, 1)
    with pytest.raises(RuleError):
        validate((await store.get()).rules)


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
async def test_without_redis_the_last_rules_serve_and_it_recovers(started, store, redis_server, redis_prefix, caplog):
    async with RedisSwitch(redis_server.port) as switch:
        worker = await started(switch.url, redis_prefix)
        worker._timeout_s = 0.1
        await store.put(rules("last"), expected_revision=1)
        await until(lambda: worker.current().revision == 2)
        await switch.refuse()
        await until(lambda: not worker._reachable)
        assert worker.current().rules == rules("last")
        before = switch.accepted
        await store.put(rules("meanwhile"), expected_revision=2)
        await switch.restore()
        await until(lambda: worker.current().revision == 3)
        await until(lambda: worker._reachable)
        assert switch.accepted - before <= 6  # the pool and the listener, no storm
    logged = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert logged == ["rules_store_unreachable", "rules_store_restored"]


@pytest.mark.usefixtures("eager")
async def test_a_redis_that_hangs_stops_nobody(started, store, redis_server, redis_prefix):
    async with RedisSwitch(redis_server.port) as switch:
        switch.pause()
        async with asyncio.timeout(BOUND_S):
            worker = await started(switch.url, redis_prefix)
        assert worker.current() is SEED
        await switch.restore()
        await until(lambda: worker.current().revision == 1)
        assert (await store.get()).rules == SEED.rules


@pytest.mark.usefixtures("eager")
async def test_a_redis_that_lost_everything_gets_the_last_rules_back(started, redis_prefix):
    with RedisServer() as server:
        worker = await started(server.url, redis_prefix)
        client = connect(server.url)
        store = RedisRuleStore(client, redis_prefix, timeout_s=BOUND_S)
        await store.put(rules("last"), expected_revision=1)
        await until(lambda: worker.current().revision == 2)
        await asyncio.to_thread(server.stop)
        with pytest.raises(RulesUnavailable, match="does not answer"):
            await store.get()
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(BOUND_S):
            while (await store.get()).revision == 0:  # noqa: ASYNC110 - it is asked, not told
                await asyncio.sleep(0.01)
        assert await store.get() == RuleSet(revision=2, rules=rules("last"))
        await client.aclose()


async def test_applied_answers_even_when_redis_is_gone(redis_server, redis_prefix):
    async with RedisSwitch(redis_server.port) as switch:
        client = connect(switch.url)
        store = RedisRuleStore(client, redis_prefix, timeout_s=0.05)
        await switch.refuse()
        applied = await store.applied(1)
        assert (applied.workers, applied.of) == (0, 0)
        await client.aclose()


# --- reports --------------------------------------------------------------------------------------


async def test_workers_report_themselves_and_leave_when_they_close(store, redis_server, redis_client, redis_prefix):
    client = connect(redis_server.url)
    workers = [RedisRuleSource(client, redis_prefix, SEED, validate, f"w{n}") for n in (2, 1)]
    for worker in workers:
        await worker.start()
    reports = await store.workers()
    assert [(r.id, r.revision, r.state, r.detail) for r in reports] == [
        ("w1", 1, "serving", ""),
        ("w2", 1, "serving", ""),
    ]
    assert all(r.pid > 0 and r.started > 0 for r in reports)
    assert 0 < await redis_client.pttl(f"{redis_prefix}{{rules}}:worker:w1") <= 5000
    for worker in workers:
        await worker.close()
    assert await store.workers() == []
    await client.aclose()


async def test_a_worker_that_died_without_a_word_leaves_the_list(store, redis_client, redis_prefix):
    await redis_client.sadd(f"{redis_prefix}{{rules}}:workers", "dead")
    assert await store.workers() == []
    assert await redis_client.scard(f"{redis_prefix}{{rules}}:workers") == 0


async def test_applied_waits_for_the_slowest_and_no_longer_than_told(store, redis_client, redis_prefix):
    async def report(worker_id: str, revision: int) -> None:
        fields = {"pid": 1, "revision": revision, "started": 1, "state": "serving", "detail": ""}
        await redis_client.hset(f"{redis_prefix}{{rules}}:worker:{worker_id}", mapping=fields)
        await redis_client.sadd(f"{redis_prefix}{{rules}}:workers", worker_id)

    await report("fast", 2)
    await report("slow", 1)
    partial = await store.applied(2, timeout_s=0.05)
    assert (partial.workers, partial.of) == (1, 2)
    waiting = asyncio.ensure_future(store.applied(2, timeout_s=BOUND_S))
    await asyncio.sleep(0.03)
    assert not waiting.done()
    await report("slow", 3)
    assert (await waiting).workers == 2


# --- rules with an instant ------------------------------------------------------------------------


async def test_all_workers_hold_a_set_and_put_it_in_force_at_its_instant(
    started, store, redis_server, redis_prefix, monkeypatch
):
    now = [1_000_000.0]
    monkeypatch.setattr(redis_rules.time, "time", lambda: now[0])
    workers = [await started(redis_server.url, redis_prefix, f"w{n}") for n in range(3)]
    revision = await store.put(rules("new"), expected_revision=1, at_ms=1_000_002_000)
    applied = await store.applied(revision, timeout_s=BOUND_S)
    assert (applied.workers, applied.of) == (3, 3)
    assert {w.current().revision for w in workers} == {1}
    now[0] += 1.9
    assert {w.current().revision for w in workers} == {1}
    now[0] += 0.1
    assert {w.current() for w in workers} == {RuleSet(revision=2, rules=rules("new"))}


async def test_a_set_at_once_goes_before_one_that_is_held(worker, store, monkeypatch):
    now = [1_000_000.0]
    monkeypatch.setattr(redis_rules.time, "time", lambda: now[0])
    held = await store.put(rules("held"), expected_revision=1, at_ms=1_000_002_000)
    assert (await store.applied(held, timeout_s=BOUND_S)).workers == 1
    await store.put(rules("at-once"), expected_revision=held)
    await until(lambda: worker.current().revision == 3)
    now[0] += 5
    assert [r.name for r in worker.current().rules] == ["at-once"]


@pytest.mark.parametrize("at_ms", [1, 2**52])
async def test_an_instant_that_has_passed_or_is_another_clocks_is_not_waited_for(worker, store, at_ms):
    await store.put(rules("new"), expected_revision=1, at_ms=at_ms)
    await until(lambda: worker.current().revision == 2)
