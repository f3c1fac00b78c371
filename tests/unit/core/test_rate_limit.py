from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.rate_limit import Charge, Outcome, charges, decide, decide_all, verdict
from gateway.core.types import Caller, Limit

SECOND, MINUTE, HOUR = 1_000_000, 60_000_000, 3_600_000_000
NOW = 1_700_000_000_000_000


def one_per_second(burst: int = 3, *, cost: int = 1, key: str = "k") -> Charge:
    return Charge(key=key, name="n", emission_interval_us=SECOND, burst=burst, cost=cost)


def play(charge: Charge, instants: list[int]) -> list[Outcome]:
    outcomes, tat = [], None
    for instant in instants:
        outcome = decide(charge, tat_us=tat, now_us=NOW + instant)
        tat = outcome.tat_us
        outcomes.append(outcome)
    return outcomes


TABLE = [  # at, allowed, remaining, reset, retry after; in milliseconds
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
    outcomes = play(one_per_second(), [row[0] * 1000 for row in TABLE])
    told = [
        (row[0], o.allowed, o.remaining, o.reset_us // 1000, o.retry_after_us // 1000)
        for row, o in zip(TABLE, outcomes, strict=True)
    ]
    assert told == TABLE


def test_remaining_falls_2_1_0_then_refuses_and_a_request_after_retry_after_passes():
    outcomes = play(one_per_second(), [0] * 6)
    assert [o.remaining for o in outcomes] == [2, 1, 0, 0, 0, 0]
    assert [o.allowed for o in outcomes] == [True] * 3 + [False] * 3
    last = outcomes[-1]
    assert 0 < last.retry_after_us <= last.reset_us
    again = decide(one_per_second(), tat_us=last.tat_us, now_us=NOW + last.retry_after_us)
    assert again.allowed
    early = decide(one_per_second(), tat_us=last.tat_us, now_us=NOW + last.retry_after_us - 1)
    assert not early.allowed


def test_a_refusal_costs_nothing():
    *_, full, refused = play(one_per_second(), [0, 0, 0, 0])
    assert refused.tat_us == full.tat_us


def test_a_cost_counts_as_so_many_requests():
    first, second = play(one_per_second(5, cost=3), [0, 0])
    assert (first.allowed, first.remaining) == (True, 2)
    assert (second.allowed, second.remaining, second.retry_after_us) == (False, 2, SECOND)


def test_a_clock_set_back_never_costs_more_than_one_window():
    outcome = decide(one_per_second(), tat_us=NOW + HOUR, now_us=NOW)
    assert (outcome.allowed, outcome.retry_after_us, outcome.reset_us) == (False, SECOND, 3 * SECOND)


@given(
    interval=st.integers(1, 10**9),
    burst=st.integers(1, 50),
    gaps=st.lists(st.integers(0, 3 * 10**9), min_size=1, max_size=120),
)
def test_never_more_than_burst_and_one_per_interval(interval, burst, gaps):
    charge = replace(one_per_second(burst), emission_interval_us=interval)
    now, tat, admitted = NOW, None, []
    for gap in gaps:
        now += gap
        outcome = decide(charge, tat_us=tat, now_us=now)
        tat = outcome.tat_us
        assert 0 <= outcome.remaining <= burst
        assert 0 <= outcome.reset_us <= interval * burst
        assert (outcome.retry_after_us == 0) is outcome.allowed
        if outcome.allowed:
            admitted.append(now)
    # Over every stretch between two admissions, not only from the start.
    for first, begin in enumerate(admitted):
        for last in range(first, len(admitted)):
            elapsed = admitted[last] - begin
            assert last - first + 1 <= burst + elapsed // interval


@given(st.integers(1, 20), st.integers(0, 40))
def test_remaining_is_how_many_more_pass_now(burst, used):
    outcomes = play(one_per_second(burst), [0] * (used + 1))
    tat, remaining = outcomes[-1].tat_us, outcomes[-1].remaining
    for _ in range(remaining):
        outcome = decide(one_per_second(burst), tat_us=tat, now_us=NOW)
        assert outcome.allowed
        tat = outcome.tat_us
    assert not decide(one_per_second(burst), tat_us=tat, now_us=NOW).allowed


def test_a_counter_charged_twice_is_decided_on_top_of_the_first():
    outcomes = decide_all([one_per_second(), one_per_second()], tats_us={}, now_us=NOW)
    assert [o.remaining for o in outcomes] == [2, 1]
    outcomes = decide_all([one_per_second(1), one_per_second(1)], tats_us={}, now_us=NOW)
    assert [o.allowed for o in outcomes] == [True, False]


def test_the_verdict_names_the_limit_nearest_to_its_end():
    wide = replace(one_per_second(100, key="wide"), name="100 a second")
    narrow = replace(one_per_second(2, key="narrow"), name="2 a second")
    said = verdict([wide, narrow], decide_all([wide, narrow], tats_us={}, now_us=NOW))
    assert (said.allowed, said.name, said.limit, said.remaining) == (True, "2 a second", 2, 1)


def test_the_verdict_of_a_refusal_names_the_limit_that_refuses_longest():
    short, long = one_per_second(key="short"), replace(one_per_second(key="long"), emission_interval_us=MINUTE)
    tats = {"short": NOW + 3 * SECOND, "long": NOW + 3 * MINUTE}
    said = verdict([short, long], decide_all([short, long], tats_us=tats, now_us=NOW))
    assert (said.allowed, said.remaining, said.retry_after_us) == (False, 0, MINUTE)


def test_no_charges_no_limit():
    assert verdict((), ()).allowed
    assert verdict((), ()).limit is None


def caller(*limits: Limit) -> Caller:
    return Caller(key_id="k1", tenant="t", limits=limits)


def test_each_limit_of_a_key_is_a_counter_of_its_own():
    slow = Limit(requests=60, period_us=MINUTE, burst=10)
    fast = Limit(requests=600, period_us=MINUTE, burst=10)
    taken = charges(caller(slow, fast))
    assert [c.name for c in taken] == ["60 requests per minute", "600 requests per minute"]
    assert len({c.key for c in taken}) == 2
    assert {c.owner for c in taken} == {"k1"}
    assert taken[0].emission_interval_us == SECOND


def test_a_limit_written_twice_is_charged_once():
    limit = Limit(requests=1, period_us=SECOND, burst=1)
    assert len(charges(caller(limit, limit))) == 1


def test_the_interval_is_rounded_so_that_a_limit_is_never_overrun():
    (charge,) = charges(caller(Limit(requests=7, period_us=SECOND, burst=7)))
    assert charge.emission_interval_us * 7 >= SECOND
