import copy
import random
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loads import Standing
from gateway.core.replicas import ReplicaLoads
from gateway.core.routing import Pool, State, is_settled, only
from gateway.core.rules import (
    MAX_RULES,
    RuleSet,
    check_models,
    check_prices,
    check_speech,
    check_targets,
    parse_rules,
    rules_document,
)
from gateway.core.rules.fields import RuleError
from gateway.core.strategies import Option
from gateway.core.types import Caller, InferenceRequest, OpenAIPayload, Place
from tests.kit.plans import plan_of

A1 = {"backend": "triton", "model": "m", "version": "1"}
A2 = {"backend": "triton", "model": "m", "version": "2"}
B = {"backend": "local", "model": "m"}
C = {"backend": "llm", "model": "big"}


def nested(levels: int) -> dict[str, Any]:
    return {"x": nested(levels - 1)} if levels else {}


def rule(name: str = "r", **fields: Any) -> dict[str, Any]:
    return {"name": name, "match": {"task": "embed"}, "split": [A1], **fields}


def request(task: str = "embed", tenant: str = "t1", model: str = "", version: str = "") -> InferenceRequest:
    who = Caller(key_id="k", tenant=tenant)
    return InferenceRequest(
        id="1", task=task, caller=who, input=None, received_us=0, deadline_us=1, model=model, version=version
    )


def planned(
    rules: list[dict[str, Any]],
    *,
    draw: float = 0.0,
    down: tuple[str, ...] = (),
    loads: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    **asked: str,
):
    def why_not(target):
        return "down" if str(target) in down else None

    state = State(why_not=why_not, loads=lambda backend: loads.get(backend, {}), draw=lambda: draw)
    return plan_of(RuleSet(revision=7, rules=parse_rules(rules)), request(**asked), state)


def names(made) -> list[str]:
    return [str(c) for c in made.candidates]


def refusals(made) -> list[str]:
    return [f"{place}: {why}" for place, why in made.refusals]


# --- parsing: every refusal names the rule and the field ------------------------------------------


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("rules", "rules: must be a list"),
        ({"rules": []}, "rules: must be a list"),
        (["x"], "rules[0]: must be a mapping"),
        ([{1: 2}], "rules[0]: must be a mapping"),
        ([{}], "rules[0]: name: must be a name"),
        ([rule("([")], "rules[0]: name: must be a name"),
        ([rule("x" * 129)], "rules[0]: name: must be a name"),
        ([rule(), rule()], "rule 'r': name is used twice"),
        ([rule(splitt=[A1])], "rule 'r': unknown field 'splitt' (did you mean 'split'?)"),
        ([rule(gaurd={})], "rule 'r': unknown field 'gaurd' (did you mean 'guard'?)"),
        ([rule(match={"tsak": "embed"})], "rule 'r': match: unknown field 'tsak' (did you mean 'task'?)"),
        ([rule(match={"task": "(a+)+$"})], "rule 'r': match.task: must be a name"),
        ([rule(match={"model": "a b"})], "rule 'r': match.model: must be a name"),
        ([rule(match={"task": "*", "modle": "m"})], "rule 'r': match: unknown field 'modle' (did you mean 'model'?)"),
        ([rule(split=[{"backend": "triton", "model": "m*"}])], "rule 'r': split[0].model: must be a name"),
        ([rule(match=[])], "rule 'r': match: must be a mapping"),
        ([rule(split=[])], "rule 'r': split: at least one target is needed"),
        ([rule(split="triton/m")], "rule 'r': split: must be a list of targets"),
        ([rule(split=[A1, "m"])], "rule 'r': split[1]: must be a mapping"),
        ([rule(split=[{"model": "m"}])], "rule 'r': split[0].backend: must be a name"),
        ([rule(split=[{"backend": "triton"}])], "rule 'r': split[0].model: must be a name"),
        ([rule(split=[{**A1, "weight": -1}])], "rule 'r': split[0].weight: must be a whole number"),
        ([rule(split=[{**A1, "weight": "x"}])], "rule 'r': split[0].weight: must be a whole number"),
        ([rule(split=[{**A1, "weight": True}])], "rule 'r': split[0].weight: must be a whole number"),
        ([rule(split=[{**A1, "weight": 0.5}])], "rule 'r': split[0].weight: must be a whole number"),
        ([rule(split=[{**A1, "weight": 10**7}])], "rule 'r': split[0].weight: must be a whole number"),
        ([rule(split=[{**A1, "wieght": 1}])], "rule 'r': split[0]: unknown field 'wieght' (did you mean"),
        ([rule(split=[{**A1, "version": 2}])], "rule 'r': split[0].version: must be a quoted number"),
        ([rule(split=[{**A1, "version": "v2"}])], "rule 'r': split[0].version: must be a quoted number"),
        ([rule(split=[{**A1, "weight": 0}])], "rule 'r': split: every weight is 0"),
        ([rule(fallback=B)], "rule 'r': fallback: must be a list of targets"),
        ([rule(fallback=[{**B, "backend": ""}])], "rule 'r': fallback[0].backend: must be a name"),
        ([rule(strategy="quickest")], "rule 'r': strategy: must be one of weighted, ordered, least_in_flight, fastest"),
        ([rule(strategy=["weighted"])], "rule 'r': strategy: must be one of weighted, ordered"),
        ([rule(retries=6)], "rule 'r': retries: must be a whole number from 0 to 5"),
        ([rule(retries=True)], "rule 'r': retries: must be a whole number"),
        ([rule(hedge="yes")], "rule 'r': hedge: must be true or false"),
        ([rule(split=[{**C, "context_tokens": -1}])], "rule 'r': split[0].context_tokens: must be a whole number"),
        ([rule(split=[{**C, "parameters": []}])], "rule 'r': split[0].parameters: must be a mapping"),
        ([rule(split=[{**C, "parameters": {"model": "x"}}])], "rule 'r': split[0].parameters.model: is not a target's"),
        (
            [rule(split=[{**C, "parameters": {"api_key": "x"}}])],
            "rule 'r': split[0].parameters.api_key: holds a secret",
        ),
        ([rule(split=[{**C, "parameters": {"x": {1, 2}}}])], "rule 'r': split[0].parameters: must be JSON"),
        ([rule(split=[{**C, "parameters": {"x": float("nan")}}])], "rule 'r': split[0].parameters: must be JSON"),
        ([rule(split=[{**C, "parameters": {"x": 2**64}}])], "rule 'r': split[0].parameters: must be JSON"),
        ([rule(split=[{**C, "parameters": {"x": "\ud800"}}])], "rule 'r': split[0].parameters: must be JSON"),
        ([rule(split=[{**C, "parameters": {"x": nested(300)}}])], "rule 'r': split[0].parameters: must be JSON"),
        (
            [rule(split=[{**C, "parameters": {"x": "y" * 20_000}}])],
            "rule 'r': split[0].parameters: is over",
        ),
        ([rule(split=[{**C, "parameters": {"x": nested(150)}}])], "rule 'r': split[0].parameters: has over 100 levels"),
        ([rule(split=[A1] * 101)], "rule 'r': split: at most 100 targets are taken"),
        ([rule(fallback=[A1] * 101)], "rule 'r': fallback: at most 100 targets are taken"),
        ([rule(sticky_by="cookie")], "rule 'r': sticky_by: must be one of request, tenant"),
        ([rule(enabled="yes")], "rule 'r': enabled: must be true or false"),
        ([rule("a"), rule("b", enabled=1)], "rule 'b': enabled: must be true or false"),
    ],
)
def test_a_refusal_names_the_rule_and_the_field(document, text):
    with pytest.raises(RuleError) as refused:
        parse_rules(document)
    assert str(refused.value).startswith(text)


def test_a_set_has_a_bound():
    with pytest.raises(RuleError, match="at most 1000"):
        parse_rules([rule(f"r{i}") for i in range(MAX_RULES + 1)])


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"match": {"task": "embd"}}, "rule 'r': match.task: unknown task 'embd' (did you mean 'embed'?)"),
        ({"split": [A1, {**B, "backend": "locl"}]}, "rule 'r': split[1].backend: unknown backend 'locl' (did you"),
        ({"fallback": [{**C, "backend": "x"}]}, "rule 'r': fallback[0].backend: unknown backend 'x'"),
    ],
)
def test_unknown_places_are_named(changed, text):
    rules = parse_rules([rule(**changed)])
    with pytest.raises(RuleError) as refused:
        check_targets(rules, backends=("triton", "local", "llm"), tasks=("embed",))
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"match": {"task": "embed", "model": "m"}},
            "rule 'r': match.model: callers of the task 'embed' name no model",
        ),
        ({"split": [A1, {**B, "model": "*"}]}, "rule 'r': split[1].model: callers of the task 'embed' name no model"),
        ({"fallback": [{**C, "model": "*"}]}, "rule 'r': fallback[0].model: callers of the task 'embed' name no"),
    ],
)
def test_models_that_no_caller_names_are_refused(changed, text):
    rules = parse_rules([rule(**changed)])
    with pytest.raises(RuleError) as refused:
        check_models(rules, naming=("tensor",))
    assert str(refused.value).startswith(text)
    check_models(rules, naming=("tensor", "embed"))


def test_known_places_and_the_star_pass():
    rules = parse_rules([rule(), rule("any", match={}, fallback=[B, C])])
    check_targets(rules, backends=("triton", "local", "llm"), tasks=("embed",))


def test_the_document_form_and_the_rules_are_inverse():
    documents = [
        rule("full", split=[{**A1, "weight": 9}, {**A2, "weight": 0}], fallback=[B, C], sticky_by="tenant"),
        rule("small", match={}, split=[B], strategy="ordered", enabled=False),
    ]
    before = copy.deepcopy(documents)
    rules = parse_rules(documents)
    assert documents == before
    assert parse_rules(rules_document(rules)) == rules
    assert rules_document(parse_rules(rules_document(rules))) == rules_document(rules)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "match", "split", "backend", "weight", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_document_is_taken_or_refused_as_rules(document):
    try:
        parse_rules(document)
    except RuleError as refused:
        assert str(refused)  # noqa: PT017 - the other outcome, being taken, is right as well


# --- planning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"task": "embed", "tenant": "t1"}, "both"),
        ({"task": "embed", "tenant": "t2"}, "task"),
        ({"task": "other", "tenant": "t1"}, "rest"),
    ],
)
def test_the_first_enabled_match_wins(asked, expected):
    rules = [
        rule("off", match={}, enabled=False),
        rule("both", match={"task": "embed", "tenant": "t1"}),
        rule("task"),
        rule("rest", match={"task": "*", "tenant": "*"}),
    ]
    made = planned(rules, **asked)
    assert (made.rule, made.revision) == (expected, 7)


def test_no_rule_takes_it():
    made = planned([rule()], task="other")
    assert (made.rule, made.candidates, made.revision) == ("", (), 7)


SPLIT = [{**A1, "weight": 90}, {**A2, "weight": 10}]


@pytest.mark.parametrize(
    ("draw", "first"),
    [(0.0, "triton/m:1"), (0.899, "triton/m:1"), (0.9, "triton/m:2"), (0.999999, "triton/m:2")],
)
def test_a_split_follows_the_draw_and_the_rest_stay_as_seconds(draw, first):
    made = planned([rule(split=SPLIT, fallback=[B])], draw=draw)
    assert names(made)[0] == first
    assert sorted(names(made)[:2]) == ["triton/m:1", "triton/m:2"]
    assert names(made)[2:] == ["local/m"]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5).filter(any), st.floats(0, 1, exclude_max=True))
def test_a_weight_of_zero_is_never_drawn(weights, draw):
    split = [{**B, "model": f"m{i}", "weight": w} for i, w in enumerate(weights)]
    chosen = {str(c) for c in planned([rule(split=split)], draw=draw).candidates}
    assert chosen == {f"local/m{i}" for i, w in enumerate(weights) if w}


def test_a_split_is_shared_by_weight():
    split = [{**A1, "weight": 3}, {**A2, "weight": 1}]
    firsts = Counter(names(planned([rule(split=split)], draw=i / 400))[0] for i in range(400))
    assert firsts == {"triton/m:1": 300, "triton/m:2": 100}


def test_sticky_tenants_keep_their_side_and_share_by_weight():
    rules = [rule(split=[{**A1, "weight": 1}, {**A2, "weight": 1}], sticky_by="tenant")]
    sides = {
        f"t{i}": {names(planned(rules, draw=draw, tenant=f"t{i}"))[0] for draw in (0.0, 0.4, 0.99)} for i in range(200)
    }
    assert all(len(side) == 1 for side in sides.values())
    counts = Counter(next(iter(side)) for side in sides.values())
    assert min(counts.values()) > 60


def test_ordered_ignores_the_draw():
    made = planned([rule(split=SPLIT, strategy="ordered", fallback=[C, B])], draw=0.99)
    assert names(made) == ["triton/m:1", "triton/m:2", "llm/big", "local/m"]


@pytest.mark.parametrize(
    ("down", "left"),
    [
        (("triton/m:1",), ["triton/m:2", "local/m", "llm/big"]),
        (("triton/m:1", "triton/m:2"), ["local/m", "llm/big"]),
        (("triton/m:1", "triton/m:2", "local/m"), ["llm/big"]),
    ],
)
def test_what_cannot_be_tried_is_skipped_with_its_reason(down, left):
    made = planned([rule(split=SPLIT, fallback=[B, C])], draw=0.5, down=down)
    assert names(made) == left
    assert refusals(made) == [f"{place}: down" for place in down]


def test_all_down_keeps_the_rule_and_the_reasons():
    made = planned([rule(fallback=[B])], down=("triton/m:1", "local/m"))
    assert (made.rule, made.candidates) == ("r", ())
    assert refusals(made) == ["triton/m:1: down", "local/m: down"]


def test_a_drained_target_of_the_split_is_told():
    made = planned([rule(split=[{**A1, "weight": 0}, A2])])
    assert names(made) == ["triton/m:2"]
    assert refusals(made) == ["triton/m:1: weight 0"]


def test_all_of_the_split_drained_goes_to_the_fallback():
    assert names(planned([rule(split=[{**A1, "weight": 0}], fallback=[B])])) == ["local/m"]


def test_a_fallback_that_is_in_the_split_too_is_tried_once():
    assert names(planned([rule(split=[A1, B], strategy="ordered", fallback=[B, C])])) == [
        "triton/m:1",
        "local/m",
        "llm/big",
    ]


def test_the_same_place_is_tried_once_whatever_its_weight_says():
    made = planned([rule(split=[{**B, "weight": 90}, {**A1, "weight": 10}], fallback=[B])])
    assert names(made) == ["local/m", "triton/m:1"]


# --- models that the caller names -----------------------------------------------------------------

STAR = {"backend": "triton", "model": "*"}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"model": "resnet"}, ["triton/resnet", "local/resnet"]),
        ({"model": "resnet", "version": "3"}, ["triton/resnet:3", "local/resnet:3"]),
    ],
)
def test_a_star_is_the_model_that_the_caller_names(asked, expected):
    made = planned([rule(split=[STAR], fallback=[{"backend": "local", "model": "*"}])], **asked)
    assert names(made) == expected


def test_a_star_leads_nowhere_for_a_caller_that_names_no_model():
    made = planned([rule(split=[STAR])])
    assert made.candidates == ()
    assert made.refusals[0][1] == "the request names no model"


def test_a_rule_for_one_model_stands_before_the_one_for_all():
    rules = [rule("one", match={"task": "embed", "model": "m"}, split=SPLIT), rule("all", split=[STAR])]
    assert planned(rules, model="m").rule == "one"
    assert planned(rules, model="other").rule == "all"
    assert planned(rules).rule == "all"


def test_the_version_that_the_caller_names_stands_above_the_splits():
    assert names(planned([rule(split=SPLIT)], model="m", version="2")) == ["triton/m:2"]


# --- replicas -------------------------------------------------------------------------------------

TWO = {"triton": {"a": 5, "b": 1}}


def test_of_two_replicas_the_less_loaded_is_first_and_the_other_its_second():
    for draw in (0.0, 0.3, 0.6, 0.99):
        made = planned([rule(fallback=[B])], loads=TWO, draw=draw)
        assert names(made) == ["triton/m:1@b", "triton/m:1@a", "local/m"]


def test_a_replica_that_is_down_is_refused_with_its_reason_and_the_other_serves():
    made = planned([rule()], loads=TWO, down=("triton/m:1@b",))
    assert names(made) == ["triton/m:1@a"]
    assert refusals(made) == ["triton/m:1@b: down"]


def test_a_target_without_a_healthy_replica_is_out_of_the_split():
    down = ("triton/m:1@a", "triton/m:1@b")
    assert names(planned([rule(split=[A1, B], strategy="ordered")], loads=TWO, down=down)) == ["local/m"]


def test_at_most_two_replicas_of_a_target_are_candidates():
    loads = {"triton": {f"r{i}": i for i in range(20)}}
    for draw in (0.0, 0.5, 0.99):
        made = planned([rule(fallback=[B])], loads=loads, draw=draw)
        assert len(made.candidates) == 3
        assert len(set(made.candidates)) == 3


def test_only_keeps_the_rule_and_one_place():
    made = planned([rule(fallback=[B])], loads=TWO)
    narrowed = only(made, made.candidates[1])
    assert (narrowed.rule, narrowed.candidates) == ("r", (made.candidates[1],))


# --- pools: places in the order that a strategy gives -----------------------------------------------


def pooled(rules, *, tokens: Mapping[str, int] = MappingProxyType({}), down: tuple[str, ...] = (), replicas=()):
    """The plan of a generative request, with so many tokens in flight at each place."""
    asked: list[Place] = []

    def option(place: Place) -> Option:
        asked.append(place)
        return Option(place=place, standing=Standing(tokens=tokens.get(str(place), 0)))

    state = State(
        why_not=lambda place: "down" if str(place) in down else None,
        loads=lambda backend: dict.fromkeys(replicas, 0) if backend == "llm" else {},
        draw=lambda: 0.0,
        pool=Pool(option=option, prefix=lambda: b""),
    )
    return plan_of(RuleSet(revision=7, rules=parse_rules(rules)), request(), state), asked


BIG, SMALL = C, {"backend": "llm", "model": "small"}


def test_a_strategy_orders_the_split_and_leaves_the_fallback_behind():
    made, _ = pooled(
        [rule(split=[BIG, SMALL], strategy="least_in_flight", fallback=[B])],
        tokens={"llm/big": 900, "llm/small": 10},
    )
    assert names(made) == ["llm/small", "llm/big", "local/m"]


def test_all_replicas_of_all_targets_are_weighed_and_those_that_are_down_are_not():
    made, asked = pooled(
        [rule(split=[BIG, SMALL], strategy="least_in_flight")],
        tokens={"llm/big@x": 5, "llm/big@y": 1, "llm/small@x": 3},
        replicas=("x", "y"),
        down=("llm/small@y",),
    )
    assert names(made) == ["llm/big@y", "llm/small@x", "llm/big@x"]
    assert len(asked) == 3
    assert refusals(made) == ["llm/small@y: down"]


def test_nothing_is_weighed_where_there_is_nothing_to_choose():
    made, asked = pooled([rule(split=[BIG], strategy="fastest", fallback=[SMALL])])
    assert names(made) == ["llm/big", "llm/small"]
    assert asked == []


def test_what_a_target_says_of_a_place_is_in_the_plan():
    target = {**BIG, "parameters": {"max_tokens": 50, "seed": None}, "context_tokens": 8000}
    made, _ = pooled([rule(split=[target], fallback=[SMALL], retries=2, hedge=True)])
    big, small = made.candidates
    assert (made.retries, made.hedge, made.context(big), made.context(small)) == (2, True, 8000, 0)
    given = OpenAIPayload(body={"messages": [], "seed": 7, "max_tokens": 9, "stop": None})
    assert made.payload_for(big, given).body == {"messages": [], "max_tokens": 50, "stop": None}
    assert made.payload_for(small, given) is given
    assert given.body["seed"] == 7


def test_names_in_parameters_are_texts_as_in_json():
    (only,) = parse_rules([rule(split=[{**BIG, "parameters": {"logit_bias": {50256: -100}}}])])
    assert only.split[0].parameters == {"logit_bias": {"50256": -100}}


def test_a_document_says_of_a_target_only_what_was_said():
    target = {**BIG, "weight": 1, "parameters": {"max_tokens": 50}, "context_tokens": 8000}
    (document,) = rules_document(parse_rules([rule(split=[target, {**SMALL, "weight": 1}], retries=1, hedge=True)]))
    assert document["split"] == [target, {**SMALL, "weight": 1}]
    assert (document["retries"], document["hedge"]) == (1, True)
    (plain,) = rules_document(parse_rules([rule()]))
    assert not {"retries", "hedge"} & plain.keys()


# --- rules that cannot work ------------------------------------------------------------------------


def test_a_rule_must_lead_to_backends_that_can_answer_its_task():
    kinds = {"triton": "tensors", "local": "tensors", "llm": "openai"}
    tasks = {"embed": frozenset({"tensors"}), "nlu": frozenset({"tensors", "openai"}), "chat": frozenset({"openai"})}

    def check(task, *targets):
        check_speech(parse_rules([rule(match={"task": task}, split=list(targets))]), backends=kinds, tasks=tasks)

    check("embed", A1)
    check("nlu", A1, C)
    check("chat", C)
    check("unheard-of", C)
    with pytest.raises(RuleError, match=r"split\[1\]\.backend: the task 'embed' cannot be answered by an LLM endpoint"):
        check("embed", A1, C)
    with pytest.raises(RuleError, match="cannot be answered by a model server such as 'triton'"):
        check("chat", A1)


def test_the_cheapest_needs_prices():
    rules = parse_rules([rule(split=[BIG, SMALL], strategy="cheapest", fallback=[C])])
    check_prices(rules, has_price=lambda _: True)
    with pytest.raises(RuleError, match="needs a price of 'small' on 'llm'"):
        check_prices(rules, has_price=lambda place: place.model != "small")
    check_prices(parse_rules([rule(split=[BIG, SMALL])]), has_price=lambda _: False)


# --- many replicas: two that are drawn may be enough ------------------------------------------------


ONE_RULE = RuleSet(revision=7, rules=parse_rules([rule()]))
MANY = ReplicaLoads([f"r{i}" for i in range(10)], lambda name: int(name[1:]) % 3)


def chance(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - no secret, and the same in every run


def of_many(rng: random.Random, *, down: frozenset[str], is_brief: bool, looked: list[Place] | None = None):
    """A plan over ten replicas whose loads are their numbers' rests by three."""

    def why_not(place: Place) -> str | None:
        if looked is not None:
            looked.append(place)
        return "down" if place.replica in down else None

    state = State(why_not=why_not, loads=lambda _: MANY, draw=rng.random, is_brief=is_brief)
    return plan_of(ONE_RULE, request(), state)


@pytest.mark.parametrize("down", [frozenset(), frozenset({"r0", "r4"}), frozenset(f"r{i}" for i in range(8))])
def test_two_that_are_drawn_first_are_as_likely_as_two_out_of_all(down: frozenset[str]):
    rounds, rng = 40_000, chance(5)
    drawn = Counter(of_many(rng, down=down, is_brief=True).candidates for _ in range(rounds))
    of_all = Counter(of_many(rng, down=down, is_brief=False).candidates for _ in range(rounds))
    assert drawn.keys() == of_all.keys()
    # The square of the difference of two such counts has their sum for its mean; chi-squared of so many degrees.
    pairs = list(drawn)
    chi_squared = sum((drawn[pair] - of_all[pair]) ** 2 / (drawn[pair] + of_all[pair]) for pair in pairs)
    assert chi_squared < len(pairs) + 5 * (2 * len(pairs)) ** 0.5


def test_of_many_that_are_well_only_two_are_looked_at():
    looked: list[Place] = []
    made = of_many(chance(1), down=frozenset(), is_brief=True, looked=looked)
    assert sorted(looked, key=str) == sorted(made.candidates, key=str)


def test_a_plan_that_is_not_brief_says_of_each_replica_why_not():
    down = frozenset({"r2", "r7"})
    assert refusals(of_many(chance(1), down=down, is_brief=False)) == [
        "triton/m:1@r2: down",
        "triton/m:1@r7: down",
    ]


@given(down=st.frozensets(st.integers(0, 9).map("r{}".format)), seed=st.integers(0, 99))
def test_a_brief_plan_finds_a_replica_wherever_there_is_one(down: frozenset[str], seed: int):
    made = of_many(chance(seed), down=down, is_brief=True)
    assert len(made.candidates) == min(2, 10 - len(down))
    assert not down & {place.replica for place in made.candidates}
    if len(down) == 10:
        assert len(made.refusals) == 10


def test_a_strategy_that_orders_all_replicas_sees_all_of_them():
    many = [f"r{i}" for i in range(10)]
    asked: list[Place] = []

    def option(place: Place) -> Option:
        asked.append(place)
        return Option(place=place, standing=Standing())

    state = State(
        why_not=lambda _: None,
        loads=lambda _: dict.fromkeys(many, 0),
        draw=lambda: 0.0,
        pool=Pool(option=option, prefix=lambda: b""),
        is_brief=True,
    )
    made = plan_of(RuleSet(revision=7, rules=parse_rules([rule(split=[C], strategy="fastest")])), request(), state)
    assert {place.replica for place in asked} == set(many)
    assert len(made.candidates) == 10


# --- plans that are the same for every request -----------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"split": [A1], "fallback": [B, C]}, True),
        ({"split": [A1, A2], "strategy": "ordered"}, True),
        ({"split": [{**A1, "weight": 1}, {**A2, "weight": 1}]}, False),
        ({"split": [A1, A2], "strategy": "least_in_flight"}, False),
    ],
)
def test_a_plan_is_settled_where_there_is_nothing_to_choose(fields: dict[str, Any], expected: bool):
    (one,) = parse_rules([rule(**fields)])
    assert is_settled(one, planned([rule(**fields)])) is expected


def test_no_plan_is_settled_whose_places_are_down_or_replicas():
    (one,) = parse_rules([rule(fallback=[C])])
    assert not is_settled(one, planned([rule(fallback=[C])], down=("llm/big",)))
    assert not is_settled(one, planned([rule()], loads={"triton": {"a": 0}}))
