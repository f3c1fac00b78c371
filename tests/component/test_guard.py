"""The guard of the control plane over a real Redis, with figures that a test makes up and a clock that it sets."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.admin.rollouts.guard import CLAIM, Guard, WeightHistory, every_second
from gateway.admin.rollouts.rollouts import Rollouts, rolling
from gateway.admin.routing.rule_writer import RuleWriter
from gateway.admin_ports import Change
from gateway.core.errors import BackendBroke, Fault, FaultKind, RulesUnavailable
from gateway.core.rollouts.progressive import Course
from gateway.core.routing import Plan
from gateway.core.rules import Rule, Target, parse_rules
from gateway.core.switches import Scope, Switch
from gateway.core.types import Place, Route
from gateway.core.watching.record import RequestRecord
from gateway.stores.control import rule_store
from gateway.stores.control.audit import RedisAuditLog
from gateway.stores.control.figures import RedisFigures, RedisFigureSource
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.redis_deploys import ROLLOUTS, RedisDeployStore
from tests.kit.rolling import TASK, Clock, MadeFigures
from tests.kit.wait import until_async

pytest_plugins = ["tests.kit.redis"]

GUARD = {"max_error_ratio": 0.02, "max_p99_ms": 250, "min_requests": 100, "window_s": 60}
OLD, NEW, THIRD = (Place(backend="triton", model="m", version=version) for version in ("1", "2", "3"))


def check(_) -> None:
    """Every rule fits."""


def rule(*weights: int, **fields: Any) -> Rule:
    split = [{"backend": "triton", "model": "m", "version": str(n + 1), "weight": w} for n, w in enumerate(weights)]
    return parse_rules([{"name": "r", "match": {"task": TASK}, "split": split, "guard": GUARD, **fields}])[0]


@dataclass
class World:
    client: Redis
    prefix: str
    clock: Clock
    figures: MadeFigures
    rules: RedisRuleStore
    store: RedisDeployStore
    audit: RedisAuditLog

    def guard(self, rules: RedisRuleStore | None = None, figures: Any = None) -> Guard:
        rules = rules or self.rules
        return Guard(
            rules=rules,
            writer=RuleWriter(rules, check),
            figures=figures or self.figures,
            claims=self.store,
            audit=self.audit,
            clock=self.clock,
        )

    async def put(self, *rules: Rule) -> None:
        current = await self.rules.get()
        await self.rules.put(rules, expected_revision=current.revision, change=Change(by="ann"))
        self.clock.forward(2)

    async def weights(self, name: str = "r") -> list[int]:
        return [target.weight for target in (await self.rules.get()).named(name).split]

    def add(self, place: Place, count: int, **fields: Any) -> None:
        self.figures.add(str(place), count, **fields)


@pytest.fixture
def world(redis_client, redis_prefix, monkeypatch) -> World:
    clock = Clock()
    monkeypatch.setattr(rule_store, "_now_ms", clock)
    return World(
        client=redis_client,
        prefix=redis_prefix,
        clock=clock,
        figures=MadeFigures(clock),
        rules=RedisRuleStore(redis_client, redis_prefix, timeout_s=5),
        store=RedisDeployStore(redis_client, redis_prefix, timeout_s=5, kind=ROLLOUTS),
        audit=RedisAuditLog(redis_client, redis_prefix, timeout_s=5),
    )


async def test_a_canary_that_breaks_a_bound_gets_no_more(world):
    await world.put(rule(90, 10), rule(5, name="other"))
    guard = world.guard()
    world.add(OLD, 900, failed=900)  # the baseline is nobody's to judge
    world.add(NEW, 100, failed=3)
    await guard.tick()
    assert await world.weights() == [90, 0]
    newest = (await world.rules.revisions())[0]
    words = "triton/m:2: error ratio 0.03 is above 0.02 (100 requests; the others: 1)"
    assert (newest.change.by, newest.change.action, newest.change.note) == ("guard", "guard", words)
    (entry,), _ = await world.audit.page()
    assert (entry.actor, entry.role, entry.action, entry.target) == ("guard", "system", "guard.take_out", "r")
    assert entry.before == {"target": "triton/m:2", "weight": 10}
    assert entry.after == {"target": "triton/m:2", "weight": 0}
    assert entry.reason == words
    await guard.tick()
    assert (await world.rules.get()).revision == newest.revision


async def test_slow_answers_are_a_breach_too(world):
    await world.put(rule(90, 10))
    world.add(NEW, 100, ms=2000)
    await world.guard().tick()
    assert await world.weights() == [90, 0]


async def test_of_several_canaries_only_the_bad_one_goes(world):
    await world.put(rule(80, 10, 10))
    world.add(NEW, 200)
    world.add(THIRD, 200, failed=50)
    await world.guard().tick()
    assert await world.weights() == [80, 10, 0]


async def test_two_bad_ones_both_go(world):
    await world.put(rule(80, 10, 10))
    world.add(NEW, 200, failed=50)
    world.add(THIRD, 200, failed=50)
    guard = world.guard()
    await guard.tick()
    await guard.tick()
    assert await world.weights() == [80, 0, 0]
    assert len((await world.audit.page())[0]) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"guard": None},
        {"enabled": False},
        {"guard": {**GUARD, "min_requests": 101}},
        {"guard": {**GUARD, "max_error_ratio": 1.0}},
    ],
)
async def test_what_is_not_to_be_judged_stays(world, fields):
    await world.put(rule(90, 10, **fields))
    world.add(NEW, 100, failed=100)
    await world.guard().tick()
    assert await world.weights() == [90, 10]


async def test_what_is_older_than_the_window_does_not_count(world):
    await world.put(rule(90, 10))
    world.add(NEW, 100, failed=100)
    world.clock.forward(61)
    await world.guard().tick()
    assert await world.weights() == [90, 10]


async def test_raised_again_it_is_judged_afresh(world):
    await world.put(rule(90, 10))
    guard = world.guard()
    world.add(NEW, 100, failed=100)
    await guard.tick()
    await world.put(rule(90, 20))
    await guard.tick()
    await world.guard().tick()  # nor does one that knows nothing of before
    assert await world.weights() == [90, 20]
    world.add(NEW, 99, failed=99)
    await guard.tick()
    assert await world.weights() == [90, 20]
    world.add(NEW, 1)
    await guard.tick()
    assert await world.weights() == [90, 0]


async def test_other_changes_of_the_rules_give_no_fresh_start(world):
    await world.put(rule(90, 10))
    guard = world.guard()
    world.add(NEW, 60, failed=60)
    await guard.tick()
    await world.put(rule(90, 10, retries=2), rule(5, name="other"))
    world.add(NEW, 60, failed=60)
    await guard.tick()
    assert await world.weights() == [90, 0]


async def test_it_acts_while_changes_are_frozen(world):
    await world.put(rule(90, 10))
    now_ms = world.clock()
    everything = Scope(kind="everything")
    times = {"created_ms": now_ms, "expires_ms": now_ms + 3_600_000}
    await world.rules.add_switch(Switch(id="f", action="freeze", scope=everything, reason="w", owner="bob", **times))
    world.add(NEW, 100, failed=100)
    await world.guard().tick()
    assert await world.weights() == [90, 0]


async def test_a_rule_that_a_rollout_is_at_is_left_to_it(world):
    await world.put(rule(90, 10))
    rollouts = Rollouts(rules=world.rules, check=check, store=world.store, figures=world.figures, clock=world.clock)
    course = Course(target=Target(backend="triton", model="m", version="2"), steps=(20, 100))
    seen = await rollouts.begin("r", course)
    world.clock.forward(2)
    world.add(NEW, 100, failed=100)
    guard = world.guard()
    await guard.tick()
    assert await world.weights() == [20, 80]
    await rollouts.tick()
    assert (await rollouts.get(seen.rollout.id)).rollout.status == "rolled_back"
    assert await world.weights() == [90, 10]
    await guard.tick()  # its weight is new, and so are its figures
    assert await world.weights() == [90, 10]


async def test_of_several_control_planes_one_looks(world):
    await world.put(rule(90, 10))
    world.add(NEW, 100, failed=100)
    guards = [world.guard() for _ in range(3)]
    await asyncio.gather(*(guard.tick() for guard in guards))
    assert await world.weights() == [90, 0]
    assert len((await world.audit.page())[0]) == 1
    assert len(world.figures.reads) == 1


async def test_another_takes_over_from_one_that_leaves(world):
    await world.put(rule(90, 10))
    first, second = world.guard(), world.guard()
    await first.tick()
    world.add(NEW, 100, failed=100)
    await second.tick()
    assert await world.weights() == [90, 10]
    await second.close()  # which has nothing to give up
    await second.tick()
    assert await world.weights() == [90, 10]
    await first.close()
    await second.tick()
    assert await world.weights() == [90, 0]


class Edited(RedisRuleStore):
    """Somebody changes the split just before the guard does."""

    async def put(self, rules, *, expected_revision, **fields) -> int:
        current = await self.get()
        if current.rules[0].split[1].weight == 10:
            await super().put((rule(90, 5),), expected_revision=current.revision)
        return await super().put(rules, expected_revision=expected_revision, **fields)


async def test_a_split_that_was_edited_meanwhile_is_not_what_was_judged(world):
    await world.put(rule(90, 10))
    world.add(NEW, 100, failed=100)
    await world.guard(Edited(world.client, world.prefix, timeout_s=5)).tick()
    assert await world.weights() == [90, 5]
    assert (await world.audit.page())[0] == []


class Stalled(RedisRuleStore):
    """Redis is away for half a minute; an operator, quicker after it, takes the canary out and gives it its share."""

    world: World | None = None

    async def put(self, rules, *, expected_revision, **fields) -> int:
        if self.world is not None:
            world, self.world = self.world, None
            world.clock.forward(30)
            before = await world.rules.get()
            await world.put(rule(90, 0))
            await world.put(*before.rules)
        return await super().put(rules, expected_revision=expected_revision, **fields)


async def test_an_old_verdict_does_not_stand(world):
    await world.put(rule(90, 10))
    world.add(NEW, 100, failed=100)
    stalled = Stalled(world.client, world.prefix, timeout_s=5)
    stalled.world = world
    guard = world.guard(stalled)
    await guard.tick()
    assert await world.weights() == [90, 10]
    assert (await world.audit.page())[0] == []
    await guard.tick()  # nothing has come since
    assert await world.weights() == [90, 10]


async def test_without_figures_nobody_is_judged(world):
    await world.put(rule(90, 10))
    world.figures.is_away = True
    with pytest.raises(RulesUnavailable):
        await world.guard().tick()
    assert await world.weights() == [90, 10]


async def test_what_the_audit_log_does_not_take_is_done_all_the_same(world, caplog):
    class Away(RedisAuditLog):
        async def add(self, entry) -> None:
            raise RulesUnavailable("no")

    world.audit = Away(world.client, world.prefix)
    await world.put(rule(90, 10))
    world.add(NEW, 100, failed=100)
    await world.guard().tick()
    assert await world.weights() == [90, 0]
    assert "audit_lost" in caplog.text


# --- with the workers' own figures -----------------------------------------------------------------


def record(version: str, *, failed: bool = False, is_slow: bool = False) -> RequestRecord:
    place = Place(backend="triton", model="m", version=version)
    fault = Fault(kind=FaultKind.BROKEN, message="", place=place)
    return RequestRecord(
        id="i",
        task=TASK,
        tenant="a",
        key_id="k",
        total_us=2_000_000 if is_slow else 5_000,
        error=BackendBroke("no") if failed else None,
        plan=Plan(rule="r", revision=1, candidates=(place,)),
        faults=(fault,) if failed else (),
        route=None if failed else Route(backend="triton", model="m", version=version, rule="r", attempts=1),
    )


@pytest.mark.parametrize("what", [{"failed": True}, {"is_slow": True}])
async def test_the_figures_of_real_workers_are_judged(world, what):
    await world.put(rule(90, 10))
    guard = world.guard(figures=RedisFigureSource(world.client, world.prefix))
    workers = [RedisFigures(world.client, world.prefix, now_s=lambda: world.clock() / 1000) for _ in range(2)]
    for worker in workers:
        for n in range(60):
            worker.ended(record("1"))
            worker.ended(record("2", **(what if n % 10 == 0 else {})))
        await worker.flush()
    await guard.tick()
    assert await world.weights() == [90, 0]


# --- since when weights are as they are -------------------------------------------------------------


async def test_weights_have_been_so_since_they_were_changed_last(world):
    times = []
    for weights, extra in (((90, 10), {}), ((90, 0), {}), ((90, 10), {}), ((90, 10), {"retries": 1}), ((80, 10), {})):
        times.append(world.clock())
        await world.put(rule(*weights, **extra))
    history = WeightHistory(world.rules)
    await history.follow((await world.rules.get()).revision, since_ms=0)
    assert history.since_ms("r", NEW) == times[2]
    assert history.since_ms("r", OLD) == times[4]
    assert history.since_ms("r", THIRD) == times[0]
    await world.put(rule(80, 20))
    await history.follow(6, since_ms=times[4])
    assert history.since_ms("r", NEW) > times[4]
    assert history.since_ms("r", OLD) <= times[4]


async def test_of_many_revisions_only_new_ones_are_read(world, monkeypatch):
    monkeypatch.setattr(rule_store, "KEPT", 200)
    for n in range(60):
        await world.put(rule(90, 10, retries=n % 5))
    read = []

    class Watched(RedisRuleStore):
        async def revision(self, number: int):
            read.append(number)
            return await super().revision(number)

    history = WeightHistory(Watched(world.client, world.prefix, timeout_s=5))
    await history.follow(60, since_ms=0)
    assert sorted(read) == list(range(1, 61))
    await history.follow(60, since_ms=0)
    await world.put(rule(90, 11))
    await history.follow(61, since_ms=0)
    assert read[60:] == [61]


# --- for ever ---------------------------------------------------------------------------------------


async def test_what_goes_wrong_is_tried_again(caplog):
    looks = 0

    async def tick() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RulesUnavailable("away")
        raise ValueError("a fault of ours")

    async def wait(seconds: float) -> None:
        assert seconds == 1.0
        if looks == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await every_second("guard", tick, wait)
    assert "guard_waits" in caplog.text
    assert caplog.text.count("guard_failed") == 2


async def test_while_the_block_lasts_both_look_and_then_give_up_the_claim(world):
    await world.put(rule(90, 10))

    async def is_claimed() -> bool:
        return bool(await world.store.owner(CLAIM))

    parts = {"rules": world.rules, "check": check, "store": world.store, "figures": world.figures}
    async with rolling(**parts, audit=world.audit) as rollouts:
        await until_async(is_claimed)
        assert await rollouts.recent() == []
    assert not await is_claimed()
