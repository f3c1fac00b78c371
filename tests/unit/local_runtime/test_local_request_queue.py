import pytest

from local_runtime.repository.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from local_runtime.scheduling.decisions import Admission, Dropped, DropReason, QueuedRequest
from local_runtime.scheduling.request_queue import RequestQueue

LEVELS = {"priority_levels": 3, "default_priority_level": 2}


def make_queue(*, max_rows=8, max_queue_size=0, **config):
    return RequestQueue(DynamicBatching(**config), max_rows=max_rows, max_queue_size=max_queue_size)


def timeout(at_us, action=TimeoutAction.REJECT, **fields):
    return QueuePolicy(timeout_action=action, default_timeout_microseconds=at_us, **fields)


def request(number, at_us=0, *, rows=1, key="A", **fields):
    return QueuedRequest(id=number, rows=rows, batch_key=key, enqueued_us=at_us, **fields)


def add(queue, *requests):
    for each in requests:
        assert queue.add(each) is Admission.ACCEPTED


@pytest.mark.parametrize(
    ("rows", "keys", "prefix_rows", "is_stopped"),
    [
        ([1], "A", [1], False),
        ([3, 3, 2], "AAA", [3, 6, 8], False),
        ([3, 3, 3, 1], "AAAA", [3, 6], True),
        ([8, 1], "AA", [8], True),
        ([1, 1, 1], "ABA", [1], True),
    ],
)
@pytest.mark.parametrize("asked_always", [False, True])
def test_the_front_is_what_fits_one_batch(rows, keys, prefix_rows, is_stopped, asked_always):
    queue = make_queue()
    for number, (count, key) in enumerate(zip(rows, keys, strict=True)):
        add(queue, request(number, rows=count, key=key))
        if asked_always:
            queue.front()
    front = queue.front()
    assert (front.prefix_rows, front.is_stopped, front.batch_key) == (prefix_rows, is_stopped, "A")


def test_without_batches_the_front_is_one_request():
    queue = make_queue(max_rows=0)
    add(queue, request(0, rows=3), request(1))
    assert (queue.front().prefix_rows, queue.front().is_stopped) == ([3], True)


def test_a_higher_level_goes_before_a_front_already_seen():
    queue = make_queue(**LEVELS)
    add(queue, request(0, at_us=1, rows=5, priority=3))
    assert queue.front().prefix_rows == [5]
    add(queue, request(1, at_us=2, rows=2, priority=1))
    assert (queue.front().prefix_rows, queue.front().oldest_enqueued_us) == ([2, 7], 1)
    assert queue.take(2) == (1, 0)


def test_a_fresh_request_goes_before_a_delayed_one_of_a_front_already_seen():
    queue = make_queue(default_queue_policy=timeout(10, TimeoutAction.DELAY))
    add(queue, request(0, rows=5))
    assert queue.expire(10) == ()
    assert queue.front().prefix_rows == [5]
    add(queue, request(1, at_us=10, rows=2))
    assert queue.front().prefix_rows == [2, 7]


def test_what_was_taken_is_no_longer_at_the_front():
    queue = make_queue()
    add(queue, *(request(number, at_us=number) for number in range(5)))
    queue.front()
    assert queue.take(2) == (0, 1)
    assert (queue.front().prefix_rows, queue.front().oldest_enqueued_us, len(queue)) == ([1, 2, 3], 2, 3)


def test_cancel_looks_in_every_level_and_among_the_delayed():
    queue = make_queue(default_queue_policy=timeout(10, TimeoutAction.DELAY), **LEVELS)
    add(queue, *(request(number, priority=number) for number in (3, 1, 2)))
    queue.expire(10)
    add(queue, request(4, at_us=10, priority=3))
    assert [queue.cancel(number) for number in (3, 4, 4, 9)] == [True, True, False, False]
    assert queue.take(len(queue)) == (1, 2)


def test_delayed_ones_run_after_their_level_and_before_the_next():
    queue = make_queue(
        priority_levels=2, default_priority_level=2, default_queue_policy=timeout(10, TimeoutAction.DELAY)
    )
    add(queue, request(0, priority=1), request(1, priority=2))
    queue.expire(10)
    add(queue, request(2, at_us=10, priority=2), request(3, at_us=10, priority=1))
    assert queue.take(4) == (3, 0, 2, 1)


def test_delayed_ones_are_ordered_by_when_they_expired():
    queue = make_queue(default_queue_policy=timeout(100, TimeoutAction.DELAY, allow_timeout_override=True))
    add(queue, request(0), request(1, timeout_us=20), request(2, timeout_us=10), request(3, timeout_us=10))
    queue.expire(20)
    assert queue.take(4) == (0, 2, 3, 1)


def test_delayed_ones_count_for_the_bound_of_their_level():
    queue = make_queue(default_queue_policy=timeout(10, TimeoutAction.DELAY, max_queue_size=2))
    add(queue, request(0), request(1))
    queue.expire(10)
    assert queue.add(request(2, at_us=10)) is Admission.QUEUE_FULL
    queue.cancel(0)
    assert queue.add(request(3, at_us=10)) is Admission.ACCEPTED


def test_the_bound_of_the_whole_queue_spans_the_levels():
    queue = make_queue(max_queue_size=2, **LEVELS)
    add(queue, request(0, priority=1), request(1, priority=2))
    assert queue.add(request(2, priority=3)) is Admission.QUEUE_FULL
    assert len(queue) == 2


def test_each_is_dropped_once_when_its_time_has_come():
    queue = make_queue(default_queue_policy=timeout(10))
    add(queue, request(0), request(1, at_us=3), request(2, at_us=3, deadline_us=5))
    assert queue.expire(4) == ()
    assert queue.expire(5) == (Dropped(id=2, reason=DropReason.DEADLINE),)
    assert queue.expire(10) == (Dropped(id=0, reason=DropReason.QUEUE_TIMEOUT),)
    assert queue.expire(20) == (Dropped(id=1, reason=DropReason.QUEUE_TIMEOUT),)
    assert (queue.expire(99), len(queue)) == ((), 0)


def test_next_timeout_is_that_of_a_waiting_request():
    queue = make_queue(default_queue_policy=timeout(10))
    assert queue.next_timeout_us() is None
    add(queue, request(0), request(1, at_us=3), request(2, at_us=5))
    queue.cancel(0)
    assert queue.next_timeout_us() == 13
    queue.take(2)
    assert queue.next_timeout_us() is None


@pytest.mark.parametrize(
    ("config", "can_reject"),
    [
        ({}, False),
        ({"default_queue_policy": QueuePolicy(max_queue_size=5, allow_timeout_override=True)}, False),
        ({"default_queue_policy": timeout(5)}, True),
        ({"default_queue_policy": timeout(5, TimeoutAction.DELAY)}, False),
        ({"priority_queue_policy": {3: timeout(5)}, **LEVELS}, True),
        ({"priority_queue_policy": {1: timeout(5)}}, False),
    ],
)
def test_it_is_known_whether_time_alone_can_reject(config, can_reject):
    assert make_queue(**config).can_reject is can_reject


def test_drain_empties_all_levels_and_forgets_their_times():
    queue = make_queue(default_queue_policy=timeout(10), **LEVELS)
    add(queue, request(0, priority=3), request(1, priority=1, deadline_us=4))
    assert queue.drain() == (1, 0)
    assert (len(queue), queue.next_timeout_us(), queue.expire(99), queue.drain()) == (0, None, (), ())


def test_times_of_requests_that_have_left_do_not_pile_up():
    queue = make_queue(default_queue_policy=timeout(10**6))
    for number in range(1000):
        add(queue, request(number, deadline_us=10**7))
        queue.take(1)
    assert len(queue._timeouts._heap) < 100
    assert len(queue._deadlines._heap) < 100


def test_sweeping_old_times_keeps_those_of_waiting_requests():
    queue = make_queue(default_queue_policy=timeout(500))
    add(queue, request(10_000))
    for number in range(300):
        add(queue, request(number, at_us=1 + number, deadline_us=10**6))
        queue.cancel(number)
    assert queue.expire(500) == (Dropped(id=10_000, reason=DropReason.QUEUE_TIMEOUT),)
