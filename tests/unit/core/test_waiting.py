import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.types import Priority, Tensor, TensorPayload
from gateway.core.waiting import (
    FEWEST_STAYS,
    MOST_AWAY,
    MOST_WEIGHED,
    STAY_WEIGHT,
    Stays,
    Waiter,
    WaitingLine,
    expected_wait_us,
    items_of,
)

BOUND = 4
PRIORITIES: tuple[Priority, ...] = ("interactive", "batch")


def join(line: WaitingLine[str], name: str, *, work: int = 1, priority: Any = "interactive") -> str | None:
    """`name` is its tenant's letter, and what else tells it apart; returns whom it put out."""
    put_out = line.join(name, tenant=name[0], priority=priority, work=work)[1]
    return put_out.item if put_out else None


def drained(line: WaitingLine[str]) -> list[str]:
    return [waiter.item for waiter in iter(line.next, None)]


def test_interactive_goes_before_batch_and_each_in_order():
    line: WaitingLine[str] = WaitingLine(10)
    for name, priority in (("a1", "batch"), ("a2", "interactive"), ("a3", "batch"), ("a4", "interactive")):
        join(line, name, priority=priority)
    assert drained(line) == ["a2", "a4", "a1", "a3"]


@pytest.mark.parametrize(
    ("arrivals", "order"),
    [
        pytest.param([("a1", 1), ("a2", 1), ("b1", 1), ("a3", 1)], "a1 b1 a2 a3", id="by turns where all are alike"),
        pytest.param([("a1", 9), ("b1", 3), ("b2", 3), ("b3", 3), ("b4", 3), ("a2", 9)], "a1 b1 b2 b3 b4 a2", id="1:3"),
        pytest.param([("a1", 0), ("a2", -5), ("b1", 1), ("b2", 1)], "a1 b1 a2 b2", id="never less than one"),
        pytest.param([("a1", 5), ("b1", 2), ("c1", 2), ("c2", 2)], "a1 b1 c1 c2", id="of several alike who came first"),
        pytest.param([("b1", 10**30), ("b2", 1), ("a1", 1), ("a2", 1)], "b1 a1 a2 b2", id="as large as they claim"),
    ],
)
def test_tenants_share_by_work(arrivals: list[tuple[str, int]], order: str):
    line: WaitingLine[str] = WaitingLine(10)
    for name, work in arrivals:
        join(line, name, work=work)
    assert drained(line) == order.split()


def test_a_tenant_of_one_priority_pays_for_that_alone():
    line: WaitingLine[str] = WaitingLine(10)
    for name, work in (("a1", 100), ("b1", 1)):
        join(line, name, work=work)
    for name in ("a2", "b2"):
        join(line, name, priority="batch")
    assert drained(line) == ["a1", "b1", "a2", "b2"]


def test_who_was_away_has_saved_nothing_up():
    line: WaitingLine[str] = WaitingLine(100)
    for i in range(20):
        join(line, f"a{i}", work=10)
    for _ in range(10):
        line.next()
    for i in range(5):
        join(line, f"b{i}", work=10)
    assert drained(line)[:6] == ["b0", "a10", "b1", "a11", "b2", "a12"]


def test_who_comes_back_at_once_still_owes_what_it_had():
    line: WaitingLine[str] = WaitingLine(10)
    join(line, "a1", work=10)
    for i in range(3):
        join(line, f"b{i}", work=5)
    assert [line.next().item for _ in range(2)] == ["a1", "b0"]  # type: ignore[union-attr]  # three wait
    join(line, "a2", work=10)
    assert drained(line) == ["b1", "b2", "a2"]


@pytest.mark.parametrize(
    ("took", "order"),
    [
        pytest.param(None, "b1 b2 b3 a2", id="as expected"),
        pytest.param(4, "b1 a2 b2 b3", id="less"),
        pytest.param(100, "b1 b2 b3 a2", id="more"),
    ],
)
@pytest.mark.parametrize("waits", [True, False])
def test_what_a_request_took_in_the_end_counts(took: int | None, order: str, *, waits: bool):
    line: WaitingLine[str] = WaitingLine(10)
    first, _ = line.join("a1", tenant="a", priority="interactive", work=13)
    for i in (1, 2, 3):
        join(line, f"b{i}", work=5)
    assert line.next() is first
    if waits:
        join(line, "a2")
    if took is not None:
        line.ended(first, took)
    if not waits:
        join(line, "a2")
    assert drained(line) == order.split()


def test_what_was_used_beyond_what_was_expected_is_owed_even_by_one_that_was_forgotten():
    line: WaitingLine[str] = WaitingLine(10)
    first, _ = line.join("a1", tenant="a", priority="interactive", work=1)
    for i in range(6):
        join(line, f"b{i}", work=5)
    assert [line.next().item for _ in range(4)] == ["a1", "b0", "b1", "b2"]  # type: ignore[union-attr]  # seven wait
    line.ended(first, 18)
    join(line, "a2")
    assert drained(line) == ["b3", "a2", "b4", "b5"]


def test_what_was_not_used_by_several_at_once_is_not_owed():
    line: WaitingLine[str] = WaitingLine(10)
    sent = [line.join(f"a{i}", tenant="a", priority="interactive", work=1000)[0] for i in range(5)]
    drained(line)
    for waiter in sent:
        line.ended(waiter, 1)
    for name in ("b1", "b2", "a5"):
        join(line, name)
    assert drained(line) == ["b1", "a5", "b2"]


def test_who_has_had_no_turn_took_nothing():
    line: WaitingLine[str] = WaitingLine(10)
    left, _ = line.join("a1", tenant="a", priority="interactive", work=9)
    line.leave(left)
    line.ended(left, 0)
    for name in ("b1", "a2"):
        join(line, name)
    assert drained(line) == ["b1", "a2"]


def test_a_full_line_puts_out_the_newcomer():
    line: WaitingLine[str] = WaitingLine(1)
    join(line, "a1")
    assert join(line, "a2") == "a2"
    assert join(line, "b1", priority="batch") == "b1"
    assert len(line) == 1


def test_in_a_full_line_interactive_puts_out_the_last_batch_request_of_the_tenant_with_the_most():
    line: WaitingLine[str] = WaitingLine(5)
    for name in ("b1", "c1", "b2", "a1"):
        join(line, name, priority="batch")
    join(line, "c2")
    assert [join(line, f"c{i}") for i in (3, 4, 5, 6, 7)] == ["b2", "a1", "c1", "b1", "c7"]
    assert drained(line) == ["c2", "c3", "c4", "c5", "c6"]


@pytest.mark.parametrize("priority", ["interactive", "batch"])
def test_a_flood_does_not_keep_others_out_of_a_full_line(priority: Priority):
    line: WaitingLine[str] = WaitingLine(4)
    put_out = [join(line, f"a{i}", priority=priority) for i in range(6)]
    put_out += [join(line, f"b{i}", priority=priority, work=1000) for i in range(3)]
    put_out += [join(line, "c1", priority=priority), join(line, "c2", priority=priority)]
    assert put_out == [None, None, None, None, "a4", "a5", "a3", "a2", "b2", "b1", "c2"]
    assert sorted(drained(line)) == ["a0", "a1", "b0", "c1"]


def test_a_large_request_is_not_put_out_by_many_small_ones():
    line: WaitingLine[str] = WaitingLine(3)
    join(line, "a1", work=10_000)
    assert [join(line, f"b{i}") for i in range(4)] == [None, None, "b2", "b3"]


def test_a_line_of_no_places_takes_nobody():
    line: WaitingLine[str] = WaitingLine(0)
    assert join(line, "a1") == "a1"


def test_a_newcomer_knows_how_many_go_before_it():
    line: WaitingLine[str] = WaitingLine(100)
    assert (line.ahead_of("a", "interactive"), line.ahead_of("a", "batch")) == (0, 0)
    for name, priority in (("a1", "batch"), ("a2", "interactive"), ("a3", "batch")):
        join(line, name, priority=priority)
    assert (line.ahead_of("a", "interactive"), line.ahead_of("a", "batch")) == (1, 3)
    for i in range(50):
        join(line, f"b{i}", work=2)
    assert [line.ahead_of(tenant, "interactive") for tenant in "abc"] == [2, 51, 2]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(PRIORITIES)), max_size=30),
    st.integers(0, 30),
    st.sampled_from("abcd"),
    st.sampled_from(PRIORITIES),
)
def test_of_requests_alike_it_is_foretold_exactly(
    arrivals: list[tuple[str, Any]], turns: int, tenant: str, priority: Any
):
    line: WaitingLine[str] = WaitingLine(100)
    for name, its in arrivals:
        join(line, name, work=7, priority=its)
    for _ in range(turns):
        line.next()
    foretold = line.ahead_of(tenant, priority)
    join(line, f"{tenant} new", work=7, priority=priority)
    assert drained(line).index(f"{tenant} new") == foretold


def test_of_very_many_tenants_some_stand_for_all():
    line: WaitingLine[str] = WaitingLine(10_000)
    for i in range(MOST_WEIGHED * 10):
        join(line, chr(1000 + i))
    assert line.ahead_of("a", "interactive") == MOST_WEIGHED * 10


def test_tenants_that_are_away_are_forgotten():
    line: WaitingLine[str] = WaitingLine(MOST_AWAY * 3)
    for i in range(MOST_AWAY * 3):
        join(line, chr(1000 + i), work=5)
    drained(line)
    fair = line._by_priority["interactive"]
    assert MOST_AWAY // 2 <= len(fair._away) <= MOST_AWAY
    assert (fair._tenants, fair._ranks, fair._by_rank, fair._by_places) == ({}, [], {}, {})


@pytest.mark.parametrize(
    ("shapes", "items"),
    [
        pytest.param([(3, 4)], 3, id="rows"),
        pytest.param([(3, 4), (3,)], 3, id="all the same"),
        pytest.param([(3, 4), (2, 4)], 1, id="no batch"),
        pytest.param([()], 1, id="a scalar"),
        pytest.param([(0, 4)], 1, id="none at all"),
        pytest.param([], 1, id="no inputs"),
    ],
)
def test_items_of_a_tensor_request(shapes: list[tuple[int, ...]], items: int):
    inputs = tuple(Tensor(name=str(i), datatype="FP32", shape=shape, data=b"") for i, shape in enumerate(shapes))
    assert items_of(TensorPayload(inputs=inputs)) == items


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


@given(st.data())
def test_tenants_that_always_wait_have_had_the_same_but_for_one_request(data: st.DataObject):
    tenants = "abc"
    largest = {tenant: data.draw(st.integers(1, 1000)) for tenant in tenants}
    chance = data.draw(st.randoms(use_true_random=False))
    line: WaitingLine[str] = WaitingLine(1000)
    for name in tenants:
        for _ in range(3):
            join(line, name, work=chance.randint(1, largest[name]))
    had = dict.fromkeys(tenants, 0)
    history = [dict(had)]
    for _ in range(100):
        waiter = line.next()
        assert waiter is not None
        had[waiter.tenant] += waiter.work
        join(line, waiter.tenant, work=chance.randint(1, largest[waiter.tenant]))
        history.append(dict(had))
    for one, other in itertools.combinations(tenants, 2):
        leads = [seen[one] - seen[other] for seen in history]
        assert max(map(abs, leads)) <= max(largest[one], largest[other])  # from the start
        assert max(leads) - min(leads) <= largest[one] + largest[other]  # over any span


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 1000))
def test_a_trickle_waits_for_one_request_of_a_flood_at_most(flood: list[int], work: int):
    line: WaitingLine[str] = WaitingLine(1000)
    for size in flood * 5:
        join(line, "flood", work=size)
    for _ in flood:
        line.next()
        join(line, "trickle", work=work)
        ahead = 0
        while (waiter := line.next()) is not None and waiter.tenant != "t":
            ahead += waiter.work
            join(line, "flood", work=waiter.work)
        assert ahead <= work + max(flood)  # what it had itself, and the one that straddles that


class AgainstPlainLists(RuleBasedStateMachine):
    """The line does what searching plain lists would do."""

    def __init__(self) -> None:
        super().__init__()
        self.line: WaitingLine[int] = WaitingLine(BOUND)
        self.waiting: list[Waiter[int]] = []
        self.sent: list[Waiter[int]] = []
        self.at: dict[tuple[str, str], int] = {}
        self.now = dict.fromkeys(PRIORITIES, 0)
        self.count = 0

    def of(self, waiter: Waiter[int]) -> list[Waiter[int]]:
        return [w for w in self.waiting if (w.tenant, w.priority) == (waiter.tenant, waiter.priority)]

    @rule(tenant=st.sampled_from("abc"), priority=st.sampled_from(PRIORITIES), work=st.integers(1, 9))
    def join(self, tenant: str, priority: Any, work: int) -> None:
        self.count += 1
        full = len(self.waiting) == BOUND
        waiter, put_out = self.line.join(self.count, tenant=tenant, priority=priority, work=work)
        assert (waiter.item, waiter.work) == (self.count, work)
        own = self.of(waiter)
        if full:
            batch = [w for w in self.waiting if w.priority == "batch"]
            losers = batch or [w for w in self.waiting if w.priority == priority]
            most = max((len(self.of(w)) for w in losers), default=0)
            if not (batch and priority == "interactive") and most < len(own) + 2:
                assert put_out is waiter
                return
            assert put_out in losers
            assert len(self.of(put_out)) == most
            assert put_out is self.of(put_out)[-1]
            self.waiting.remove(put_out)
        else:
            assert put_out is None
        if not own:
            key = (tenant, priority)
            self.at[key] = max(self.now[priority], self.at.get(key, 0))
        self.waiting.append(waiter)

    @rule(chance=st.randoms(use_true_random=False))
    def leave(self, chance: random.Random) -> None:
        if self.waiting:
            gone = chance.choice(self.waiting)
            self.waiting.remove(gone)
            self.line.leave(gone)
            self.line.leave(gone)

    @rule()
    def take(self) -> None:
        first = min(PRIORITIES.index(w.priority) for w in self.waiting) if self.waiting else 0
        heads = [w for w in self.waiting if w.priority == PRIORITIES[first] and w is self.of(w)[0]]
        expected = min(heads, key=lambda w: (self.at[w.tenant, w.priority], w.number), default=None)
        assert self.line.next() is expected
        if expected is not None:
            key = (expected.tenant, expected.priority)
            self.waiting.remove(expected)
            self.sent.append(expected)
            self.now[expected.priority] = max(self.now[expected.priority], self.at[key])
            self.at[key] += expected.work

    @rule(took=st.none() | st.integers(0, 20), chance=st.randoms(use_true_random=False))
    def end(self, took: int | None, chance: random.Random) -> None:
        if self.sent:
            waiter = chance.choice(self.sent)
            self.sent.remove(waiter)
            self.line.ended(waiter, took)
            self.line.ended(waiter, took)
            self.at[waiter.tenant, waiter.priority] += 0 if took is None else took - waiter.work

    @invariant()
    def no_more_is_remembered_than_is_needed(self) -> None:
        for fair in self.line._by_priority.values():
            assert all(tenant.sent or tenant.at > 0 for tenant in fair._away.values())
            assert not fair._tenants.keys() & fair._away.keys()

    @invariant()
    def same_length(self) -> None:
        assert len(self.line) == len(self.waiting)


TestAgainstPlainLists = AgainstPlainLists.TestCase
