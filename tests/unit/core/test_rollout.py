"""Rules while a model moves from one version to another."""

import random
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.rollouts.model_move import (
    Marks,
    Move,
    RolloutError,
    marks_document,
    names_version,
    parse_marks,
    restore,
    shape,
)
from gateway.core.routing import State
from gateway.core.rules import Rule, RuleSet, parse_rules, rules_document
from gateway.core.types import Caller, InferenceRequest
from tests.kit.plans import plan_of

MOVE = Move(model="m", backends=frozenset({"triton"}), old="1", new="2")


def rules(*entries: dict[str, Any]) -> tuple[Rule, ...]:
    return parse_rules([{"name": f"r{i}", **entry} for i, entry in enumerate(entries)])


def to(model: str = "m", version: str = "", weight: int = 1, backend: str = "triton") -> dict[str, Any]:
    return {"backend": backend, "model": model, "version": version, "weight": weight}


def told(rule: Rule) -> str:
    """A rule in one line: `name model strategy sticky: split | fallback`."""

    def one(targets) -> str:
        return " ".join(f"{t.backend}/{t.model}{':' + t.version if t.version else ''}*{t.weight}" for t in targets)

    return f"{rule.name} {rule.match.model} {rule.strategy} {rule.sticky_by}: {one(rule.split)} | {one(rule.fallback)}"


CASES = {
    "one target": (
        {"split": [to()]},
        {
            0: ["r0 * weighted tenant: triton/m:1*100 | "],
            10: ["r0 * weighted tenant: triton/m:2*10 triton/m:1*90 | "],
            100: ["r0 * weighted tenant: triton/m:2*100 | "],
        },
    ),
    "beside others, in proportion": (
        {"split": [to("x", weight=30), to(weight=60), to(backend="llm", weight=10)]},
        {
            0: ["r0 * weighted tenant: triton/x*300 triton/m:1*600 llm/m*100 | "],
            50: ["r0 * weighted tenant: triton/x*300 triton/m:2*300 triton/m:1*300 llm/m*100 | "],
        },
    ),
    "the old version by its number": (
        {"split": [to(version="1")]},
        {10: ["r0 * weighted tenant: triton/m:2*10 triton/m:1*90 | "]},
    ),
    "another version by its number": (
        {"split": [to(version="7")]},
        {10: ["r0 * weighted request: triton/m:7*1 | "]},
    ),
    "a fallback goes last": (
        {"split": [to("x")], "fallback": [to()]},
        {
            10: ["r0 * weighted request: triton/x*1 | triton/m:1*1"],
            100: ["r0 * weighted request: triton/x*1 | triton/m:2*1"],
        },
    ),
    "an ordered split": (
        {"strategy": "ordered", "split": [to(), to("x")], "fallback": [to("y")]},
        {10: ["r0 * weighted tenant: triton/m:2*10 triton/m:1*90 | triton/x*1 triton/y*1"]},
    ),
    "later in an ordered split": (
        {"strategy": "ordered", "split": [to("x"), to()]},
        {
            10: ["r0 * ordered request: triton/x*1 triton/m:1*1 | "],
            100: ["r0 * ordered request: triton/x*1 triton/m:2*1 | "],
        },
    ),
    "callers that name the model": (
        {"split": [to("*")], "fallback": [to("*", backend="local")]},
        {
            0: [
                "deploy-m-r0 m weighted tenant: triton/m:1*100 | local/**1",
                "r0 * weighted request: triton/**1 | local/**1",
            ],
            10: [
                "deploy-m-r0 m weighted tenant: triton/m:2*10 triton/m:1*90 | local/**1",
                "r0 * weighted request: triton/**1 | local/**1",
            ],
        },
    ),
    "a rule for the model alone": (
        {"match": {"model": "m"}, "split": [to("*")]},
        {10: ["r0 m weighted tenant: triton/*:2*10 triton/*:1*90 | "]},
    ),
    "a rule for another model": (
        {"match": {"model": "x"}, "split": [to("*")]},
        {10: ["r0 x weighted request: triton/**1 | "]},
    ),
    "another backend": (
        {"split": [to(backend="local")]},
        {10: ["r0 * weighted request: local/m*1 | "]},
    ),
    "no weight at all": (
        {"split": [to(weight=0)], "fallback": [to("x")]},
        {
            10: ["r0 * weighted tenant: triton/m:1*0 | triton/x*1"],
            100: ["r0 * weighted tenant: triton/m:2*0 | triton/x*1"],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_shapes(case):
    entry, forms = CASES[case]
    before, marks = rules(entry), Marks()
    current = before
    for percent, lines in forms.items():
        shaped = shape(current, marks, MOVE, percent=percent)
        assert [told(rule) for rule in shaped.rules] == lines
        assert parse_rules(rules_document(shaped.rules)) == shaped.rules
        assert shape(shaped.rules, shaped.marks, MOVE, percent=percent).rules == shaped.rules
        current, marks = shaped.rules, shaped.marks
    assert restore(current, marks, MOVE, serves="1") == before


def test_what_named_the_old_version_names_the_one_that_serves():
    before = rules({"split": [to(version="1")], "fallback": [to(version="1"), to(version="7")]})
    shaped = shape(before, Marks(), MOVE, percent=100)
    (after,) = restore(shaped.rules, shaped.marks, MOVE, serves="2")
    assert told(after) == "r0 * weighted request: triton/m:2*1 | triton/m:2*1 triton/m:7*1"


def test_weights_too_far_apart_are_refused_by_name():
    with pytest.raises(RolloutError, match="rule 'r0'"):
        shape(rules({"split": [to(weight=1_000_000), to("x", weight=1)]}), Marks(), MOVE, percent=10)


def test_large_weights_of_a_common_measure_are_fine():
    shaped = shape(rules({"split": [to(weight=1_000_000), to("x", weight=500_000)]}), Marks(), MOVE, percent=10)
    assert told(shaped.rules[0]).startswith("r0 * weighted tenant: triton/m:2*20 triton/m:1*180 triton/x*100")


# --- edits by others ------------------------------------------------------------------------------


def shaped_twice():
    first = shape(rules({"split": [to()]}, {"split": [to("x")]}), Marks(), MOVE, percent=0)
    return shape(first.rules, first.marks, MOVE, percent=10)


def test_an_edit_of_another_field_is_kept_through_all_steps():
    shaped = shaped_twice()
    fallback = parse_rules([{"name": "f", "split": [to("x")], "fallback": [to("y")]}])[0].fallback
    edited = [replace(r, enabled=False, fallback=fallback) if r.name == "r0" else r for r in shaped.rules]
    shaped = shape(edited, shaped.marks, MOVE, percent=50)
    assert told(shaped.rules[0]) == "r0 * weighted tenant: triton/m:2*50 triton/m:1*50 | triton/y*1"
    assert not shaped.rules[0].enabled
    # And back again, although an earlier form of ours was enabled.
    shaped = shape([replace(shaped.rules[0], enabled=True), *shaped.rules[1:]], shaped.marks, MOVE, percent=100)
    after = restore(shaped.rules, shaped.marks, MOVE, serves="2")
    assert told(after[0]) == "r0 * weighted request: triton/m*1 | triton/y*1"
    assert after[0].enabled


def test_a_split_that_was_edited_is_left_alone():
    shaped = shaped_twice()
    theirs = parse_rules([{"name": "r0", "split": [to(version="1")]}])[0]
    for percent in (50, 100):
        shaped = shape([theirs, *shaped.rules[1:]], shaped.marks, MOVE, percent=percent)
        assert shaped.rules[0] == theirs
        assert shaped.marks.released == ("r0",)
    assert names_version(shaped.rules, MOVE, "1") == ("r0",)
    assert restore(shaped.rules, shaped.marks, MOVE, serves="2")[0] == theirs


def test_rules_that_come_and_go():
    shaped = shaped_twice()
    new = rules({"name": "new", "split": [to()]})
    shaped = shape([*new, shaped.rules[1]], shaped.marks, MOVE, percent=50)
    assert [told(r) for r in shaped.rules] == [
        "new * weighted tenant: triton/m:2*50 triton/m:1*50 | ",
        "r1 * weighted request: triton/x*1 | ",
    ]
    assert restore(shaped.rules, shaped.marks, MOVE, serves="2")[0] == new[0]


def test_a_form_that_was_planned_but_not_stored_is_no_edit():
    stored = shaped_twice()
    planned = shape(stored.rules, stored.marks, MOVE, percent=50)
    again = shape(stored.rules, planned.marks, MOVE, percent=50)
    assert again.rules == planned.rules
    assert not again.marks.released
    before = rules({"split": [to()]})
    planned = shape(before, Marks(), MOVE, percent=0)
    assert restore(before, planned.marks, MOVE, serves="1") == before


def test_an_added_rule_is_made_anew_from_the_rule_it_stands_for():
    before = rules({"split": [to("*")]})
    shaped = shape(before, Marks(), MOVE, percent=10)
    edited = [shaped.rules[0], replace(shaped.rules[1], enabled=False)]
    shaped = shape(edited, shaped.marks, MOVE, percent=50)
    assert [r.enabled for r in shaped.rules] == [False, False]
    gone = shape([shaped.rules[0]], shaped.marks, MOVE, percent=50)
    assert gone.rules == ()


def test_only_enabled_rules_that_name_the_version_count():
    some = rules(
        {"split": [to(version="1")]},
        {"split": [to(version="1")], "enabled": False},
        {"split": [to("*", version="1")], "match": {"model": "m"}},
        {"split": [to("x")], "fallback": [to(version="2")]},
        {"split": [to(version="1", backend="local")]},
    )
    assert names_version(some, MOVE, "1") == ("r0", "r2")
    assert names_version(some, MOVE, "2") == ("r3",)


def test_marks_go_through_a_document():
    shaped = shape(rules({"split": [to("*")]}, {"split": [to()]}), Marks(), MOVE, percent=10)
    assert parse_marks(marks_document(shaped.marks)) == shaped.marks


# --- random sets ----------------------------------------------------------------------------------


def some_rules(rng: random.Random) -> tuple[Rule, ...]:
    def target() -> dict[str, Any]:
        return to(
            rng.choice(("m", "m", "x", "*")),
            rng.choice(("", "", "1", "7")),
            rng.randint(0, 9),
            rng.choice(("triton", "triton", "local")),
        )

    entries = []
    for _ in range(rng.randint(1, 4)):
        split = [target() for _ in range(rng.randint(1, 4))]
        split[0]["weight"] += 1
        entries.append(
            {
                "match": {"task": rng.choice(("t", "*")), "model": rng.choice(("*", "*", "m", "x"))},
                "split": split,
                "fallback": [target() for _ in range(rng.randint(0, 2))],
                "strategy": rng.choice(("weighted", "weighted", "ordered")),
                "sticky_by": rng.choice(("request", "tenant")),
                "enabled": rng.random() < 0.9,
            }
        )
    return rules(*entries)


def first_place(current: tuple[Rule, ...], tenant: str, model: str):
    request = InferenceRequest(
        id="i",
        task="t",
        caller=Caller(key_id="k", tenant=tenant),
        input=None,
        received_us=0,
        deadline_us=1,
        model=model,
    )
    made = plan_of(
        RuleSet(revision=1, rules=current),
        request,
        State(why_not=lambda _: None, loads=lambda _: {}, draw=lambda: 0.5),
    )
    return made.candidates[0] if made.candidates else None


@pytest.mark.parametrize("seed", range(150))
def test_at_every_step_each_caller_goes_forward_only_and_no_other_target_gains_or_loses(seed):
    rng = random.Random(seed)  # noqa: S311 - reproducible cases, no secrets
    before = some_rules(rng)
    current, marks = before, Marks()
    callers = [(f"t{n}", model) for n in range(12) for model in ("", "m", "x")]
    last: dict[tuple[str, str], Any] = {}
    for percent in (0, rng.randint(1, 49), 50, 100):
        shaped = shape(current, marks, MOVE, percent=percent)
        current, marks = shaped.rules, shaped.marks
        assert parse_rules(rules_document(current)) == current
        for caller in callers:
            place = first_place(current, *caller)
            before_place = last.get(caller, place)
            if place != before_place:
                assert (before_place.model, before_place.version) == ("m", "1")
                assert (place.model, place.version) == ("m", "2")
            last[caller] = place
        _weights_add_up(before, current, percent)
    assert restore(current, marks, MOVE, serves="1") == before
    for caller in callers:
        assert (
            last[caller] is None
            or last[caller].backend == "local"
            or last[caller].model == "x"
            or last[caller].version in ("2", "7")
        )


def _weights_add_up(before: tuple[Rule, ...], now: tuple[Rule, ...], percent: int) -> None:
    """Each target of a shared split has the share that it had; ours is divided as asked."""
    shaped = {rule.name: rule for rule in now}
    for rule in before:
        if rule.strategy != "weighted" or not any(t.weight for t in rule.split):
            continue
        after = shaped[rule.name]
        whole, whole_after = (sum(t.weight for t in one.split) for one in (rule, after))

        def share(one: Rule, total: int, of: str) -> float:
            return (
                sum(t.weight for t in one.split if (t.backend, t.model) == ("triton", "m") and t.version in of) / total
            )

        assert share(after, whole_after, "1" if percent < 100 else "2") == pytest.approx(
            share(rule, whole, ("", "1")) * ((100 - percent) / 100 if percent < 100 else 1)
        )
        assert sum(t.weight for t in after.split if t.backend == "local") / whole_after == pytest.approx(
            sum(t.weight for t in rule.split if t.backend == "local") / whole
        )


def test_rules_with_long_names_have_one_each_for_the_callers_of_the_model():
    long = "tensors-" * 12
    named = [{"name": f"{long}{end}", "match": {"tenant": end}, "split": [to("*")]} for end in ("a", "b")]
    move = replace(MOVE, model="m" * 60)
    shaped = shape(parse_rules(named), Marks(), move, percent=10)
    assert [rule.match.tenant for rule in shaped.rules if rule.match.model == move.model] == ["a", "b"]
    assert parse_rules(rules_document(shaped.rules)) == shaped.rules
    assert restore(shaped.rules, shaped.marks, move, serves="2") == parse_rules(named)


@pytest.mark.parametrize("model", ["_m", "m n", "m" * 129])
def test_a_model_that_no_rule_can_name_moves_nobody(model):
    with pytest.raises(RolloutError, match="no rule can name"):
        shape(rules({"split": [to("*")]}), Marks(), replace(MOVE, model=model), percent=0)
