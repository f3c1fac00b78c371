"""What becomes of rule sets that were in force, and changes that are frozen, in Redis."""

import time

import pytest

from gateway.admin_ports import Change
from gateway.core.errors import Frozen, RulesUnavailable, StaleRevision, UnknownRevision
from gateway.core.rules import RuleSet
from gateway.core.switches import Scope, Switch
from gateway.stores.control import rule_store
from gateway.stores.redis_rules import RedisRuleSource
from tests.kit.rule_workers import rules

pytest_plugins = ["tests.kit.redis", "tests.kit.rule_fixtures"]

MINUTE_MS = 60_000


def freeze(name: str, *, ms: int = MINUTE_MS) -> Switch:
    now_ms = round(time.time() * 1000)
    return Switch(
        id=name,
        action="freeze",
        scope=Scope(kind="everything"),
        reason="the audit",
        owner="ana",
        created_ms=now_ms,
        expires_ms=now_ms + ms,
    )


async def test_a_set_is_kept_with_who_put_it_and_why(store):
    before_ms = time.time() * 1000
    await store.put(rules("a"), expected_revision=0, change=Change(by="ana", note="the first"))
    await store.put(rules("a", "b"), expected_revision=1, change=Change(by="guard", action="guard", is_automatic=True))
    newest, oldest = await store.revisions()
    assert (newest.revision, newest.count, newest.rules) == (2, 2, None)
    assert newest.change == Change(by="guard", action="guard", is_automatic=True)
    assert (oldest.revision, oldest.change) == (1, Change(by="ana", note="the first"))
    assert before_ms - 1 <= oldest.at_ms <= newest.at_ms <= time.time() * 1000 + 1
    whole = await store.revision(1)
    assert (whole.rules, whole.change, whole.count) == (rules("a"), oldest.change, 1)


async def test_the_history_is_read_in_pages(store):
    for n in range(7):
        await store.put(rules(f"r{n}"), expected_revision=n)
    assert [one.revision for one in await store.revisions(size=3)] == [7, 6, 5]
    assert [one.revision for one in await store.revisions(before=5, size=3)] == [4, 3, 2]
    assert [one.revision for one in await store.revisions(before=2, size=3)] == [1]
    assert await store.revisions(before=1) == []


async def test_an_empty_store_has_no_history(store):
    assert await store.revisions() == []
    with pytest.raises(UnknownRevision, match="revision 1"):
        await store.revision(1)


async def test_the_newest_are_kept_also_after_a_gap(store, redis_client, redis_prefix, monkeypatch):
    monkeypatch.setattr(rule_store, "KEPT", 3)
    for n in range(2):
        await store.put(rules(f"r{n}"), expected_revision=n)
    await redis_client.hset(f"{redis_prefix}{{rules}}", "revision", 98)
    for n in range(98, 102):
        await store.put(rules(f"r{n}"), expected_revision=n)
        assert len(await store.revisions()) <= 3
    assert [one.revision for one in await store.revisions()] == [102, 101, 100]
    assert await redis_client.hlen(f"{redis_prefix}{{rules}}:history") == 6
    with pytest.raises(UnknownRevision):
        await store.revision(99)
    assert (await store.revision(100)).rules == rules("r99")


async def test_a_refused_or_repeated_change_leaves_no_trace(store):
    await store.put(rules("a"), expected_revision=0, change=Change(by="ana"))
    await store.put(rules("a"), expected_revision=0, change=Change(by="ana, again"))
    with pytest.raises(StaleRevision):
        await store.put(rules("b"), expected_revision=0, change=Change(by="ben"))
    assert [(one.revision, one.change.by) for one in await store.revisions()] == [(1, "ana")]


async def test_the_first_set_is_kept_too(store, redis_client, redis_prefix):
    worker = RedisRuleSource(redis_client, redis_prefix, RuleSet(revision=0, rules=rules("seed")), lambda _: None, "w1")
    await worker.start()
    await worker.close()
    (only,) = await store.revisions()
    assert (only.revision, only.change.action, only.count) == (1, "seed", 1)
    assert (await store.revision(1)).rules == rules("seed")


@pytest.mark.parametrize("field", ["1", "1:rules"])
@pytest.mark.parametrize("text", ["{not json", "[]", "5"])
async def test_what_cannot_be_read_is_said_so(store, redis_client, redis_prefix, field, text):
    await store.put(rules("a"), expected_revision=0)
    await redis_client.hset(f"{redis_prefix}{{rules}}:history", field, text)
    if (field, text) == ("1:rules", "[]"):
        assert (await store.revision(1)).rules == ()
    else:
        with pytest.raises(RulesUnavailable, match="revision 1"):
            await store.revision(1)
    if field == "1":
        with pytest.raises(RulesUnavailable):
            await store.revisions()


# --- frozen ---------------------------------------------------------------------------------------


async def test_frozen_rules_are_changed_by_nobody_but_what_takes_back(store):
    await store.put(rules("a"), expected_revision=0)
    await store.add_switch(freeze("f1"))
    with pytest.raises(Frozen, match=r"until 20.*by switch f1 \(freeze everything\), which ana has set: the audit"):
        await store.put(rules("b"), expected_revision=1)
    assert await store.put(rules("a"), expected_revision=0) == 1  # made before, and sent again
    change = Change(by="guard", action="guard", is_automatic=True)
    assert await store.put(rules("c"), expected_revision=1, change=change) == 2
    assert (await store.get()).rules == rules("c")
    assert [one.revision for one in await store.revisions()] == [2, 1]


async def test_a_freeze_that_is_ended_freezes_nothing(store):
    await store.add_switch(freeze("f1"))
    await store.add_switch(freeze("f2", ms=2 * MINUTE_MS))
    await store.end_switch("f2")
    with pytest.raises(Frozen, match="f1"):
        await store.put(rules("a"), expected_revision=0)
    await store.end_switch("f1")
    assert await store.put(rules("a"), expected_revision=0) == 1


async def test_a_freeze_ends_by_itself(store, redis_client, redis_prefix):
    await store.add_switch(freeze("f1"))
    with pytest.raises(Frozen):
        await store.put(rules("a"), expected_revision=0)
    seconds, _ = await redis_client.time()
    await redis_client.hset(f"{redis_prefix}{{rules}}", "frozen_until_ms", seconds * 1000)  # its time is over
    assert await store.put(rules("a"), expected_revision=0) == 1


async def test_a_freeze_whose_switch_cannot_be_read_holds_all_the_same(store, redis_client, redis_prefix):
    await store.add_switch(freeze("f1"))
    await redis_client.hset(f"{redis_prefix}{{rules}}", "switches", "bad")
    with pytest.raises(Frozen, match=r"changes are frozen until 20[0-9-]+ [0-9:]+Z$"):
        await store.put(rules("a"), expected_revision=0)
