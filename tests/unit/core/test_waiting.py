import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.waiting import WaitingLine

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
