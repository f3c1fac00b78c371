"""A worker that is behind sheds batch first, then all, and nothing for one late beat."""

import asyncio

import pytest

from gateway.api.shedding import BEAT_S, Shedding
from gateway.core.errors import QueueFull
from gateway.core.types import Caller

LATE_US = 100_000
BEAT_US = int(BEAT_S * 1e6)
ALICE = Caller(key_id="a", tenant="a")
NIGHTLY = Caller(key_id="n", tenant="a", priority="batch")


class Spent:
    """Processor time that a test spends."""

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
    """A heart whose beats come when the test says so."""

    def __init__(self, late_us: int = LATE_US) -> None:
        self.spent, self.told = Spent(), Told()
        self.of = Shedding(late_us, self.spent, self.told)

    def beats_after(self, late_us: int) -> None:
        self.spent.us += BEAT_US + late_us
        self.of._late()

    def refuses(self, caller: Caller = ALICE, headers=None) -> bool:
        try:
            if self.of.is_behind:
                self.of.check(caller, headers or {})
        except QueueFull:
            return True
        return False


@pytest.fixture
async def heart():
    heart = Heart()
    heart.of.start()
    yield heart
    heart.of.close()


async def test_a_worker_that_keeps_up_refuses_nothing(heart):
    for _ in range(3):
        heart.beats_after(LATE_US // 3)
        heart.spent.us += BEAT_US
        assert not heart.refuses()
        assert not heart.refuses(NIGHTLY)


async def test_one_late_beat_says_nothing(heart):
    heart.beats_after(10 * LATE_US)
    assert not heart.refuses(NIGHTLY)
    heart.beats_after(0)
    heart.spent.us += BEAT_US + 10 * LATE_US
    assert not heart.refuses(NIGHTLY)


async def test_batch_is_shed_first_and_then_all(heart):
    heart.beats_after(2 * LATE_US)
    heart.spent.us += BEAT_US + LATE_US * 3 // 4
    assert not heart.refuses()
    assert heart.refuses(NIGHTLY)
    assert heart.refuses(ALICE, {"x-priority": "Batch"})
    heart.spent.us += LATE_US
    assert heart.refuses()
    assert heart.told.heard == ["batch", "batch", "interactive"]


async def test_what_is_turned_away_by_its_head_is_told_with_the_next_beat(heart, caplog):
    heart.beats_after(2 * LATE_US)
    heart.spent.us += BEAT_US + LATE_US * 3 // 4
    batch = {b"x-priority": b"batch"}
    assert [heart.of.turns_away(headers) for headers in (batch, {}, batch)] == [True, False, True]
    heart.spent.us += LATE_US
    assert heart.of.turns_away({})
    assert heart.told.heard == []
    heart.of._late()
    assert heart.told.heard == [("batch", 2), ("interactive", 1)]
    (line,) = caplog.records
    assert (line.levelname, line.batch, line.interactive) == ("WARNING", 2, 1)


async def test_the_log_tells_of_it_once_a_second(heart, caplog):
    for _ in range(5):
        heart.beats_after(2 * LATE_US)
        heart.spent.us += BEAT_US + 2 * LATE_US
        assert heart.of.turns_away({})
    heart.of._late()
    assert len(heart.told.heard) == 5
    assert len(caplog.records) == 1


async def test_a_heart_that_stops_tells_of_the_last_ones(heart):
    heart.beats_after(2 * LATE_US)
    heart.spent.us += BEAT_US + 2 * LATE_US
    assert heart.of.turns_away({})
    heart.of.close()
    assert heart.told.heard == [("interactive", 1)]


async def test_a_beat_lets_in_again_and_two_in_time_end_it(heart):
    heart.beats_after(2 * LATE_US)
    heart.spent.us += BEAT_US + 2 * LATE_US
    assert heart.refuses()
    heart.of._late()
    assert not heart.refuses()
    heart.beats_after(0)
    assert not heart.of.is_behind


async def test_no_bound_no_heart():
    heart = Heart(late_us=0)
    heart.of.start()
    await asyncio.sleep(2 * BEAT_S)
    heart.spent.us += 10**9
    assert not heart.refuses(NIGHTLY)


async def test_a_heart_that_is_stopped_refuses_nothing(heart):
    heart.beats_after(2 * LATE_US)
    heart.spent.us += BEAT_US + 2 * LATE_US
    heart.of.close()
    assert not heart.refuses()
