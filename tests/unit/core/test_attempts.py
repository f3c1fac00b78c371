"""What follows from each failed attempt, as a table."""

import pytest

from gateway.core.attempts import CONSEQUENCES, MIN_ATTEMPT_US, GiveUp, Try, blames_backend, next_attempt
from gateway.core.errors import Fault, FaultKind, error_headers
from gateway.core.routing import Plan
from gateway.core.types import Place

A, B = Place(backend="a", model="m"), Place(backend="b", model="m")


def plan(*places: Place) -> Plan:
    return Plan(rule="r", revision=1, candidates=places)


def step(candidates, faults=(), *, now_us=0, deadline_us=1_000_000, attempt_timeout_us=300_000):
    return next_attempt(
        plan(*candidates),
        [Fault(kind=k, message="m") for k in faults],
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
    assert isinstance(step([A, B], [kind]), Try if consequence.try_next else GiveUp)
    given_up = step([A], [kind])
    assert isinstance(given_up, GiveUp)
    assert type(given_up.error) is consequence.error


def test_the_callers_own_faults_never_blame_a_backend():
    assert not CONSEQUENCES[FaultKind.REFUSED_INPUT].blames_backend
    assert not CONSEQUENCES[FaultKind.OVERLOADED].blames_backend


def test_nobody_to_ask_is_a_503_that_names_the_rule():
    assert "rule 'r'" in step([]).error.detail
    nowhere = next_attempt(
        Plan(rule="", revision=1, candidates=()), [], now_us=0, deadline_us=10**6, attempt_timeout_us=1
    )
    assert nowhere.error.detail == "no enabled rule routes this task"
    assert nowhere.error.code == "no_healthy_backend"


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
    fault = Fault(kind=FaultKind.OVERLOADED, message="m", retry_after_us=7_000_000)
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
