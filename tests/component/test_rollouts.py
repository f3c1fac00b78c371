"""Rollouts over a real Redis: by their paths, with figures that a test makes up and a clock that it sets."""

from dataclasses import replace

import pytest

from tests.kit.admin_plane import problem
from tests.kit.rollout_world import NEW

pytest_plugins = ["tests.kit.redis", "tests.kit.rollout_fixtures"]

# --- the way forward -------------------------------------------------------------------------------


async def test_the_whole_way(world):
    await world.seed()
    one = await world.begin(steps=[10, 50, 100], hold_s=30, note="faster weights")
    assert await world.weights() == [40, 270, 90]
    assert (one["status"], one["step"], one["percent"], one["held"]) == ("running", 0, 10, "")
    assert one["target"] == NEW
    assert one["revision"] == (await world.rules.get()).revision
    assert (one["note"], one["actor"]) == ("faster weights", "admin")
    assert one["next_at"] > one["step_since"] >= one["started_at"]
    await world.pass_by(29, count=500)
    assert await world.weights() == [40, 270, 90]
    await world.pass_by(1)
    assert await world.weights() == [200, 150, 50]
    assert (await world.get(one["id"]))["canary"]["requests"] == 0  # of this step
    await world.pass_by(31, count=500)
    assert await world.weights() == [400, 0, 0]
    await world.pass_by(31, count=500, failed=5)
    over = await world.get(one["id"])
    assert (over["status"], over["percent"], over["held"], over["next_at"]) == ("done", 100, "", None)
    assert over["canary"]["error_ratio"] == 0.01
    assert over["baseline"]["requests"] == 1000
    assert [event["what"] for event in over["events"]] == ["10 %", "50 %", "100 %", "done"]
    assert await world.entries() == [
        ("admin", "rollout.start"),
        ("rollout", "rollout.step"),
        ("rollout", "rollout.step"),
        ("rollout", "rollout.done"),
    ]
    changes = [(one.change.by, one.change.action) for one in await world.rules.revisions()]
    assert changes == [("rollout", "rollout"), ("rollout", "rollout"), ("admin", "rollout"), ("ann", "put")]
    await world.pass_by(60)
    assert await world.weights() == [400, 0, 0]


async def test_sticky_callers_move_at_one_instant_on_all_workers(world):
    await world.seed()
    await world.begin(steps=[10, 100], hold_s=1, sticky_by="tenant")
    stored = await world.client.hgetall(f"{world.prefix}{{rules}}")
    assert int(stored[b"at_ms"]) > 0
    assert (await world.rule()).sticky_by == "tenant"
    await world.pass_by(2, count=500)
    assert (await world.rule()).sticky_by == "request"


async def test_too_few_requests_hold_it_and_it_says_so(world):
    await world.seed()
    one = await world.begin(steps=[10, 100], hold_s=10)
    await world.pass_by(11, count=12)
    held = await world.get(one["id"])
    assert (held["held"], held["next_at"]) == ("12 of 100 requests seen", None)
    assert held["canary"]["attempts"] == 12
    await world.pass_by(1, count=80)
    assert (await world.get(one["id"]))["held"] == "92 of 100 requests seen"
    # The guard's window is a minute, but what the step has seen since it began counts.
    await world.pass_by(300, count=8)
    moved = await world.get(one["id"])
    assert (moved["percent"], moved["held"]) == (100, "")
    assert [event["what"] for event in moved["events"]] == ["10 %", "held: 12 of 100 requests seen", "100 %"]


async def test_where_nothing_is_sent_it_says_why(world):
    await world.seed()
    one = await world.begin(steps=[10, 100], hold_s=10)
    shut = ["triton", "m", "2", "a:1", "breaker open: unavailable"]
    await world.reports(w1={"shut": [shut]}, w2={"shut": [shut], "replicas": {"triton": ["a:1", "b:1"]}})
    await world.pass_by(11)
    assert (await world.get(one["id"]))["held"] == "0 of 100 requests seen"  # `b:1` takes them
    await world.reports(w1={"shut": [shut]}, w2={"shut": [shut]})
    await world.pass_by(1)
    held = (await world.get(one["id"]))["held"]
    assert held == "0 of 100 requests seen; nothing is sent there: breaker open: unavailable"
    await world.reports(w1={"replicas": {"llm": []}}, w2={"replicas": {"llm": []}})
    await world.pass_by(1)
    assert "nothing is sent there: backend is off" in (await world.get(one["id"]))["held"]
    await world.reports(w1={"shut": [shut]}, w2={"shut": [shut], "replicas": {"triton": ["a:1", "b:1"]}})
    await world.pass_by(1)  # a server that has started again: the time is counted anew
    await world.reports(w1={"shut": [shut]}, w2={"shut": [shut]})
    await world.pass_by(1)
    await world.pass_by(29)
    assert (await world.get(one["id"]))["status"] == "running"
    await world.pass_by(2)
    given_up = await world.get(one["id"])
    assert given_up["status"] == "rolled_back"
    assert "nothing could be sent there for 30 s: breaker open: unavailable" in given_up["reason"]


async def test_figures_of_before_the_step_do_not_count(world):
    await world.seed()
    world.figures.add("triton/m:2", 1000, failed=1000)
    one = await world.begin(steps=[10, 100], hold_s=0)
    await world.pass_by(5)
    assert (await world.get(one["id"]))["held"] == "0 of 100 requests seen"


async def test_without_a_guard_time_alone_counts(world):
    await world.seed()
    one = await world.begin(steps=[10, 100], hold_s=10, guard=None)
    assert one["guard"] is None
    await world.pass_by(11)
    assert await world.weights() == [400, 0, 0]


async def test_a_rule_s_own_guard_is_the_rollout_s(world):
    await world.seed({"guard": {"max_p99_ms": 250, "min_requests": 7}})
    answer = await world.admin.post("/rollouts", json={"rule": "r", "target": NEW})
    assert answer.json()["guard"]["max_p99_ms"] == 250
    assert (answer.json()["steps"], answer.json()["hold_s"]) == ([1, 10, 50, 100], 60)


async def test_frozen_changes_hold_it(world):
    await world.seed()
    one = await world.begin(steps=[10, 100], hold_s=10)
    switch = await world.freeze()
    await world.pass_by(11, count=500)
    assert (await world.get(one["id"]))["held"] == f"changes are frozen by {switch}: a release"
    assert "frozen" in problem(await world.admin.post(f"/rollouts/{one['id']}/promote"), 409, "frozen")["detail"]
    assert "frozen" in problem(await world.admin.post(f"/rollouts/{one['id']}/abort"), 409, "frozen")["detail"]
    assert await world.weights() == [40, 270, 90]
    await world.rules.end_switch("f")
    await world.pass_by(1)
    assert await world.weights() == [400, 0, 0]


async def test_a_rule_that_is_switched_off_holds_it(world):
    await world.seed()
    one = await world.begin(steps=[10, 100], hold_s=10)
    await world.put(replace(await world.rule(), enabled=False, retries=2))
    await world.pass_by(11, count=500)
    assert (await world.get(one["id"]))["held"] == "rule 'r' is switched off"
    await world.put(replace(await world.rule(), enabled=True))
    await world.pass_by(1)
    assert await world.weights() == [400, 0, 0]
    assert (await world.rule()).retries == 2  # what others change beside the split stays


async def test_without_figures_nothing_moves(world):
    await world.seed()
    one = await world.begin(steps=[10, 100], hold_s=10, guard=None)
    world.figures.is_away = True
    await world.pass_by(11)
    assert (await world.get(one["id"]))["percent"] == 10
    world.figures.is_away = False
    await world.pass_by(1)
    assert (await world.get(one["id"]))["percent"] == 100


# --- and back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [False, True])
async def test_a_breach_takes_it_back_at_once(world, is_frozen):
    await world.seed()
    before = await world.rule()
    one = await world.begin(steps=[10, 100], hold_s=600)
    if is_frozen:
        await world.freeze()
    await world.pass_by(5, count=200, failed=10)
    over = await world.get(one["id"])
    assert over["status"] == "rolled_back"
    assert over["reason"] == "triton/m:2: error ratio 0.05 is above 0.02 (200 requests; the others: 0)"
    assert over["canary"]["failed_attempts"] == 10
    assert await world.rule() == before
    entries = await world.audit.page()
    newest = entries[0][0]
    assert (newest.actor, newest.role, newest.action, newest.target) == ("guard", "system", "rollout.rolled_back", "r")
    assert newest.reason == over["reason"]
    assert (newest.before["percent"], newest.after["status"]) == (10, "rolled_back")
    assert (await world.rules.revisions())[0].change.by == "guard"


async def test_at_the_last_step_it_is_watched_too(world):
    await world.seed()
    before = await world.rule()
    one = await world.begin(steps=[100], hold_s=60)
    await world.pass_by(5, count=200, failed=200)
    assert (await world.get(one["id"]))["status"] == "rolled_back"
    assert await world.rule() == before


async def test_what_went_wrong_lately_counts_though_the_step_is_long(world):
    await world.seed()
    one = await world.begin(steps=[10, 100], hold_s=3600)
    for _ in range(5):
        await world.pass_by(100, count=10_000)
    await world.pass_by(100, count=200, failed=20)
    assert (await world.get(one["id"]))["status"] == "rolled_back"


async def test_an_operator_takes_it_back(world):
    await world.seed()
    before = await world.rule()
    one = await world.begin()
    answer = await world.admin.post(f"/rollouts/{one['id']}/abort", json={"note": "callers complain"})
    assert (answer.status_code, answer.json()["status"]) == (200, "aborted")
    assert answer.json()["reason"] == "by admin: callers complain"
    assert await world.rule() == before
    assert await world.entries() == [("admin", "rollout.start"), ("admin", "rollout.abort")]
    problem(await world.admin.post(f"/rollouts/{one['id']}/abort"), 409, "rollout_conflict")
    problem(await world.admin.post(f"/rollouts/{one['id']}/promote"), 409, "rollout_conflict")


# --- operators go on -------------------------------------------------------------------------------


async def test_an_operator_goes_on_whatever_the_time_and_the_count(world):
    await world.seed()
    one = await world.begin(steps=[1, 10, 100], hold_s=3600)
    for percent in (10, 100):
        answer = await world.admin.post(f"/rollouts/{one['id']}/promote", json={"note": "looks good"})
        assert (answer.status_code, answer.json()["percent"], answer.json()["status"]) == (200, percent, "running")
    answer = await world.admin.post(f"/rollouts/{one['id']}/promote")
    assert answer.json()["status"] == "done"
    assert await world.entries() == [("admin", "rollout.start"), *[("admin", "rollout.promote")] * 3]
    assert "promoted by admin: looks good" in [event["what"] for event in answer.json()["events"]]


async def test_nobody_goes_on_while_a_bound_is_broken(world):
    await world.seed()
    one = await world.begin()
    world.clock.forward(2)
    world.figures.add("triton/m:2", 200, failed=200)
    words = problem(await world.admin.post(f"/rollouts/{one['id']}/promote"), 409, "rollout_conflict")["detail"]
    assert "error ratio 1 is above 0.02" in words
    await world.rollouts.tick()
    assert (await world.get(one["id"]))["status"] == "rolled_back"


# --- what is refused -------------------------------------------------------------------------------

REFUSED = {
    "a rule that there is not": ({"rule": "x"}, 404, "unknown_rule"),
    "an ordered rule": ({"rule": "ordered"}, 409, "rollout_conflict"),
    "nothing to move": ({"target": {"backend": "triton", "model": "m", "version": "1"}, "rule": "alone"}, 409, None),
    "an unknown backend": ({"target": {"backend": "x", "model": "m"}}, 422, "invalid_rules"),
    "a weight": ({"target": {**NEW, "weight": 1}}, 422, "invalid_rules"),
    "a target without a model": ({"target": {"backend": "triton"}}, 422, "invalid_rules"),
    "a guard of nothing": ({"guard": {"min_requests": 5}}, 422, "invalid_rules"),
    "steps that fall": ({"steps": [50, 10, 100]}, 422, "invalid_input"),
    "steps that end early": ({"steps": [1, 10]}, 422, "invalid_input"),
    "no steps": ({"steps": []}, 422, "invalid_input"),
    "a step of nothing": ({"steps": [0, 100]}, 422, "invalid_input"),
    "an unknown field": ({"percent": 5}, 422, "invalid_input"),
    "a shadow that there is not": ({"guard": {"max_disagreement": 0.1}}, 409, "rollout_conflict"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_is_refused_and_changes_nothing(world, case):
    body, status, code = REFUSED[case]
    alone = [{"backend": "triton", "model": "m", "version": "1"}]
    await world.seed({}, {"name": "ordered", "strategy": "ordered"}, {"name": "alone", "split": alone})
    before = await world.rules.get()
    answer = await world.admin.post("/rollouts", json={"rule": "r", "target": NEW, **body})
    problem(answer, status, code or "rollout_conflict")
    assert (await world.rules.get()).revision == before.revision
    assert (await world.admin.get("/rollouts")).json() == {"items": [], "next": None}
    assert await world.entries() == [("admin", "rollout.start")]


async def test_one_rollout_at_a_time_of_a_rule(world):
    await world.seed({}, {"name": "other"})
    one = await world.begin()
    again = await world.admin.post("/rollouts", json={"rule": "r", "target": NEW})
    assert one["id"] in problem(again, 409, "rollout_conflict")["detail"]
    await world.begin(rule="other")


async def test_while_changes_are_frozen_none_begins(world):
    await world.seed()
    await world.freeze()
    problem(await world.admin.post("/rollouts", json={"rule": "r", "target": NEW}), 409, "frozen")
    assert (await world.admin.get("/rollouts")).json()["items"] == []


async def test_an_unknown_rollout_is_told(world):
    await world.seed()
    for call in (
        world.admin.get("/rollouts/x"),
        world.admin.post("/rollouts/x/promote"),
        world.admin.post("/rollouts/x/abort"),
    ):
        problem(await call, 404, "unknown_rollout")


async def test_they_are_listed_the_newest_first(world):
    await world.seed(*({"name": f"r{n}"} for n in range(5)))
    for n in range(5):
        await world.begin(rule=f"r{n}")
        world.clock.forward(1)
    first = (await world.admin.get("/rollouts?limit=3")).json()
    rest = (await world.admin.get(f"/rollouts?limit=3&cursor={first['next']}")).json()
    assert [one["rule"] for one in (*first["items"], *rest["items"])] == ["r4", "r3", "r2", "r1", "r0"]
    assert rest["next"] is None
