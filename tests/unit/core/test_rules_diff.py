"""What differs between two sets of rules."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.rules import Rule, parse_rules
from gateway.core.rules.diff import FieldChange, changes


def rule(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "split": [{"backend": "triton", "model": "m"}], **fields}


def rules(*entries: dict[str, Any] | str) -> tuple[Rule, ...]:
    return parse_rules([rule(entry) if isinstance(entry, str) else entry for entry in entries])


def told(before: tuple[Rule, ...], after: tuple[Rule, ...]) -> list[str]:
    return [change.text for change in changes(before, after)]


SPLIT = [
    {"backend": "triton", "model": "m", "version": "1", "weight": 90},
    {"backend": "triton", "model": "m", "version": "2", "weight": 10},
]


def test_a_weight_is_named_by_its_place():
    before = rules(rule("x", split=SPLIT))
    after = rules(rule("x", split=[{**SPLIT[0], "weight": 50}, {**SPLIT[1], "weight": 50}]))
    (change,) = changes(before, after)
    assert (change.rule, change.change) == ("x", "changed")
    assert change.fields == (
        FieldChange(field="split[0].weight", before=90, after=50),
        FieldChange(field="split[1].weight", before=10, after=50),
    )
    assert change.text == "rule 'x': split[0].weight: 90 -> 50; split[1].weight: 10 -> 50"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, {"enabled": False}, "enabled: true -> false"),
        ({}, {"timeout_ms": 500}, "timeout_ms: none -> 500"),
        ({"timeout_ms": 500}, {}, "timeout_ms: 500 -> none"),
        ({}, {"match": {"headers": {"x-beta": "1"}}}, 'match.headers: none -> {"x-beta": "1"}'),
        (
            {"match": {"headers": {"x-beta": "1"}}},
            {"match": {"headers": {"x-beta": "2"}}},
            'match.headers.x-beta: "1" -> "2"',
        ),
        (
            {},
            {"fallback": [{"backend": "local", "model": "m"}]},
            'fallback[0]: none -> {"backend": "local", "model": "m", "weight": 1}',
        ),
        ({"split": SPLIT}, {"split": SPLIT[:1]}, None),
        (
            {"match": {"times": [{"days": ["mon", "tue"]}]}},
            {"match": {"times": [{"days": ["mon"]}]}},
            'match.times[0].days: ["mon", "tue"] -> ["mon"]',
        ),
        (
            {"split": [{"backend": "llm", "model": "m", "parameters": {"logprobs": True}}]},
            {"split": [{"backend": "llm", "model": "m", "parameters": {"logprobs": 1}}]},
            "split[0].parameters.logprobs: true -> 1",
        ),
        ({"ordering": {"mode": "release"}}, {}, None),
        ({}, {"guard": {"max_error_ratio": 0.02}}, None),
    ],
)
def test_each_field_that_differs_is_told(before, after, words):
    (change,) = changes(rules(rule("x", **before)), rules(rule("x", **after)))
    assert change.change == "changed"
    if words is None:
        assert len(change.fields) == 1
    else:
        assert change.text == f"rule 'x': {words}"


def test_a_long_value_is_cut_in_the_text_alone():
    after = rules(rule("x", fallback=[{"backend": "local", "model": "m" * 120}]))
    (change,) = changes(rules("x"), after)
    assert change.text.endswith("...")
    assert len(change.text) < 200
    assert change.fields[0].after["model"] == "m" * 120


def test_rules_come_and_go():
    found = changes(rules("a", "b"), rules("c", "b"))
    assert [(one.rule, one.change) for one in found] == [("c", "added"), ("a", "removed")]
    assert [one.text for one in found] == ["rule 'c': added as number 1", "rule 'a': removed from number 1"]
    (added,), (removed,) = found[0].fields, found[1].fields
    assert (added.field, added.before, added.after["name"]) == ("rule", None, "c")
    assert (removed.field, removed.before["name"], removed.after) == ("rule", "a", None)


def test_as_few_as_can_be_have_moved():
    assert told(rules("a", "b", "c", "d"), rules("d", "a", "b", "c")) == ["rule 'd': moved from number 4 to number 1"]
    assert told(rules("a", "b", "c", "d"), rules("b", "c", "d", "a")) == ["rule 'a': moved from number 1 to number 4"]
    assert told(rules("a", "b", "c"), rules("new", "a", "b", "c")) == ["rule 'new': added as number 1"]
    assert told(rules("a", "b", "c"), rules("b", "c")) == ["rule 'a': removed from number 1"]


def test_a_rule_may_change_and_move():
    found = changes(rules("a", "b", "c"), rules(rule("c", enabled=False), "a", "b"))
    assert [(one.rule, one.change) for one in found] == [("c", "changed"), ("c", "moved")]
    assert found[1].fields == (FieldChange(field="position", before=3, after=1),)


NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True)


@given(NAMES)
def test_a_set_does_not_differ_from_itself(names):
    assert changes(rules(*names), rules(*names)) == ()


@given(NAMES, NAMES)
def test_what_is_told_leads_from_the_one_set_to_the_other(before, after):
    found = changes(rules(*before), rules(*after))
    gone = {one.rule for one in found if one.change == "removed"}
    moved = {one.rule for one in found if one.change == "moved"}
    new = {one.rule for one in found if one.change == "added"}
    assert gone == set(before) - set(after)
    assert new == set(after) - set(before)
    stayed = [name for name in before if name not in gone | moved]
    assert stayed == [name for name in after if name not in new | moved]
    assert len(changes(rules(*after), rules(*before))) == len(found)
