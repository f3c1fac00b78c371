"""Any order of arrivals, cancellations, passing time, and instances that become free."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from local_runtime.scheduling.batching import (
    Admission,
    Batcher,
    BatchingRules,
    Dispatch,
    QueuedRequest,
    WaitUntil,
)

MS = 1000


class RandomTimeline(RuleBasedStateMachine):
    @initialize(
        max_batch=st.integers(1, 8),
        preferred=st.sets(st.integers(1, 8), max_size=3),
        delay_ms=st.sampled_from([0, 1, 20]),
        dynamic=st.booleans(),
        instances=st.integers(1, 3),
    )
    def start(self, max_batch, preferred, delay_ms, dynamic, instances):
        self.rules = BatchingRules(
            max_batch_size=max_batch,
            dynamic=dynamic,
            preferred_batch_sizes=tuple(sorted(size for size in preferred if size <= max_batch)),
            max_queue_delay_us=delay_ms * MS,
        )
        self.batcher = Batcher(self.rules)
        self.now_us = 0
        self.next_id = 0
        self.free = instances
        self.requests = {}
        self.waiting = []
        self.ended = []
        self.wake_us = None

    def end(self, ids):
        for number in ids:
            self.waiting.remove(number)
            self.ended.append(number)

    def serve(self):
        self.wake_us = None
        while self.free:
            decision = self.batcher.decide(self.now_us)
            for number in decision.expired:
                assert self.requests[number].deadline_us <= self.now_us
            self.end(decision.expired)
            if isinstance(decision, Dispatch):
                self.check_dispatch(decision)
                self.free -= 1
                continue
            if isinstance(decision, WaitUntil):
                oldest = self.requests[self.waiting[0]]
                assert self.now_us < decision.at_us <= oldest.enqueued_us + self.rules.max_queue_delay_us
                self.wake_us = decision.at_us
            else:
                assert not self.waiting
            break

    def check_dispatch(self, decision):
        members = [self.requests[number] for number in decision.ids]
        assert members
        assert list(decision.ids) == self.waiting[: len(members)], "first in, first out"
        assert decision.rows == sum(member.rows for member in members) <= self.rules.max_batch_size
        assert len({member.batch_key for member in members}) == 1
        assert all(member.deadline_us is None or member.deadline_us > self.now_us for member in members)
        assert self.rules.dynamic or len(members) == 1
        self.end(decision.ids)

    @rule(rows=st.integers(1, 8), key=st.sampled_from("AB"), timeout_ms=st.sampled_from([None, 0, 5, 50]))
    def arrive(self, rows, key, timeout_ms):
        new = QueuedRequest(
            id=self.next_id,
            rows=min(rows, self.rules.max_batch_size),
            batch_key=key,
            enqueued_us=self.now_us,
            deadline_us=None if timeout_ms is None else self.now_us + timeout_ms * MS,
        )
        self.next_id += 1
        self.requests[new.id] = new
        self.waiting.append(new.id)
        assert self.batcher.enqueue(new) is Admission.ACCEPTED
        self.serve()

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick):
        number = self.waiting[pick % len(self.waiting)]
        assert self.batcher.cancel(number)
        self.end([number])
        self.serve()

    @precondition(lambda self: self.ended)
    @rule(pick=st.integers(0, 1000))
    def cancel_too_late(self, pick):
        assert not self.batcher.cancel(self.ended[pick % len(self.ended)])

    @rule(ms=st.integers(1, 30))
    def pass_time(self, ms):
        until = self.now_us + ms * MS
        while self.wake_us is not None and self.wake_us <= until:
            self.now_us = self.wake_us
            self.serve()
        self.now_us = until

    @rule()
    def instance_becomes_free(self):
        self.free += 1
        self.serve()

    @invariant()
    def every_request_ends_once(self):
        if hasattr(self, "next_id"):
            assert len(self.ended) == len(set(self.ended))
            assert sorted(self.ended + self.waiting) == list(range(self.next_id))
            assert len(self.batcher) == len(self.waiting)

    @invariant()
    def nobody_waits_past_the_delay_beside_an_idle_instance(self):
        if hasattr(self, "free") and self.free and self.waiting:
            oldest = self.requests[self.waiting[0]]
            assert self.now_us < oldest.enqueued_us + self.rules.max_queue_delay_us

    def teardown(self):
        if hasattr(self, "batcher"):
            self.free = 10**6
            self.now_us += 10**6
            self.serve()
            assert sorted(self.ended) == list(range(self.next_id))


RandomTimeline.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRandomTimeline = RandomTimeline.TestCase
