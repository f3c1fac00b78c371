"""10^5 random timelines of sequences, on a virtual clock, against a plain bookkeeping of what was promised."""

import random

import pytest

from local_runtime.repository.model_config import DirectStrategy, OldestStrategy, SequenceBatching
from local_runtime.scheduling.decisions import Admission, Dispatch, DropReason, QueuedRequest, WaitUntil
from local_runtime.scheduling.sequencing import Sequencer
from tests.kit.timelines import chunks

BLOCKS = 20
TIMELINES_PER_BLOCK = 5_000
MS = 1000


class Life:
    """One sequence from its first START until it is over, as the bookkeeping knows it."""

    __slots__ = ("changed_us", "is_open", "name", "place", "running", "waiting")

    def __init__(self, name):
        self.name = name
        self.waiting = []
        self.running = None
        self.place = None
        self.is_open = True
        self.changed_us = 0


class World:
    def __init__(self, rng):
        self.rng = rng
        self.max_batch = rng.choice((0, 1, 2, 4))
        self.instances = rng.randint(1, 3)
        self.delay_us = rng.choice((0, 0, 5 * MS, 20 * MS))
        self.idle_us = rng.choice((25 * MS, 50 * MS))
        self.is_direct = rng.random() < 0.5
        if self.is_direct:
            minimum = rng.choice((0.0, 0.5, 1.0))
            strategy = DirectStrategy(max_queue_delay_microseconds=self.delay_us, minimum_slot_utilization=minimum)
            slots = max(1, self.max_batch)
            if minimum == 0:
                self.delay_us = 0
        else:
            slots = rng.randint(1, 4)
            preferred = tuple(size for size in (2, 4) if size <= self.max_batch and rng.random() < 0.5)
            if self.max_batch == 0:
                self.delay_us = 0
            strategy = OldestStrategy(
                max_candidate_sequences=slots,
                preferred_batch_size=preferred,
                max_queue_delay_microseconds=self.delay_us,
            )
        self.slots = slots
        self.max_queue_size = rng.choice((0, 0, 0, 3))
        self.sequencer = Sequencer(
            max_batch_size=self.max_batch,
            config=SequenceBatching(strategy=strategy, max_sequence_idle_microseconds=self.idle_us),
            instances=self.instances,
            max_queue_size=self.max_queue_size,
        )
        self.now_us = 0
        self.wake_us = None
        self.free = list(range(self.instances))
        self.running = []
        self.requests = {}
        self.life_of = {}
        self.fate = {}
        self.lives = {}
        self.owners = {}
        self.states = set()
        self.last_decision = None

    # What is promised about requests that leave

    def over(self, life):
        self.lives[life.name].remove(life)
        if life.place is not None:
            del self.owners[life.place, life]

    def tidy(self, life):
        if not life.is_open and not life.waiting and life.running is None:
            self.over(life)

    def end_silent(self):
        for lives in self.lives.values():
            for life in list(lives):
                is_silent = life.is_open and not life.waiting and life.running is None
                if is_silent and self.now_us >= life.changed_us + self.idle_us:
                    self.over(life)

    def leave(self, dropped, reasons):
        """Drops come in runs: one with its own reason, then those that cannot go on without it."""
        at = 0
        while at < len(dropped):
            first = dropped[at]
            assert first.reason in reasons
            if first.reason is DropReason.DEADLINE:
                assert self.requests[first.id].deadline_us <= self.now_us
            life = self.life_of[first.id]
            start = life.waiting.index(first.id)
            end = start + 1
            while end < len(life.waiting) and not self.requests[life.waiting[end]].is_start:
                end += 1
            gone = life.waiting[start:end]
            assert [left.id for left in dropped[at : at + len(gone)]] == gone
            assert all(left.reason is DropReason.SEQUENCE_CANCELLED for left in dropped[at + 1 : at + len(gone)])
            for number in gone:
                self.end(number, "dropped")
            if end == len(life.waiting):
                life.is_open = False
            del life.waiting[start:end]
            if start == 0 and life.running is None:
                life.changed_us = self.now_us
            self.tidy(life)
            at += len(gone)

    def end(self, number, fate):
        assert number not in self.fate, "every request ends once"
        self.fate[number] = fate

    def run(self, dispatch):
        assert dispatch.instance in self.free
        self.free.remove(dispatch.instance)
        assert dispatch.ids
        assert dispatch.rows == len(dispatch.slots) <= max(1, self.max_batch)
        assert dispatch.ids == tuple(slot.request for slot in dispatch.slots if slot.request is not None)
        assert dispatch.slots[-1].request is not None
        assert self.is_direct or len(dispatch.ids) == dispatch.rows, "only direct has fillers"
        assert len({self.requests[number].batch_key for number in dispatch.ids}) == 1
        for row, slot in enumerate(dispatch.slots):
            if slot.request is not None:
                self.start(slot, dispatch.instance, row if self.is_direct else None)
        self.running.append(dispatch)

    def start(self, slot, instance, row):
        request = self.requests[slot.request]
        assert (slot.correlation_id, slot.is_start, slot.is_end) == (
            request.correlation_id,
            request.is_start,
            request.is_end,
        )
        assert request.deadline_us is None or request.deadline_us > self.now_us
        life = self.life_of[request.id]
        assert life is self.lives[life.name][0], "a name is used by one sequence at a time"
        assert life.running is None, "never two of a sequence in flight"
        assert life.waiting.pop(0) == request.id, "in order"
        life.running = request.id
        place = (instance, row)
        if life.place is None:
            life.place = place
            self.owners[place, life] = True
            sharing = sum(1 for other, _ in self.owners if other == place)
            assert sharing <= (1 if self.is_direct else self.slots), "a place is never given twice"
        assert life.place == place, "a sequence keeps its place"
        if request.is_start:
            self.states.add(life.name)
        self.end(request.id, "run")

    # What may happen

    def serve(self):
        self.wake_us = None
        while True:
            decision = self.sequencer.decide(self.now_us, free=tuple(self.free))
            self.leave(decision.dropped, (DropReason.DEADLINE,))
            self.end_silent()
            self.take_ended()
            if not isinstance(decision, Dispatch):
                break
            self.run(decision)
        if isinstance(decision, WaitUntil):
            assert decision.at_us > self.now_us
            self.wake_us = decision.at_us
        assert len(self.sequencer) == len(self.requests) - len(self.fate)
        self.check_nobody_waits_beside_an_idle_instance()

    def take_ended(self):
        for name in self.sequencer.take_ended():
            assert not self.lives.get(name), "no state is given up too early"
            self.states.discard(name)

    def check_nobody_waits_beside_an_idle_instance(self):
        if not self.free:
            return
        fronts = [lives[0] for lives in self.lives.values() if lives]
        everyone_has_a_place = len(fronts) <= self.slots * self.instances and len(self.free) == self.instances
        for life in fronts:
            if not life.waiting or life.running is not None:
                continue
            if life.place is not None and life.place[0] in self.free:
                since_us = self.requests[life.waiting[0]].enqueued_us
                if not self.is_direct:
                    since_us = max(since_us, life.changed_us)
                assert self.now_us < since_us + self.delay_us
                assert self.wake_us is not None
                assert self.wake_us <= since_us + self.delay_us
            elif life.place is None and everyone_has_a_place:
                assert self.delay_us > 0
                assert self.wake_us is not None

    def arrive(self, name, *, is_start, is_end, key="A", timeout_us=None):
        number = len(self.requests)
        request = QueuedRequest(
            id=number,
            rows=1,
            batch_key=key,
            enqueued_us=self.now_us,
            deadline_us=None if timeout_us is None else self.now_us + timeout_us,
            correlation_id=name,
            is_start=is_start,
            is_end=is_end,
        )
        self.end_silent()
        waiting = len(self.requests) - len(self.fate)
        self.requests[number] = request
        lives = self.lives.setdefault(name, [])
        life = lives[-1] if lives and lives[-1].is_open else None
        expected = Admission.ACCEPTED
        if name in (0, ""):
            expected = Admission.NO_CORRELATION_ID
        elif life is None and not is_start:
            expected = Admission.NOT_STARTED
        elif 0 < self.max_queue_size <= waiting:
            expected = Admission.QUEUE_FULL
        assert self.sequencer.enqueue(request) is expected
        if expected is not Admission.ACCEPTED:
            self.end(number, "refused")
            return
        if life is None:
            life = Life(name)
            lives.append(life)
        life.waiting.append(number)
        life.is_open = not is_end
        self.life_of[number] = life

    def cancel(self):
        number = self.rng.randrange(len(self.requests))
        dropped = self.sequencer.cancel(number)
        assert bool(dropped) == (number not in self.fate), "only what waits can be cancelled"
        if dropped:
            assert dropped[0].id == number
            self.leave(dropped, (DropReason.CANCELLED,))

    def finish(self):
        dispatch = self.running.pop(self.rng.randrange(len(self.running)))
        self.sequencer.finished(dispatch, now_us=self.now_us, compute_us=1)
        self.free.append(dispatch.instance)
        for number in dispatch.ids:
            life = self.life_of[number]
            life.running = None
            life.changed_us = self.now_us
            self.tidy(life)

    def pass_time(self, us):
        until_us = self.now_us + us
        while self.wake_us is not None and self.wake_us <= until_us:
            self.now_us = self.wake_us
            self.serve()
        self.now_us = until_us
        self.serve()

    def step(self):
        rng = self.rng
        pick = rng.random()
        if pick < 0.6:
            self.arrive(
                rng.choice((1, 2, 3, 4, "1", "b")) if rng.random() < 0.98 else rng.choice((0, "")),
                is_start=rng.random() < 0.5,
                is_end=rng.random() < 0.3,
                key="A" if rng.random() < 0.85 else "B",
                timeout_us=None if rng.random() < 0.9 else rng.choice((0, 3 * MS, 15 * MS)),
            )
        elif pick < 0.82 and self.running:
            self.finish()
        elif pick < 0.9 and self.requests:
            self.cancel()
        elif pick < 0.98:
            self.pass_time(rng.randrange(1, 30) * MS)
            return
        else:
            # The timer is late: something else happens first.
            self.now_us += rng.randrange(1, 60) * MS
            return
        self.serve()

    # How it ends

    def come_to_rest(self):
        while self.running or len(self.sequencer):
            while self.running:
                self.finish()
            self.serve()
            if not self.running:
                self.pass_time(self.delay_us or self.idle_us)
        self.pass_time(self.idle_us)

    def check_no_slot_was_lost(self):
        """As many new sequences as there are places live at once; one more must wait."""
        places = self.slots * self.instances
        self.max_queue_size = self.sequencer._max_queue_size = 0
        first = len(self.requests)
        for number in range(places):
            self.arrive(f"new {number}", is_start=True, is_end=False)
        self.arrive("one more", is_start=True, is_end=False)
        self.serve()
        for _ in range(places):
            if self.wake_us is not None and self.free and not self.running:
                self.now_us = self.wake_us
                self.serve()
            while self.running:
                self.finish()
            if len(self.sequencer) == 1:
                break
            self.serve()
        assert [self.fate.get(number) for number in range(first, first + places)] == ["run"] * places
        assert first + places not in self.fate


def play(seed):
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    world = World(rng)
    for _ in range(rng.randrange(4, 22)):
        world.step()
    world.come_to_rest()
    assert len(world.fate) == len(world.requests)
    assert not any(world.lives.values())
    assert not world.states, "the state of every sequence is given up"
    world.check_no_slot_was_lost()


@pytest.mark.parametrize("block", chunks(BLOCKS))
def test_every_timeline_keeps_what_is_promised(block):
    for seed in range(block * TIMELINES_PER_BLOCK, (block + 1) * TIMELINES_PER_BLOCK):
        try:
            play(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
