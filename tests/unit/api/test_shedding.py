"""A worker that is behind takes in what it can do in time: batch is shed first, then all; one late beat is little."""

import asyncio

import pytest

from gateway.api.shedding import BEAT_S, CALM, FEWEST, LOOKS_BACK, Shedding
from gateway.core.errors import QueueFull
from gateway.core.types import Caller

MOST_US = 100_000
COST_US = 1000
BEAT_US = int(BEAT_S * 1e6)
ALICE = Caller(key_id="a", tenant="a")
NIGHTLY = Caller(key_id="n", tenant="a", priority="batch")
BATCH = {b"x-priority": b"Batch"}


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.us = 0

    def __call__(self) -> int:
        return self.us


class Told:
    """What was told, in order."""

    def __init__(self) -> None:
        self.heard = []

    def shed(self, priority) -> None:
        self.heard.append(priority)

    def turned_away(self, priority, count) -> None:
        self.heard.append((priority, count))


class Heart:
    """A heart whose beats come when the test says so; the worker does nothing else than work."""

    def __init__(self, most_us: int = MOST_US) -> None:
        self.spent, self.now, self.told = Time(), Time(), Told()
        self.of = Shedding(most_us, self.spent, self.now, self.told)

    def beats_after(self, late_us: int, *, idle_us: int = 0) -> None:
        """As many requests were begun as the time is worth."""
        self.of.begun += (BEAT_US + late_us) // COST_US
        self.spent.us += BEAT_US + late_us
        self.now.us += BEAT_US + late_us + idle_us
        self.of._beats()

    def is_late(self) -> None:
        """Twice, by as much as may lie ahead."""
        for _ in range(2):
            self.beats_after(MOST_US)
        assert self.of.is_behind

    def refuses(self, caller: Caller = ALICE, headers=None, *, is_taken: bool = False) -> bool:
        try:
            if self.of.is_behind:
                self.of.check(caller, headers or {}, is_taken=is_taken)
        except QueueFull:
            return True
        return False

    def taken(self, headers=None, *, most: int = 1000) -> int:
        """How many are let in at once before one is turned away."""
        return next(count for count in range(most) if self.of.turns_away(headers or {}))


@pytest.fixture
async def heart():
    heart = Heart()
    heart.of.start()
    yield heart
    heart.of.close()


async def test_a_worker_that_keeps_up_refuses_nothing(heart):
    for _ in range(5):
        heart.beats_after(MOST_US // 3)
        assert not heart.refuses()
        assert not heart.refuses(NIGHTLY)


async def test_one_late_beat_keeps_out_no_more_than_what_comes_at_once(heart):
    heart.beats_after(0)
    heart.beats_after(10 * MOST_US)  # one large request
    assert heart.taken() == pytest.approx(MOST_US // COST_US, abs=2)
    for _ in range(LOOKS_BACK):
        heart.beats_after(0)
    heart.beats_after(10 * MOST_US)
    assert heart.taken() == pytest.approx(MOST_US // COST_US, abs=2)


async def test_after_two_late_beats_as_much_is_ahead_again(heart):
    heart.beats_after(MOST_US)
    heart.beats_after(0)  # a short turn comes after a long one
    heart.beats_after(2 * MOST_US)
    assert heart.taken() == 0
    heart.now.us += MOST_US
    assert heart.taken() == 1


async def test_no_more_is_let_in_than_can_be_done_in_time(heart):
    heart.is_late()
    assert heart.taken() == 1  # as long as the last turn was over its time is ahead already
    heart.now.us += MOST_US // 2
    assert heart.taken() == pytest.approx(MOST_US // 2 // COST_US, abs=2)
    heart.now.us += 10 * MOST_US  # nothing was ahead any more
    assert heart.taken() == pytest.approx(MOST_US // COST_US, abs=2)


async def test_batch_is_shed_first_and_then_all(heart):
    heart.is_late()
    heart.now.us += 10 * MOST_US
    assert heart.taken(BATCH) == pytest.approx(MOST_US // 2 // COST_US, abs=2)
    assert heart.taken() == pytest.approx(MOST_US // 2 // COST_US, abs=2)
    assert heart.of._turned_away == {"batch": 1, "interactive": 1}
    assert heart.refuses()
    assert heart.told.heard == ["interactive"]


async def test_what_only_the_key_tells_is_judged_at_the_door_and_counts_once(heart):
    heart.is_late()
    heart.now.us += 10 * MOST_US
    assert heart.taken(BATCH)
    assert heart.refuses(NIGHTLY)
    assert heart.refuses(NIGHTLY, is_taken=True)  # its head did not say so
    assert not heart.refuses(NIGHTLY, {"x-priority": "batch"}, is_taken=True)
    assert not heart.refuses(is_taken=True)
    ahead_us = heart.of._busy_until_us
    heart.now.us += MOST_US // 4
    assert not heart.refuses(NIGHTLY, is_taken=True)
    assert heart.of._busy_until_us == ahead_us
    assert not heart.refuses(NIGHTLY)
    assert heart.of._busy_until_us > ahead_us
    assert heart.told.heard == ["batch", "batch"]


async def test_it_is_over_after_a_second_in_which_nothing_was_late_or_refused(heart):
    def beats(count: int) -> list[bool]:
        told = []
        for _ in range(count):
            heart.beats_after(0)
            told.append(heart.of.is_behind)
        return told

    heart.is_late()
    assert all(beats(CALM - 1))
    heart.taken()
    assert all(beats(CALM))
    heart.beats_after(MOST_US)
    assert all(beats(CALM - 1))
    assert beats(1) == [False]


async def test_dear_requests_are_let_in_more_seldom_and_a_few_always(heart):
    heart.is_late()
    heart.now.us += 10 * MOST_US
    assert heart.taken() == pytest.approx(MOST_US // COST_US, abs=2)
    for each, few in ((50, MOST_US // 3000), (10, FEWEST), (1, FEWEST)):
        for _ in range(100):
            heart.of.begun += each
            heart.spent.us += BEAT_US + MOST_US
            heart.of._beats()
        heart.now.us += 10**9
        assert heart.taken() == pytest.approx(few, abs=2)


async def test_no_bound_no_heart():
    heart = Heart(most_us=0)
    heart.of.start()
    await asyncio.sleep(2 * BEAT_S)
    assert heart.of._beat is None
    assert not heart.refuses(NIGHTLY)


async def test_a_heart_that_is_stopped_refuses_nothing(heart):
    heart.is_late()
    heart.taken()
    heart.of.close()
    assert not heart.refuses()


async def test_what_is_turned_away_by_its_head_is_told_with_the_next_beat(heart, caplog):
    heart.is_late()
    heart.taken(BATCH)
    heart.taken()
    assert heart.of.turns_away(BATCH)
    assert heart.told.heard == []
    heart.beats_after(0)
    assert heart.told.heard == [("batch", 2), ("interactive", 1)]
    (line,) = caplog.records
    assert (line.levelname, line.batch, line.interactive) == ("WARNING", 2, 1)


async def test_the_log_tells_of_it_once_a_second(heart, caplog):
    heart.is_late()
    for _ in range(5):
        heart.taken()
        heart.beats_after(MOST_US)
    assert len(heart.told.heard) == 5
    assert len(caplog.records) == 1


async def test_a_heart_that_stops_tells_of_the_last_ones(heart):
    heart.is_late()
    heart.taken()
    heart.of.close()
    assert heart.told.heard == [("interactive", 1)]
