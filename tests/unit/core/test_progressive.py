"""A rollout as a value: its steps, what follows from a verdict, and its share in the rule."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.rollouts.guarding import Verdict
from gateway.core.rollouts.model_move import RolloutError
from gateway.core.rollouts.progressive import (
    ENDED,
    MAX_EVENTS,
    Advance,
    Course,
    Done,
    Hold,
    RollBack,
    Rollout,
    advanced,
    begun,
    ended,
    next_step,
    noted,
    settled,
    shaped,
    share,
    split_at,
    taken_back,
    taken_over,
)
from gateway.core.rollouts.rollout_documents import parse_rollout, rollout_document
from gateway.core.routing import State
from gateway.core.rules import MAX_WEIGHT, Guard, Rule, RuleSet, Target, parse_rules, rules_document
from gateway.core.types import Caller, InferenceRequest
from tests.kit.plans import plan_of

NEW = Target(backend="a", model="m", version="2")
FINE, BROKEN, FEW = Verdict(), Verdict(breach="error ratio 1"), Verdict(lacks="12 of 200 requests seen")


def rule(*split: tuple[str, int], **fields: Any) -> Rule:
    """`backend:version` and weight of each target."""
    targets = [
        {"backend": name.partition(":")[0], "model": "m", "version": name.partition(":")[2], "weight": weight}
        for name, weight in split
    ]
    return parse_rules([{"name": "r", "split": targets, **fields}])[0]


def course(**fields: Any) -> Course:
    return Course(**{"target": NEW, "steps": (1, 10, 50, 100), "hold_s": 60, **fields})


def begin(one: Rule, **fields: Any) -> Rollout:
    return begun(one, course(**fields), rollout_id="x", now_ms=0)


def weights(one: Rule) -> list[tuple[str, int]]:
    return [(f"{target.backend}:{target.version}", target.weight) for target in one.split]


# --- the split -------------------------------------------------------------------------------------

SPLITS = {
    "one other": ((("a:1", 7),), {1: [1, 99], 10: [10, 90], 100: [100, 0]}),
    "two others": ((("a:1", 30), ("b:", 10)), {1: [4, 297, 99], 50: [200, 150, 50], 100: [400, 0, 0]}),
    "in the split already": ((("a:1", 90), ("a:2", 10)), {1: [1, 99], 50: [50, 50]}),
    "some without a share": ((("a:1", 2), ("b:", 0)), {10: [10, 90, 0]}),
}  # fmt: skip


@pytest.mark.parametrize("case", SPLITS)
def test_the_target_stands_first_with_its_percentage(case):
    split, forms = SPLITS[case]
    for percent, expected in forms.items():
        made = split_at(rule(*split).split, NEW, percent)
        assert [target.weight for target in made] == expected
        assert made[0].place == NEW.place


@given(
    others=st.lists(st.integers(0, 100), min_size=1, max_size=5).filter(any),
    canary=st.integers(0, 50),
    percent=st.integers(1, 100),
)
def test_weights_are_exactly_what_was_promised(others, canary, percent):
    split = rule(("a:2", canary), *((f"b{n}:", weight) for n, weight in enumerate(others))).split
    made = split_at(split, NEW, percent)
    whole = sum(target.weight for target in made)
    assert made[0].weight * 100 == percent * whole
    assert share(made, NEW) == percent
    assert all(0 <= target.weight <= MAX_WEIGHT for target in made)
    for target, weight in zip(made[1:], others, strict=True):
        assert target.weight * sum(others) == weight * (whole - made[0].weight)
    if percent < 100:  # then nobody else has anything to give
        assert split_at(made, NEW, percent) == made


def test_a_target_that_is_there_keeps_its_parameters():
    split = (replace(NEW, weight=5, parameters={"seed": 1}), Target(backend="b", model="m"))
    assert split_at(split, NEW, 10)[0].parameters == {"seed": 1}
    assert split_at(split, replace(NEW, parameters={"seed": 2}), 10)[0].parameters == {"seed": 2}


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (rule(("a:2", 1)), "rule 'r': no other target"),
        (rule(("a:2", 1), ("b:", 0)), "rule 'r': no other target"),
        (rule(("b:", 1_000_000), ("c:", 999_999)), "rule 'r': its weights are too far apart"),
        (rule(("b:", 1), strategy="ordered"), "rule 'r': strategy 'ordered'"),
    ],
)
def test_rules_that_cannot_take_part_are_refused_by_name(one, words):
    with pytest.raises(RolloutError, match=words):
        begin(one)


def test_large_weights_of_a_common_measure_are_fine():
    assert begin(rule(("b:", 1_000_000), ("c:", 500_000))).forms[-1][0].weight == 3


# --- what follows ----------------------------------------------------------------------------------


def test_a_step_needs_its_time_and_enough_requests_and_no_breach():
    one = settled(begin(rule(("a:1", 1))), now_ms=1000, revision=5)
    assert one.next_ms == 61_000
    assert next_step(one, FINE, now_ms=60_999) == Hold()
    assert next_step(one, FEW, now_ms=61_000) == Hold(reason="12 of 200 requests seen")
    assert next_step(one, FINE, now_ms=61_000) == Advance(percent=10)
    assert next_step(one, FINE, now_ms=61_000, obstacle="frozen") == Hold(reason="frozen")
    assert next_step(one, BROKEN, now_ms=1001, obstacle="frozen") == RollBack(reason="error ratio 1")


def test_an_operator_skips_the_hold_and_the_count_but_no_breach():
    one = settled(begin(rule(("a:1", 1))), now_ms=0, revision=1)
    assert next_step(one, FEW, now_ms=0, is_asked=True) == Advance(percent=10)
    assert next_step(one, FEW, now_ms=0, is_asked=True, obstacle="frozen") == Hold(reason="frozen")
    assert isinstance(next_step(one, BROKEN, now_ms=0, is_asked=True), RollBack)


def test_the_last_step_is_watched_too():
    one = settled(begin(rule(("a:1", 1)), steps=(100,)), now_ms=0, revision=1)
    assert next_step(one, FINE, now_ms=59_999) == Hold()
    assert isinstance(next_step(one, BROKEN, now_ms=70_000), RollBack)
    assert next_step(one, FINE, now_ms=60_000) == Done()


# --- beside others' edits --------------------------------------------------------------------------


def test_what_others_change_beside_the_split_is_kept():
    one = begin(rule(("a:1", 1)), sticky_by="tenant")
    edited = replace(shaped(rule(("a:1", 1)), one), retries=2, enabled=False)
    assert taken_over(edited, one) == ""
    again = shaped(edited, advanced(settled(one, now_ms=0, revision=1), now_ms=0))
    assert (again.retries, again.enabled, weights(again)) == (2, False, [("a:2", 10), ("a:1", 90)])


def test_an_edited_split_is_the_editor_s():
    before = rule(("a:1", 1))
    one = settled(begin(before), now_ms=0, revision=1)
    assert taken_over(shaped(before, one), one) == ""
    assert "edited meanwhile" in taken_over(before, one)
    assert "edited meanwhile" in taken_over(rule(("a:1", 1), ("b:", 1)), one)
    assert "removed" in taken_over(None, one)
    assert "weight" in taken_over(replace(shaped(before, one), strategy="ordered"), one)


def test_while_a_step_is_being_made_the_rule_may_have_either_form():
    before = rule(("a:1", 1))
    one = begin(before)
    assert not one.is_settled
    assert taken_over(before, one) == taken_over(shaped(before, one), one) == ""
    step = advanced(settled(one, now_ms=0, revision=1), now_ms=0)
    assert taken_over(shaped(before, one), step) == taken_over(shaped(before, step), step) == ""
    assert taken_over(before, step)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_taken_back_the_rule_is_as_it_was(steps):
    before = rule(("a:1", 3), ("a:2", 1), sticky_by="session")
    one = settled(begin(before, sticky_by="tenant"), now_ms=0, revision=1)
    current = shaped(before, one)
    assert current.sticky_by == "tenant"
    for _ in range(steps):
        one = settled(advanced(one, now_ms=0), now_ms=0, revision=1)
        current = shaped(current, one)
    back = taken_back(one, "rolled_back", "slow")
    assert taken_over(current, back) == ""
    assert shaped(current, back) == before
    over = settled(back, now_ms=9, revision=2)
    assert (over.status, over.reason, over.is_open, over.events[-1].what) == (
        "rolled_back",
        "slow",
        False,
        "rolled back: slow",
    )


def test_at_the_end_callers_stick_as_they_did():
    before = rule(("a:1", 1))
    one = begin(before, steps=(50, 100), sticky_by="tenant")
    half = shaped(before, one)
    assert half.sticky_by == "tenant"
    whole = advanced(settled(one, now_ms=0, revision=1), now_ms=0)
    assert shaped(half, whole).sticky_by == "request"
    assert shaped(replace(half, sticky_by="session"), whole).sticky_by == "session"


# --- random timelines ------------------------------------------------------------------------------

_MOMENTS = st.lists(
    st.tuples(
        st.sampled_from([FINE, FINE, FINE, FEW, BROKEN]),
        st.sampled_from(["", "", "", "frozen"]),
        st.booleans(),  # an operator asks to go on
        st.sampled_from(["", "", "", "", "", "edit", "abort", "crash"]),
        st.integers(0, 90_000),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(
    moments=_MOMENTS,
    steps=st.sets(st.integers(1, 99), max_size=4),
    others=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_no_timeline_skips_a_step_or_leaves_anything_behind(moments, steps, others):
    """Each moment: a verdict, an obstacle, what someone does, and how much time goes by."""
    before = rule(*((f"b{n}:", weight) for n, weight in enumerate(others)))
    one, current, now_ms = begin(before, steps=(*sorted(steps), 100)), before, 0
    seen: list[int] = []
    for verdict, obstacle, is_asked, event, passed_ms in moments:
        if not one.is_open:
            break
        if event == "crash":
            one = parse_rollout(json.loads(json.dumps(rollout_document(one))))
        if not one.is_settled:
            current = shaped(current, one)
            assert parse_rules(rules_document([current])) == (current,)
            one = settled(one, now_ms=now_ms, revision=1)
            seen += [one.percent] if one.is_open else []
        if event == "edit" and one.is_open:
            current = replace(current, split=(*current.split, Target(backend="z", model="z")))
            one = ended(one, "aborted", taken_over(current, one), now_ms=now_ms)
        elif event == "abort" and one.is_open:
            one = taken_back(one, "aborted", "asked")
        elif one.is_open:
            one = _follow(one, next_step(one, verdict, now_ms=now_ms, obstacle=obstacle, is_asked=is_asked), now_ms)
        now_ms += passed_ms
    if not one.is_settled:
        current = shaped(current, one)
        one = settled(one, now_ms=now_ms, revision=1)
        seen += [one.percent] if one.is_open else []
    assert seen == list(one.course.steps[: len(seen)])
    _is_as_promised(one, current, before, seen)


def _follow(one: Rollout, step: Hold | Advance | RollBack | Done, now_ms: int) -> Rollout:
    if isinstance(step, Advance):
        return advanced(one, now_ms=now_ms)
    if isinstance(step, RollBack):
        return taken_back(one, "rolled_back", step.reason)
    if isinstance(step, Done):
        return ended(one, "done", "", now_ms=now_ms)
    return replace(one, held=step.reason)


def _is_as_promised(one: Rollout, current: Rule, before: Rule, seen: Sequence[int]) -> None:
    assert one.status in ("running", *ENDED)
    if one.status == "done":
        assert seen[-1] == 100
        assert [t.weight for t in current.split[1:]] == [0] * len(before.split)
    elif one.status == "rolled_back" or one.reason == "asked":
        assert current == before
    elif one.status == "aborted":
        assert current.split[-1].backend == "z"
    else:
        assert share(current.split, NEW) == seen[-1] == one.percent


# --- callers ---------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    steps=st.sets(st.integers(1, 99), min_size=1, max_size=5),
    others=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    canary=st.integers(0, 9),
    seed=st.integers(0, 10**9),
)
def test_a_sticky_caller_that_has_arrived_stays(steps, others, canary, seed):
    before = rule(("a:2", canary), *((f"b{n}:", weight) for n, weight in enumerate(others)), sticky_by="tenant")
    one = begin(before, steps=(*sorted(steps), 100))
    tenants = [f"tenant-{seed}-{n}" for n in range(200)]
    arrived: set[str] = set()
    while True:
        one = settled(one, now_ms=0, revision=1)
        current = RuleSet(revision=1, rules=(shaped(before, one),))
        there = {tenant for tenant in tenants if _place(current, tenant) == NEW.place}
        assert arrived <= there
        arrived = there
        if one.is_at_last:
            break
        one = advanced(one, now_ms=0)
    assert arrived == set(tenants)


def _place(rules: RuleSet, tenant: str) -> object:
    caller = Caller(key_id="k", tenant=tenant, priority="interactive")
    request = InferenceRequest(id="", task="t", caller=caller, input=None, received_us=0, deadline_us=1)
    state = State(why_not=lambda _: None, loads=lambda _: {}, draw=random.random)
    return plan_of(rules, request, state).candidates[0]


# --- documents -------------------------------------------------------------------------------------


def test_a_rollout_survives_its_store():
    guard = Guard(max_error_ratio=0.02, max_p99_ms=250)
    target = replace(NEW, parameters={"seed": 1}, context_tokens=4096)
    one = begin(rule(("a:1", 3)), guard=guard, sticky_by="tenant", target=target)
    for state in (one, advanced(settled(one, now_ms=1, revision=2), now_ms=3), taken_back(one, "aborted", "why")):
        assert parse_rollout(json.loads(json.dumps(rollout_document(state)))) == state


def test_of_many_events_the_last_are_kept():
    one = begin(rule(("a:1", 1)))
    for n in range(MAX_EVENTS + 5):
        one = noted(one, str(n), now_ms=n)
    assert (len(one.events), one.events[0].what) == (MAX_EVENTS, "5")
