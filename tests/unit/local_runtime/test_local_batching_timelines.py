"""100,000 random timelines of arrivals, cancellations, deadlines, timeouts and instances that become free.

Every decision is compared with a slow model of Triton's rule that keeps one plain list and looks at all of it again
each time; what a queue must promise whatever the rule (nothing lost, nothing late, nothing overtaken) is checked
besides. A failure prints the number of the timeline; `play_timeline(number)` repeats it.
"""

import dataclasses
import heapq
import itertools
import random
from collections.abc import Hashable

import pytest

from local_runtime.repository.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from local_runtime.scheduling.batching import Batcher
from local_runtime.scheduling.decisions import Admission, Dispatch, DropReason, Idle, QueuedRequest, WaitUntil
from tests.kit.timelines import chunks

CHUNKS = 50
TIMELINES_PER_CHUNK = 2000
NEVER = 10**9


@dataclasses.dataclass(slots=True)
class Waiting:
    """A waiting request as the slow model sees it. `turn` counts arrivals."""

    turn: int
    id: int
    rows: int
    key: Hashable
    came: int
    deadline: int
    level: int
    timeout_at: int
    action: TimeoutAction

    def is_delayed(self, now):
        return self.action is TimeoutAction.DELAY and self.timeout_at <= now

    def place(self, now):
        """Level first; within it the unexpired as they came, then the expired as they expired."""
        delayed = self.is_delayed(now)
        return (self.level, delayed, self.timeout_at if delayed else 0, self.turn)

    def end_by_time(self, now):
        if self.deadline <= now:
            return DropReason.DEADLINE
        if self.action is TimeoutAction.REJECT and self.timeout_at <= now:
            return DropReason.QUEUE_TIMEOUT
        return None


class SlowModel:
    """Triton's queue and dynamic batcher from its description, without any cleverness."""

    def __init__(self, *, max_batch_size, config, max_queue_size):
        self.is_batching = config is not None and max_batch_size > 0
        self.config = config or DynamicBatching()
        self.max_batch_size = max_batch_size
        self.max_queue_size = max_queue_size
        self.waiting = []
        self.arrivals = 0

    def policy(self, level):
        return self.config.priority_queue_policy.get(level, self.config.default_queue_policy)

    def enqueue(self, request):
        """Whether it is taken."""
        config = self.config
        level = request.priority if 1 <= request.priority <= config.priority_levels else config.default_priority_level
        policy = self.policy(level)
        in_level = sum(other.level == level for other in self.waiting)
        if self.max_queue_size and len(self.waiting) >= self.max_queue_size:
            return False
        if policy.max_queue_size and in_level >= policy.max_queue_size:
            return False
        timeout = policy.default_timeout_microseconds
        if policy.allow_timeout_override and request.timeout_us:
            timeout = min(timeout, request.timeout_us)
        self.arrivals += 1
        self.waiting.append(
            Waiting(
                turn=self.arrivals,
                id=request.id,
                rows=request.rows,
                key=request.batch_key,
                came=request.enqueued_us,
                deadline=NEVER if request.deadline_us is None else request.deadline_us,
                level=level,
                timeout_at=request.enqueued_us + timeout if timeout else NEVER,
                action=policy.timeout_action,
            )
        )
        return True

    def remove(self, ids):
        self.waiting = [request for request in self.waiting if request.id not in ids]

    def ended_by_time(self, now):
        return {request.id: reason for request in self.waiting if (reason := request.end_by_time(now))}

    def next_batch(self, now):
        """The ids to run now; empty to wait on."""
        queue = sorted(self.waiting, key=lambda request: request.place(now))
        if not queue or not self.is_batching:
            return [request.id for request in queue[:1]]
        preferred = set(self.config.preferred_batch_size) or {self.max_batch_size}
        delay = self.config.max_queue_delay_microseconds
        scanned, best, stopped, rows = [], 0, False, 0
        for request in queue:
            if scanned and (rows + request.rows > self.max_batch_size or request.key != scanned[0].key):
                stopped = True
                break
            if scanned and not best and rows + request.rows > max(preferred):
                best = len(scanned)
            scanned.append(request)
            rows += request.rows
            if rows in preferred:
                best = len(scanned)
        is_young = now - min(request.came for request in scanned) < delay
        if best and (delay == 0 or is_young):
            scanned = scanned[:best]
        elif delay and is_young and not stopped and rows < max(preferred):
            scanned = []
        return [request.id for request in scanned]


def random_policy(rng):
    return QueuePolicy(
        timeout_action=rng.choice(list(TimeoutAction)),
        default_timeout_microseconds=rng.choice([0, 4, 20, 60]),
        allow_timeout_override=rng.random() < 0.5,
        max_queue_size=rng.choice([0, 0, 2, 5]),
    )


def random_rules(rng):
    max_batch_size = rng.choice([0, 1, 2, 4, 4, 8, 8])
    levels = rng.choice([0, 0, 2, 3])
    has_policies = rng.random() < 0.5
    config = DynamicBatching(
        preferred_batch_size=tuple({rng.randint(1, max_batch_size) for _ in range(rng.randint(0, 3))})
        if max_batch_size
        else (),
        max_queue_delay_microseconds=rng.choice([0, 0, 5, 30]),
        priority_levels=levels,
        default_priority_level=rng.randint(1, levels) if levels else 0,
        default_queue_policy=random_policy(rng) if has_policies else QueuePolicy(),
        priority_queue_policy={rng.randint(1, levels): random_policy(rng)} if levels and has_policies else {},
    )
    return {
        "max_batch_size": max_batch_size,
        "config": config if rng.random() < 0.9 else None,
        "max_queue_size": rng.choice([0, 0, 0, 6]),
    }


def random_events(rng, max_batch_size):
    """(time, request that comes) and (time, id that is cancelled), in order."""
    events = []
    now = 0
    has_deadlines = rng.random() < 0.5
    keys = rng.choice(["A", "A", "AAAB"])
    biggest = rng.choice([1, max(1, max_batch_size)])
    for turn in range(rng.randint(4, 18)):
        now += rng.choice([0, 0, 1, 3, 10, 40])
        request = QueuedRequest(
            id=1000 - turn,  # falling: the order of ids must not matter
            rows=rng.randint(1, biggest),
            batch_key=rng.choice(keys),
            enqueued_us=now,
            deadline_us=now + rng.choice([0, 3, 30, 100]) if has_deadlines and rng.random() < 0.5 else None,
            priority=rng.choice([0, 1, 2, 3, 7]),
            timeout_us=rng.choice([0, 0, 2, 50]),
        )
        events.append((now, request))
        if rng.random() < 0.15:
            events.append((now + rng.choice([0, 2, 25]), 1000 - rng.randint(0, turn)))
    return events


class Timeline:
    """Does as a scheduler does, on a clock of its own, and checks everything the batcher says."""

    def __init__(self, rng):
        self.rng = rng
        self.rules = random_rules(rng)
        self.instances = rng.randint(1, 3)
        self.events = random_events(rng, self.rules["max_batch_size"])
        self.batcher = Batcher(**self.rules)
        self.model = SlowModel(**self.rules)
        self.free = list(range(self.instances))
        self.order = itertools.count()
        self.agenda = [(at, next(self.order), what) for at, what in self.events]
        heapq.heapify(self.agenda)
        self.wake_at = None
        self.accepted = set()
        self.ended = {}
        self.latest_turn = {}

    def run(self):
        while self.agenda:
            now, _, what = heapq.heappop(self.agenda)
            if what is None and now != self.wake_at:
                continue
            if isinstance(what, QueuedRequest):
                self.arrive(what)
            elif isinstance(what, Dispatch):
                self.free.append(what.instance)
                self.batcher.finished(what, now_us=now, compute_us=1)
            elif what is not None:
                self.cancel(what)
            self.serve(now)
        assert self.ended.keys() == self.accepted, "every request ends"
        assert len(self.batcher) == 0

    def arrive(self, request):
        is_taken = self.model.enqueue(request)
        assert self.batcher.enqueue(request) is (Admission.ACCEPTED if is_taken else Admission.QUEUE_FULL)
        if is_taken:
            self.accepted.add(request.id)

    def cancel(self, request_id):
        dropped = {entry.id: entry.reason for entry in self.batcher.cancel(request_id)}
        is_waiting = request_id in self.accepted and request_id not in self.ended
        assert dropped == ({request_id: DropReason.CANCELLED} if is_waiting else {})
        self.end(dropped)

    def end(self, ends):
        assert not ends.keys() & self.ended.keys(), "no request ends twice"
        assert ends.keys() <= self.accepted
        self.ended.update(ends)
        self.model.remove(ends)

    def serve(self, now):
        self.wake_at = None
        if not self.free and not self.batcher.needs_timer:
            return
        while True:
            decision = self.batcher.decide(now, free=tuple(self.free))
            self.check_dropped(decision, now)
            expected = self.model.next_batch(now) if self.free else []
            if not isinstance(decision, Dispatch):
                break
            assert list(decision.ids) == expected
            self.check_dispatch(decision, now)
        assert not expected
        self.check_wait(decision, now)
        assert len(self.batcher) == len(self.model.waiting)

    def check_dropped(self, decision, now):
        dropped = {entry.id: entry.reason for entry in decision.dropped}
        assert len(dropped) == len(decision.dropped)
        assert dropped == self.model.ended_by_time(now)
        for request in self.model.waiting:
            if dropped.get(request.id) is DropReason.QUEUE_TIMEOUT:
                assert request.timeout_at == now, "a timeout is told when it ends, busy or not"
        self.end(dropped)

    def check_dispatch(self, decision, now):
        members = {request.id: request for request in self.model.waiting if request.id in decision.ids}
        rows = sum(member.rows for member in members.values())
        assert len(members) == len(decision.ids) > 0, "only what waits runs: not cancelled, not expired, not run"
        assert decision.rows == rows <= max(self.rules["max_batch_size"], rows if len(members) == 1 else 0)
        assert len({member.key for member in members.values()}) == 1
        assert self.model.is_batching or len(members) == 1
        for request_id in decision.ids:
            member = members[request_id]
            assert member.deadline > now
            if not member.is_delayed(now):
                assert self.latest_turn.get(member.level, 0) < member.turn, "first in, first out within a level"
                self.latest_turn[member.level] = member.turn
        self.end(dict.fromkeys(decision.ids, "ran"))
        assert decision.instance == self.free.pop(0)
        heapq.heappush(self.agenda, (now + self.rng.choice([1, 8, 50]), next(self.order), decision))

    def check_wait(self, decision, now):
        delay = self.model.config.max_queue_delay_microseconds if self.model.is_batching else 0
        if self.free:
            assert all(now < request.came + delay for request in self.model.waiting), "no wait past the delay"
            assert isinstance(decision, WaitUntil) or not self.model.waiting
        if isinstance(decision, Idle):
            rejecting = [request for request in self.model.waiting if request.action is TimeoutAction.REJECT]
            assert all(request.timeout_at == NEVER for request in rejecting)
            return
        assert now < decision.at_us
        self.wake_at = decision.at_us
        heapq.heappush(self.agenda, (decision.at_us, next(self.order), None))


def play_timeline(number):
    timeline = Timeline(random.Random(number))  # noqa: S311 - test data, nothing secret
    try:
        timeline.run()
    except Exception as error:
        events = "\n".join(f"  {event}" for event in timeline.events)
        raise AssertionError(
            f"timeline {number}: {timeline.instances} instances, {timeline.rules}\n{events}\nended {timeline.ended}"
        ) from error
    return timeline


@pytest.mark.parametrize("chunk", chunks(CHUNKS))
def test_every_decision_is_tritons_and_every_request_ends_once(chunk):
    for number in range(chunk * TIMELINES_PER_CHUNK, (chunk + 1) * TIMELINES_PER_CHUNK):
        play_timeline(number)


def test_the_timelines_meet_every_way_to_end():
    timelines = [play_timeline(number) for number in range(1000)]
    ends = {end for timeline in timelines for end in timeline.ended.values()}
    assert ends == {"ran", DropReason.CANCELLED, DropReason.DEADLINE, DropReason.QUEUE_TIMEOUT}
    assert any(
        len(timeline.accepted) < sum(isinstance(what, QueuedRequest) for _, what in timeline.events)
        for timeline in timelines
    )
