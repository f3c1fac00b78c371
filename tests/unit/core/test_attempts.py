"""What follows from each failed attempt, as a table."""

import pytest

from gateway.core.attempts import CONSEQUENCES, MIN_ATTEMPT_US, GiveUp, Try, next_attempt
from gateway.core.errors import Fault, FaultKind
from gateway.core.routing import Plan, Target

A, B = Target(backend="a", model="m"), Target(backend="b", model="m")


def plan(*targets: Target) -> Plan:
    return Plan(rule="r", revision=1, candidates=targets, reasons=())


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
    assert step([A, B]) == Try(target=A, timeout_us=300_000)


def test_the_last_candidate_gets_all_that_is_left():
    assert step([A]) == Try(target=A, timeout_us=1_000_000)
    assert step([A, B], [FaultKind.TIMEOUT], now_us=400_000) == Try(target=B, timeout_us=600_000)


def test_an_attempt_never_outlives_the_deadline():
    assert step([A, B], deadline_us=100_000) == Try(target=A, timeout_us=100_000)


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


def test_retry_after_is_the_backends_or_one_probe():
    fault = Fault(kind=FaultKind.OVERLOADED, message="m", retry_after_us=7_000_000)
    told = next_attempt(plan(A), [fault], now_us=0, deadline_us=10**6, attempt_timeout_us=10**5)
    assert isinstance(told, GiveUp)
    assert told.error.retry_after_us == 7_000_000
    assert step([A], [FaultKind.UNAVAILABLE]).error.retry_after_us == 1_000_000
    assert step([A], [FaultKind.BROKEN]).error.retry_after_us is None
