"""What follows from each failed attempt, as a table."""

from dataclasses import replace

import pytest

from gateway.core.attempts import (
    CONSEQUENCES,
    FIRST_PAUSE_US,
    LONGEST_PAUSE_US,
    MIN_ATTEMPT_US,
    RETRIES_PER_S,
    RETRY_RESERVE,
    RETRY_SHARE,
    GiveUp,
    RetryBudget,
    Try,
    blames_backend,
    next_attempt,
    nobody,
    second_attempt,
    told,
)
from gateway.core.error_forms import error_headers
from gateway.core.errors import Fault, FaultKind
from gateway.core.routing import Plan
from gateway.core.rules import Target
from gateway.core.types import Place

A, B = Place(backend="a", model="m"), Place(backend="b", model="m")


def plan(*places: Place) -> Plan:
    return Plan(rule="r", revision=1, candidates=places)


def step(candidates, faults=(), *, now_us=0, deadline_us=1_000_000, attempt_timeout_us=300_000):
    return next_attempt(
        plan(*candidates),
        [Fault(kind=k, message="m", place=place) for k, place in zip(faults, candidates, strict=False)],
        now_us=now_us,
        deadline_us=deadline_us,
        attempt_timeout_us=attempt_timeout_us,
    )


def test_every_kind_of_fault_has_its_consequence():
    assert set(CONSEQUENCES) == set(FaultKind)


def test_the_first_attempt_leaves_time_for_the_next():
    assert step([A, B]) == Try(place=A, begin_within_us=300_000, timeout_us=1_000_000)


def test_the_last_candidate_gets_all_that_is_left():
    assert step([A]) == Try(place=A, begin_within_us=1_000_000, timeout_us=1_000_000)
    last = Try(place=B, begin_within_us=600_000, timeout_us=600_000)
    assert step([A, B], [FaultKind.TIMEOUT], now_us=400_000) == last


def test_an_attempt_never_outlives_the_deadline():
    assert step([A, B], deadline_us=100_000) == Try(place=A, begin_within_us=100_000, timeout_us=100_000)


@pytest.mark.parametrize("left_us", [-5, 0, MIN_ATTEMPT_US - 1])
def test_no_time_left_is_a_504(left_us):
    given_up = step([A, B], [FaultKind.UNAVAILABLE], now_us=1_000_000 - left_us)
    assert isinstance(given_up, GiveUp)
    assert given_up.error.code == "deadline_exceeded"


@pytest.mark.parametrize("kind", FaultKind)
def test_what_may_be_tried_elsewhere_and_what_the_caller_sees(kind):
    consequence = CONSEQUENCES[kind]
    goes_on = consequence.try_next and kind is not FaultKind.CONTEXT_TOO_LONG  # that one has a table of its own
    assert isinstance(step([A, B], [kind]), Try if goes_on else GiveUp)
    given_up = step([A], [kind])
    assert isinstance(given_up, GiveUp)
    assert type(given_up.error) is consequence.error


def test_the_callers_own_faults_never_blame_a_backend():
    assert not CONSEQUENCES[FaultKind.REFUSED_INPUT].blames_backend
    assert not CONSEQUENCES[FaultKind.OVERLOADED].blames_backend


REPLICAS = [Place(backend="triton", model="m", version="", replica=name) for name in ("a", "b")]


@pytest.mark.parametrize(
    ("refusals", "other", "code"),
    [
        ((), None, "model_not_found"),
        (((REPLICAS[1], "breaker open: unavailable"),), None, "no_healthy_backend"),
        (((Place(backend="local", model="m", version=""), "off"),), None, "model_not_found"),
        (((Place(backend="triton", model="n", version="", replica="b"), "off"),), None, "model_not_found"),
        ((), FaultKind.TIMEOUT, "no_healthy_backend"),
        ((), FaultKind.SKIPPED, "no_healthy_backend"),
        ((), FaultKind.NO_SUCH_MODEL, "model_not_found"),
    ],
)
def test_a_model_is_not_there_when_all_replicas_have_said_so(refusals, other, code):
    faults = [Fault(kind=FaultKind.NO_SUCH_MODEL, message="unknown", place=REPLICAS[0])]
    if other is not None:
        faults.insert(0, Fault(kind=other, message="x", place=REPLICAS[1]))
    asked = Plan(rule="r", revision=1, candidates=(REPLICAS[0],), refusals=refusals)
    assert told(faults, asked).code == code


def test_nobody_to_ask_is_a_503_that_names_the_rule_and_passes_or_says_what_brings_one_back():
    nobody_now = nobody(plan())
    assert "rule 'r'" in nobody_now.detail
    assert error_headers(nobody_now) == {"retry-after": "1"}
    nowhere = nobody(Plan(rule="", revision=1, candidates=()))
    assert nowhere.detail.startswith("no enabled rule takes this request")
    assert "`gateway rules " in nowhere.detail
    assert (nowhere.status, nowhere.code) == (503, "no_healthy_backend")
    assert error_headers(nowhere) == {"x-should-retry": "false"}  # waiting brings no rule


@pytest.mark.parametrize(
    ("kind", "waited_us", "blamed"),
    [
        (FaultKind.TIMEOUT, 300_000, True),
        (FaultKind.TIMEOUT, 299_000, True),  # a timer may fire a little early
        (FaultKind.TIMEOUT, 80_000, False),  # the caller's own short timeout
        (FaultKind.TIMEOUT, 0, False),  # the caller read too slowly
        (FaultKind.BROKEN, 0, True),
        (FaultKind.OVERLOADED, 300_000, False),
        (FaultKind.REFUSED_INPUT, 300_000, False),
        (FaultKind.CONTEXT_TOO_LONG, 300_000, False),
        (FaultKind.UNREACHABLE, 0, True),
    ],
)
def test_whose_fault_it_is(kind, waited_us, blamed):
    fault = Fault(kind=kind, message="m")
    assert blames_backend(fault, waited_us=waited_us, attempt_timeout_us=300_000) is blamed


@pytest.mark.parametrize(("kind", "blamed"), [(FaultKind.BROKEN, False), (FaultKind.UNAVAILABLE, True)])
def test_a_wrong_answer_of_a_model_that_callers_name_opens_no_breaker(kind, blamed):
    fault = Fault(kind=kind, message="x")
    assert blames_backend(fault, waited_us=0, attempt_timeout_us=1, is_named_by_caller=True) is blamed


def test_retry_after_is_the_backends_own():
    fault = Fault(kind=FaultKind.OVERLOADED, message="m", retry_after_us=7_000_000, place=A)
    told = next_attempt(plan(A), [fault], now_us=0, deadline_us=10**6, attempt_timeout_us=10**5)
    assert isinstance(told, GiveUp)
    assert told.error.retry_after_us == 7_000_000
    assert error_headers(told.error)["retry-after"] == "7"
    assert error_headers(step([A], [FaultKind.UNAVAILABLE]).error)["retry-after"] == "1"
    assert "retry-after" not in error_headers(step([A], [FaultKind.BROKEN]).error)


def test_a_request_that_two_models_died_of_is_not_sent_to_a_third():
    third = Place(backend="c", model="m")
    assert isinstance(step([A, B, third], [FaultKind.DEAD]), Try)
    assert isinstance(step([A, B, third], [FaultKind.DEAD, FaultKind.UNAVAILABLE]), Try)
    given_up = step([A, B, third], [FaultKind.DEAD, FaultKind.DEAD])
    assert isinstance(given_up, GiveUp)
    assert given_up.error.code == "backend_error"


# --- after "context too long": only places with more ------------------------------------------------


def sized(*sizes: int) -> Plan:
    places = tuple(Place(backend=f"b{i}", model="m") for i in range(len(sizes)))
    targets = {p: Target(backend=p.backend, model="m", context_tokens=n) for p, n in zip(places, sizes, strict=True)}
    return Plan(rule="r", revision=1, candidates=places, targets=targets)


@pytest.mark.parametrize(
    ("sizes", "next_one"),
    [((4_000, 8_000), 1), ((4_000, 4_000, 8_000), 2), ((8_000, 4_000), None), ((0, 0), None), ((0, 8_000), 1)],
)
def test_a_prompt_that_is_too_long_goes_where_more_fits(sizes, next_one):
    made = sized(*sizes)
    fault = Fault(kind=FaultKind.CONTEXT_TOO_LONG, message="too long", place=made.candidates[0], status=400)
    decided = next_attempt(made, [fault], now_us=0, deadline_us=10**6, attempt_timeout_us=10**6)
    if next_one is None:
        assert isinstance(decided, GiveUp)
        assert (decided.error.code, decided.error.upstream_status) == ("invalid_input", 400)
    else:
        assert isinstance(decided, Try)
        assert decided.place == made.candidates[next_one]


def test_a_place_that_was_not_asked_does_not_hide_why_the_others_failed():
    given_up = step([A, B], [FaultKind.OVERLOADED, FaultKind.SKIPPED])
    assert (given_up.error.code, given_up.error.status) == ("queue_full", 429)


def test_a_place_that_cannot_do_it_at_all_does_not_hide_why_the_others_did_not():
    assert step([A, B], [FaultKind.OVERLOADED, FaultKind.UNSUPPORTED]).error.code == "queue_full"
    assert step([A, B], [FaultKind.UNSUPPORTED, FaultKind.UNSUPPORTED]).error.code == "unsupported"


# --- further rounds, where the rule has retries ----------------------------------------------------


def again(kinds, *, retries, places=(A,), draw=1.0, deadline_us=10**8, retry_after_us=None):
    faults = [
        Fault(kind=kind, message="m", place=places[i % len(places)], retry_after_us=retry_after_us)
        for i, kind in enumerate(kinds)
    ]
    made = replace(plan(*places), retries=retries)
    return next_attempt(made, faults, now_us=0, deadline_us=deadline_us, attempt_timeout_us=300_000, draw=lambda: draw)


AWAY, FULL = FaultKind.UNREACHABLE, FaultKind.OVERLOADED


def test_there_are_no_further_rounds_unless_the_rule_says_so():
    assert isinstance(again([AWAY], retries=0), GiveUp)


@pytest.mark.parametrize("rounds", range(1, 6))
def test_pauses_double_with_every_round_up_to_a_bound(rounds):
    decided = again([AWAY] * rounds, retries=5)
    assert isinstance(decided, Try)
    assert decided.pause_us == min(FIRST_PAUSE_US * 2 ** (rounds - 1), LONGEST_PAUSE_US)
    assert isinstance(again([AWAY] * rounds, retries=rounds - 1), GiveUp)


def test_a_pause_is_a_random_part_but_never_less_than_the_place_asked_for():
    assert again([FULL], retries=1, draw=0.25).pause_us == FIRST_PAUSE_US // 4
    assert again([FULL], retries=1, draw=0.25, retry_after_us=3_000_000).pause_us == 3_000_000


def test_the_pause_comes_off_the_time_and_is_not_made_where_none_is_left():
    decided = again([FULL], retries=1, deadline_us=1_000_000, retry_after_us=900_000)
    assert decided == Try(place=A, begin_within_us=100_000, timeout_us=100_000, pause_us=900_000)
    assert isinstance(again([FULL], retries=1, deadline_us=1_000_000, retry_after_us=999_000), GiveUp)


def test_a_round_goes_in_the_plans_order_and_leaves_out_what_will_not_pass():
    assert again([AWAY, AWAY], retries=1, places=(A, B)).place == A
    assert again([AWAY, AWAY, AWAY], retries=1, places=(A, B)).place == B
    assert again([FaultKind.BROKEN, AWAY], retries=1, places=(A, B)).place == B
    assert isinstance(again([FaultKind.BROKEN], retries=3), GiveUp)
    assert isinstance(again([FaultKind.REFUSED_INPUT], retries=3), GiveUp)


def test_a_round_goes_where_it_may_begin_soonest_and_not_where_the_time_would_be_over():
    full = Fault(kind=FULL, message="m", place=A, retry_after_us=5_000_000)
    away = Fault(kind=AWAY, message="m", place=B)

    def after(*faults, deadline_us=10**8):
        made = replace(plan(A, B), retries=2)
        return next_attempt(made, faults, now_us=0, deadline_us=deadline_us, attempt_timeout_us=300_000)

    assert after(full, away).place == B
    assert after(full, away, away).place == A
    assert after(full, away, away, deadline_us=4_000_000).place == B
    assert isinstance(after(full, away, away, away, deadline_us=4_000_000), GiveUp)


def test_a_round_leaves_out_what_is_too_small():
    made = replace(plan(A, B), retries=1, targets={B: Target(backend="b", model="m", context_tokens=1000)})
    faults = [
        Fault(kind=FULL, message="m", place=A),
        Fault(kind=FaultKind.CONTEXT_TOO_LONG, message="too long", place=B),
    ]
    given_up = next_attempt(made, faults, now_us=0, deadline_us=10**8, attempt_timeout_us=300_000)
    assert isinstance(given_up, GiveUp)
    assert given_up.error.detail == "too long"


# --- the budget ------------------------------------------------------------------------------------


def test_a_budget_begins_full_and_then_gives_a_share_of_the_traffic():
    budget = RetryBudget()
    assert all(budget.take(0) for _ in range(int(RETRY_RESERVE)))
    assert not budget.take(0)
    taken = 0
    for _ in range(1000):
        budget.request()
        taken += budget.take(0)
    assert abs(taken - 1000 * RETRY_SHARE) <= 1


def test_a_budget_fills_with_time_and_not_over_its_brim():
    budget = RetryBudget()
    while budget.take(0):
        pass
    assert sum(budget.take(1_000_000) for _ in range(100)) == RETRIES_PER_S
    assert not budget.take(500_000)  # a clock that goes back gives nothing
    assert sum(budget.take(10**12) for _ in range(2000)) == RETRY_RESERVE


# --- the rest --------------------------------------------------------------------------------------


def test_when_all_asked_to_wait_the_caller_is_told_for_how_long():
    error = nobody(plan(), cooling_us=2_500_000)
    assert (error.status, error_headers(error)["retry-after"]) == (429, "3")


def test_a_second_copy_goes_to_another_place_that_may_be_tried():
    first = Try(place=A, begin_within_us=1, timeout_us=1)
    third = Place(backend="c", model="m")
    made = plan(A, B, third)

    def second(*, down=(), deadline_us=10**6, made=made):
        return second_attempt(
            made,
            first,
            lambda place: "down" if place in down else None,
            now_us=0,
            deadline_us=deadline_us,
            attempt_timeout_us=300_000,
        )

    assert second() == Try(place=B, begin_within_us=300_000, timeout_us=10**6)  # a third may follow
    assert second(made=plan(A, B)) == Try(place=B, begin_within_us=10**6, timeout_us=10**6)
    assert second(down=(B,)).place == third
    assert second(down=(B, third)) is None
    assert second(deadline_us=10) is None
