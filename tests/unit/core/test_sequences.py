"""Sequences: numbers, the table of pins, and what ends one."""

import pytest

from gateway.core.breaker import COOL_DOWN_US, BreakerBoard
from gateway.core.errors import Fault, FaultKind, Reply
from gateway.core.routing import Plan
from gateway.core.sequences import (
    TRIES,
    Pin,
    Pins,
    is_gone,
    is_over,
    numbers,
    owner,
    preferring,
    unknown,
)
from gateway.core.types import Caller, InferenceRequest, Place, SequenceStep

A = Place(backend="triton", model="m", replica="a")
B = Place(backend="triton", model="m", replica="b")
S = 1_000_000
MUST_START = (
    "inference request for sequence 43 to model 'm' must specify the START flag on the first request of the sequence"
)


def request(chosen: int | str = 42, *, tenant: str = "t1", task: str = "total", model: str = "") -> InferenceRequest:
    caller = Caller(key_id="k", tenant=tenant)
    step = SequenceStep(id=chosen)
    return InferenceRequest(
        id="r", task=task, caller=caller, input=None, received_us=0, deadline_us=10 * S, model=model, sequence=step
    )


# --- owners and numbers ---------------------------------------------------------------------------


def test_an_owner_is_tenant_task_model_and_id_with_its_type():
    asked = [
        request(),
        request(43),
        request("42"),
        request(tenant="t2"),
        request(task="other"),
        request(model="n"),
    ]
    assert len({owner(one) for one in asked}) == len(asked)
    assert owner(request()) == owner(request())


@pytest.mark.parametrize(
    ("chosen", "bits", "own"),
    [
        (42, 64, True),
        (2**64 - 1, 64, True),
        (2**32, 32, False),
        (2**32 - 1, 32, True),
        (0, 64, False),
        (-1, 64, False),
        ("42", 64, False),
    ],
)
def test_the_callers_own_number_comes_first_where_it_fits(chosen, bits, own):
    tried = numbers(chosen, "owner", bits=bits)
    assert (tried[0] == chosen) is own
    assert len(tried) == TRIES
    assert all(1 <= number < 2**bits for number in tried)


def test_texts_that_begin_alike_are_far_apart():
    first = {numbers(text, owner(request(text)), bits=64)[0] for text in ("user-x", "user-y", "user-z")}
    assert len(first) == 3


# --- the table ------------------------------------------------------------------------------------


def test_a_pin_lives_for_the_idle_time_after_its_last_request_can_be_under_way():
    pins = Pins()
    assert pins.pin("o", A, [42], idle_us=5 * S, for_us=10 * S, now_us=0) == 42
    assert pins.find("o", for_us=S, now_us=14 * S) == Pin(place=A, number=42, idle_us=5 * S, silent_us=14 * S)
    assert pins.find("o", for_us=0, now_us=19 * S).silent_us == 5 * S
    assert pins.find("o", for_us=0, now_us=24 * S) is None


def test_a_number_that_lives_under_another_owner_is_not_given_away():
    pins = Pins()
    lease = {"idle_us": 5 * S, "for_us": 0}
    assert pins.pin("o1", A, [42, 7], **lease, now_us=0) == 42
    assert pins.pin("o2", B, [42, 8], **lease, now_us=1) == 8  # whatever the replica: it may be started anew there
    assert pins.pin("o3", Place(backend="triton", model="n"), [42], **lease, now_us=2) == 42  # another model's number
    assert pins.pin("o4", A, [42, 8], **lease, now_us=3) is None
    assert pins.pin("o1", B, [9, 42], **lease, now_us=4) == 42  # started anew: under the number that it has
    assert pins.pin("o4", A, [42, 8], **lease, now_us=6 * S) == 42  # all have been silent for too long


def test_an_ended_sequence_frees_its_number_when_no_late_request_can_meet_the_next_owner():
    pins = Pins()
    pins.pin("o1", A, [42], idle_us=S, for_us=10 * S, now_us=0)
    pins.end("o1", Pin(place=A, number=42, idle_us=S), now_us=S)
    assert pins.find("o1", for_us=0, now_us=S) is None
    assert pins.pin("o2", A, [42], idle_us=S, for_us=0, now_us=2 * S) is None
    assert pins.pin("o1", A, [42], idle_us=S, for_us=0, now_us=3 * S) == 42  # its owner may go on with it at once
    assert pins.pin("o2", A, [42], idle_us=S, for_us=0, now_us=11 * S) == 42


def test_a_lost_sequence_says_so_until_it_is_started_anew():
    pins = Pins()
    pins.pin("o", A, [42], idle_us=5 * S, for_us=0, now_us=0)
    pins.lose("o", Pin(place=A, number=42, idle_us=5 * S), now_us=1)
    assert pins.find("o", for_us=0, now_us=4 * S).is_lost
    assert pins.find("o", for_us=0, now_us=8 * S).is_lost  # each request renews that too
    pins.pin("o", B, [42], idle_us=5 * S, for_us=0, now_us=9 * S)
    found = pins.find("o", for_us=0, now_us=9 * S)
    assert (found.place, found.is_lost) == (B, False)


def test_what_failed_elsewhere_does_not_end_a_sequence_that_was_started_anew():
    pins = Pins()
    pins.pin("o", A, [42], idle_us=S, for_us=0, now_us=0)
    old = pins.find("o", for_us=0, now_us=0)
    pins.pin("o", B, [42], idle_us=S, for_us=0, now_us=1)
    pins.lose("o", old, now_us=2)
    pins.end("o", old, now_us=3)
    found = pins.find("o", for_us=0, now_us=4)
    assert (found.place, found.is_lost) == (B, False)


def test_what_is_past_is_forgotten():
    pins = Pins()
    for index in range(10):
        pins.pin(f"o{index}", A, [index + 1], idle_us=S, for_us=index * S, now_us=0)
    assert len(pins) == 20
    pins.sweep(5 * S)
    assert len(pins) == 10


# --- what ends a sequence -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FaultKind)
def test_only_the_loss_of_what_kept_the_state_ends_it(kind):
    gone = {FaultKind.UNAVAILABLE, FaultKind.DEAD, FaultKind.UNKNOWN_MODEL, FaultKind.NO_SUCH_MODEL}
    assert is_over(Fault(kind=kind, message="x")) is (kind in gone)
    assert is_over(Fault(kind=kind, message="x", is_server=True))


def test_a_server_that_does_not_know_it_ends_it():
    told = Fault(kind=FaultKind.REFUSED_INPUT, message="x", reply=Reply(code="INVALID_ARGUMENT", text=MUST_START))
    assert is_over(told)
    assert is_over(Fault(kind=FaultKind.REFUSED_INPUT, message=MUST_START))


def test_health_tells_what_is_gone_from_what_works_badly():
    board = BreakerBoard()
    versioned = Place(backend="triton", model="m", version="3", replica="a")
    assert not is_gone(board, versioned)
    for _ in range(3):
        board.failed(A, now_us=0, fault=Fault(kind=FaultKind.TIMEOUT, message="x"))
    assert board.why_not(A, 1) is not None
    assert not is_gone(board, versioned)
    board.healed(A)
    board.failed(A, now_us=0, fault=Fault(kind=FaultKind.DEAD, message="x"))
    assert is_gone(board, versioned)
    assert is_gone(board, versioned), COOL_DOWN_US  # and stays so until it has answered somebody
    board.healed(A)
    board.probed(Place(backend="triton", model="*", replica="a"), now_us=0, fault=FaultKind.UNAVAILABLE)
    assert is_gone(board, versioned)
    assert not is_gone(board, B)


def test_the_refusal_is_in_tritons_words():
    error = unknown(request(43), "m")
    assert (error.status, error.code) == (400, "sequence_unknown")
    assert error.detail == MUST_START
    assert error.reply == Reply(code="INVALID_ARGUMENT", text=MUST_START)


def test_a_start_prefers_the_replica_where_the_sequence_was():
    other = Place(backend="local", model="m")
    plan = Plan(rule="r", revision=1, candidates=(A, B, other))
    lived = Place(backend="triton", model="m", version="2", replica="c")
    c = Place(backend="triton", model="m", replica="c")
    assert preferring(plan, lived).candidates == (c, A, B, other)
    assert preferring(plan, B).candidates == (B, A, other)
    assert preferring(plan, other) is plan  # the rules lead elsewhere now
    newer = Plan(rule="r", revision=1, candidates=(Place(backend="triton", model="m", version="3", replica="a"),))
    assert preferring(newer, lived) is newer
