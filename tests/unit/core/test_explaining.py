"""Why a request goes where it goes; and that what is told is what a worker does."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.headers import route_headers
from gateway.core import routing
from gateway.core.cost import parse_prices
from gateway.core.rate_limit import name_of
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.rules.matching import Circumstances
from gateway.core.strategies import Option
from gateway.core.switches import Scope, Switch, Switches
from gateway.core.types import Caller, InferenceRequest, Limit, Place, Route, Work
from gateway.core.watching.explaining import NO_RULE, Candidate, Explanation, World, explain, headers_of
from gateway.core.watching.worker_view import WorkerView, view_of

NOW_S = 1_800_000_000.0
A1 = {"backend": "triton", "model": "m", "version": "1", "weight": 90}
A2 = {"backend": "triton", "model": "m", "version": "2", "weight": 10}
LOCAL = {"backend": "local", "model": "m"}
BIG, SMALL = {"backend": "llm", "model": "big"}, {"backend": "llm2", "model": "small"}
REPORT: Mapping[str, Any] = {
    "at_ms": int(NOW_S * 1000),
    "replicas": {"triton": ["a", "b"], "local": [], "llm": [], "llm2": []},
    "in_flight": [["triton", "m", "1", "a", 3], ["triton", "other", "", "a", 1], ["local", "m", "", "", 2]],
    "standings": [["llm", "big", "", "", 2, 900, 84_000.0], ["llm2", "small", "", "", 1, 400, None]],
    "engines": [["llm", "", 2, 0, 0.5]],
}
PRICES = parse_prices({"prices": {"big": {"input": 2, "output": 4}}})


def request(**changes: Any) -> InferenceRequest:
    fields: dict[str, Any] = {"id": "", "task": "t", "input": None, "received_us": 0, "deadline_us": 1}
    return InferenceRequest(**{**fields, "caller": Caller(key_id="k", tenant="acme"), **changes})


def explained(
    rules: Sequence[Mapping[str, Any]] | None = None,
    *,
    report: Mapping[str, Any] = REPORT,
    switches: tuple[Switch, ...] = (),
    draw: float = 0.5,
    work: Work | None = None,
    **asked: Any,
) -> Explanation:
    parsed = parse_rules([{"name": "r", "split": [A1, A2], "fallback": [LOCAL]}] if rules is None else rules)
    rule_set = RuleSet(revision=7, rules=parsed, switches=Switches(revision=1, items=switches))
    at = Circumstances(now_s=lambda: NOW_S, input_tokens=lambda: asked.pop("tokens", None))
    world = World(view=view_of(report), draw=lambda: draw, work=work, prices=PRICES)
    return explain(rule_set, request(**asked), at, world)


def switch(action: str, kind: str, name: str = "", value: str = "", lasts_s: int = 60) -> Switch:
    now_ms = int(NOW_S * 1000)
    return Switch(
        id="s1",
        action=action,  # type: ignore[arg-type]  # the tests' own words
        scope=Scope(kind=kind, name=name),  # type: ignore[arg-type]  # the same
        reason="why",
        owner="me",
        created_ms=now_ms,
        expires_ms=now_ms + lasts_s * 1000,
        value=value,
    )


def at(found: Explanation, place: str) -> Candidate:
    return next(one for one in found.candidates if str(one.place) == place)


def ranks(found: Explanation) -> dict[str, int | None]:
    return {str(one.place): one.rank for one in found.candidates}


# --- rules ---------------------------------------------------------------------------------------


def test_the_rules_are_told_up_to_the_one_that_takes_it() -> None:
    rules = [
        {"name": "off", "split": [LOCAL], "enabled": False},
        {"name": "canary", "match": {"headers": {"x-canary": "yes"}}, "split": [LOCAL]},
        {"name": "mine", "match": {"tenant": "ac*"}, "split": [LOCAL]},
        {"name": "rest", "split": [LOCAL]},
    ]
    found = explained(rules)
    assert [(one.rule, one.matched, one.why) for one in found.looked] == [
        ("off", False, "is switched off"),
        ("canary", False, "match.headers.x-canary is 'yes', the request has none"),
        ("mine", True, "takes it"),
    ]
    assert found.rule is not None
    assert found.rule.name == "mine"


def test_without_a_rule_nobody_answers() -> None:
    found = explained([{"name": "other", "match": {"task": "u"}, "split": [LOCAL]}])
    assert (found.rule, found.refused, found.candidates, found.taken) == (None, NO_RULE, (), None)
    assert headers_of(found) == {}


# --- places --------------------------------------------------------------------------------------


def test_a_weighted_split_is_told_with_its_weights_and_replicas() -> None:
    found = explained()
    assert ranks(found) == {
        "triton/m:1@a": 2,
        "triton/m:1@b": 1,
        "triton/m:2@a": 4,
        "triton/m:2@b": 3,
        "local/m": 5,
    }
    first, second = at(found, "triton/m:1@b"), at(found, "triton/m:1@a")
    assert (first.side, first.score) == ("split[0]", "weight 90 of 100; 0 requests in flight")
    assert first.reason.startswith("taken: the side on which chance falls")
    assert second.score == "weight 90 of 100; 4 requests in flight"
    assert second.reason == "would be tried as number 2, if those before it fail"
    assert at(found, "local/m").score == "fallback[0], in the written order; 2 requests in flight"


def test_chance_may_fall_on_the_other_side() -> None:
    found = explained(draw=0.95)
    assert str(found.taken).startswith("triton/m:2@")


def test_of_many_replicas_two_are_drawn() -> None:
    report = {**REPORT, "replicas": {"triton": ["a", "b", "c"]}}
    found = explained([{"name": "r", "split": [A1]}], report=report)
    left = [one for one in found.candidates if one.rank is None]
    assert len(left) == 1
    assert left[0].reason == "not among the two of its replicas that were drawn"


def test_a_sticky_split_tells_the_hash() -> None:
    rules = [{"name": "r", "split": [A1, A2], "sticky_by": "tenant"}]
    found = {explained(rules, draw=draw).taken for draw in (0.0, 0.3)}
    assert len({(place.model, place.version) for place in found if place}) == 1
    reason = next(one.reason for one in explained(rules).candidates if one.rank == 1)
    assert "the hash of its tenant falls" in reason
    assert reason.endswith("always the same")


def test_a_place_that_is_shut_says_why() -> None:
    shut = [["triton", "m", "1", "a", "its circuit is open: timeout"], ["triton", "*", "", "b", "nobody answers"]]
    found = explained(report={**REPORT, "shut": shut})
    assert at(found, "triton/m:1@a").reason == "its circuit is open: timeout"
    assert at(found, "triton/m:1@b").reason == "nobody answers"
    assert ranks(found)["triton/m:2@a"] == 1
    assert at(found, "triton/m:2@a").reason == "taken: the only side that may be tried"


def test_a_backend_that_is_off_and_a_weight_of_nothing() -> None:
    report = {**REPORT, "replicas": {"local": []}}
    found = explained([{"name": "r", "split": [A1, {**A2, "weight": 0}], "fallback": [LOCAL]}], report=report)
    assert at(found, "triton/m:1").reason == routing.BACKEND_OFF
    assert at(found, "triton/m:2").reason == "weight 0"
    assert at(found, "local/m").reason == "taken: the first fallback that may be tried, as no place of the split may"


def test_the_same_place_twice_stands_once() -> None:
    found = explained([{"name": "r", "split": [LOCAL], "fallback": [LOCAL]}])
    assert [(one.side, one.rank, one.reason) for one in found.candidates] == [
        ("split[0]", 1, "taken: the only place that may be tried"),
        ("fallback[0]", None, "stands above as split[0]"),
    ]


def test_a_worker_that_never_reported_is_taken_to_have_all_backends() -> None:
    found = explained(report={})
    assert ranks(found) == {"triton/m:1": 1, "triton/m:2": 2, "local/m": 3}


def test_a_model_that_the_caller_names() -> None:
    rules = [{"name": "r", "split": [{"backend": "local", "model": "*"}]}]
    assert str(explained(rules, model="mine", version="4").taken) == "local/mine:4"
    assert explained(rules).candidates[0].reason == "the request names no model"


@pytest.mark.parametrize(
    ("strategy", "taken", "score", "reason"),
    [
        ("least_in_flight", "llm2/small", "1 requests in flight, 400 tokens", "the fewest tokens in flight"),
        ("fastest", "llm2/small", "1 requests in flight, 400 tokens, not measured", "the shortest time"),
        (
            "cheapest",
            "llm/big",
            "2 requests in flight, 900 tokens, its engine runs 2 and has 0 waiting, 0.000400 USD expected",
            "the lowest expected cost",
        ),
        (
            "prefix_affinity",
            "llm2/small",
            "1 requests in flight, 400 tokens",
            "the fewest tokens in flight; the prompt",
        ),
        ("ordered", "llm/big", "2 requests in flight", "the first in the written order"),
    ],
)
def test_what_each_strategy_looks_at(strategy: str, taken: str, score: str, reason: str) -> None:
    rules = [{"name": "r", "split": [BIG, SMALL], "strategy": strategy}]
    found = explained(rules, work=Work(input_tokens=100, output_tokens=50))
    assert str(found.taken) == taken
    first = at(found, taken)
    assert first.score.endswith(f"; {score}")
    assert first.reason.startswith(f"taken: {reason}")


def test_what_is_measured_and_what_has_no_price_is_told() -> None:
    work = Work(input_tokens=100, output_tokens=50)
    found = explained([{"name": "r", "split": [BIG, SMALL], "strategy": "fastest"}], work=work)
    assert at(found, "llm/big").score.endswith("first token after 84 ms")
    found = explained([{"name": "r", "split": [BIG, SMALL], "strategy": "cheapest"}], work=work)
    assert at(found, "llm2/small").score.endswith("no price")


# --- switches, keys, limits ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "taken"),
    [
        (switch("force_backend", "tenant", "acme", value="local"), "local/m"),
        (switch("force_fallback", "everything"), "local/m"),
        (switch("drain", "replica", "triton@b"), "triton/m:1"),
        (switch("block", "model", "m:1"), "triton/m:2"),
        (switch("block", "backend", "triton"), "local/m"),
        (switch("block", "backend", "triton", lasts_s=0), "triton/m:1"),
        (switch("force_backend", "tenant", "other", value="local"), "triton/m:1"),
    ],
)
def test_switches_move_it(one: Switch, taken: str) -> None:
    found = explained(switches=(one,), draw=0.0)
    assert found.refused == ""
    assert str(found.taken).partition("@")[0] == taken


def test_a_switch_that_concerns_it_is_told() -> None:
    drain = switch("drain", "backend", "local")
    found = explained(switches=(drain, switch("block", "tenant", "other"), switch("freeze", "everything")))
    assert found.switches == (drain,)
    assert at(found, "local/m").reason == "closed by switch s1 (drain backend local)"
    forced = explained(switches=(switch("force_fallback", "task", "t"),))
    assert at(forced, "local/m").reason == "taken: sent there by switch s1 (force_fallback task t)"
    assert at(forced, "triton/m:1").reason == "requests are sent to the fallbacks by switch s1 (force_fallback task t)"


def test_a_block_refuses_it_and_the_places_are_told_all_the_same() -> None:
    found = explained(switches=(switch("block", "key", "k"),))
    assert found.refused == "refused by switch s1 (block key k)"
    assert found.taken is None
    assert ranks(found)["local/m"] == 5


@pytest.mark.parametrize(
    ("rights", "asked", "refused"),
    [
        ({"tasks": frozenset({"u"})}, {}, "the key 'k' may not use the task 't'"),
        ({"models": frozenset({"x"})}, {"model": "m"}, "the key 'k' may not name the model 'm'"),
        ({"models": frozenset({"x"})}, {}, ""),
    ],
)
def test_what_a_key_may(rights: dict[str, Any], asked: dict[str, Any], refused: str) -> None:
    caller = Caller(key_id="k", tenant="acme", **rights)
    assert explained(caller=caller, **asked).refused == refused


def test_the_limits_of_its_key_and_of_its_rule() -> None:
    limits = (
        Limit(kind="requests", amount=60, per="minute", burst=60),
        Limit(kind="requests", amount=5, per="second", burst=5, task="u"),
    )
    rules = [{"name": "r", "split": [LOCAL], "limits": [{"requests": 9, "per": "hour"}]}]
    found = explained(rules, caller=Caller(key_id="k", tenant="acme", limits=limits))
    assert {(take.limit.rule, name_of(take.limit)) for take in found.limits} == {
        ("", "60 requests per minute"),
        ("r", name_of(found.limits[-1].limit)),
    }


def test_the_headers_are_those_that_an_answer_bears() -> None:
    found = explained()
    route = Route(backend="triton", model="m", version="1", rule="r", attempts=1, replica="b")
    assert headers_of(found) == route_headers(route)


# --- the same as a worker ------------------------------------------------------------------------

_targets = st.builds(
    lambda backend, model, weight: {"backend": backend, "model": model, "weight": weight},
    st.sampled_from(("triton", "local", "llm", "off")),
    st.sampled_from(("m", "*")),
    st.integers(0, 3),
)
_rules = st.builds(
    lambda split, fallback, strategy, sticky_by: {
        "name": "r",
        "split": [*split, {**LOCAL, "weight": 1}],
        "fallback": [{**target, "weight": 1} for target in fallback],
        "strategy": strategy,
        "sticky_by": sticky_by if strategy == "weighted" else "request",
    },
    st.lists(_targets, max_size=3),
    st.lists(_targets, max_size=2),
    st.sampled_from(("weighted", "ordered", "least_in_flight", "fastest", "cheapest", "prefix_affinity")),
    st.sampled_from(("request", "tenant", "session")),
)
_switches = st.lists(
    st.sampled_from(
        (
            switch("force_backend", "everything", value="local"),
            switch("force_fallback", "tenant", "acme"),
            switch("drain", "replica", "triton@a"),
            switch("block", "backend", "llm"),
            switch("block", "model", "m"),
        )
    ),
    max_size=2,
)
_shut = st.lists(
    st.sampled_from(
        (["triton", "*", "", "a", "away"], ["triton", "m", "", "b", "open"], ["local", "m", "", "", "open"])
    ),
    max_size=3,
)


@given(rule=_rules, switches=_switches, shut=_shut, draw=st.sampled_from((0.0, 0.3, 0.5, 0.99)), is_llm=st.booleans())
def test_what_is_told_is_what_a_worker_does(
    rule: dict[str, Any], switches: list[Switch], shut: list[list[str]], draw: float, *, is_llm: bool
) -> None:
    work = Work(input_tokens=10, output_tokens=10) if is_llm else None
    report = {**REPORT, "shut": shut}
    asked = {"model": "m", "session": "s"}
    found = explained([rule], report=report, switches=tuple(switches), draw=draw, work=work, **asked)
    plan = _worker_plan(rule, report, tuple(switches), draw, is_llm=is_llm)
    assert found.plan is not None
    assert found.plan.candidates == plan.candidates
    assert found.plan.refusals == plan.refusals
    ranked = sorted((one for one in found.candidates if one.rank), key=lambda one: one.rank or 0)
    assert tuple(one.place for one in ranked) == plan.candidates
    told = [(one.place, one.reason) for one in found.candidates if (one.place, one.reason) in plan.refusals]
    assert len(told) == len(plan.refusals)


def _worker_plan(
    rule: dict[str, Any], report: Mapping[str, Any], switches: tuple[Switch, ...], draw: float, *, is_llm: bool
) -> routing.Plan:
    """As `pipeline` makes it, out of the same state."""
    view: WorkerView = view_of(report)
    above, now_ms = Switches(items=switches), int(NOW_S * 1000)

    def why_not(place: Place) -> str | None:
        closing = above.closing(place, now_ms)
        return f"closed by {closing}" if closing else view.why_not(place)

    def option(place: Place) -> Option:
        price = PRICES.of(place.backend, place.model)
        return Option(
            place=place,
            standing=view.standing(place),
            engine=view.engines.get((place.backend, place.replica)),
            expected_nano_usd=None if price is None else 60_000,
        )

    asked = request(model="m", session="s")
    state = routing.State(
        why_not=why_not,
        loads=view.loads,
        draw=lambda: draw,
        pool=routing.Pool(option=option, prefix=lambda: b"") if is_llm else None,
        forced=above.forced(asked, now_ms),
    )
    return routing.plan_by(parse_rules([rule])[0], 7, asked, state)


def test_a_report_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="shut"):
        view_of({"shut": [["too", "short"]]})
    assert replace(view_of({}), at_ms=0) == WorkerView()
