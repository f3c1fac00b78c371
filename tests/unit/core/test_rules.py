"""Documents of rules, and which rule takes a request."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.rules import Match, Rule, RuleSet, Target, TimeWindow, check_shared_limits, check_speech, parse_rules
from gateway.core.rules import rules_document as written
from gateway.core.rules.fields import RuleError
from gateway.core.rules.matching import NOWHERE, Circumstances, RuleTable, is_within, why_not
from gateway.core.types import Caller, InferenceRequest

MONDAY_NOON = 1_700_481_600.0  # 2023-11-20 12:00 UTC
HOUR = 3600
TARGET = {"backend": "triton", "model": "m", "weight": 1}

WHOLE = {
    "name": "whole",
    "match": {
        "task": "chat",
        "tenant": "acme-*",
        "model": "*",
        "key": "k1",
        "priority": "batch",
        "min_input_tokens": 1,
        "max_input_tokens": 4000,
        "max_input_bytes": 10_000,
        "headers": {"x-beta": "1", "user-agent": "curl*"},
        "times": [{"days": ["mon", "fri"], "from": "22:00", "to": "06:30", "timezone": "Asia/Seoul"}],
    },
    "split": [TARGET],
    "strategy": "weighted",
    "sticky_by": "session",
    "fallback": [],
    "shadow": {"backend": "local", "model": "m", "percent": 5, "compare": True},
    "guard": {"max_error_ratio": 0.02, "max_p99_ms": 250, "min_requests": 200, "window_s": 60},
    "timeout_ms": 9000,
    "attempt_timeout_ms": 800,
    "limits": [
        {"requests": 5, "per": "second"},
        {"tokens": 100, "per": "minute", "burst": 10, "shared_by": "tenant"},
        {"usd": 1.5, "per": "day", "model": "big"},
        {"concurrent": 4, "priority": "batch", "shared_by": "key"},
    ],
    "enabled": True,
}


def rule(name: str = "r", **match: Any) -> Rule:
    return Rule(name=name, match=Match(**match), split=(Target(backend="b", model="m"),))


def request(**fields: Any) -> InferenceRequest:
    caller = Caller(key_id=fields.pop("key", "k1"), tenant=fields.pop("tenant", "acme-1"))
    told = {"id": "i", "task": "chat", "input": None, "received_us": 0, "deadline_us": 1, **fields}
    return InferenceRequest(caller=caller, **told)


def at(now_s: float = MONDAY_NOON, tokens: int | None = 10) -> Circumstances:
    return Circumstances(now_s=lambda: now_s, input_tokens=lambda: tokens)


# --- documents ------------------------------------------------------------------------------------


def test_a_whole_rule_is_read_and_written_again():
    (read,) = parse_rules([WHOLE])
    assert written([read]) == [WHOLE]
    assert parse_rules(written([read])) == (read,)
    assert {limit.rule for limit in read.limits} == {"whole"}
    assert [limit.amount for limit in read.limits] == [5, 100, 1_500_000_000, 4]


def test_what_is_not_said_is_not_written():
    plain = {"name": "r", "match": {"task": "chat"}, "split": [TARGET]}
    (document,) = written(parse_rules([plain]))
    assert set(document) == {"name", "match", "split", "strategy", "sticky_by", "fallback", "enabled"}
    assert document["match"] == {"task": "chat", "tenant": "*", "model": "*"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"match": {"tenant": "(["}}, "match.tenant: must be a name"),
        ({"match": {"tenant": "(a+)+$"}}, "match.tenant: must be a name"),
        ({"match": {"tenant": "a*b"}}, "match.tenant: must be a name"),
        ({"match": {"tenant": "**"}}, "match.tenant: must be a name"),
        ({"match": {"priority": "urgent"}}, "match.priority: must be one of *, interactive, batch"),
        ({"match": {"headers": {"Authorization": "Bearer x"}}}, "match.headers.authorization: holds a secret"),
        ({"match": {"headers": {"x beta": "1"}}}, "match.headers: 'x beta' is not the name of a header"),
        ({"match": {"headers": {"x-beta": 1}}}, 'match.headers.x-beta: must be a text: "1"'),
        ({"match": {"headers": {"x-beta": True}}}, 'match.headers.x-beta: must be a text: "true"'),
        ({"match": {"headers": {"X-B": "1", "x-b": "2"}}}, "match.headers.x-b: is there twice"),
        ({"match": {"headers": {f"x-{i}": "1" for i in range(9)}}}, "match.headers: at most 8"),
        ({"match": {"min_input_tokens": 5, "max_input_tokens": 4}}, "match.min_input_tokens: is above"),
        ({"match": {"max_input_bytes": -1}}, "match.max_input_bytes: must be a whole number"),
        ({"match": {"times": {}}}, "match.times: must be a list"),
        ({"match": {"times": [{"from": "25:00"}]}}, "match.times[0].from: must be a time of the day"),
        ({"match": {"times": [{"to": "24:01"}]}}, "match.times[0].to: must be a time of the day"),
        ({"match": {"times": [{"days": ["monday"]}]}}, "match.times[0].days[0]: must be one of mon"),
        ({"match": {"times": [{"days": []}]}}, "match.times[0].days: at least one"),
        ({"match": {"times": [{"timezone": "Mars/Base"}]}}, "match.times[0].timezone: must be an IANA name"),
        ({"match": {"times": [{"timezone": "../etc/passwd"}]}}, "match.times[0].timezone: must be an IANA name"),
        ({"match": {"times": [{"timezone": "Asia"}]}}, "match.times[0].timezone: must be an IANA name"),
        ({"match": {"times": [{"timezone": 3}]}}, "match.times[0].timezone: must be an IANA name"),
        ({"match": {"times": [{"form": "09:00"}]}}, "match.times[0]: unknown field 'form' (did you mean 'from'?)"),
        ({"shadow": {"backend": "b", "model": "m", "percent": 0}}, "shadow.percent: must be above 0"),
        ({"shadow": {"backend": "b", "model": "m", "percent": 101}}, "shadow.percent: must be a number from 0 to 100"),
        ({"shadow": {"backend": "b"}}, "shadow.model: must be a name"),
        ({"shadow": {"backend": "b", "model": "m", "weight": 1}}, "shadow: unknown field 'weight'"),
        ({"guard": {"min_requests": 3}}, "guard: one of max_error_ratio"),
        ({"guard": {"max_error_ratio": 2}}, "guard.max_error_ratio: must be a number from 0 to 1"),
        ({"guard": {"max_p99_ms": 0}}, "guard.max_p99_ms: must be a whole number from 1"),
        ({"guard": {"max_p99_ms": 1, "window_s": 1}}, "guard.window_s: must be a whole number from 5"),
        ({"guard": {"max_eror_ratio": 1}}, "guard: unknown field 'max_eror_ratio' (did you mean 'max_error_ratio'?)"),
        ({"timeout_ms": -1}, "timeout_ms: must be a whole number"),
        ({"limits": [{"requests": 5}]}, "limits[0].per: must be one of second"),
        ({"limits": [{"requests": 5, "tokens": 1, "per": "day"}]}, "limits[0]: give one of requests"),
        ({"limits": [{"concurrent": 5, "per": "day"}]}, "limits[0].per: `concurrent` has no period"),
        ({"limits": [{"usd": 5, "per": "hour"}]}, "limits[0].per: must be one of day, month"),
        ({"limits": [{"usd": 5, "per": "day", "burst": 1}]}, "limits[0].burst: `usd` has no burst"),
        ({"limits": [{"requests": 1, "per": "day", "burst": 10**9}]}, "limits[0].burst: is too large"),
        ({"limits": [{"requests": 1, "per": "day", "task": "x"}]}, "limits[0]: unknown field 'task'"),
        ({"limits": [{"requests": 1, "per": "day"}] * 17}, "limits: at most 16"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], text: str):
    with pytest.raises(RuleError) as refused:
        parse_rules([{"name": "r", "match": {}, "split": [TARGET], **fields}])
    assert str(refused.value).startswith(f"rule 'r': {text}")


@pytest.mark.parametrize(
    "name",
    [
        *("X-Api-Key", "api-key", "apikey", "x-goog-api-key", "cookie", "set-cookie", "proxy-authorization"),
        *("sec-websocket-protocol", "x-auth-token", "x-amz-security-token", "x-csrf-token", "client_secret", "x-jwt"),
    ],
)
def test_no_rule_matches_on_a_secret(name):
    """The request log keeps what rules match on; of browsers' WebSockets a key stands among the protocols."""
    with pytest.raises(RuleError, match="holds a secret"):
        parse_rules([{"name": "r", "match": {"headers": {name: "x*"}}, "split": [TARGET]}])


def test_what_is_no_secret_may_be_matched_on_and_set():
    names = ("x-beta", "x-max-tokens", "idempotency-key", "x-routing-key", "user-agent")
    for name in names:
        parse_rules([{"name": "r", "match": {"headers": {name: "x*"}}, "split": [TARGET]}])
    fields = {"max_tokens": 5, "stop_token_ids": [1], "logit_bias": {"token": 1}, "api_key": None}
    parse_rules([{"name": "r", "match": {}, "split": [{**TARGET, "parameters": fields}]}])


def test_a_bare_time_in_yaml_is_a_number_of_minutes():
    (read,) = parse_rules([{"name": "r", "match": {"times": [{"from": 1050, "to": "18:00"}]}, "split": [TARGET]}])
    assert read.match.times[0].from_min == 17 * 60 + 30


def test_tokens_are_counted_only_where_an_llm_can_answer():
    with pytest.raises(RuleError, match="use min_input_bytes"):
        check_speech([rule(task="embed", max_input_tokens=5)], backends={}, tasks={"embed": frozenset(("tensors",))})


def test_a_limit_that_all_share_is_refused_where_counters_do_not_lie_together():
    (read,) = parse_rules([{**WHOLE, "limits": [{"requests": 1, "per": "day"}]}])
    with pytest.raises(RuleError, match=r"limits\[0\].shared_by"):
        check_shared_limits([read])
    check_shared_limits([replace(read, limits=(replace(read.limits[0], shared_by="tenant"),))])


# --- matching ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "asked", "word"),
    [
        ({"task": "chat"}, {}, ""),
        ({"task": "embed"}, {}, "task"),
        ({"tenant": "acme-*"}, {}, ""),
        ({"tenant": "acme-*"}, {"tenant": "acme"}, "tenant"),
        ({"tenant": "acme-1"}, {}, ""),
        ({"key": "k2"}, {}, "key"),
        ({"model": "m*"}, {"model": "minilm"}, ""),
        ({"model": "m*"}, {"model": ""}, "model"),
        ({"priority": "batch"}, {}, "priority"),
        ({"priority": "batch"}, {"priority": "batch"}, ""),
        ({"headers": {"x-beta": "1"}}, {"headers": {"x-beta": "1"}}, ""),
        ({"headers": {"x-beta": "1"}}, {"headers": {"x-beta": "10"}}, "headers.x-beta"),
        ({"headers": {"x-beta": "1*"}}, {"headers": {"x-beta": "10"}}, ""),
        ({"headers": {"x-beta": "*"}}, {"headers": {"x-beta": ""}}, ""),
        ({"headers": {"x-beta": "*"}}, {}, "headers.x-beta"),
        ({"max_input_tokens": 10}, {}, ""),
        ({"max_input_tokens": 9}, {}, "max_input_tokens"),
        ({"min_input_tokens": 11}, {}, "min_input_tokens"),
        ({"max_input_bytes": 5}, {"input_bytes": 5}, ""),
        ({"max_input_bytes": 5}, {"input_bytes": 6}, "max_input_bytes"),
        ({"min_input_bytes": 5}, {"input_bytes": 4}, "min_input_bytes"),
        ({"times": (TimeWindow(from_min=11 * 60, to_min=12 * 60),)}, {}, "times"),
        ({"times": (TimeWindow(from_min=12 * 60, to_min=13 * 60),)}, {}, ""),
    ],
)
def test_a_rule_takes_what_fits_every_field(match: dict[str, Any], asked: dict[str, Any], word: str):
    one, made = rule(**match), request(**asked)
    reason = why_not(one.match, made, at())
    assert (reason or "") == "" if not word else f"match.{word}" in str(reason)
    assert RuleSet(revision=1, rules=(one,)).rule_of(made, at()) is (None if word else one)


def test_a_task_without_tokens_fits_no_bound_of_them():
    assert why_not(Match(max_input_tokens=5), request(), at(tokens=None))


def test_a_value_of_a_header_is_not_told():
    assert "secret" not in str(why_not(Match(headers={"x-a": "1"}), request(headers={"x-a": "secret"}), at()))


@pytest.mark.parametrize(
    ("window", "hours", "fits"),
    [
        (TimeWindow(days=(0,)), 0, True),
        (TimeWindow(days=(1,)), 0, False),
        (TimeWindow(days=(1,)), 12, True),
        (TimeWindow(from_min=720, to_min=721), 0, True),
        (TimeWindow(from_min=0, to_min=720), 0, False),
        (TimeWindow(from_min=22 * 60, to_min=6 * 60), 11, True),  # Monday 23:00
        (TimeWindow(from_min=22 * 60, to_min=6 * 60, days=(0,)), 17, True),  # Tuesday 05:00, Monday's night
        (TimeWindow(from_min=22 * 60, to_min=6 * 60, days=(1,)), 17, False),
        (TimeWindow(from_min=22 * 60, to_min=6 * 60), 18, False),  # Tuesday 06:00
        (TimeWindow(from_min=21 * 60, to_min=22 * 60, timezone="Asia/Seoul"), 0, True),
        (TimeWindow(from_min=7 * 60, to_min=8 * 60, timezone="America/New_York"), 0, True),
    ],
)
def test_a_window_of_the_week(window: TimeWindow, hours: int, *, fits: bool):
    assert is_within(window, MONDAY_NOON + hours * HOUR) is fits


def test_nothing_is_asked_that_no_rule_needs():
    def never() -> Any:
        raise AssertionError

    circumstances = Circumstances(now_s=never, input_tokens=never)
    one = rule(headers={"x-a": "1"})
    assert RuleSet(revision=1, rules=(one,)).rule_of(request(headers={"x-a": "1"}), circumstances) is one


NAMES = st.sampled_from(("*", "a", "b", "ab", "a*"))
MATCHES = st.builds(
    Match,
    task=st.sampled_from(("*", "chat", "embed")),
    tenant=NAMES,
    key=NAMES,
    model=NAMES,
    priority=st.sampled_from(("*", "interactive", "batch")),
    headers=st.dictionaries(st.sampled_from(("x-a", "x-b")), NAMES, max_size=2),
    max_input_bytes=st.sampled_from((0, 5)),
)
REQUESTS = st.builds(
    request,
    task=st.sampled_from(("chat", "embed", "other")),
    tenant=st.sampled_from(("a", "b", "ab")),
    key=st.sampled_from(("a", "b")),
    model=st.sampled_from(("", "a", "ab")),
    priority=st.sampled_from(("interactive", "batch")),
    headers=st.dictionaries(st.sampled_from(("x-a", "x-b")), st.sampled_from(("a", "b", "ab")), max_size=2),
    input_bytes=st.integers(0, 9),
)


@given(st.lists(st.tuples(MATCHES, st.booleans()), max_size=8), st.lists(REQUESTS, min_size=1, max_size=8))
def test_the_table_finds_the_first_rule_that_a_look_through_all_of_them_finds(matches, requests):
    rules = [replace(rule(f"r{i}"), match=match, enabled=on) for i, (match, on) in enumerate(matches)]
    table = RuleTable(rules)
    for made in requests:
        first = next((one for one in rules if one.enabled and why_not(one.match, made, NOWHERE) is None), None)
        assert table.find(made, NOWHERE) is first


def test_callers_that_name_many_models_fill_no_memory():
    table = RuleTable([rule(model="m*"), rule("all")])
    for i in range(10_000):
        table.find(request(model=f"m{i}"), NOWHERE)
    assert len(table._memo) <= 4096
