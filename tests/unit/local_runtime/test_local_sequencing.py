import heapq
import itertools

import pytest

from local_runtime.repository.model_config import DirectStrategy, OldestStrategy, SequenceBatching
from local_runtime.scheduling.decisions import (
    Admission,
    Dispatch,
    DispatchReason,
    Dropped,
    DropReason,
    Idle,
    Policy,
    QueuedRequest,
    Slot,
    WaitUntil,
)
from local_runtime.scheduling.sequencing import Sequencer

MS = 1000
DIRECT = DirectStrategy()


def sequencer(strategy=DIRECT, *, max_batch_size=4, instances=1, idle_ms=3000, max_queue_size=0) -> Policy:
    return Sequencer(
        max_batch_size=max_batch_size,
        config=SequenceBatching(strategy=strategy, max_sequence_idle_microseconds=idle_ms * MS),
        instances=instances,
        max_queue_size=max_queue_size,
    )


def request(number, name, flags="", *, at_ms=0, key="A", deadline_ms=None):
    """`flags`: S for START, E for END."""
    return QueuedRequest(
        id=number,
        rows=1,
        batch_key=key,
        enqueued_us=at_ms * MS,
        deadline_us=None if deadline_ms is None else deadline_ms * MS,
        correlation_id=name,
        is_start="S" in flags,
        is_end="E" in flags,
    )


def rows(dispatch):
    """The batch as one number or None for each row."""
    assert isinstance(dispatch, Dispatch), dispatch
    return [slot.request for slot in dispatch.slots]


def run(policy, now_ms, *, instance=0):
    """Let the instance run one batch that takes no time."""
    dispatch = policy.decide(now_ms * MS, free=(instance,))
    if isinstance(dispatch, Dispatch):
        policy.finished(dispatch, now_us=now_ms * MS, compute_us=0)
    return dispatch


def play(policy, requests, *, busy_ms=None, instances=1):
    """Serve requests on a virtual clock. Returns batches as (time in ms, instance, rows) and what was refused."""
    busy_ms = busy_ms or {}
    order = itertools.count()
    events = [(item.enqueued_us, next(order), item) for item in requests]
    heapq.heapify(events)
    free = list(range(instances))
    batches, refused = [], {}
    while events:
        now_us, _, event = heapq.heappop(events)
        if isinstance(event, QueuedRequest):
            admission = policy.enqueue(event)
            if admission is not Admission.ACCEPTED:
                refused[event.id] = admission
        elif isinstance(event, Dispatch):
            policy.finished(event, now_us=now_us, compute_us=0)
            free.append(event.instance)
        while isinstance(decision := policy.decide(now_us, free=tuple(free)), Dispatch):
            free.remove(decision.instance)
            batches.append((now_us // MS, decision.instance, rows(decision)))
            ends_us = now_us + max(busy_ms.get(number, 0) for number in decision.ids) * MS
            heapq.heappush(events, (ends_us, next(order), decision))
        if isinstance(decision, WaitUntil):
            heapq.heappush(events, (decision.at_us, next(order), None))
    return batches, refused


# What real Triton did, see `seq-*` among the recorded parity cases. Requests: (id, name, flags, time in ms).
PARITY = {
    "seq-01-controls": (
        {},
        [(1, 42, "S", 0), (2, 42, "", 60), (3, 42, "E", 120)],
        [(0, 0, [1]), (60, 0, [2]), (120, 0, [3])],
    ),
    "seq-04-no-corrid": ({}, [(1, 0, "S", 0)], []),
    "seq-06-restart": (
        {},
        [(1, 46, "S", 0), (2, 46, "S", 60), (3, 46, "E", 120)],
        [(0, 0, [1]), (60, 0, [2]), (120, 0, [3])],
    ),
    "seq-07-direct-batch": (
        {},
        [(1, 50, "S", 0), (2, 51, "S", 60), (3, 52, "S", 75), (4, 50, "E", 90), (5, 51, "E", 105), (6, 52, "E", 120)],
        [(0, 0, [1]), (400, 0, [4, 2, 3]), (400, 0, [None, 5, 6])],
    ),
    "seq-08-backlog": (
        {"max_batch_size": 1},
        [(1, 60, "S", 0), (2, 61, "S", 60), (3, 61, "E", 120), (4, 60, "E", 500)],
        [(0, 0, [1]), (500, 0, [4]), (500, 0, [2]), (500, 0, [3])],
    ),
    "seq-09-backlog-idle": (
        {"max_batch_size": 1, "idle_ms": 400},
        [(1, 60, "S", 0), (2, 61, "SE", 60), (3, 60, "E", 1100)],
        [(0, 0, [1]), (400, 0, [2])],
    ),
    "seq-11-idle-kept": (
        {"max_batch_size": 1, "idle_ms": 400},
        [(1, 71, "S", 0), (2, 71, "", 250), (3, 71, "E", 500)],
        [(0, 0, [1]), (250, 0, [2]), (500, 0, [3])],
    ),
    "seq-12-two-instances": (
        {"max_batch_size": 1, "instances": 2},
        [(1, 80, "S", 0), (2, 81, "S", 60), (3, 82, "SE", 120), (4, 80, "E", 420), (5, 81, "E", 500)],
        [(0, 0, [1]), (60, 1, [2]), (420, 0, [4]), (420, 0, [3]), (500, 1, [5])],
    ),
    "seq-13-min-slot-util": (
        {"strategy": DirectStrategy(max_queue_delay_microseconds=250 * MS, minimum_slot_utilization=1.0)},
        [(1, 90, "SE", 0)],
        [(250, 0, [1])],
    ),
    "seq-15-oldest-backlog": (
        {"strategy": OldestStrategy(max_candidate_sequences=2)},
        [(1, 100, "S", 0), (2, 101, "S", 60), (3, 102, "SE", 120), (4, 100, "E", 450), (5, 101, "E", 520)],
        [(0, 0, [1]), (60, 0, [2]), (450, 0, [4]), (450, 0, [3]), (520, 0, [5])],
    ),
    "seq-18-string-id": (
        {},
        [(1, "user-x", "S", 0), (2, "user-x", "E", 60)],
        [(0, 0, [1]), (60, 0, [2])],
    ),
}
REFUSED = {
    "seq-04-no-corrid": {1: Admission.NO_CORRELATION_ID},
    "seq-09-backlog-idle": {3: Admission.NOT_STARTED},
}
BUSY_MS = {"seq-07-direct-batch": {1: 400}}


@pytest.mark.parametrize("case", PARITY)
def test_batches_are_those_that_triton_formed(case):
    options, arrivals, expected = PARITY[case]
    requests = [request(number, name, flags, at_ms=at_ms) for number, name, flags, at_ms in arrivals]
    batches, refused = play(
        sequencer(**options), requests, busy_ms=BUSY_MS.get(case), instances=options.get("instances", 1)
    )
    assert batches == expected
    assert refused == REFUSED.get(case, {})


@pytest.mark.parametrize("strategy", [DIRECT, OldestStrategy(max_candidate_sequences=4)])
def test_slots_tell_what_the_control_inputs_need(strategy):
    policy = sequencer(strategy)
    policy.enqueue(request(1, 7, "S"))
    policy.enqueue(request(2, "b", "SE"))
    dispatch = policy.decide(0, free=(0,))
    assert dispatch.slots == (
        Slot(request=1, correlation_id=7, is_start=True, is_end=False),
        Slot(request=2, correlation_id="b", is_start=True, is_end=True),
    )
    assert (dispatch.ids, dispatch.rows) == ((1, 2), 2)


@pytest.mark.parametrize("name", [0, ""])
def test_a_request_without_correlation_id_is_refused(name):
    assert sequencer().enqueue(request(1, name, "S")) is Admission.NO_CORRELATION_ID


def test_a_sequence_begins_with_start():
    assert sequencer().enqueue(request(1, 7)) is Admission.NOT_STARTED


def test_a_number_and_its_text_name_different_sequences():
    policy = sequencer()
    policy.enqueue(request(1, 5, "S"))
    assert policy.enqueue(request(2, "5")) is Admission.NOT_STARTED
    assert policy.enqueue(request(3, "5", "S")) is Admission.ACCEPTED
    assert rows(policy.decide(0, free=(0,))) == [1, 3]


def test_nothing_joins_a_sequence_after_end_was_accepted():
    policy = sequencer()
    policy.enqueue(request(1, 7, "SE"))
    assert policy.enqueue(request(2, 7)) is Admission.NOT_STARTED


def test_a_name_is_used_anew_only_when_the_former_sequence_has_run():
    policy = sequencer()
    policy.enqueue(request(1, 7, "SE"))
    assert policy.enqueue(request(2, 7, "S")) is Admission.ACCEPTED
    first = policy.decide(0, free=(0,))
    assert rows(first) == [1]
    policy.finished(first, now_us=0, compute_us=0)
    assert rows(policy.decide(0, free=(0,))) == [2]
    assert policy.take_ended() == (), "the name lives again"


def test_a_sequence_that_waits_for_its_name_keeps_its_turn():
    policy = sequencer(max_batch_size=1)
    for number, name in enumerate((7, 7, 8), start=1):
        policy.enqueue(request(number, name, "SE"))
    assert [rows(run(policy, 0)) for _ in range(3)] == [[1], [2], [3]]


def test_the_queue_has_a_bound():
    policy = sequencer(max_queue_size=2)
    assert [policy.enqueue(request(number, number, "S")) for number in (1, 2, 3)] == [
        Admission.ACCEPTED,
        Admission.ACCEPTED,
        Admission.QUEUE_FULL,
    ]
    assert len(policy) == 2
    run(policy, 0)
    assert policy.enqueue(request(4, 3)) is Admission.NOT_STARTED, "what was refused has started nothing"
    assert policy.enqueue(request(5, 3, "S")) is Admission.ACCEPTED


def test_requests_of_one_sequence_run_one_by_one():
    policy = sequencer()
    for number, flags in enumerate(("S", "", "E"), start=1):
        policy.enqueue(request(number, 7, flags))
    first = policy.decide(0, free=(0,))
    assert rows(first) == [1]
    assert policy.decide(0, free=()) == Idle()
    policy.finished(first, now_us=0, compute_us=0)
    assert [rows(run(policy, 0)) for _ in range(2)] == [[2], [3]]


def test_sequences_spread_over_the_instances_before_they_share_one():
    policy = sequencer(max_batch_size=2, instances=2)
    for number in (1, 2, 3):
        policy.enqueue(request(number, number, "S"))
    assert rows(policy.decide(0, free=(0, 1))) == [1, 3]
    assert rows(policy.decide(0, free=(1,))) == [2]


def test_the_longest_free_instance_with_work_is_used():
    policy = sequencer(max_batch_size=1, instances=3)
    for number in (1, 2, 3):
        policy.enqueue(request(number, number, "S"))
    assert policy.decide(0, free=(2, 0, 1)).instance == 2


def test_other_shapes_are_left_for_the_next_batch_and_the_oldest_goes_first():
    policy = sequencer()
    for number, key in ((1, "A"), (2, "B"), (3, "A")):
        policy.enqueue(request(number, number, "S", key=key))
    assert rows(run(policy, 0)) == [1, None, 3]
    policy.enqueue(request(4, 1, at_ms=1))
    assert rows(run(policy, 1)) == [None, 2], "although a lower slot has something to run"
    assert rows(run(policy, 1)) == [4]


MINIMUM = DirectStrategy(max_queue_delay_microseconds=100 * MS, minimum_slot_utilization=0.5)


def test_direct_waits_from_the_oldest_request_until_enough_slots_are_ready():
    policy = sequencer(MINIMUM)
    policy.enqueue(request(1, 1, "S", at_ms=10))
    assert policy.decide(20 * MS, free=(0,)) == WaitUntil(at_us=110 * MS)
    policy.enqueue(request(2, 2, "S", at_ms=30))
    dispatch = policy.decide(30 * MS, free=(0,))
    assert (rows(dispatch), dispatch.reason) == ([1, 2], DispatchReason.SLOTS_FILLED)


def test_direct_does_not_wait_longer_than_its_delay():
    policy = sequencer(MINIMUM)
    policy.enqueue(request(1, 1, "S"))
    assert policy.decide(100 * MS - 1, free=(0,)) == WaitUntil(at_us=100 * MS)
    assert policy.decide(100 * MS, free=(0,)).reason is DispatchReason.DELAY_REACHED


@pytest.mark.parametrize(
    ("delay_us", "minimum", "reason"),
    [(0, 1.0, DispatchReason.NO_DELAY), (100 * MS, 0.0, DispatchReason.SLOTS_FILLED)],
)
def test_direct_does_not_wait_with_only_one_of_the_two_set(delay_us, minimum, reason):
    strategy = DirectStrategy(max_queue_delay_microseconds=delay_us, minimum_slot_utilization=minimum)
    policy = sequencer(strategy)
    policy.enqueue(request(1, 1, "S"))
    assert policy.decide(0, free=(0,)).reason is reason


def test_a_utilization_that_no_float_can_hold_is_reached():
    third = 0.3333333432674408  # 1/3 as the 32-bit float of a config file
    policy = sequencer(
        DirectStrategy(max_queue_delay_microseconds=MS, minimum_slot_utilization=third), max_batch_size=3
    )
    policy.enqueue(request(1, 1, "S"))
    assert policy.decide(0, free=(0,)).reason is DispatchReason.SLOTS_FILLED


def test_a_model_without_batch_dimension_has_one_slot_for_each_instance():
    policy = sequencer(max_batch_size=0)
    policy.enqueue(request(1, 1, "S"))
    policy.enqueue(request(2, 2, "S"))
    assert rows(run(policy, 0)) == [1]
    assert run(policy, 0) == WaitUntil(at_us=3000 * MS)


OLDEST = OldestStrategy(max_candidate_sequences=8, preferred_batch_size=(4,), max_queue_delay_microseconds=100 * MS)


def test_oldest_sends_a_preferred_size_at_once():
    policy = sequencer(OLDEST, max_batch_size=8)
    for number in (1, 2, 3):
        policy.enqueue(request(number, number, "SE"))
    assert policy.decide(0, free=(0,)) == WaitUntil(at_us=100 * MS)
    policy.enqueue(request(4, 4, "SE"))
    policy.enqueue(request(5, 5, "SE"))
    dispatch = policy.decide(0, free=(0,))
    assert (rows(dispatch), dispatch.reason) == ([1, 2, 3, 4], DispatchReason.PREFERRED_SIZE)


def test_oldest_gives_one_shot_sequences_a_slot_each():
    """Triton puts them in one slot behind each other, so that they cannot share a batch."""
    policy = sequencer(OldestStrategy(max_candidate_sequences=8), max_batch_size=8)
    for number in range(1, 6):
        policy.enqueue(request(number, number, "SE"))
    assert rows(policy.decide(0, free=(0,))) == [1, 2, 3, 4, 5]


def test_oldest_counts_the_delay_from_when_the_request_could_run():
    policy = sequencer(OLDEST, max_batch_size=8)
    policy.enqueue(request(1, 7, "S"))
    policy.enqueue(request(2, 7, at_ms=10))
    first = policy.decide(100 * MS, free=(0,))
    assert (rows(first), first.reason) == ([1], DispatchReason.DELAY_REACHED)
    policy.finished(first, now_us=150 * MS, compute_us=50 * MS)
    assert policy.decide(150 * MS, free=(0,)) == WaitUntil(at_us=250 * MS)


def test_oldest_takes_turns_among_more_candidates_than_rows():
    policy = sequencer(OldestStrategy(max_candidate_sequences=3), max_batch_size=2)
    for number in range(1, 4):
        policy.enqueue(request(number, number, "S"))
        policy.enqueue(request(number + 3, number, "E"))
    assert [rows(run(policy, 0)) for _ in range(3)] == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("strategy", [DIRECT, OldestStrategy(max_candidate_sequences=4)])
def test_cancelling_a_request_ends_its_sequence(strategy):
    policy = sequencer(strategy)
    for number, flags in enumerate(("S", "", "", "E"), start=1):
        policy.enqueue(request(number, 7, flags))
    running = policy.decide(0, free=(0,))
    assert policy.cancel(3) == (
        Dropped(id=3, reason=DropReason.CANCELLED),
        Dropped(id=4, reason=DropReason.SEQUENCE_CANCELLED),
    )
    assert policy.enqueue(request(5, 7)) is Admission.NOT_STARTED
    policy.finished(running, now_us=0, compute_us=0)
    assert policy.take_ended() == ()
    assert rows(run(policy, 0)) == [2], "what came before is still whole"
    assert policy.take_ended() == (7,)
    assert policy.take_ended() == ()
    assert len(policy) == 0


@pytest.mark.parametrize("strategy", [DIRECT, OldestStrategy(max_candidate_sequences=4)])
def test_a_cancelled_sequence_goes_on_from_its_next_start(strategy):
    policy = sequencer(strategy)
    for number, flags in enumerate(("S", "", "S", "E"), start=1):
        policy.enqueue(request(number, 7, flags))
    assert [dropped.id for dropped in policy.cancel(1)] == [1, 2]
    assert [rows(run(policy, 0)) for _ in range(2)] == [[3], [4]]


def test_what_runs_or_has_run_cannot_be_cancelled():
    policy = sequencer()
    policy.enqueue(request(1, 7, "S"))
    policy.decide(0, free=(0,))
    assert policy.cancel(1) == ()
    assert policy.cancel(99) == ()


def test_cancelling_in_the_backlog_leaves_the_others_their_turn():
    policy = sequencer(max_batch_size=1)
    for number in (1, 2, 3):
        policy.enqueue(request(number, number, "SE"))
    assert [dropped.id for dropped in policy.cancel(2)] == [2]
    assert [rows(run(policy, 0)) for _ in range(2)] == [[1], [3]]


def test_a_cancelled_sequence_holds_its_slot_while_it_runs():
    policy = sequencer(max_batch_size=1, instances=1)
    policy.enqueue(request(1, 7, "S"))
    policy.enqueue(request(2, 7))
    policy.enqueue(request(3, 8, "S"))
    running = policy.decide(0, free=(0,))
    policy.cancel(2)
    assert policy.decide(0, free=()) == Idle()
    policy.finished(running, now_us=0, compute_us=0)
    assert policy.take_ended() == (7,)
    assert rows(policy.decide(0, free=(0,))) == [3]


def test_a_deadline_is_a_cancellation():
    policy = sequencer()
    policy.enqueue(request(1, 7, "S", deadline_ms=10))
    policy.enqueue(request(2, 7))
    policy.enqueue(request(3, 8, "S"))
    dispatch = policy.decide(10 * MS, free=(0,))
    assert dispatch.dropped == (
        Dropped(id=1, reason=DropReason.DEADLINE),
        Dropped(id=2, reason=DropReason.SEQUENCE_CANCELLED),
    )
    assert rows(dispatch) == [None, 3]
    assert policy.take_ended() == (7,)


def test_requests_are_dropped_in_time_although_no_instance_is_free():
    policy = sequencer()
    policy.enqueue(request(1, 7, "S", deadline_ms=10))
    assert policy.needs_timer
    assert policy.decide(10 * MS, free=()).dropped == (Dropped(id=1, reason=DropReason.DEADLINE),)
    assert len(policy) == 0


def test_silence_ends_a_sequence_even_before_a_timer_says_so():
    policy = sequencer(idle_ms=100)
    policy.enqueue(request(1, 7, "S"))
    run(policy, 0)
    assert policy.enqueue(request(2, 7, at_ms=100)) is Admission.NOT_STARTED
    assert policy.take_ended() == (7,)


def test_a_sequence_is_not_silent_while_it_runs():
    policy = sequencer(idle_ms=100)
    policy.enqueue(request(1, 7, "S"))
    running = policy.decide(0, free=(0,))
    assert policy.decide(500 * MS, free=()) == Idle()
    policy.finished(running, now_us=500 * MS, compute_us=500 * MS)
    assert policy.decide(500 * MS, free=(0,)) == WaitUntil(at_us=600 * MS)
    assert policy.enqueue(request(2, 7, at_ms=599)) is Admission.ACCEPTED


def test_the_queue_can_be_drained_while_a_batch_runs():
    policy = sequencer(max_batch_size=1, instances=2)
    for number in range(1, 6):
        policy.enqueue(request(number, number, "S"))
    policy.enqueue(request(6, 1))
    running = policy.decide(0, free=(0, 1))
    assert policy.drain() == (2, 3, 4, 5, 6)
    assert len(policy) == 0
    assert policy.decide(0, free=(1,)) == Idle()
    policy.finished(running, now_us=0, compute_us=0)
    assert set(policy.take_ended()) == {1, 2, 3, 4, 5}
    assert policy.decide(0, free=(0, 1)) == Idle()


def test_what_has_left_is_forgotten():
    """A stuck slot and many impatient callers behind it do not fill the memory."""
    policy = sequencer(max_batch_size=1)
    policy.enqueue(request(0, 1, "S"))
    run(policy, 0)
    for number in range(1, 2000):
        policy.enqueue(request(number, number + 1, "S", deadline_ms=1000))
        policy.cancel(number)
    assert len(policy._backlog) < 200
    assert len(policy._deadlines) < 200
    assert list(policy._sequences) == [1]
