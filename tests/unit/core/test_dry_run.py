"""What a set of rules would do to requests of before."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.routing import State
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.rules.dry_run import Move, RuleShare, Sample, dry_run, sample_of
from gateway.core.types import Caller, InferenceRequest
from tests.kit.plans import plan_of

A = {"backend": "triton", "model": "m", "version": "1"}
B = {"backend": "triton", "model": "m", "version": "2"}
LOCAL = {"backend": "local", "model": "m"}
MONDAY_NOON_S = 1_767_614_400.0  # 2026-01-05T12:00:00Z


def rule(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "split": [A], **fields}


def rules(*entries: dict[str, Any]) -> RuleSet:
    return RuleSet(revision=1, rules=parse_rules(entries))


def sample(task: str = "embed", tenant: str = "t", **more: Any) -> Sample:
    told = {name: more.pop(name) for name in ("input_tokens", "stands_for", "at_s") if name in more}
    request = InferenceRequest(
        id="",
        task=task,
        caller=Caller(key_id=more.pop("key", "k"), tenant=tenant),
        input=None,
        received_us=0,
        deadline_us=0,
        **more,
    )
    return Sample(request=request, at_s=told.pop("at_s", MONDAY_NOON_S), **told)


def moves(before: RuleSet, after: RuleSet, *samples: Sample) -> list[tuple[str, str, float]]:
    found = dry_run(before, after, samples)
    return [(one.from_place, one.to_place, one.requests) for one in found.moves]


def test_a_tenth_more_of_1000_requests_is_100():
    before = rules(rule("x", split=[{**A, "weight": 9}, {**B, "weight": 1}]))
    after = rules(rule("x", split=[{**A, "weight": 8}, {**B, "weight": 2}]))
    found = dry_run(before, after, [sample()] * 1000)
    assert (found.requests, found.moved, found.refused_before, found.refused_after) == (1000, 100.0, 0, 0)
    assert found.moves == (Move(from_place="triton/m:1", to_place="triton/m:2", requests=100.0),)
    assert found.rules == (RuleShare(rule="x", before=1000, after=1000),)


def test_what_leaves_a_place_goes_to_those_that_gain():
    before = rules(rule("x", split=[{**A, "weight": 1}]))
    after = rules(rule("x", split=[{**A, "weight": 2}, {**B, "weight": 1}, {**LOCAL, "weight": 1}]))
    # Of 10 requests 5 stay; the other 5 go half to the one and half to the other.
    assert moves(before, after, *[sample()] * 10) == [
        ("triton/m:1", "local/m", 2.5),
        ("triton/m:1", "triton/m:2", 2.5),
    ]


def test_figures_are_of_a_tenth():
    after = rules(rule("x", split=[A, B, LOCAL]))
    found = dry_run(rules(rule("x")), after, [sample()] * 10)
    assert found.moved == 6.7
    assert [one.requests for one in found.moves] == [3.3, 3.3]


def test_requests_without_a_rule_are_refused():
    before = rules(rule("embeds", match={"task": "embed"}))
    after = rules(rule("chats", match={"task": "chat"}))
    found = dry_run(before, after, [sample()] * 3 + [sample("chat")] * 2 + [sample("ocr")])
    assert (found.refused_before, found.refused_after, found.moved) == (3, 4, 5.0)
    assert found.moves == (
        Move(from_place="triton/m:1", to_place="refused", requests=3.0),
        Move(from_place="refused", to_place="triton/m:1", requests=2.0),
    )
    assert found.rules == (RuleShare(rule="chats", before=0, after=2), RuleShare(rule="embeds", before=3, after=0))


def test_a_rule_that_leads_nowhere_refuses():
    named = rules(rule("x", split=[{"backend": "triton", "model": "*"}]))
    found = dry_run(rules(rule("x")), named, [sample(), sample(model="mine", version="7")])
    assert found.refused_after == 1
    assert {(one.from_place, one.to_place) for one in found.moves} == {
        ("triton/m:1", "refused"),
        ("triton/m:7", "triton/mine:7"),
    }


def test_the_fallback_counts_where_the_split_leads_nowhere():
    before = rules(rule("x", fallback=[LOCAL]))
    after = rules(rule("x", split=[{**A, "weight": 0}], fallback=[{**LOCAL, "weight": 0}, LOCAL]))
    assert moves(before, after, sample()) == [("triton/m:1", "local/m", 1.0)]


@pytest.mark.parametrize(
    ("strategy", "weights", "moved"),
    [("ordered", (1, 9), []), ("fastest", (1, 9), [("triton/m:1", "triton/m:2", 5.0)])],
)
def test_only_a_weighted_split_is_shared_by_weight(strategy, weights, moved):
    split = [{**A, "weight": weights[0]}, {**B, "weight": weights[1]}]
    after = rules(rule("x", split=split, strategy=strategy))
    assert moves(rules(rule("x")), after, *[sample()] * 10) == moved


def test_one_request_may_stand_for_many():
    before, after = rules(rule("x")), rules(rule("x", split=[B]))
    found = dry_run(before, after, [sample(stands_for=40), sample()])
    assert (found.requests, found.moved) == (41, 41.0)


@pytest.mark.parametrize(
    ("match", "more"),
    [
        ({"key": "k9"}, {"key": "k9"}),
        ({"priority": "batch"}, {"priority": "batch"}),
        ({"headers": {"x-beta": "1"}}, {"headers": {"x-beta": "1"}}),
        ({"min_input_bytes": 100}, {"input_bytes": 100}),
        ({"min_input_tokens": 10}, {"input_tokens": 10}),
        ({"times": [{"days": ["tue"]}]}, {"at_s": MONDAY_NOON_S + 86_400}),
    ],
)
def test_all_that_rules_match_on_is_looked_at(match, more):
    after = rules(rule("special", match=match, split=[B]), rule("x"))
    assert moves(rules(rule("x")), after, sample(), sample(**more)) == [("triton/m:1", "triton/m:2", 1.0)]


def test_headers_that_nobody_recorded_are_named():
    before = rules(rule("x", match={"headers": {"x-known": "1"}}))
    matches = [{"x-known": "1", "x-new": "1"}, {"x-seen": "1"}, {"x-off": "1"}]
    after = rules(*(rule(f"r{n}", match={"headers": m}, enabled="x-off" not in m) for n, m in enumerate(matches)))
    samples = [sample(headers={"x-seen": "0"})]
    assert dry_run(before, after, samples).unrecorded_headers == ("x-new",)
    assert dry_run(before, after, samples, is_recorded=False).unrecorded_headers == ()


def test_no_requests_are_no_moves():
    found = dry_run(rules(rule("x")), rules(rule("y")), [])
    assert (found.requests, found.moved, found.moves, found.rules) == (0, 0.0, (), ())


STICKY = [{**A, "weight": 50}, {**B, "weight": 30}, {**LOCAL, "weight": 20}]


@pytest.mark.parametrize("sticky_by", ["tenant", "session", "ordering_key"])
def test_a_sticky_caller_is_where_routing_sends_it(sticky_by):
    before, after = rules(rule("x", split=[A])), rules(rule("x", split=STICKY, sticky_by=sticky_by))
    state = State(why_not=lambda _: None, loads=lambda _: {}, draw=lambda: 0.0)
    sides = set()
    for n in range(40):
        one = sample(tenant=f"t{n}", session=f"s{n}", ordering_key=f"o{n}")
        place = str(plan_of(after, one.request, state).candidates[0])
        sides.add(place)
        expected = [] if place == "triton/m:1" else [("triton/m:1", place, 1.0)]
        assert moves(before, after, one) == expected
    assert len(sides) == 3


def test_who_has_nothing_to_be_sticky_by_is_shared_by_weight():
    after = rules(rule("x", split=STICKY, sticky_by="session"))
    assert moves(rules(rule("x")), after, *[sample()] * 10) == [
        ("triton/m:1", "triton/m:2", 3.0),
        ("triton/m:1", "local/m", 2.0),
    ]


def test_a_document_of_the_log_is_a_sample():
    document = {
        "id": "r1",
        "at_ms": 1_000_500,
        "task": "embed",
        "tenant": "t",
        "key": "k",
        "model": "m",
        "version": "2",
        "priority": "batch",
        "stream": True,
        "headers": {"x-beta": "1"},
        "input_bytes": 12,
        "input_tokens": 3,
        "session": "s",
        "ordering_key": "o",
        "stands_for": 4,
        "code": "ok",
    }
    found = sample_of(document)
    assert found is not None
    assert (found.at_s, found.input_tokens, found.stands_for) == (1000.5, 3, 4)
    request = found.request
    assert (request.task, request.caller.tenant, request.caller.key_id) == ("embed", "t", "k")
    assert (request.model, request.version, request.priority, request.stream) == ("m", "2", "batch", True)
    assert (request.headers, request.input_bytes) == ({"x-beta": "1"}, 12)
    assert (request.session, request.ordering_key) == ("s", "o")
    assert sample_of({**document, "task": ""}) is None
    assert sample_of({**document, "tenant": ""}) is None


PLACES = st.sampled_from([A, B, LOCAL, {"backend": "triton", "model": "*"}])
TARGETS = st.lists(st.builds(lambda place, weight: {**place, "weight": weight}, PLACES, st.integers(1, 9)), max_size=3)
ENTRIES = st.builds(
    lambda task, split, fallback, sticky_by, enabled: {
        "match": {"task": task},
        "split": split or [A],
        "fallback": fallback,
        "sticky_by": sticky_by,
        "enabled": enabled,
    },
    st.sampled_from(["embed", "chat", "*"]),
    TARGETS,
    TARGETS,
    st.sampled_from(["request", "tenant"]),
    st.booleans(),
)
SETS = st.lists(ENTRIES, max_size=4).map(
    lambda entries: rules(*({"name": f"r{i}", **e} for i, e in enumerate(entries)))
)
SAMPLES = st.lists(
    st.builds(sample, st.sampled_from(["embed", "chat"]), st.sampled_from("abc"), stands_for=st.integers(1, 3)),
    max_size=20,
)


@given(SETS, SAMPLES)
def test_nothing_that_changes_moves_nobody(same, samples):
    found = dry_run(same, same, samples)
    assert (found.moved, found.moves) == (0.0, ())
    assert found.refused_before == found.refused_after
    assert all(one.before == one.after for one in found.rules)


@given(SETS, SETS, SAMPLES)
def test_no_more_move_than_there_are(before, after, samples):
    found = dry_run(before, after, samples)
    assert 0 <= found.moved <= found.requests
    assert sum(one.requests for one in found.moves) == pytest.approx(found.moved, abs=0.1 * (1 + len(found.moves)))
    for taken, refused in (("before", found.refused_before), ("after", found.refused_after)):
        assert sum(getattr(one, taken) for one in found.rules) <= found.requests
        assert refused <= found.requests
    assert all(one.from_place != one.to_place for one in found.moves)
