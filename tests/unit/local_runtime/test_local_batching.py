import dataclasses
import itertools
from collections.abc import Hashable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_runtime.repository.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from local_runtime.scheduling.batching import Batcher
from local_runtime.scheduling.decisions import (
    Admission,
    Dispatch,
    DispatchReason,
    Dropped,
    DropReason,
    Idle,
    QueuedRequest,
    WaitUntil,
)
from local_runtime.scheduling.sizing import Hold, QueueView, Send

MS = 1000
FREE = (0,)


def policy(timeout_ms=0, *, delay=False, **fields):
    action = TimeoutAction.DELAY if delay else TimeoutAction.REJECT
    return QueuePolicy(timeout_action=action, default_timeout_microseconds=timeout_ms * MS, **fields)


def rules(preferred=(), *, delay_ms=0, max_batch=8, dynamic=True, max_queue_size=0, **fields):
    config = DynamicBatching(
        preferred_batch_size=tuple(preferred), max_queue_delay_microseconds=delay_ms * MS, **fields
    )
    return {"max_batch_size": max_batch, "config": config if dynamic else None, "max_queue_size": max_queue_size}


def request(number, at_ms=0, *, rows=1, key="A", deadline_ms=None, **fields):
    return QueuedRequest(
        id=number,
        rows=rows,
        batch_key=key,
        enqueued_us=at_ms * MS,
        deadline_us=None if deadline_ms is None else deadline_ms * MS,
        **fields,
    )


def rejected(number):
    return Dropped(id=number, reason=DropReason.QUEUE_TIMEOUT)


@dataclasses.dataclass
class Arrival:
    at_ms: int
    rows: int = 1
    key: Hashable = "A"
    runs_ms: int = 0
    priority: int = 0
    timeout_ms: int = 0


@dataclasses.dataclass
class Played:
    """What ran, as (start in ms, ids), and what was refused, as (time in ms, id)."""

    ran: list
    refused: list


def play(batch_rules, arrivals, *, instances=1):
    """Arrivals in order of time; an instance is busy for as long as its slowest request says."""
    batcher = Batcher(**batch_rules)
    pending = list(enumerate(arrivals))
    busy: dict[int, int] = {}
    played = Played([], [])
    now = 0
    while True:
        while pending and pending[0][1].at_ms <= now:
            number, arrival = pending.pop(0)
            queued = request(
                number,
                arrival.at_ms,
                rows=arrival.rows,
                key=arrival.key,
                priority=arrival.priority,
                timeout_us=arrival.timeout_ms * MS,
            )
            if batcher.enqueue(queued) is Admission.QUEUE_FULL:
                played.refused.append((now, number))
        busy = {instance: end for instance, end in busy.items() if end > now}
        while True:
            free = [instance for instance in range(instances) if instance not in busy]
            decision = batcher.decide(now * MS, free=free)
            played.refused += [(now, dropped.id) for dropped in decision.dropped]
            if not isinstance(decision, Dispatch):
                break
            assert decision.instance == free[0]
            played.ran.append((now, list(decision.ids)))
            runs_ms = max(arrivals[number].runs_ms for number in decision.ids)
            if runs_ms:
                busy[decision.instance] = now + runs_ms
        wake = [decision.at_us // MS] if isinstance(decision, WaitUntil) else []
        upcoming = [arrival.at_ms for _, arrival in pending[:1]] + list(busy.values()) + wake
        if not upcoming:
            return played
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
    assert sizes(play(batch_rules, arrivals).ran) == expected


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
    assert play(batch_rules, arrivals).ran == expected


def test_rows_count_not_requests():
    arrivals = [PLUG, *(Arrival(60 + n, rows=rows) for n, rows in enumerate([3, 3, 3, 2]))]
    assert [ids for _, ids in play(rules(), arrivals).ran] == [[0], [1, 2], [3, 4]]


def test_shapes_never_share_a_batch_and_never_overtake():
    arrivals = [PLUG, *(Arrival(60 + n, key=key) for n, key in enumerate("AABAA"))]
    assert [ids for _, ids in play(rules(), arrivals).ran] == [[0], [1, 2], [3], [4, 5]]


def test_first_free_of_two_instances_takes_all():
    arrivals = [PLUG, Arrival(0, key="B", runs_ms=500), *(Arrival(60 + n) for n in range(6))]
    assert sizes(play(rules(), arrivals, instances=2).ran) == [1, 1, 6]


def test_no_batch_dimension_runs_alone():
    assert sizes(play(rules(max_batch=0), [PLUG, *[Arrival(60)] * 3]).ran) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("batch_rules", "rows", "now_ms", "reason"),
    [
        (rules(dynamic=False), [1], 0, DispatchReason.UNBATCHED),
        (rules([2]), [1, 1, 1], 0, DispatchReason.PREFERRED_SIZE),
        (rules([2], delay_ms=5), [1, 1, 1], 5, DispatchReason.FULL),
        (rules([3], delay_ms=5), [1, 1, 1], 5, DispatchReason.FULL),
        (rules([3], delay_ms=5, max_batch=4), [4], 0, DispatchReason.FULL),
        (rules([5], delay_ms=5), [3, 3], 0, DispatchReason.PREFERRED_SIZE),
        (rules(), [1], 0, DispatchReason.NO_DELAY),
        (rules(delay_ms=5), [1], 5, DispatchReason.DELAY_REACHED),
    ],
)
def test_reason(batch_rules, rows, now_ms, reason):
    batcher = Batcher(**batch_rules)
    for number, count in enumerate(rows):
        batcher.enqueue(request(number, rows=count))
    decision = batcher.decide(now_ms * MS, free=FREE)
    assert isinstance(decision, Dispatch)
    assert decision.reason is reason


def test_other_shape_is_the_reason():
    batcher = Batcher(**rules(delay_ms=5))
    batcher.enqueue(request(0))
    batcher.enqueue(request(1, key="B"))
    decision = batcher.decide(0, free=(3, 1))
    assert decision == Dispatch(instance=3, ids=(0,), rows=1, reason=DispatchReason.NEXT_DOES_NOT_FIT)


def test_cancelled_never_runs():
    batcher = Batcher(**rules())
    for number in range(3):
        batcher.enqueue(request(number))
    assert batcher.cancel(1) == (Dropped(id=1, reason=DropReason.CANCELLED),)
    assert batcher.cancel(1) == ()
    decision = batcher.decide(0, free=FREE)
    assert isinstance(decision, Dispatch)
    assert decision.ids == (0, 2)
    assert batcher.cancel(0) == ()
    assert batcher.decide(0, free=FREE) == Idle()


def test_a_cancelled_request_leaves_a_batch_that_waits_for_company():
    batcher = Batcher(**rules([3], delay_ms=100))
    batcher.enqueue(request(0, at_ms=0))
    batcher.enqueue(request(1, at_ms=10, key="A"))
    assert batcher.decide(10 * MS, free=FREE) == WaitUntil(at_us=100 * MS)
    batcher.cancel(0)
    assert batcher.decide(20 * MS, free=FREE) == WaitUntil(at_us=110 * MS)


def test_expired_never_runs_and_is_named():
    batcher = Batcher(**rules())
    batcher.enqueue(request(0, deadline_ms=5))
    batcher.enqueue(request(1))
    decision = batcher.decide(5 * MS, free=FREE)
    assert isinstance(decision, Dispatch)
    assert (decision.ids, decision.dropped) == ((1,), (Dropped(id=0, reason=DropReason.DEADLINE),))


def test_a_deadline_needs_no_timer_and_prolongs_no_delay():
    batcher = Batcher(**rules(delay_ms=100))
    batcher.enqueue(request(0))
    batcher.enqueue(request(1, deadline_ms=20))
    assert not batcher.needs_timer
    assert batcher.decide(0, free=()) == Idle()
    assert batcher.decide(0, free=FREE) == WaitUntil(at_us=100 * MS)
    dropped = (Dropped(id=1, reason=DropReason.DEADLINE),)
    assert batcher.decide(30 * MS, free=FREE) == WaitUntil(at_us=100 * MS, dropped=dropped)


def test_nothing_runs_while_no_instance_is_free():
    batcher = Batcher(**rules([2]))
    for number in range(4):
        batcher.enqueue(request(number))
    assert batcher.decide(0, free=()) == Idle()
    assert len(batcher) == 4


def test_bound_counts_waiting_requests_not_rows():
    batcher = Batcher(**rules(max_queue_size=2))
    assert batcher.enqueue(request(0, rows=8)) is Admission.ACCEPTED
    assert batcher.enqueue(request(1)) is Admission.ACCEPTED
    assert batcher.enqueue(request(2)) is Admission.QUEUE_FULL
    assert isinstance(batcher.decide(0, free=FREE), Dispatch)
    assert batcher.enqueue(request(3)) is Admission.ACCEPTED


def test_no_sequence_ever_ends_here():
    batcher = Batcher(**rules())
    batcher.enqueue(request(0))
    batcher.decide(0, free=FREE)
    assert batcher.take_ended() == ()


def test_drain_names_what_waited():
    batcher = Batcher(**rules())
    batcher.enqueue(request(0))
    batcher.enqueue(request(1, deadline_ms=9))
    assert batcher.drain() == (0, 1)
    assert batcher.decide(0, free=FREE) == Idle()


@given(rows=st.lists(st.integers(1, 8), min_size=1, max_size=30), max_batch=st.integers(8, 16))
def test_without_delay_a_full_queue_is_cut_greedily(rows, max_batch):
    batcher = Batcher(**rules(max_batch=max_batch))
    for number, count in enumerate(rows):
        batcher.enqueue(request(number, rows=count))
    batches = []
    while isinstance(decision := batcher.decide(0, free=FREE), Dispatch):
        batches.append(decision)
    for batch, following in itertools.pairwise(batches):
        assert batch.rows + rows[following.ids[0]] > max_batch


BUSY = Arrival(0, runs_ms=400)
LEVELS = {"priority_levels": 3, "default_priority_level": 2}


# Real Triton 24.10 ran and refused the same; the names are those of the recorded cases.
@pytest.mark.parametrize(
    ("batch_rules", "arrivals", "expected", "refused"),
    [
        pytest.param(
            rules(max_batch=1, **LEVELS),
            [BUSY, *(Arrival(60 + 20 * n, priority=level) for n, level in enumerate([3, 0, 9, 0, 1]))],
            [[0], [5], [2], [3], [4], [1]],
            [],
            id="pri-02 none, 0 and out of range mean the default level",
        ),
        pytest.param(
            rules(max_batch=1),
            [BUSY, *(Arrival(60 + 20 * n, priority=level) for n, level in enumerate([3, 1, 2]))],
            [[0], [1], [2], [3]],
            [],
            id="pri-03 ignored without levels",
        ),
        pytest.param(
            rules(max_batch=4, priority_levels=2, default_priority_level=2),
            [BUSY, *(Arrival(62 + 12 * n, priority=level) for n, level in enumerate([2, 1] * 4))],
            [[0], [2, 4, 6, 8], [1, 3, 5, 7]],
            [],
            id="pri-04 first in, first out within a level",
        ),
        pytest.param(
            rules(max_batch=8, priority_levels=2, default_priority_level=2),
            [BUSY, *(Arrival(62 + 12 * n, priority=level) for n, level in enumerate([2, 1, 2]))],
            [[0], [2, 1, 3]],
            [],
            id="a batch mixes levels",
        ),
        pytest.param(
            rules(
                max_batch=1,
                priority_levels=2,
                default_priority_level=2,
                priority_queue_policy={1: policy(max_queue_size=1)},
            ),
            [BUSY, Arrival(60, priority=1), Arrival(80, priority=1), Arrival(100), Arrival(120)],
            [[0], [1], [3], [4]],
            [(80, 2)],
            id="qp-03 bound of one level",
        ),
        pytest.param(
            rules(
                max_batch=1, priority_levels=2, default_priority_level=2, default_queue_policy=policy(max_queue_size=1)
            ),
            [BUSY, *(Arrival(60 + n, priority=level) for n, level in enumerate([1, 1, 2, 2]))],
            [[0], [1], [3]],
            [(61, 2), (63, 4)],
            id="the default policy's bound holds for each level by itself",
        ),
        pytest.param(
            rules(default_queue_policy=policy(150)),
            [Arrival(0, runs_ms=1500), Arrival(60), Arrival(80), Arrival(1460)],
            [[0], [3]],
            [(210, 1), (230, 2)],
            id="qp-05 REJECT while busy, in time",
        ),
        pytest.param(
            rules(max_batch=2, default_queue_policy=policy(150, delay=True)),
            [Arrival(0, runs_ms=600), Arrival(60), Arrival(80), Arrival(540), Arrival(560)],
            [[0], [3, 4], [1, 2]],
            [],
            id="qp-06 DELAY puts them behind",
        ),
        pytest.param(
            rules(default_queue_policy=policy(5000, allow_timeout_override=True)),
            [Arrival(0, runs_ms=800), Arrival(60, timeout_ms=100), Arrival(80)],
            [[0], [2]],
            [(160, 1)],
            id="qp-07 shorter timeout of the request",
        ),
        pytest.param(
            rules(default_queue_policy=policy(150, allow_timeout_override=True)),
            [Arrival(0, runs_ms=800), Arrival(60, timeout_ms=5000)],
            [[0]],
            [(210, 1)],
            id="qp-08 longer timeout of the request is ignored",
        ),
        pytest.param(
            rules(default_queue_policy=policy(allow_timeout_override=True)),
            [Arrival(0, runs_ms=600), Arrival(60, timeout_ms=100)],
            [[0], [1]],
            [],
            id="no default timeout: that of the request is ignored",
        ),
        pytest.param(
            rules(default_queue_policy=policy(max_queue_size=100)),
            [Arrival(0, runs_ms=600), Arrival(60, timeout_ms=100)],
            [[0], [1]],
            [],
            id="qp-10 timeout of the request without allow_timeout_override",
        ),
        pytest.param(
            rules([8], delay_ms=400, default_queue_policy=policy(100)),
            [Arrival(0), Arrival(20)],
            [],
            [(100, 0), (120, 1)],
            id="qp-11 timeout shorter than the delay, idle",
        ),
        pytest.param(
            rules(max_batch=1, priority_levels=2, default_priority_level=2, priority_queue_policy={2: policy(100)}),
            [Arrival(0, runs_ms=900), Arrival(60, priority=1), Arrival(80, priority=2)],
            [[0], [1]],
            [(180, 2)],
            id="qp-12 timeout of one level",
        ),
        pytest.param(
            rules(max_batch=1, default_queue_policy=policy(100)),
            [Arrival(0, runs_ms=500)],
            [[0]],
            [],
            id="qp-13 the timeout covers the queue only",
        ),
    ],
)
def test_priorities_and_queue_policies(batch_rules, arrivals, expected, refused):
    played = play(batch_rules, arrivals)
    assert [ids for _, ids in played.ran] == expected
    assert played.refused == refused


def test_the_delay_is_that_of_the_longest_waiting_of_the_batch_whatever_its_level():
    batcher = Batcher(**rules([8], delay_ms=100, priority_levels=2, default_priority_level=2))
    batcher.enqueue(request(0, at_ms=0, priority=2))
    batcher.enqueue(request(1, at_ms=50, priority=1))
    assert batcher.decide(50 * MS, free=FREE) == WaitUntil(at_us=100 * MS)
    decision = batcher.decide(100 * MS, free=FREE)
    assert isinstance(decision, Dispatch)
    assert decision.ids == (1, 0)


def test_a_timeout_under_reject_needs_a_timer_and_says_when():
    batcher = Batcher(**rules(default_queue_policy=policy(150)))
    assert batcher.needs_timer
    batcher.enqueue(request(0, at_ms=10))
    assert batcher.decide(20 * MS, free=()) == WaitUntil(at_us=160 * MS)
    assert batcher.decide(160 * MS, free=()) == Idle(dropped=(rejected(0),))


def test_a_timeout_under_delay_needs_no_timer():
    assert not Batcher(**rules(default_queue_policy=policy(150, delay=True))).needs_timer


def test_a_request_may_be_delayed_and_then_miss_its_deadline():
    batcher = Batcher(**rules(default_queue_policy=policy(10, delay=True)))
    batcher.enqueue(request(0, deadline_ms=20))
    assert batcher.decide(10 * MS, free=()) == Idle()
    assert batcher.decide(20 * MS, free=FREE) == Idle(dropped=(Dropped(id=0, reason=DropReason.DEADLINE),))


class Spy:
    """A sizing that sends two requests and notes what it is told."""

    def __init__(self):
        self.told = []

    def choose(self, view, now_us):
        self.told.append(msgspec.structs.replace(view, prefix_rows=tuple(view.prefix_rows)))
        enough = len(view.prefix_rows) >= 2
        return Send(count=2, reason=DispatchReason.ADAPTIVE) if enough else Hold(until_us=now_us + 7)

    def arrived(self, *, rows, now_us):
        self.told.append(("arrived", rows, now_us))

    def finished(self, *, rows, compute_us, now_us):
        self.told.append(("finished", rows, compute_us, now_us))


def test_the_sizing_decides_and_is_told_all():
    spy = Spy()
    batcher = Batcher(**rules(max_queue_size=3), sizing=spy)
    for number, rows in enumerate([2, 3, 4]):
        batcher.enqueue(request(number, at_ms=number, rows=rows))
    assert batcher.enqueue(request(9, at_ms=3)) is Admission.QUEUE_FULL
    first = batcher.decide(3 * MS, free=(0, 1))
    assert first == Dispatch(instance=0, ids=(0, 1), rows=5, reason=DispatchReason.ADAPTIVE)
    assert batcher.decide(4 * MS, free=(1,)) == WaitUntil(at_us=4 * MS + 7)
    batcher.finished(first, now_us=9 * MS, compute_us=6 * MS)
    assert spy.told == [
        ("arrived", 2, 0),
        ("arrived", 3, 1 * MS),
        ("arrived", 4, 2 * MS),
        QueueView(prefix_rows=(2, 5), is_stopped=True, oldest_enqueued_us=0, waiting=3, running=0),
        QueueView(prefix_rows=(4,), is_stopped=False, oldest_enqueued_us=2 * MS, waiting=1, running=2),
        ("finished", 5, 6 * MS, 9 * MS),
    ]
    batcher.decide(9 * MS, free=(0, 1))
    assert spy.told[-1].running == 0


def test_a_queue_timeout_ends_a_hold():
    batcher = Batcher(**rules([8], delay_ms=400, default_queue_policy=policy(100)))
    batcher.enqueue(request(0))
    assert batcher.decide(0, free=FREE) == WaitUntil(at_us=100 * MS)
