"""What a limit has refused is refused from memory only as long as Redis would refuse it, too."""

import pytest

from gateway.core.admissions import Ask, Book, verdict_of
from gateway.core.rate_limit import counters, takes
from gateway.core.types import Caller, Limit
from gateway.stores.refused_limits import BELIEVED_S, MOST, RefusedLimits

SECOND = 1_000_000
NOW_US = 1_800_000_000 * SECOND
ONE_A_SECOND = Limit(kind="requests", amount=10, per="second", burst=1)
TOKENS = Limit(kind="tokens", amount=100, per="minute", burst=100)
PLACES = Limit(kind="concurrent", amount=1)


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class Worker:
    """One that asks a book as Redis would answer; its clock and the book's go on together."""

    def __init__(self) -> None:
        self.clock, self.book = Clock(), Book()
        self.refused = RefusedLimits(self.clock)
        self.count = 0

    @property
    def now_us(self) -> int:
        return NOW_US + round((self.clock.s - 100.0) * 1e6)

    def ask(self, *limits: Limit, tenant: str = "t", tokens: int = 1) -> Ask:
        self.count += 1
        counted = counters(Caller(key_id="k", tenant=tenant, limits=limits), "task", "model", "interactive")
        return Ask(id=f"w:{self.count}", owner=tenant, takes=takes(counted, tokens=tokens, nano_usd=0))

    def send(self, ask: Ask):
        """Redis decides; the worker remembers."""
        reply, _ = self.book.admit(ask, now_us=self.now_us)
        if not reply.admitted:
            self.refused.remember(ask, reply, self.clock.s)
        return verdict_of(ask, reply)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_flood_is_told_what_redis_would_say(worker):
    limits = (ONE_A_SECOND, TOKENS)
    worker.send(worker.ask(*limits))
    assert not worker.send(worker.ask(*limits)).allowed
    for _ in range(9):
        worker.clock.s += 0.01
        ask = worker.ask(*limits)
        told = worker.refused.verdict(ask)
        assert told == worker.send(ask)
        assert told.refused_by.limit == ONE_A_SECOND


def test_nobody_is_refused_whom_redis_would_admit(worker):
    worker.send(worker.ask(ONE_A_SECOND))
    told = worker.send(worker.ask(ONE_A_SECOND))
    worker.clock.s += told.refused_by.retry_after_us / 1e6
    ask = worker.ask(ONE_A_SECOND)
    assert worker.refused.verdict(ask) is None
    assert worker.send(ask).allowed


def test_what_lies_between_the_question_and_the_answer_is_the_callers_gain(worker):
    slow = Limit(kind="requests", amount=10, per="second", burst=1)
    worker.send(worker.ask(slow))
    ask = worker.ask(slow)
    asked_s = worker.clock.s
    reply, _ = worker.book.admit(ask, now_us=worker.now_us)
    worker.clock.s += 0.06  # the answer was long on its way: Redis may have decided at either end
    worker.refused.remember(ask, reply, asked_s)
    worker.clock.s += 0.03
    told = worker.refused.verdict(worker.ask(slow))
    assert told.refused_by.retry_after_us >= 70_000  # as if it had decided last
    worker.clock.s += 0.011  # as if it had decided first, it would pass now
    assert worker.refused.verdict(worker.ask(slow)) is None


def test_nothing_is_believed_for_long(worker):
    daily = Limit(kind="requests", amount=1, per="day", burst=1)
    worker.send(worker.ask(daily))
    worker.send(worker.ask(daily))
    worker.clock.s += BELIEVED_S
    assert worker.refused.verdict(worker.ask(daily)) is not None
    worker.clock.s += 0.001
    assert worker.refused.verdict(worker.ask(daily)) is None
    assert not worker.refused.kept


@pytest.mark.parametrize("limit", [TOKENS, PLACES], ids=["tokens", "concurrent"])
def test_what_is_given_back_is_always_asked_for(worker, limit):
    worker.send(worker.ask(limit, tokens=100))
    assert not worker.send(worker.ask(limit, tokens=100)).allowed
    assert worker.refused.verdict(worker.ask(limit, tokens=100)) is None


def test_another_limit_and_another_tenant_are_asked_for(worker):
    worker.send(worker.ask(ONE_A_SECOND))
    worker.send(worker.ask(ONE_A_SECOND))
    raised = Limit(kind="requests", amount=20, per="second", burst=5)
    assert worker.refused.verdict(worker.ask(raised)) is None
    assert worker.refused.verdict(worker.ask(ONE_A_SECOND, TOKENS)) is None  # nothing is known of its tokens
    assert worker.refused.verdict(worker.ask(ONE_A_SECOND, tenant="other")) is None


def test_no_more_is_remembered_than_there_is_room_for(worker):
    for number in range(MOST + 10):
        tenant = f"t{number}"
        worker.send(worker.ask(ONE_A_SECOND, tenant=tenant))
        worker.send(worker.ask(ONE_A_SECOND, tenant=tenant))
        assert len(worker.refused.kept) <= MOST
