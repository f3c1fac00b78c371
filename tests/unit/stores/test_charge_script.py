"""Lua == Python: `charge.lua` on a real Redis against `core.rate_limit` on random histories."""

import uuid

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.rate_limit import Charge, Outcome, decide_all
from gateway.stores.redis_script import load_script

pytest_plugins = ["tests.kit.redis"]

NOW = 1_700_000_000_000_000
# Intervals of a minute and more: counters expire by the real clock, which must not pass within a test.
INTERVALS_US = [60_000_000, 60_000_001, 61_803_399_887, 86_400_000_000, 2_592_000_000_000, 2**44 - 1]

histories = st.lists(
    st.tuples(
        st.integers(0, 3 * 10**8) | st.integers(0, 2**45),  # the time since the step before
        st.lists(
            st.tuples(st.integers(0, len(INTERVALS_US) - 1), st.integers(0, 4)),  # which counter, cost
            min_size=1,
            max_size=4,
        ),
    ),
    min_size=1,
    max_size=30,
)


def charge(counter: int, cost: int, burst: int) -> Charge:
    return Charge(key=str(counter), name="n", emission_interval_us=INTERVALS_US[counter], burst=burst, cost=cost)


@pytest.fixture(scope="module")
def script(redis_server):
    with redis.Redis(port=redis_server.port) as client:
        yield client.register_script(load_script("charge").source)


def run(script, prefix: str, taken: list[Charge], now: int | str) -> tuple[Outcome, ...]:
    numbers = [n for c in taken for n in (c.emission_interval_us, c.burst, c.cost)]
    flat = script(keys=[prefix + c.key for c in taken], args=[now, *numbers])
    rows = [flat[i : i + 5] for i in range(0, len(flat), 5)]
    return tuple(
        Outcome(allowed=bool(a), tat_us=tat, remaining=left, reset_us=reset, retry_after_us=retry)
        for a, tat, left, reset, retry in rows
    )


@settings(max_examples=150, deadline=None)
@given(history=histories, burst=st.integers(1, 40))
def test_lua_equals_python_on_random_histories(script, history, burst):
    prefix = f"history:{uuid.uuid4().hex}:"
    now, tats = NOW, {}
    for gap, taken in history:
        now += gap
        charged = [charge(counter, cost, burst) for counter, cost in taken]
        expected = decide_all(charged, tats_us=tats, now_us=now)
        assert run(script, prefix, charged, now) == expected
        if all(outcome.allowed for outcome in expected):
            tats |= {c.key: outcome.tat_us for c, outcome in zip(charged, expected, strict=True)}


@pytest.mark.parametrize("interval", INTERVALS_US)
def test_every_counter_expires_when_its_time_has_passed(script, redis_server, interval):
    key = f"ttl:{uuid.uuid4().hex}"
    charged = Charge(key=key, name="n", emission_interval_us=interval, burst=9)
    (outcome,) = run(script, "", [charged], NOW)
    with redis.Redis(port=redis_server.port) as client:
        left_ms = client.pttl(key)
    wanted_ms = -(-outcome.reset_us // 1000)
    assert wanted_ms - 10_000 < left_ms <= wanted_ms


def test_a_charge_of_nothing_leaves_no_key_without_expiry(script, redis_server):
    key = f"ttl:{uuid.uuid4().hex}"
    run(script, "", [Charge(key=key, name="n", emission_interval_us=1, burst=1, cost=0)], "")
    with redis.Redis(port=redis_server.port) as client:
        assert client.pttl(key) != -1


def test_it_takes_its_time_from_redis(script, redis_server):
    key = f"time:{uuid.uuid4().hex}"
    (outcome,) = run(script, "", [Charge(key=key, name="n", emission_interval_us=10**9, burst=1)], "")
    with redis.Redis(port=redis_server.port) as client:
        seconds, _ = client.time()
    assert abs(outcome.tat_us - 10**9 - seconds * 10**6) < 10**7
