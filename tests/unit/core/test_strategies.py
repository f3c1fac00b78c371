import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loads import Standing
from gateway.core.rules import STRATEGIES, Strategy
from gateway.core.strategies import (
    EXPLORATION,
    FREE_LOAD,
    KV_FULL,
    LOAD_BOUND,
    RETRY_UNMEASURED_US,
    TYPICAL_TOKENS,
    Option,
    ordered,
)
from gateway.core.types import EngineLoad, Place

PREFIX = b"p"
LONG_AGO = RETRY_UNMEASURED_US


def option(
    name: str = "a", *, engine: tuple[int, float | None] | None = None, usd: int | None = None, **standing
) -> Option:
    return Option(
        place=Place(backend="b", model="m", replica=name),
        standing=Standing(**standing),
        engine=None if engine is None else EngineLoad(running=0, waiting=engine[0], kv_used=engine[1]),
        expected_nano_usd=usd,
    )


def running(count: int, **standing) -> Option:
    return Option(
        place=Place(backend="b", model="m", replica=str(count)),
        standing=Standing(**standing),
        engine=EngineLoad(running=count, waiting=0),
    )


def order(strategy: Strategy, options: Sequence[Option], draw: float = 0.5, prefix: bytes = PREFIX) -> tuple[int, ...]:
    return ordered(strategy, options, prefix=prefix, draw=lambda: draw)


def firsts(strategy: Strategy, options: Sequence[Option], count: int = 2000) -> Counter[int]:
    draw = random.Random(3).random  # noqa: S311 - chance of a test
    return Counter(ordered(strategy, options, prefix=PREFIX, draw=draw)[0] for _ in range(count))


standings = st.builds(
    Standing,
    requests=st.integers(0, 50),
    tokens=st.integers(0, 10_000),
    own_requests=st.integers(0, 3),
    first_token_us=st.none() | st.floats(0, 1e7),
    since_sent_us=st.none() | st.integers(0, 10**7),
)
engines = st.none() | st.builds(
    EngineLoad, running=st.integers(0, 9), waiting=st.integers(0, 9), kv_used=st.none() | st.floats(0, 1)
)
pools = st.lists(st.tuples(standings, engines, st.none() | st.integers(0, 10**9)), max_size=8).map(
    lambda drawn: [
        Option(place=Place(backend="b", model="m", replica=str(i)), standing=s, engine=e, expected_nano_usd=c)
        for i, (s, e, c) in enumerate(drawn)
    ]
)


@given(st.sampled_from(STRATEGIES), pools, st.binary(max_size=2), st.randoms(use_true_random=False))
def test_every_order_is_a_permutation(strategy: Strategy, pool: list[Option], prefix: bytes, chance: random.Random):
    assert sorted(ordered(strategy, pool, prefix=prefix, draw=chance.random)) == list(range(len(pool)))


@pytest.mark.parametrize("strategy", ["weighted", "ordered"])
def test_strategies_that_do_not_look_keep_the_written_order(strategy: Strategy):
    assert order(strategy, [option(tokens=9), option(tokens=1)]) == (0, 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param([option(tokens=9), option(tokens=1), option(tokens=5)], (1, 2, 0), id="tokens, not requests"),
        pytest.param([option(requests=1, tokens=900), option(requests=5, tokens=50)], (1, 0), id="many short ones"),
        pytest.param(
            [option(tokens=0, engine=(1, 0.1)), option(tokens=9000)], (1, 0), id="who has a queue comes after"
        ),
        pytest.param([option(engine=(0, KV_FULL)), option(tokens=9000)], (1, 0), id="a full cache comes after"),
        pytest.param([option(tokens=1, engine=(0, 0.94)), option(tokens=9)], (0, 1), id="nearly full is not full"),
        pytest.param([option(tokens=1, engine=(0, None)), option(tokens=9)], (0, 1), id="no word of the cache"),
        pytest.param(
            [option(tokens=TYPICAL_TOKENS, engine=(3, None)), option(tokens=3 * TYPICAL_TOKENS, engine=(2, None))],
            (0, 1),
            id="where all have queues, they count as tokens",
        ),
        pytest.param([option(engine=(3, None)), option(engine=(2, None))], (1, 0), id="the shorter queue"),
        pytest.param([running(3), running(0)], (1, 0), id="what others have running there counts"),
        pytest.param([running(3, requests=3, tokens=9), running(0, tokens=10)], (0, 1), id="but not one's own twice"),
    ],
)
def test_least_in_flight(options: list[Option], expected: tuple[int, ...]):
    assert order("least_in_flight", options) == expected


@pytest.mark.parametrize("strategy", ["least_in_flight", "cheapest", "fastest"])
def test_what_is_equal_is_shared_out_by_chance(strategy: Strategy):
    counts = firsts(strategy, [option(), option(), option()])
    assert all(500 < counts[i] < 850 for i in range(3))


# --- fastest ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            [option(first_token_us=90), option(first_token_us=10), option(first_token_us=50)], (1, 2, 0), id="mean"
        ),
        pytest.param([option(first_token_us=90), option(first_token_us=10, engine=(2, 0.5))], (0, 1), id="has a queue"),
        pytest.param([option(first_token_us=10), option()], (1, 0), id="unmeasured first"),
        pytest.param([option(first_token_us=10), option(since_sent_us=LONG_AGO)], (1, 0), id="unmeasured again"),
        pytest.param(
            [option(first_token_us=10), option(own_requests=1, since_sent_us=LONG_AGO), option(first_token_us=90)],
            (0, 1, 2),
            id="being tried: directly behind the best",
        ),
        pytest.param(
            [option(first_token_us=10), option(since_sent_us=LONG_AGO - 1), option(first_token_us=90)],
            (0, 1, 2),
            id="tried just now, in vain",
        ),
        pytest.param([option(first_token_us=10), option(engine=(2, None))], (0, 1), id="unmeasured with a queue"),
        pytest.param(
            [option(first_token_us=10), option(tokens=5), option(tokens=1)], (2, 0, 1), id="one of the unmeasured"
        ),
        pytest.param([option(tokens=9), option(tokens=1)], (1, 0), id="nothing measured"),
    ],
)
def test_fastest(options: list[Option], expected: tuple[int, ...]):
    assert order("fastest", options) == expected


def test_an_unmeasured_place_gets_one_request_and_not_a_herd():
    known, new = option(first_token_us=10, requests=9), option()
    assert firsts("fastest", [known, new], 1) == {1: 1}
    under_way = option(requests=1, own_requests=1, since_sent_us=5)
    counts = firsts("fastest", [known, under_way])
    assert counts[0] > 0.95 * 2000


def test_a_small_share_explores():
    options = [option(first_token_us=10), option(first_token_us=50), option(first_token_us=90)]
    counts = firsts("fastest", options, 20_000)
    explored = (counts[1] + counts[2]) / 20_000
    assert 0.5 * EXPLORATION < explored < 2 * EXPLORATION
    assert min(counts[1], counts[2]) > 0


# --- cheapest -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param([option(usd=9), option(usd=1), option(usd=5)], (1, 2, 0), id="price"),
        pytest.param([option(usd=None), option(usd=9), option(usd=0)], (2, 1, 0), id="unknown is last, free is first"),
        pytest.param([option(usd=3, tokens=9), option(usd=3, tokens=1)], (1, 0), id="equal: the less busy"),
        pytest.param([option(usd=3, engine=(1, None)), option(usd=3, tokens=1)], (1, 0), id="equal: no queue"),
        pytest.param([option(tokens=9), option(tokens=1)], (1, 0), id="no price at all"),
    ],
)
def test_cheapest(options: list[Option], expected: tuple[int, ...]):
    assert order("cheapest", options) == expected


# --- prefix affinity ----------------------------------------------------------------------------

PREFIXES = [i.to_bytes(4, "big") for i in range(4000)]


def owners(pool: Sequence[Option]) -> list[str]:
    return [pool[order("prefix_affinity", pool, prefix=prefix)[0]].place.replica for prefix in PREFIXES]


def test_prefixes_are_shared_out_evenly():
    counts = Counter(owners([option(name) for name in "abcd"]))
    assert all(0.8 * 1000 < counts[name] < 1.2 * 1000 for name in "abcd")


def test_a_place_that_comes_or_goes_moves_its_own_share_alone():
    four, five = owners([option(n) for n in "abcd"]), owners([option(n) for n in "ebcda"])
    moved = [new for old, new in zip(four, five, strict=True) if old != new]
    assert set(moved) == {"e"}
    assert 0.8 / 5 < len(moved) / len(PREFIXES) < 1.2 / 5


def test_where_the_place_is_gone_the_second_in_order_has_the_prefix():
    pool = [option(n) for n in "abcd"]
    for prefix in PREFIXES[:100]:
        first, second, *_ = order("prefix_affinity", pool, prefix=prefix)
        rest = [one for i, one in enumerate(pool) if i != first]
        assert rest[order("prefix_affinity", rest, prefix=prefix)[0]] is pool[second]


def test_a_hot_prefix_spills_over_and_no_place_has_more_than_its_bound():
    loads = dict.fromkeys("abcd", 0)
    for sent in range(1, 201):
        pool = [option(name, requests=load) for name, load in loads.items()]
        chosen = pool[order("prefix_affinity", pool)[0]].place.replica
        loads[chosen] += 1
        assert loads[chosen] <= max(FREE_LOAD, LOAD_BOUND * sent / 4 + 1)
    assert min(loads.values()) > 0


def test_an_idle_pool_keeps_a_prefix_at_its_place():
    pool = [option(n) for n in "abcd"]
    home = order("prefix_affinity", pool)[0]
    assert {order("prefix_affinity", pool, draw=i / 10)[0] for i in range(10)} == {home}


def test_requests_that_wait_at_an_engine_count():
    pool = [option(n) for n in "ab"]
    home = order("prefix_affinity", pool)[0]
    pool[home] = option("ab"[home], engine=(4, None))
    assert order("prefix_affinity", pool)[0] == 1 - home


def test_a_request_without_prefix_goes_where_least_is_in_flight():
    assert order("prefix_affinity", [option("a", tokens=9), option("b", tokens=1)], prefix=b"") == (1, 0)


def test_every_process_chooses_alike():
    program = (
        "from tests.unit.core.test_strategies import option, owners;"
        "print(''.join(owners([option(n) for n in 'abcd'])[:200]))"
    )
    here = "".join(owners([option(n) for n in "abcd"])[:200])
    for seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert told.stdout.strip() == here
