import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.waiting import FEWEST_STAYS, STAY_WEIGHT, Stays, WaitingLine, expected_wait_us

BOUND = 4
PRIORITIES = ("interactive", "batch")


def test_interactive_goes_before_batch_and_each_in_order():
    line: WaitingLine[str] = WaitingLine(10)
    for name, priority in (("b1", "batch"), ("i1", "interactive"), ("b2", "batch"), ("i2", "interactive")):
        line.join(name, priority)
    assert [line.next() for _ in range(5)] == ["i1", "i2", "b1", "b2", None]


def test_a_full_line_puts_out_the_newcomer():
    line: WaitingLine[str] = WaitingLine(1)
    line.join("first", "interactive")
    assert line.join("second", "interactive")[1] == "second"
    assert line.join("third", "batch")[1] == "third"
    assert len(line) == 1


def test_in_a_full_line_interactive_puts_out_the_last_batch_request():
    line: WaitingLine[str] = WaitingLine(2)
    line.join("b1", "batch")
    line.join("b2", "batch")
    assert line.join("i1", "interactive")[1] == "b2"
    assert [line.next(), line.next(), line.next()] == ["i1", "b1", None]


def test_a_line_of_no_places_takes_nobody():
    line: WaitingLine[str] = WaitingLine(0)
    assert line.join("i", "interactive")[1] == "i"


def test_a_newcomer_knows_how_many_go_before_it():
    line: WaitingLine[str] = WaitingLine(10)
    assert (line.ahead_of("interactive"), line.ahead_of("batch")) == (0, 0)
    for name, priority in (("b1", "batch"), ("i1", "interactive"), ("b2", "batch")):
        line.join(name, priority)
    assert (line.ahead_of("interactive"), line.ahead_of("batch")) == (1, 3)


@pytest.mark.parametrize(
    ("stays", "ahead", "max_in_flight", "expected"),
    [
        pytest.param(Stays(), 0, 1, None, id="nothing measured"),
        pytest.param(Stays(FEWEST_STAYS - 1, 1000.0), 5, 1, None, id="too little measured"),
        pytest.param(Stays(FEWEST_STAYS, 1000.0), 0, 1, 1000, id="the only one before it must end"),
        pytest.param(Stays(FEWEST_STAYS, 1000.0), 4, 1, 5000, id="behind four"),
        pytest.param(Stays(FEWEST_STAYS, 1000.0), 4, 10, 500, id="ten places"),
        pytest.param(Stays(FEWEST_STAYS, 0.0), 4, 1, 0, id="no time at all"),
        pytest.param(Stays(10**6, 2.5), 0, 2, 1, id="whole microseconds"),
    ],
)
def test_expected_wait(stays: Stays, ahead: int, max_in_flight: int, expected: int | None):
    assert expected_wait_us(stays, ahead=ahead, max_in_flight=max_in_flight) == expected


def test_stays_are_a_plain_mean_at_first_and_then_follow_the_last_ones():
    stays = Stays()
    for us in (100, 200, 300):
        stays = stays.with_one(us)
    assert (stays.count, stays.mean_us) == (3, pytest.approx(200))
    for _ in range(int(10 / STAY_WEIGHT)):
        stays = stays.with_one(900)
    assert stays.mean_us == pytest.approx(900, abs=1)


@given(st.lists(st.integers(-5, 10**9), min_size=1, max_size=50))
def test_a_mean_stay_lies_among_the_stays(lengths: list[int]):
    stays = Stays()
    for us in lengths:
        stays = stays.with_one(us)
    assert max(0, min(lengths)) - 1 <= stays.mean_us <= max(0, *lengths, 0) + 1


class AgainstAPlainList(RuleBasedStateMachine):
    """The line does what sorting a list would do."""

    def __init__(self) -> None:
        super().__init__()
        self.line: WaitingLine[int] = WaitingLine(BOUND)
        self.waiting: list[tuple[int, int]] = []
        self.count = 0

    @rule(priority=st.sampled_from(PRIORITIES))
    def join(self, priority: Any) -> None:
        self.count += 1
        number, put_out = self.line.join(self.count, priority)
        assert number == self.count
        if len(self.waiting) < BOUND:
            assert put_out is None
        else:
            last = max(self.waiting)
            loses = last if priority == "interactive" and last[0] == 1 else (PRIORITIES.index(priority), self.count)
            assert put_out == loses[1]
            if loses[1] == self.count:
                return
            self.waiting.remove(loses)
        self.waiting.append((PRIORITIES.index(priority), self.count))

    @rule(chance=st.randoms(use_true_random=False))
    def leave(self, chance: random.Random) -> None:
        if self.waiting:
            gone = chance.choice(self.waiting)
            self.waiting.remove(gone)
            self.line.leave(gone[1])
        self.line.leave(-1)

    @rule()
    def take(self) -> None:
        expected = min(self.waiting, default=None)
        if expected is not None:
            self.waiting.remove(expected)
        assert self.line.next() == (expected[1] if expected else None)

    @invariant()
    def same_length(self) -> None:
        assert len(self.line) == len(self.waiting)


TestAgainstAPlainList = AgainstAPlainList.TestCase
