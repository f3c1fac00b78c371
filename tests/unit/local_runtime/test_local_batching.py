import dataclasses
import itertools
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local_runtime.scheduling.batching import (
    Admission,
    Batcher,
    BatchingRules,
    Dispatch,
    DispatchReason,
    Idle,
    QueuedRequest,
    WaitUntil,
)

MS = 1000


def rules(preferred=(), *, delay_ms=0, max_batch=8, dynamic=True, max_queue_size=0):
    return BatchingRules(
        max_batch_size=max_batch,
        dynamic=dynamic,
        preferred_batch_sizes=tuple(preferred),
        max_queue_delay_us=delay_ms * MS,
        max_queue_size=max_queue_size,
    )


def request(number, at_ms=0, *, rows=1, key="A", deadline_ms=None):
    return QueuedRequest(
        id=number,
        rows=rows,
        batch_key=key,
        enqueued_us=at_ms * MS,
        deadline_us=None if deadline_ms is None else deadline_ms * MS,
    )


@dataclasses.dataclass
class Arrival:
    at_ms: int
    rows: int = 1
    key: Hashable = "A"
    runs_ms: int = 0


def play(batch_rules, arrivals, *, instances=1):
    """What runs, as (start in ms, ids), when instances are never faster than the arrivals say."""
    batcher = Batcher(batch_rules)
    pending = [(arrival.at_ms, number, arrival) for number, arrival in enumerate(arrivals)]
    busy: list[int] = []
    ran = []
    now = 0
    wake = None
    while True:
        while pending and pending[0][0] <= now:
            at_ms, number, arrival = pending.pop(0)
            batcher.enqueue(request(number, at_ms, rows=arrival.rows, key=arrival.key))
        busy = [end for end in busy if end > now]
        wake = None
        while len(busy) < instances:
            decision = batcher.decide(now * MS)
            if isinstance(decision, Dispatch):
                ran.append((now, list(decision.ids)))
                runs_ms = max(arrivals[number].runs_ms for number in decision.ids)
                if runs_ms:
                    busy.append(now + runs_ms)
                continue
            if isinstance(decision, WaitUntil):
                wake = decision.at_us // MS
            break
        upcoming = [entry[0] for entry in pending[:1]] + busy + ([wake] if wake is not None else [])
        if not upcoming:
            return ran
        now = min(upcoming)


PLUG = Arrival(0, runs_ms=400)


def behind_plug(count, *, first_ms=60, step_ms=15, **fields):
    return [PLUG, *(Arrival(first_ms + step_ms * number, **fields) for number in range(count))]


def sizes(ran):
    return [len(ids) for _, ids in ran]


# What real Triton 24.10 was seen to run (one instance, a first request that keeps it busy for 400 ms).
@pytest.mark.parametrize(
    ("batch_rules", "arrivals", "expected"),
    [
        pytest.param(rules(dynamic=False), behind_plug(5), [1] * 6, id="no dynamic_batching"),
        pytest.param(rules(), [Arrival(15 * n) for n in range(4)], [1] * 4, id="idle, delay 0 never waits"),
        pytest.param(rules(), behind_plug(5), [1, 5], id="busy, 5 waiting"),
        pytest.param(rules([4]), [PLUG, *[Arrival(60)] * 10], [1, 4, 4, 2], id="preferred 4, 10 waiting"),
        pytest.param(rules([4, 8], max_batch=16), [PLUG, *[Arrival(60)] * 13], [1, 8, 4, 1], id="preferred 4 and 8"),
        pytest.param(
            rules([4], delay_ms=50, max_batch=16), [*[Arrival(0)] * 4, *[Arrival(1)] * 10], [4, 4, 4, 2], id="idle"
        ),
        pytest.param(
            rules([4], delay_ms=50, max_batch=16),
            [Arrival(0, runs_ms=400), *[Arrival(0)] * 3, *[Arrival(60)] * 10],
            [4, 10],
            id="preferred 4, delay exceeded while busy: all, not cut to 4",
        ),
        pytest.param(rules(max_batch=8), behind_plug(4), [1, 4], id="less than max_batch when nothing more waits"),
    ],
)
def test_batches_behind_a_busy_instance(batch_rules, arrivals, expected):
    assert sizes(play(batch_rules, arrivals)) == expected


@pytest.mark.parametrize(
    ("batch_rules", "arrivals", "expected"),
    [
        pytest.param(
            rules([4], delay_ms=600),
            [Arrival(20 * n) for n in range(4)],
            [(60, [0, 1, 2, 3])],
            id="fourth releases at once",
        ),
        pytest.param(
            rules([4], delay_ms=250),
            [Arrival(20 * n) for n in range(3)],
            [(250, [0, 1, 2])],
            id="three leave when the oldest has waited",
        ),
        pytest.param(rules(delay_ms=250), [Arrival(0)], [(250, [0])], id="lone request waits the delay"),
        pytest.param(
            rules(delay_ms=600),
            [Arrival(10 * n) for n in range(8)],
            [(70, list(range(8)))],
            id="full batch leaves at once",
        ),
        pytest.param(
            rules([4, 8], delay_ms=300, max_batch=16),
            [Arrival(20 * n) for n in range(6)],
            [(60, [0, 1, 2, 3]), (380, [4, 5])],
            id="rest waits its own delay",
        ),
        pytest.param(
            rules([4], delay_ms=250),
            [Arrival(0, rows=3), Arrival(30, rows=3)],
            [(30, [0]), (280, [1])],
            id="next would skip over the preferred size",
        ),
        pytest.param(
            rules([8], delay_ms=400),
            [Arrival(0), Arrival(20), Arrival(80, key="B")],
            [(80, [0, 1]), (480, [2])],
            id="other shape releases a delayed batch",
        ),
    ],
)
def test_idle_instance_with_delay(batch_rules, arrivals, expected):
    assert play(batch_rules, arrivals) == expected


def test_rows_count_not_requests():
    arrivals = [PLUG, *(Arrival(60 + n, rows=rows) for n, rows in enumerate([3, 3, 3, 2]))]
    assert [ids for _, ids in play(rules(), arrivals)] == [[0], [1, 2], [3, 4]]


def test_shapes_never_share_a_batch_and_never_overtake():
    arrivals = [PLUG, *(Arrival(60 + n, key=key) for n, key in enumerate("AABAA"))]
    assert [ids for _, ids in play(rules(), arrivals)] == [[0], [1, 2], [3], [4, 5]]


def test_first_free_of_two_instances_takes_all():
    arrivals = [PLUG, Arrival(0, key="B", runs_ms=500), *(Arrival(60 + n) for n in range(6))]
    assert sizes(play(rules(), arrivals, instances=2)) == [1, 1, 6]


def test_no_batch_dimension_runs_alone():
    assert sizes(play(rules(max_batch=0), [PLUG, *[Arrival(60)] * 3])) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("batch_rules", "rows", "now_ms", "reason"),
    [
        (rules(dynamic=False), [1], 0, DispatchReason.UNBATCHED),
        (rules([2]), [1, 1, 1], 0, DispatchReason.PREFERRED_SIZE),
        (rules([2], delay_ms=5), [1, 1, 1], 5, DispatchReason.FULL),
        (rules([3], delay_ms=5, max_batch=4), [4], 0, DispatchReason.FULL),
        (rules([5], delay_ms=5), [3, 3], 0, DispatchReason.PREFERRED_SIZE),
        (rules(), [1], 0, DispatchReason.NO_DELAY),
        (rules(delay_ms=5), [1], 5, DispatchReason.DELAY_REACHED),
    ],
)
def test_reason(batch_rules, rows, now_ms, reason):
    batcher = Batcher(batch_rules)
    for number, count in enumerate(rows):
        batcher.enqueue(request(number, rows=count))
    decision = batcher.decide(now_ms * MS)
    assert isinstance(decision, Dispatch)
    assert decision.reason is reason


def test_other_shape_is_the_reason():
    batcher = Batcher(rules(delay_ms=5))
    batcher.enqueue(request(0))
    batcher.enqueue(request(1, key="B"))
    decision = batcher.decide(0)
    assert decision == Dispatch(ids=(0,), rows=1, reason=DispatchReason.NEXT_DOES_NOT_FIT)


def test_cancelled_never_runs():
    batcher = Batcher(rules())
    for number in range(3):
        batcher.enqueue(request(number))
    assert batcher.cancel(1)
    assert not batcher.cancel(1)
    decision = batcher.decide(0)
    assert isinstance(decision, Dispatch)
    assert decision.ids == (0, 2)
    assert not batcher.cancel(0)
    assert batcher.decide(0) == Idle()


def test_expired_never_runs_and_is_named():
    batcher = Batcher(rules())
    batcher.enqueue(request(0, deadline_ms=5))
    batcher.enqueue(request(1))
    decision = batcher.decide(5 * MS)
    assert isinstance(decision, Dispatch)
    assert (decision.ids, decision.expired) == ((1,), (0,))


def test_wait_ends_at_a_deadline_before_the_delay():
    batcher = Batcher(rules(delay_ms=100))
    batcher.enqueue(request(0))
    batcher.enqueue(request(1, deadline_ms=20))
    assert batcher.decide(0) == WaitUntil(at_us=20 * MS)
    assert batcher.decide(20 * MS) == WaitUntil(at_us=100 * MS, expired=(1,))


def test_deadline_of_a_cancelled_request_wakes_nobody():
    batcher = Batcher(rules(delay_ms=100))
    batcher.enqueue(request(0, deadline_ms=20))
    batcher.enqueue(request(1))
    batcher.cancel(0)
    assert batcher.decide(0) == WaitUntil(at_us=100 * MS)


def test_bound_counts_waiting_requests_not_rows():
    batcher = Batcher(rules(max_queue_size=2))
    assert batcher.enqueue(request(0, rows=8)) is Admission.ACCEPTED
    assert batcher.enqueue(request(1)) is Admission.ACCEPTED
    assert batcher.enqueue(request(2)) is Admission.QUEUE_FULL
    assert isinstance(batcher.decide(0), Dispatch)
    assert batcher.enqueue(request(3)) is Admission.ACCEPTED


def test_drain_names_what_waited():
    batcher = Batcher(rules())
    batcher.enqueue(request(0))
    batcher.enqueue(request(1, deadline_ms=9))
    assert batcher.drain() == (0, 1)
    assert batcher.decide(0) == Idle()


def test_old_deadlines_do_not_pile_up():
    batcher = Batcher(rules())
    for number in range(1000):
        batcher.enqueue(request(number, deadline_ms=10_000))
        batcher.decide(0)
    assert len(batcher._deadlines) < 100


@given(rows=st.lists(st.integers(1, 8), min_size=1, max_size=30), max_batch=st.integers(8, 16))
@settings(deadline=None)
def test_without_delay_a_full_queue_is_cut_greedily(rows, max_batch):
    batcher = Batcher(rules(max_batch=max_batch))
    for number, count in enumerate(rows):
        batcher.enqueue(request(number, rows=count))
    batches = []
    while isinstance(decision := batcher.decide(0), Dispatch):
        batches.append(decision)
    for batch, following in itertools.pairwise(batches):
        assert batch.rows + rows[following.ids[0]] > max_batch
