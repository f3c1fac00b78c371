"""What is taken at once, and given back whichever way a request ends: step by step, and over random histories."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admissions import (
    SWEPT_AT_ONCE,
    SWEPT_BY_RENEWAL,
    Ask,
    Book,
    Reply,
    Standing,
    refusal,
    turn_late,
    turn_lost,
    verdict_of,
)
from gateway.core.error_forms import error_headers
from gateway.core.errors import OrderingQueueFull, RateLimited
from gateway.core.rate_limit import Take, counters, takes
from gateway.core.types import Caller, Limit
from tests.kit.limited import MINUTE, NOW, SECOND, concurrent, requests, tokens, usd

LEASE = 10 * SECOND


def taken(*limits: Limit, cost: int = 1) -> tuple[Take, ...]:
    counted = counters(Caller(key_id="k", tenant="acme", limits=limits), "t", "", "interactive")
    return takes(counted, tokens=cost, nano_usd=cost)


class Desk:
    """A book of one owner, and who was woken."""

    def __init__(self, lease_us: int | None = LEASE) -> None:
        self.book = Book(lease_us)
        self.now_us = NOW
        self.woken: list[str] = []

    def admit(self, name: str, *takes: Take, queue: str = "", bound: int = 10, owner: str = "o") -> Reply:
        ask = Ask(id=name, owner=owner, takes=takes, queue=queue, queue_bound=bound if queue else 0)
        reply, woken = self.book.admit(ask, now_us=self.now_us)
        self.woken += woken
        return reply

    def settle(self, name: str, *spent: int) -> None:
        self.woken += self.book.settle("o", name, spent, now_us=self.now_us)

    def renew(self, *names: str) -> list[Standing]:
        standings, woken = self.book.renew("o", names, now_us=self.now_us)
        self.woken += woken
        return list(standings)


# --- queues --------------------------------------------------------------------------------------


def test_tickets_are_in_the_order_of_admission_under_each_key():
    desk = Desk()
    told = [desk.admit(f"w:{n}", queue=queue) for n, queue in enumerate("aabab")]
    assert [(reply.ticket, reply.ahead) for reply in told] == [(1, 0), (2, 1), (1, 0), (3, 2), (2, 1)]
    assert desk.renew(*(f"w:{n}" for n in range(5))) == [
        *(Standing.FIRST, Standing.HELD, Standing.FIRST, Standing.HELD, Standing.HELD)
    ]


def test_the_next_one_is_woken_only_when_the_first_one_leaves():
    desk = Desk()
    for n in range(4):
        desk.admit(f"w:{n}", queue="a")
    desk.settle("w:1")
    assert desk.woken == []
    desk.settle("w:0")
    assert desk.woken == ["w:2"]
    assert desk.book.is_first("o", "w:2")
    assert not desk.book.is_first("o", "w:3")
    desk.settle("w:3")
    desk.settle("w:2")
    assert desk.woken == ["w:2"]
    assert desk.admit("w:9", queue="a").ticket == 5


def test_a_full_queue_refuses_and_takes_nothing():
    desk = Desk()
    places = taken(concurrent(5))
    for n in range(2):
        assert desk.admit(f"w:{n}", *places, queue="a", bound=2).admitted
    full = desk.admit("w:2", *places, queue="a", bound=2)
    assert (full.admitted, full.is_queue_full, full.ticket) == (False, True, 0)
    assert desk.admit("w:3", *places, queue="b", bound=2).admitted
    desk.settle("w:0", 0)
    again = desk.admit("w:4", *places, queue="a", bound=2)
    assert (again.ticket, again.ahead, again.rows[0].value) == (3, 1, 3)


def test_a_limit_that_refuses_gives_no_ticket():
    desk = Desk()
    assert not desk.admit("w:0", *taken(tokens(5), cost=6), queue="a").admitted
    assert desk.admit("w:1", queue="a").ticket == 1
    assert desk.renew("w:0", "w:1") == [Standing.GONE, Standing.FIRST]


def test_owners_know_nothing_of_each_other():
    desk = Desk()
    places = taken(concurrent(1))
    assert desk.admit("w:0", *places, queue="a", owner="o").admitted
    other = desk.admit("w:1", *places, queue="a", owner="p")
    assert (other.admitted, other.ticket) == (True, 1)
    assert not desk.book.is_first("nobody", "w:0")
    assert not desk.book.is_first("p", "w:0")


# --- leases --------------------------------------------------------------------------------------


def test_a_lease_that_runs_out_gives_everything_back_to_whoever_comes_next():
    desk = Desk()
    all_kinds = taken(requests(10), tokens(100), usd(100), concurrent(1), cost=60)
    assert desk.admit("dead:1", *all_kinds, queue="a").admitted
    assert desk.admit("live:1", queue="a").ahead == 1
    desk.now_us += LEASE - 1
    assert desk.renew("live:1") == [Standing.HELD]
    desk.now_us += 1
    assert desk.renew("live:1") == [Standing.FIRST]
    assert desk.woken == ["live:1"]
    again = desk.admit("live:2", *all_kinds)
    assert again.admitted
    assert [row.value for row in again.rows[2:]] == [60, 1]


def test_renewing_keeps_it_and_one_that_is_gone_stays_gone():
    desk = Desk()
    desk.admit("w:1", *taken(concurrent(2)))
    for _ in range(5):
        desk.now_us += LEASE - 1
        assert desk.renew("w:1") == [Standing.HELD]
    desk.now_us += LEASE
    desk.renew()
    assert desk.renew("w:1") == [Standing.GONE]
    desk.settle("w:1", 0)  # by a worker that was paused: nothing is given back twice
    assert desk.admit("w:2", *taken(concurrent(1))).admitted


def test_of_many_dead_the_oldest_go_first_so_many_at_once():
    desk = Desk()
    for n in range(SWEPT_BY_RENEWAL + 2 * SWEPT_AT_ONCE):
        desk.now_us += 1
        desk.admit(f"dead:{n:04}", queue="a", bound=1000)
    desk.now_us += LEASE
    assert desk.admit("live:1", queue="a", bound=1000).ahead == SWEPT_BY_RENEWAL + SWEPT_AT_ONCE
    assert desk.woken[-1:] == [f"dead:{SWEPT_AT_ONCE:04}"]  # dead as well: nobody hears it, and the next sweep takes it
    assert desk.renew("live:1") == [Standing.HELD]
    assert desk.renew("live:1") == [Standing.FIRST]
    assert desk.woken[-1] == "live:1"


def test_an_ask_that_comes_again_keeps_what_it_has():
    desk = Desk()
    wanted = taken(concurrent(2), tokens(60), cost=1)
    asked = [desk.admit(f"w:{number}", *wanted, queue="a") for number in (1, 2)]
    desk.now_us += LEASE - 1
    for number, first in enumerate(asked, 1):
        again = desk.admit(f"w:{number}", *wanted, queue="a")
        assert (again.admitted, again.ticket, again.ahead) == (True, first.ticket, first.ahead)
        assert again.rows[0].value == 2
    assert desk.woken == []
    desk.now_us += LEASE - 1
    assert desk.renew("w:1", "w:2") == [Standing.FIRST, Standing.HELD]


def test_a_process_that_cannot_outlive_itself_needs_no_leases():
    desk = Desk(lease_us=None)
    desk.admit("w:1", *taken(concurrent(1)), queue="a")
    desk.now_us += 365 * 86_400 * SECOND
    assert not desk.admit("w:2", *taken(concurrent(1))).admitted
    assert desk.renew("w:1") == [Standing.FIRST]


# --- what is taken and put right ------------------------------------------------------------------


def test_settling_puts_what_was_used_in_the_stead_of_what_was_reserved():
    desk = Desk()
    kinds = taken(tokens(60), usd(100), concurrent(5), cost=20)
    desk.admit("w:1", *kinds)
    desk.settle("w:1", 5 * SECOND, 30, 0)
    desk.settle("w:1", 0, 0, 0)  # said again: nothing
    left = desk.admit("w:2", *taken(tokens(60), usd(100), concurrent(5)))
    assert [row.value for row in left.rows] == [NOW + 6 * SECOND, 31, 1]


def test_what_nobody_admitted_settles_to_nothing():
    desk = Desk()
    desk.settle("nobody:1", 5, 5)
    desk.book.settle("no owner", "nobody:1", (), now_us=NOW)
    assert desk.admit("w:1", *taken(concurrent(1))).rows[0].value == 1


def test_a_counter_that_is_taken_of_twice_counts_twice():
    desk = Desk()
    place, rate = taken(concurrent(3))[0], taken(tokens(60), cost=20)[0]
    both = desk.admit("w:1", place, rate, place, rate)
    assert [row.value for row in both.rows] == [1, NOW + 20 * SECOND, 2, NOW + 40 * SECOND]
    refused = desk.admit("w:2", place, place)
    assert (refused.admitted, [row.passed for row in refused.rows]) == (False, [True, False])
    desk.settle("w:1", 0, 0, 0, 0)
    assert [row.value for row in desk.admit("w:3", place, rate).rows] == [1, NOW + 20 * SECOND]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 10 * SECOND)), max_size=30),
    st.integers(1, 50),
)
def test_all_or_none_and_nothing_is_left(steps, bound):
    """Each request takes of several counters; some end. Then all end, and each counter is as if nobody had come."""
    desk, open_now = Desk(lease_us=None), []
    for number, (leaving, cost, later_us) in enumerate(steps):
        desk.now_us += later_us
        kinds = taken(tokens(200), usd(bound), concurrent(3), cost=cost)
        reply = desk.admit(f"w:{number}", *kinds)
        assert reply.admitted is all(row.passed for row in reply.rows)
        if reply.admitted:
            open_now.append(f"w:{number}")
            assert reply.rows[1].value <= bound
        if leaving and open_now:
            desk.settle(open_now.pop(leaving % len(open_now)), 0, 0, 0)
    for name in open_now:
        desk.settle(name, 0, 0, 0)
    assert [row.value for row in desk.admit("last:1", *taken(tokens(200), usd(bound), concurrent(3))).rows] == [
        *(desk.now_us + MINUTE // 200, 1, 1)
    ]


def test_what_says_nothing_is_forgotten_and_the_newest_numbers_are_kept():
    desk = Desk(lease_us=None)
    desk.admit("w:0", *taken(requests(1), tokens(10), usd(5, "day"), cost=5), queue="busy")
    for n in range(1, 20):
        desk.admit(f"w:{n}", queue=f"q{n}")
        desk.settle(f"w:{n}")
    desk.admit("w:20", queue="q1")
    desk.settle("w:20")
    desk.now_us += 2 * 86_400 * SECOND
    desk.book.forget(desk.now_us, max_numbers=3)
    own = desk.book._owners["o"]
    assert (own.tats_us, own.spent) == ({}, {})
    assert own.numbers == {"busy": 1, "q19": 1, "q1": 2}
    desk.settle("w:0", 0, 0)
    assert (own.tats_us, own.spent, own.open, own.queues) == ({}, {}, {}, {})


# --- what is said of it ---------------------------------------------------------------------------


def said(*takes: Take, queue: str = "", bound: int = 1, before: int = 0):
    """The verdict on a request after so many of the same kind."""
    book = Book()
    for n in range(before + 1):
        ask = Ask(id=f"w:{n}", owner="o", takes=takes, queue=queue, queue_bound=bound)
        reply, _ = book.admit(ask, now_us=NOW)
    return verdict_of(ask, reply)


def test_a_verdict_tells_the_ticket_or_that_the_queue_is_full():
    assert (said(queue="a").allowed, said(queue="a").ticket) == (True, 1)
    assert said().ticket is None
    full = said(queue="a", before=1)
    assert (full.allowed, full.is_queue_full, full.ticket, full.refused_by) == (False, True, None, None)
    error = refusal(full)
    assert isinstance(error, OrderingQueueFull)
    assert (error.field, error.should_retry) == ("x-ordering-key", True)
    both = said(*taken(concurrent(1)), queue="a", before=1)
    assert (both.is_queue_full, both.refused_by.limit.kind) == (False, "concurrent")


REFUSALS = [  # limits, cost, said before, text, Retry-After, whether to try again
    ((requests(2, "minute"),), 1, 2, "limit reached: 2 requests per minute", "30", True),
    ((tokens(60),), 40, 1, "limit reached: 60 tokens per minute", "20", True),
    ((tokens(60),), 61, 0, "this request alone asks for more than it ever gives at once", None, False),
    ((concurrent(1),), 1, 1, "limit reached: 1 requests at once", "1", True),
    ((usd(5_000_000_000, "day"),), 5 * 10**9, 1, "limit reached: 5 USD per day", "6400", False),
    ((usd(5_000_000_000, "day"),), 6 * 10**9, 0, "this request alone asks for more", None, False),
]


@pytest.mark.parametrize(("limits", "cost", "before", "text", "retry_after", "again"), REFUSALS)
def test_a_refusal_names_the_limit_and_when_to_come_back(limits, cost, before, text, retry_after, again):
    error = refusal(said(*taken(*limits, cost=cost), before=before))
    assert isinstance(error, RateLimited)
    assert text in error.detail
    headers = error_headers(error)
    assert headers.get("retry-after") == retry_after
    assert headers.get("x-should-retry") == (None if again else "false")


def test_the_two_ends_of_waiting_have_errors_of_their_own():
    assert (turn_late().code, turn_lost().code) == ("deadline_exceeded", "ordering_unavailable")


# --- random histories ------------------------------------------------------------------------------

CHUNKS, HISTORIES = 25, 4000
STEPS, SHORT_LEASE, BUDGET, QUEUE_BOUND = 20, 30, 60, 5
KEYS = ("a", "b")
PLACE, MONEY = taken(concurrent(7))[0], taken(usd(BUDGET), cost=10)[0]
RATE = taken(tokens(60), cost=1)[0]._replace(cost=9, bound=100)


class History:
    """Three workers, two ordering keys, and all that may happen to them. Instants are small numbers after `NOW`.

    A worker knows that a request has its turn from the reply, from a message (which may get lost) or from a renewal;
    and it sends nothing after its lease has run out by its own clock.
    """

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)  # noqa: S311 - repeatable, and no secret
        self.book = Book(SHORT_LEASE)
        self.now_us = NOW
        self.names = 0
        self.workers: list[dict[str, int]] = [{}, {}, {}]  # what each has under way, and until when by its own clock
        self.queue_of: dict[str, str] = {}
        self.ticket_of: dict[str, int] = {}
        self.turns: set[str] = set()
        self.sent: set[str] = set()
        self.order: dict[str, list[int]] = {key: [] for key in KEYS}
        self.excused: dict[str, set[int]] = {key: set() for key in KEYS}  # left, or their worker died or was paused
        self.spent = 0

    def step(self) -> None:
        chance = self.rng.random()
        worker = self.workers[int(self.rng.random() * 3)]
        if chance < 0.35:
            self.admit(worker)
        elif chance < 0.55:
            self.send(worker)
        elif chance < 0.72:
            self.end(worker)
        elif chance < 0.79:
            self.leave(worker)
        elif chance < 0.87:
            self.renew(worker)
        elif chance < 0.97:
            self.now_us += int(self.rng.random() * SHORT_LEASE * 0.6)
        else:
            self.die(worker)

    def admit(self, worker: dict[str, int]) -> None:
        self.names += 1
        key, name = KEYS[self.rng.random() < 0.5], f"w:{self.names}"
        ask = Ask(id=name, owner="o", takes=(PLACE, MONEY, RATE), queue=key, queue_bound=QUEUE_BOUND)
        reply, woken = self.book.admit(ask, now_us=self.now_us)
        self.tell(woken)
        if reply.admitted:
            assert reply.rows[0].value <= PLACE.bound
            assert reply.rows[1].value <= BUDGET
            worker[name] = self.now_us + SHORT_LEASE
            self.queue_of[name], self.ticket_of[name] = key, reply.ticket
            if not reply.ahead:
                self.turns.add(name)

    def send(self, worker: dict[str, int]) -> bool:
        for name, until_us in worker.items():
            if name in self.turns and name not in self.sent and self.now_us < until_us:
                assert self.book.is_first("o", name)
                order = self.order[self.queue_of[name]]
                assert not order or order[-1] < self.ticket_of[name]
                order.append(self.ticket_of[name])
                self.sent.add(name)
                return True
        return False

    def end(self, worker: dict[str, int]) -> bool:
        name = next((name for name in worker if name in self.sent), None)
        if name is not None:
            self.settle(worker, name, int(self.rng.random() * 8))
        return name is not None

    def leave(self, worker: dict[str, int]) -> None:
        name = next((name for name in worker if name not in self.sent), None)
        if name is not None:
            self.excuse(name)
            self.settle(worker, name, 0)

    def settle(self, worker: dict[str, int], name: str, used: int) -> None:
        is_held = name in self.book._owners["o"].open  # else it was given back for it: nothing is charged
        self.tell(self.book.settle("o", name, (0, used, used), now_us=self.now_us))
        self.spent += used if is_held else 0
        del worker[name]

    def renew(self, worker: dict[str, int]) -> None:
        names = tuple(worker)
        standings, woken = self.book.renew("o", names, now_us=self.now_us)
        self.tell(woken)
        for name, standing in zip(names, standings, strict=True):
            if standing is Standing.GONE:  # it was paused for too long
                self.excuse(name)
                del worker[name]
                continue
            worker[name] = self.now_us + SHORT_LEASE
            if standing is Standing.FIRST:
                self.turns.add(name)

    def die(self, worker: dict[str, int]) -> None:
        for name in worker:
            self.excuse(name)
        worker.clear()

    def excuse(self, name: str) -> None:
        if name not in self.sent:
            self.excused[self.queue_of[name]].add(self.ticket_of[name])

    def tell(self, woken: tuple[str, ...]) -> None:
        self.turns.update(name for name in woken if self.rng.random() < 0.8)

    def finish(self) -> None:
        """From here on nobody dies: every request that is left goes through, one after another."""
        for _ in range(3 + 2 * QUEUE_BOUND * len(KEYS)):
            self.now_us += SHORT_LEASE // 2
            for worker in filter(None, self.workers):
                self.renew(worker)
                while self.send(worker):
                    pass
                while self.end(worker):
                    pass
            if not any(self.workers):
                break
        assert not any(self.workers)
        self.now_us += SHORT_LEASE
        self.book.renew("o", (), now_us=self.now_us)

    def check(self) -> None:
        own = self.book._owners.get("o")
        assert own is not None
        assert (own.open, own.queues, own.places) == ({}, {}, {})
        assert sum(spent for spent, _ in own.spent.values()) == self.spent
        for key in KEYS:
            gone = sorted([*self.order[key], *self.excused[key]])
            assert gone == list(range(1, own.numbers.get(key, 0) + 1))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_in_any_history_turns_go_in_order_and_nothing_is_left(chunk):
    sent = 0
    for seed in range(chunk * HISTORIES, (chunk + 1) * HISTORIES):
        history = History(seed)
        for _ in range(STEPS):
            history.step()
        history.finish()
        history.check()
        sent += sum(map(len, history.order.values()))
    assert sent > 3 * HISTORIES  # they do something
