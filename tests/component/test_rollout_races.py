"""Rollouts beside other writers, other control planes, and crashes."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gateway.admin.rollouts import rollouts
from gateway.admin_ports import Applied
from gateway.core.rollouts.progressive import Course
from gateway.core.rules import Target
from gateway.stores.control.rule_store import RedisRuleStore
from tests.kit.admin_plane import problem
from tests.kit.rollout_world import NEW
from tests.kit.wait import until_async

pytest_plugins = ["tests.kit.redis", "tests.kit.rollout_fixtures"]

# --- beside others ---------------------------------------------------------------------------------


async def test_a_split_that_is_edited_is_left_alone(world):
    await world.seed()
    one = await world.begin()
    rule = await world.rule()
    edited = replace(rule, split=(replace(rule.split[0], weight=7), *rule.split[1:]))
    await world.put(edited)
    await world.pass_by(5, count=200, failed=200)
    over = await world.get(one["id"])
    assert over["status"] == "aborted"
    assert over["reason"] == "the split of rule 'r' was edited meanwhile and is left as it is"
    assert await world.rule() == edited
    assert (await world.entries())[-1] == ("rollout", "rollout.aborted")


async def test_a_rule_that_is_gone_ends_it(world):
    await world.seed({}, {"name": "other"})
    one = await world.begin()
    await world.put(*(rule for rule in (await world.rules.get()).rules if rule.name != "r"))
    await world.pass_by(1)
    assert (await world.get(one["id"]))["reason"] == "rule 'r' was removed meanwhile"


class Rival(RedisRuleStore):
    """Somebody else is quicker, once; `edit` is what they do to the rule."""

    edit: dict[str, Any] | None = None

    async def put(self, rules, *, expected_revision, **fields) -> int:
        if self.edit is not None:
            edit, self.edit = self.edit, None
            current = await self.get()
            changed = (replace(current.rules[0], **edit), *current.rules[1:])
            await super().put(changed, expected_revision=current.revision)
        return await super().put(rules, expected_revision=expected_revision, **fields)


async def test_other_writers_are_waited_out(world):
    await world.seed()
    one = await world.begin(steps=[10, 100], hold_s=1)
    rival = Rival(world.client, world.prefix, timeout_s=5)
    rival.edit = {"retries": 3}
    world.clock.forward(2)
    world.figures.add("triton/m:2", 500)
    await world.plane(rival).tick()
    assert (await world.get(one["id"]))["percent"] == 100
    assert (await world.rule()).retries == 3


async def test_a_split_that_is_edited_at_that_moment_is_left_alone(world):
    await world.seed()
    one = await world.begin(steps=[10, 100], hold_s=1)
    rival = Rival(world.client, world.prefix, timeout_s=5)
    rival.edit = {"split": (await world.rule()).split[:1]}
    world.clock.forward(2)
    world.figures.add("triton/m:2", 500)
    await world.plane(rival).tick()
    assert (await world.get(one["id"]))["status"] == "aborted"
    assert await world.weights() == [40]


# --- crashes and other control planes --------------------------------------------------------------


class Crashing(RedisRuleStore):
    """Dies at a change of the rules: before it is made, or after."""

    after = False

    async def put(self, rules, **fields) -> int:
        if self.after:
            await super().put(rules, **fields)
        raise RuntimeError("the process is gone")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("is_breach", [False, True])
async def test_another_control_plane_goes_on_after_a_crash(world, after, is_breach):
    await world.seed()
    before = await world.rule()
    one = await world.begin(steps=[10, 50, 100], hold_s=10)
    crashing = Crashing(world.client, world.prefix, timeout_s=5)
    crashing.after = after
    world.clock.forward(11)
    world.figures.add("triton/m:2", 500, failed=500 if is_breach else 0)
    await world.plane(crashing).tick()
    other = world.plane()
    await other.tick()
    found = await world.get(one["id"])
    if is_breach:
        assert found["status"] == "rolled_back"
        assert await world.rule() == before
        return
    # A step that was not made begins its hold anew; one that was made is held from now on.
    assert found["percent"] == (50 if after else 10)
    world.clock.forward(11)
    world.figures.add("triton/m:2", 500)
    await other.tick()
    assert (await world.get(one["id"]))["percent"] == (100 if after else 50)


async def test_a_first_step_that_was_cut_short_is_made(world):
    await world.seed()
    crashing = Crashing(world.client, world.prefix, timeout_s=5)
    with pytest.raises(RuntimeError):
        await world.plane(crashing).begin("r", Course(target=Target(**NEW), steps=(10, 100)))
    await world.rollouts.tick()
    assert await world.weights() == [40, 270, 90]
    assert [seen.rollout.status for seen in await world.rollouts.recent()] == ["running"]


async def test_a_first_step_that_was_cut_short_waits_for_a_freeze_to_end(world, caplog):
    await world.seed()
    with pytest.raises(RuntimeError):
        await world.plane(Crashing(world.client, world.prefix, timeout_s=5)).begin("r", Course(target=Target(**NEW)))
    freeze = await world.freeze()
    await world.rollouts.tick()
    await world.rollouts.tick()
    (seen,) = await world.rollouts.recent()
    assert (seen.rollout.status, len(seen.rollout.events)) == ("running", 1)
    assert "frozen" in seen.rollout.held
    assert "rollout_failed" not in caplog.text
    assert len(await world.weights()) == 2
    await world.rules.end_switch(freeze.id)
    await world.rollouts.tick()
    (seen,) = await world.rollouts.recent()
    assert (seen.rollout.percent, seen.rollout.held) == (1, "")


async def test_who_has_the_claim_acts(world):
    await world.seed()
    one = await world.begin(steps=[10, 100], hold_s=1)
    assert await world.store.claim("r", "another")
    await world.pass_by(2, count=500)
    assert (await world.get(one["id"]))["percent"] == 10
    problem(await world.admin.post(f"/rollouts/{one['id']}/promote"), 409, "rollout_conflict")
    await world.store.release("r", "another")  # or its ten seconds are over
    await world.pass_by(1)
    assert (await world.get(one["id"]))["percent"] == 100


class Waiting(RedisRuleStore):
    """Its workers do not follow before a test says so."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.follow = asyncio.Event()

    async def applied(self, revision, timeout_s=1.0, *, of_switches=False):
        await self.follow.wait()
        return await super().applied(revision, timeout_s, of_switches=of_switches)


async def test_one_that_waits_for_its_workers_keeps_no_other_waiting(world, monkeypatch):
    monkeypatch.setattr(rollouts, "LOOK_S", 0.0)
    await world.seed({}, {"name": "other"})
    first, second = await world.begin(steps=[10, 100], hold_s=1), await world.begin(rule="other")
    waiting = Waiting(world.client, world.prefix, timeout_s=5)
    plane = world.plane(waiting)
    world.clock.forward(2)
    world.figures.add("triton/m:2", 500)
    world.figures.add("triton/m:2", 50, rule="other")

    async def is_seen() -> bool:
        await plane.tick()
        return (await world.get(second["id"]))["canary"]["requests"] == 50

    await until_async(is_seen)
    assert not (await plane.get(first["id"])).rollout.is_settled
    waiting.follow.set()

    async def is_made() -> bool:
        await plane.tick()
        return (await plane.get(first["id"])).rollout.is_settled

    await until_async(is_made)
    assert (await world.get(first["id"]))["percent"] == 100
    await plane.close()


async def test_a_control_plane_that_stops_leaves_it_to_others(world):
    await world.seed()
    one = await world.begin(steps=[10, 100], hold_s=1)
    waiting = Waiting(world.client, world.prefix, timeout_s=5)
    plane = world.plane(waiting)
    world.clock.forward(2)
    world.figures.add("triton/m:2", 500)
    looking = asyncio.create_task(plane.tick())

    async def is_put() -> bool:
        return await world.weights() == [400, 0, 0]

    await until_async(is_put)
    looking.cancel()
    await plane.close()
    assert await world.store.owner("r") == ""
    await world.rollouts.tick()
    assert [event["what"] for event in (await world.get(one["id"]))["events"]] == ["10 %", "100 %"]


class Lagging(RedisRuleStore):
    """One of two workers never follows."""

    async def applied(self, revision, timeout_s=1.0, *, of_switches=False):
        return Applied(workers=1, of=2, ms=1)


async def test_workers_that_lag_are_told(world):
    await world.seed()
    plane = world.plane(Lagging(world.client, world.prefix, timeout_s=5))
    seen = await plane.begin("r", Course(target=Target(**NEW), steps=(10, 100)))
    assert [event.what for event in seen.rollout.events] == [
        "revision 2 of the rules runs on only 1 of 2 workers",
        "10 %",
    ]
    assert (seen.rollout.status, await world.weights()) == ("running", [40, 270, 90])


async def test_of_many_control_planes_one_makes_each_step(world):
    await world.seed()
    one = await world.begin(steps=[10, 50, 100], hold_s=1)
    planes = [world.plane() for _ in range(4)]
    for _ in range(6):
        world.clock.forward(2)
        world.figures.add("triton/m:2", 500)
        await asyncio.gather(*(plane.tick() for plane in planes))
    assert (await world.get(one["id"]))["status"] == "done"
    actions = [action for _, action in await world.entries()]
    assert actions == ["rollout.start", "rollout.step", "rollout.step", "rollout.done"]
    assert (await world.rules.get()).revision == 4


async def test_of_two_who_promote_at_the_same_time_one_does(world):
    await world.seed()
    one = await world.begin(steps=[1, 10, 50, 100], hold_s=1000)
    answers = await asyncio.gather(*(world.admin.post(f"/rollouts/{one['id']}/promote") for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    assert (await world.get(one["id"]))["percent"] == 10
    assert (await world.admin.post(f"/rollouts/{one['id']}/promote")).json()["percent"] == 50
