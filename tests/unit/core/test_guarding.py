"""What a guard makes of figures."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.rollouts.guarding import (
    ENOUGH_COMPARED,
    ENOUGH_TIMES,
    canaries,
    canary_out,
    conduct,
    figures_of,
    judge,
    others_of,
)
from gateway.core.rules import Guard, Rule, parse_rules
from gateway.core.watching.figures import STEP, Series, Tally, step_of

MS = 1000


def rule(*split: tuple[str, int], **fields: Any) -> Rule:
    """`backend/model:version` and weight of each target."""
    return parse_rules([{"name": "r", "split": [target(*one) for one in split], **fields}])[0]


def target(place: str, weight: int = 1) -> dict[str, Any]:
    backend, _, model = place.partition("/")
    model, _, version = model.partition(":")
    return {"backend": backend, "model": model, "version": version, "weight": weight}


def times(*counts: tuple[int, int]) -> dict[int, int]:
    """Of `count` answers that took so many milliseconds."""
    return {step_of(ms * MS): count for ms, count in counts}


def answered(count: int, ms: int = 10, **fields: Any) -> Tally:
    return Tally(**{"requests": count, "attempts": count, "whole": times((ms, count)), **fields})


def guard(**bounds: Any) -> Guard:
    return Guard(**{"min_requests": 200, **bounds})


BREACHES = {
    "errors": (
        guard(max_error_ratio=0.02),
        answered(195, attempts=200, failed_attempts=5),
        answered(1000, failed_attempts=3),
        "error ratio 0.025 is above 0.02 (200 requests; the others: 0.003)",
    ),
    "errors of what had begun to answer": (
        guard(max_error_ratio=0.02),
        answered(200, errors=6),
        None,
        "error ratio 0.03 is above 0.02 (200 requests)",
    ),
    "slow answers": (
        guard(max_p99_ms=250),
        answered(197, whole=times((10, 190), (900, 7)), attempts=200),
        answered(1000, ms=40),
        "p99 of at least 830 ms is above 250 ms (197 answers; the others: 39 ms)",
    ),
    "slow first tokens": (
        guard(max_first_token_ms=100),
        answered(200, first_token=times((10, 95), (400, 5))),
        None,
        "p99 of the first token of at least 387 ms is above 100 ms (100 streamed answers)",
    ),
    "violations": (
        guard(max_violation_ratio=0.0),
        answered(200, violations=1, failed_attempts=1),
        None,
        "violation ratio 0.005 is above 0 (200 requests)",
    ),
    "disagreement": (
        guard(max_disagreement=0.1),
        answered(200, agreed=40, disagreed=10),
        answered(200, agreed=50),
        "disagreement 0.2 is above 0.1 (50 comparisons; the others: 0)",
    ),
}


@pytest.mark.parametrize("case", BREACHES)
def test_a_breach_is_told_with_its_numbers(case):
    bounds, canary, baseline, words = BREACHES[case]
    verdict = judge(bounds, canary, baseline)
    assert verdict.breach == words
    assert verdict.is_enough


def test_two_breaches_are_both_told():
    verdict = judge(guard(max_error_ratio=0.0, max_violation_ratio=0.0), answered(300, violations=3, failed_attempts=3))
    assert verdict.breach.split("; ") == [
        "error ratio 0.01 is above 0 (300 requests)",
        "violation ratio 0.01 is above 0 (300 requests)",
    ]


def test_below_the_least_number_of_requests_nothing_is_judged():
    everything = guard(max_error_ratio=0.0, max_p99_ms=1, max_violation_ratio=0.0)
    broken = Tally(attempts=199, failed_attempts=199, violations=199)
    assert judge(everything, broken).breach == ""
    assert judge(everything, broken).lacks == "199 of 200 requests seen"
    assert judge(everything, Tally()).lacks == "0 of 200 requests seen"
    broken.add(Tally(attempts=1, failed_attempts=1, violations=1))
    assert judge(everything, broken).breach.startswith("error ratio 1 is above 0 (200 requests)")


def test_each_measure_needs_enough_of_its_own_kind():
    bounds = guard(max_first_token_ms=5, max_disagreement=0.0, max_p99_ms=1000)
    canary = answered(400, first_token=times((900, ENOUGH_TIMES - 1)), disagreed=ENOUGH_COMPARED - 1)
    verdict = judge(bounds, canary)
    assert verdict.breach == ""
    assert verdict.lacks == "49 of 50 comparisons seen, 99 of 100 streamed answers seen"
    canary.add(Tally(first_token=times((900, 1)), disagreed=1))
    assert judge(bounds, canary).is_enough
    assert judge(bounds, canary).breach


def test_a_guard_that_asks_for_few_gets_by_with_few():
    verdict = judge(guard(max_p99_ms=100, max_disagreement=0.5, min_requests=5), answered(5, ms=900, disagreed=5))
    assert verdict.is_enough
    assert "p99" in verdict.breach
    assert "disagreement" in verdict.breach


@given(ms=st.integers(1, 60_000), bound=st.integers(1, 60_000))
def test_the_histograms_coarseness_breaks_no_bound(ms, bound):
    breach = judge(guard(max_p99_ms=bound), answered(200, ms=ms)).breach
    if ms <= bound:
        assert breach == ""
    if ms > bound * STEP * STEP:
        assert breach


@given(failed=st.integers(0, 500), attempts=st.integers(0, 500), least=st.integers(1, 500), most=st.floats(0, 1))
def test_the_error_ratio_is_exact(failed, attempts, least, most):
    failed = min(failed, attempts)
    verdict = judge(guard(max_error_ratio=most, min_requests=least), Tally(attempts=attempts, failed_attempts=failed))
    assert verdict.is_enough == (attempts >= least)
    assert bool(verdict.breach) == (attempts >= least and failed / attempts > most)


def test_nothing_seen_has_no_ratios():
    seen = conduct(Tally())
    assert (seen.error_ratio, seen.violation_ratio, seen.p99_ms, seen.disagreement) == (None, None, None, None)
    assert (seen.requests, seen.attempts) == (0, 0)


# --- which targets ---------------------------------------------------------------------------------


def test_all_but_the_heaviest_are_canaries():
    assert [t.version for t in canaries(rule(("a/m:1", 90), ("a/m:2", 5), ("a/m:3", 0), ("a/m:4", 5)))] == ["2", "4"]
    assert [t.version for t in canaries(rule(("a/m:1", 1), ("a/m:2", 1)))] == ["2"]
    assert canaries(rule(("a/m:1", 1))) == ()
    assert canaries(rule(("a/m:1", 9), ("a/m:1", 1))) == ()


def test_a_canary_is_taken_out_and_the_baseline_never():
    one = rule(("a/m:1", 90), ("a/m:2", 5), ("a/m:3", 5), ("a/m:2", 7))
    assert [t.weight for t in canary_out(one, one.split[1]).split] == [90, 0, 5, 0]
    assert canary_out(one, one.split[0]) == one
    both = rule(("a/m:1", 1), ("a/m:2", 1))
    assert [t.weight for t in canary_out(both, both.split[1]).split] == [1, 0]
    assert replace(canary_out(one, one.split[2]), split=one.split) == one


def test_figures_are_the_target_s_that_names_them_best():
    one = rule(("a/m", 90), ("a/m:2", 5), ("a/*", 3), ("b/m", 2), fallback=[target("c/m")])
    figures = {
        Series("t", "r", "a", "m", "1"): Tally(requests=1),
        Series("t", "r", "a", "m", ""): Tally(requests=2),
        Series("u", "r", "a", "m", "2"): Tally(requests=4),
        Series("t", "r", "a", "x", "2"): Tally(requests=8),
        Series("t", "r", "b", "m", "7"): Tally(requests=16),
        Series("t", "r", "c", "m", ""): Tally(requests=32),
        Series("t", "other", "a", "m", "2"): Tally(requests=64),
        Series("t", "r", "", "", ""): Tally(requests=128),
    }
    assert [figures_of(one, t, figures).requests for t in one.split] == [3, 4, 8, 16]
    assert [others_of(one, t, figures).requests for t in one.split] == [28, 27, 23, 15]
