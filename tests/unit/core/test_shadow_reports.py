"""What copies add up to: counts, and the report made of them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.shadows.comparison import Comparison
from gateway.core.shadows.shadow_reports import LARGEST, Pair, ShadowResult, disagreement, document, measures

PAIR = Pair("chat", "llm/m", "llm2/s")
SAME = Comparison(agreed=True, similarity=1.0, what="text")
UNLIKE = Comparison(agreed=False, similarity=0.25, what="text", reason="the texts differ")
UNKNOWN = Comparison(agreed=None, similarity=None, what="nothing", reason="an answer is not JSON")
SIZES = Comparison(agreed=False, similarity=None, what="embedding", reason="they have other sizes")


def result(outcome="answered", **changes) -> ShadowResult:
    plain = {"request_id": "r", "rule": "nlu", "pair": PAIR, "at_ms": 5, "outcome": outcome}
    return ShadowResult(**{**plain, **changes})


def reported(*results: ShadowResult, **more):
    counts: Counter[str] = Counter()
    for one in results:
        for measure, count in measures(one):
            counts[measure] += count
    return document("nlu", PAIR, counts, since_ms=1, **more)


def test_a_report():
    found = reported(
        result(comparison=SAME, real_us=10_000, shadow_us=14_000, real_nano_usd=1000, shadow_nano_usd=4000),
        result(comparison=UNLIKE, real_us=20_000, shadow_us=20_500, shadow_nano_usd=500),
        result(comparison=UNKNOWN, real_us=30_000, shadow_us=30_000),
        result("failed", failure="timeout", shadow_us=99_000, shadow_nano_usd=100),
        result("skipped"),
        result("skipped"),
        last_failure="timeout",
        disagreements=[disagreement(result(comparison=UNLIKE))],
    )
    assert found == {
        "rule": "nlu",
        "task": "chat",
        "place": "llm/m",
        "shadow": "llm2/s",
        "sent": 4,
        "compared": 2,
        "agreed": 1,
        "agreement": 0.5,
        "similarity_mean": 0.625,
        "similarity_p10": pytest.approx(0.25, abs=0.075),
        "failed": 1,
        "last_failure": "timeout",
        "skipped": 2,
        "primary_ms_mean": 20.0,
        "shadow_ms_mean": 21.5,
        "latency_delta_ms": 1.5,
        "shadow_cost_usd": 4600e-9,
        "cost_delta_usd": 3000e-9,
        "since_ms": 1,
        "disagreements": [
            {"request_id": "r", "at_ms": 5, "similarity": 0.25, "what": "text", "reason": "the texts differ"}
        ],
    }


def test_a_report_of_nothing():
    found = reported()
    nothing = {"sent", "compared", "agreed", "failed", "skipped", "shadow_cost_usd"}
    assert {name for name, value in found.items() if value == 0} == nothing
    assert found["agreement"] is found["similarity_mean"] is found["similarity_p10"] is None
    assert found["latency_delta_ms"] is found["cost_delta_usd"] is found["last_failure"] is None


def test_a_cheaper_shadow_has_a_negative_cost():
    assert reported(result(real_nano_usd=5000, shadow_nano_usd=2000))["cost_delta_usd"] == -3000e-9


def test_what_agreed_or_was_not_compared_is_no_disagreement():
    assert [disagreement(result(comparison=one)) for one in (None, SAME, UNKNOWN)] == [None, None, None]
    assert disagreement(result(comparison=SIZES))["similarity"] is None


def test_sizes_that_differ_are_compared_and_have_no_similarity():
    found = reported(result(comparison=SIZES))
    assert (found["compared"], found["agreement"], found["similarity_mean"]) == (1, 0.0, None)


def test_what_servers_tell_of_times_and_costs_is_bounded():
    counts = dict(measures(result(shadow_us=2**62, real_us=-1, real_nano_usd=0, shadow_nano_usd=2**62)))
    assert (counts["shadow_us"], counts["real_us"], counts["shadow_nano_usd"]) == (LARGEST, 0, LARGEST)
    assert counts["dearer_nano_usd"] == LARGEST


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=50))
def test_of_ten_answers_nine_are_at_least_as_alike_as_it_is_said(similarities):
    compared = [
        result(comparison=Comparison(agreed=True, similarity=similarity, what="text")) for similarity in similarities
    ]
    found = reported(*compared)
    ranked = sorted(similarities)
    tenth = ranked[len(ranked) - -(-9 * len(ranked) // 10)]
    rounding = 2e-4  # to four places, and to whole millionths
    assert found["similarity_p10"] <= tenth + rounding
    assert 1 - found["similarity_p10"] <= (1 - tenth) * 1.1 + rounding
    assert found["similarity_mean"] == pytest.approx(sum(similarities) / len(similarities), abs=rounding)
