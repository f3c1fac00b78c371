"""The arithmetic of limits: what passes, what is said of it, and that no limit is ever overrun."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.rate_limit import MOST, boundaries_us, cost_of, counters, name_of, shared_out, takes
from gateway.core.types import Caller, Limit
from tests.kit.limited import DAY, HOUR, MINUTE, NOW, SECOND, Door, concurrent, requests, tokens, usd

# --- rates ---------------------------------------------------------------------------------------

TABLE = [  # at, allowed, remaining, reset, retry after; in milliseconds. 60 per minute, 3 at once
    (0, True, 2, 1000, 0),
    (0, True, 1, 2000, 0),
    (0, True, 0, 3000, 0),
    (0, False, 0, 3000, 1000),
    (999, False, 0, 2001, 1),
    (1000, True, 0, 3000, 0),  # one interval later, one more
    (1000, False, 0, 3000, 1000),
    (3500, True, 1, 1500, 0),
    (3500, True, 0, 2500, 0),
    (3500, False, 0, 2500, 500),
    (3999, False, 0, 2001, 1),
    (4000, True, 0, 3000, 0),
    (60_000, True, 2, 1000, 0),  # after a long idle: whole again, and no more than whole
]


def test_three_at_once_then_one_a_second():
    door, told = Door((requests(60, "minute", burst=3),)), []
    for at_ms, *_ in TABLE:
        door.now_us = NOW + at_ms * 1000
        (state,) = door.enter().states
        told.append(
            (at_ms, not state.is_refused, state.remaining, state.reset_us // 1000, state.retry_after_us // 1000)
        )
    assert told == TABLE


@pytest.mark.parametrize(
    "limit",
    [requests(3), requests(7, "minute"), requests(1, "day"), requests(60, "hour", burst=5), requests(10**6, burst=3)],
)
def test_retry_after_is_exact(limit):
    door = Door((limit,))
    assert door.many(limit.burst) == limit.burst
    refused = door.enter().refused_by
    door.now_us += refused.retry_after_us - 1
    assert not door.enter().allowed
    door.now_us += 1
    assert door.enter().allowed


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**7), st.integers(0, 10**6))
def test_retry_after_is_exact_for_tokens_too(amount, first, second, later):
    door = Door((tokens(amount, "minute", burst=10**6),))
    door.enter(tokens=first)
    door.now_us += later
    told = door.enter(tokens=second)
    if told.allowed:
        return
    if told.refused_by.is_hopeless:
        assert second > 10**6
        return
    door.now_us += told.refused_by.retry_after_us - 1
    assert not door.enter(tokens=second).allowed
    door.now_us += 1
    assert door.enter(tokens=second).allowed


@given(
    amount=st.integers(1, 2000),
    burst=st.integers(1, 50),
    gaps=st.lists(st.integers(0, 3 * SECOND), min_size=1, max_size=100),
)
def test_never_more_than_the_limit_and_its_burst_over_any_stretch(amount, burst, gaps):
    door, admitted = Door((requests(amount, "minute", burst=burst),)), []
    for gap in gaps:
        door.now_us += gap
        (state,) = door.enter().states
        assert 0 <= state.remaining < burst
        assert 0 < state.reset_us <= burst * -(-MINUTE // amount)
        assert (state.retry_after_us > 0) is state.is_refused
        if not state.is_refused:
            admitted.append(door.now_us)
    for first, begin in enumerate(admitted):  # every stretch between two admissions, not only from the start
        for last in range(first, len(admitted)):
            assert last - first + 1 <= burst + (admitted[last] - begin) * amount // MINUTE


@given(
    amount=st.integers(1, 10**9),
    steps=st.lists(st.tuples(st.integers(0, MINUTE), st.integers(0, 10**9), st.integers(0, 10**9)), max_size=40),
)
def test_what_was_used_of_tokens_is_never_more_than_there_was_but_for_what_was_not_reserved(amount, steps):
    """Each request ends at once, with more or less than it had reserved."""
    door, used, beyond = Door((tokens(amount),)), 0, 0
    for gap, reserved, real in steps:
        door.now_us += gap
        if door.enter(tokens=reserved).allowed:
            door.leave(door.count, tokens=real)
            used += real
            beyond += max(0, real - reserved)
    assert used <= amount + (door.now_us - NOW) * amount // MINUTE + beyond


@given(st.integers(1, 20), st.integers(0, 40))
def test_remaining_is_how_many_more_pass_now(burst, used):
    door = Door((requests(60, "minute", burst=burst),))
    for _ in range(used + 1):
        told = door.enter()
    remaining = told.states[0].remaining
    assert door.many(remaining + 1) == remaining


@given(st.integers(1, 10**9), st.sampled_from(["second", "minute", "hour", "day"]), st.integers(1, 10**9))
def test_the_remaining_tokens_pass_at_once_and_one_more_does_not(amount, per, first):
    door = Door((tokens(amount, per),))
    remaining = door.enter(tokens=min(first, amount)).states[0].remaining
    assert remaining <= amount - min(first, amount)
    assert door.enter(tokens=remaining).allowed
    door = Door((tokens(amount, per),))
    door.enter(tokens=min(first, amount))
    assert not door.enter(tokens=remaining + -(-amount // 10**6) + 1).allowed  # a microsecond may be many tokens


def test_the_whole_burst_passes_whatever_is_rounded():
    for amount in (1, 3, 7, 59, 997, 10**6 + 1):
        assert Door((requests(amount, "second", burst=min(amount, 500)),)).many(500) == min(amount, 500)
        assert Door((tokens(amount),)).enter(tokens=amount).allowed
        assert not Door((tokens(amount),)).enter(tokens=amount + 1).allowed


def test_a_refusal_takes_nothing_of_any_limit():
    door = Door((requests(100), tokens(10), usd(1000), concurrent(1)))
    assert door.enter(tokens=5, nano_usd=10).allowed
    before = door.enter(tokens=5, nano_usd=10).states
    assert [state.limit.kind for state in before if state.is_refused] == ["concurrent"]
    assert door.enter(tokens=5, nano_usd=10).states == before
    assert [state.remaining for state in before] == [99, 5, 990, 0]


def test_a_clock_that_is_set_back_costs_two_windows_at_most():
    door = Door((requests(3),))
    assert door.many(4) == 3
    door.now_us -= HOUR
    refused = door.enter().refused_by
    assert refused.retry_after_us <= 2 * SECOND
    door.now_us += refused.retry_after_us
    assert door.enter().allowed


def test_a_debt_is_remembered_for_one_window_beyond_a_used_up_one():
    door = Door((tokens(60),))
    assert door.enter(tokens=1).allowed
    door.leave(1, tokens=1_000_000)
    assert door.enter().refused_by.retry_after_us == MINUTE + SECOND
    door.now_us += MINUTE
    assert not door.enter().allowed
    door.now_us += SECOND
    assert door.enter().allowed


def test_what_was_reserved_is_given_back_also_after_some_of_it_has_come_back_by_itself():
    door = Door((tokens(60),))
    assert door.enter(tokens=60).allowed
    door.now_us += MINUTE // 2
    assert door.enter(tokens=30).allowed
    door.leave(1)
    assert door.enter(tokens=30).states[0].remaining == 30
    door.now_us += HOUR
    door.leave(2)
    assert door.enter(tokens=60).states[0].remaining == 0  # never more than whole


def test_what_takes_nothing_passes_also_a_limit_in_debt():
    door = Door((tokens(60), usd(10)))
    assert door.enter(tokens=60, nano_usd=10).allowed
    door.leave(1, tokens=100, nano_usd=20)
    assert not door.enter(tokens=1).allowed
    assert not door.enter(tokens=0, nano_usd=1).allowed
    told = door.enter(tokens=0)
    assert told.allowed
    assert [state.remaining for state in told.states] == [0, 0]


def test_costs_are_exact_and_bounded():
    limit = tokens(7, "second", burst=7)
    assert cost_of(limit, 7) == SECOND
    assert cost_of(limit, 1) * 7 >= SECOND
    assert cost_of(tokens(1, "day"), 10**12) == MOST
    assert cost_of(usd(1), 10**30) == MOST
    assert MOST + NOW < 2**53


# --- budgets and places --------------------------------------------------------------------------


def test_a_budget_is_spent_to_its_last_nano_dollar_and_whole_again_in_the_next_period():
    door = Door((usd(100, "day"),))
    assert door.many(11, nano_usd=10) == 10
    refused = door.enter(nano_usd=1).refused_by
    assert (refused.remaining, refused.retry_after_us) == (0, refused.reset_us)
    door.now_us += refused.retry_after_us - 1
    assert not door.enter(nano_usd=1).allowed
    door.now_us += 1
    assert door.now_us % DAY == 0
    assert door.enter(nano_usd=100).allowed


def test_what_was_reserved_in_the_last_period_is_put_right_there():
    door = Door((usd(100, "day"),), now_us=NOW - NOW % DAY + DAY - SECOND)
    assert door.enter(nano_usd=100).allowed
    door.now_us += SECOND
    assert door.enter(nano_usd=60).states[0].remaining == 40
    door.leave(1)
    assert door.enter(nano_usd=10).states[0].remaining == 30
    door.leave(2, nano_usd=90)
    assert door.enter(nano_usd=1).refused_by.remaining == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=40))
def test_a_budget_is_overspent_by_what_was_not_reserved_alone(requests_of):
    door, spent, beyond = Door((usd(200),)), 0, 0
    for reserved, real in requests_of:
        if door.enter(nano_usd=reserved).allowed:
            door.leave(door.count, nano_usd=real)
            spent, beyond = spent + real, beyond + max(0, real - reserved)
    assert spent <= 200 + beyond


def test_places_are_taken_and_given_back():
    door = Door((concurrent(2),))
    assert door.many(3) == 2
    refused = door.enter().refused_by
    assert (refused.remaining, refused.reset_us, refused.retry_after_us, refused.is_hopeless) == (0, 0, 0, False)
    door.leave(1)
    assert door.many(2) == 1


@pytest.mark.parametrize(
    ("at", "per", "begin", "end", "after"),
    [
        ("2024-02-28T23:59:59", "day", "2024-02-28", "2024-02-29", "2024-03-01"),
        ("2023-02-28T00:00:00", "day", "2023-02-28", "2023-03-01", "2023-03-02"),
        ("2024-02-29T12:00:00", "month", "2024-02-01", "2024-03-01", "2024-04-01"),
        ("2023-12-31T23:59:59", "month", "2023-12-01", "2024-01-01", "2024-02-01"),
        ("2023-12-31T23:59:59", "day", "2023-12-31", "2024-01-01", "2024-01-02"),
        ("2024-11-30T00:00:00", "month", "2024-11-01", "2024-12-01", "2025-01-01"),
        ("2100-02-28T23:00:00", "day", "2100-02-28", "2100-03-01", "2100-03-02"),  # no leap year
        ("2023-01-31T09:30:00", "month", "2023-01-01", "2023-02-01", "2023-03-01"),
    ],
)
def test_periods_are_those_of_the_calendar(at, per, begin, end, after):
    expected = [micros(day + "T00:00:00") for day in (begin, end, after)]
    assert list(boundaries_us(per, micros(at))) == expected
    assert list(boundaries_us(per, micros(at) + 999_999)) == expected


@given(st.integers(0, 4_000_000_000_000_000), st.sampled_from(["day", "month"]))
def test_every_instant_lies_in_its_period(now_us, per):
    begin, end, after = boundaries_us(per, now_us)
    assert begin <= now_us < end < after
    assert boundaries_us(per, end)[:2] == (end, after)
    assert boundaries_us(per, end - 1)[0] == begin


def micros(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000_000


# --- which limits count, and where ----------------------------------------------------------------


def caller(*limits: Limit, key: str = "k1", tenant: str = "acme") -> Caller:
    return Caller(key_id=key, tenant=tenant, limits=limits)


@pytest.mark.parametrize(
    ("limit", "counts"),
    [
        (requests(), True),
        (requests(task="chat"), True),
        (requests(task="other"), False),
        (requests(model="llama"), True),
        (requests(model="other"), False),
        (requests(priority="batch"), True),
        (requests(priority="interactive"), False),
        (requests(task="chat", model="llama", priority="batch"), True),
        (requests(task="chat", model="llama", priority="interactive"), False),
    ],
)
def test_a_limit_counts_the_requests_that_it_names(limit, counts):
    assert bool(counters(caller(limit), "chat", "llama", "batch")) is counts


def test_every_limit_has_a_counter_of_its_own_and_one_written_twice_counts_once():
    limits = (
        *(requests(), requests(4), requests(3, "minute"), requests(3, burst=2), tokens(3, "second")),
        *(requests(task="a"), requests(model="a"), requests(priority="batch"), requests(task="a", model="a")),
        *(usd(5, "day"), usd(5, "month"), usd(5, "day", task="a"), concurrent(), concurrent(task="a")),
        *(replace(requests(), shared_by="tenant"), replace(requests(), shared_by="all")),
        *(replace(usd(5), shared_by="tenant"), replace(concurrent(), shared_by="all")),
    )
    taken = counters(caller(*limits, *limits), "a", "a", "batch")
    assert [take.limit for take in taken] == list(limits)
    assert len({take.key for take in taken}) == len(limits)


def test_keys_and_tenants_share_what_they_are_said_to_share():
    def counter(shared_by: str, key: str, tenant: str) -> str:
        limit = replace(requests(), shared_by=shared_by)
        return counters(caller(limit, key=key, tenant=tenant), "t", "", "interactive")[0].key

    for shared_by, key, tenant in (("key", False, True), ("tenant", True, False), ("all", True, True)):
        one = counter(shared_by, "k1", "acme")
        assert (counter(shared_by, "k2", "acme") == one) is key
        assert (counter(shared_by, "k1", "other") == one) is tenant
    assert counter("key", "acme", "x") != counter("tenant", "x", "acme")


def test_what_was_spent_counts_on_under_another_amount_and_of_two_the_stricter_one_stands():
    door = Door((usd(100),))
    assert door.enter(nano_usd=80).allowed
    door.limits = (usd(50),)
    assert not door.enter(nano_usd=1).allowed
    door.limits = (usd(200), usd(150), usd(1000))
    (state,) = door.enter(nano_usd=10).states
    assert (state.limit.amount, state.remaining) == (150, 60)


def test_a_caller_without_limits_takes_nothing():
    assert counters(caller(), "t", "", "batch") == ()
    assert Door(()).enter().allowed


def test_what_is_held_is_all_but_requests():
    taken = takes(
        counters(caller(requests(), tokens(), usd(5), concurrent()), "t", "", "batch"), tokens=100, nano_usd=3
    )
    assert [(take.cost, take.is_held) for take in taken] == [
        (-(-SECOND // 3), False),
        (MINUTE // 10, True),
        (3, True),
        (1, True),
    ]


# --- one worker's part ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize(
    "limit", [requests(60, "minute"), requests(60, "minute", burst=1), requests(5, "hour", burst=3), requests(1, "day")]
)
def test_workers_that_cannot_ask_each_other_admit_the_limit_together_and_one_each_at_least(limit, workers):
    admitted = []
    for _ in range(workers):
        door, count = Door((limit,), workers=workers), 0
        for step in range(400):
            door.now_us = NOW + step * DAY // 400
            count += door.enter().allowed
            count += door.enter().allowed
        admitted.append(count)
    assert min(admitted) >= 1
    assert sum(admitted) <= limit.burst + limit.amount * DAY // {"minute": MINUTE, "hour": HOUR, "day": DAY}[
        limit.per
    ] + (workers)
    at_once = sum(Door((limit,), workers=workers).many(200) for _ in range(workers))
    assert at_once <= max(limit.burst, workers)


@pytest.mark.parametrize("workers", [2, 3, 10])
def test_money_tokens_and_places_are_shared_out_too(workers):
    for limit, asked in (
        (usd(100), {"nano_usd": 7}),
        (tokens(100, "day"), {"tokens": 7}),
        (concurrent(5), {}),
    ):
        admitted = [Door((limit,), workers=workers).many(50, **asked) for _ in range(workers)]
        assert min(admitted) >= 1
        assert sum(admitted) * (asked.get("nano_usd") or asked.get("tokens") or 1) <= limit.amount + 7 * workers


def test_what_a_worker_alone_has_really_used_counts_as_its_part_too():
    door = Door((tokens(100, "day"),), workers=4)
    assert door.enter(tokens=25).allowed
    door.leave(1, tokens=10)
    assert door.enter(tokens=15).states[0].remaining == 0
    assert not door.enter(tokens=1).allowed


def test_what_no_limit_ever_gives_one_worker_alone_does_not_give_either():
    limits = (tokens(100), usd(100), concurrent(1))
    taken = takes(counters(caller(*limits), "t", "", "batch"), tokens=101, nano_usd=101)
    assert shared_out(taken, 5)[:2] == taken[:2]
    told = Door((tokens(100),), workers=5).enter(tokens=101)
    assert told.refused_by.is_hopeless


# --- the verdict ---------------------------------------------------------------------------------


def test_of_several_refusals_the_one_that_lasts_longest_is_named():
    door = Door((requests(1), requests(2, "minute", burst=1), concurrent(1)))
    assert door.enter().allowed
    refused = door.enter().refused_by
    assert (refused.limit.per, refused.retry_after_us) == ("minute", MINUTE // 2)


def test_a_hopeless_request_is_named_first_and_told_no_time():
    door = Door((requests(1, "day"), tokens(10, "second")))
    assert door.enter().allowed
    refused = door.enter(tokens=11).refused_by
    assert (refused.limit.kind, refused.is_hopeless, refused.retry_after_us) == ("tokens", True, 0)


def test_all_states_are_told_and_the_nearest_of_a_kind():
    told = Door((requests(100), requests(2, "minute"), tokens(50))).enter(tokens=10)
    assert [state.remaining for state in told.states] == [99, 1, 40]
    assert told.nearest("requests").limit.per == "minute"
    assert told.nearest("usd") is None


@pytest.mark.parametrize(
    ("limit", "name"),
    [
        (requests(60, "minute"), "60 requests per minute"),
        (tokens(1000, "day", task="chat"), "1000 tokens per day for the task chat"),
        (requests(60, "minute", burst=5), "60 requests per minute, 5 at once"),
        (usd(10_000_000_000), "10 USD per month"),
        (usd(250_000_000, "day", shared_by="tenant"), "0.25 USD per day of the tenant"),
        (concurrent(4, model="llama"), "4 requests at once for the model llama"),
        (requests(5, shared_by="all", priority="batch"), "5 requests per second of all callers for the priority batch"),
    ],
)
def test_a_limit_is_named_as_its_caller_would(limit, name):
    assert name_of(limit) == name
