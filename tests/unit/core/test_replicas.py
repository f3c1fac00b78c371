import random
from collections import Counter

import pytest

from gateway.core.replicas import two_choices


@pytest.mark.parametrize(("loads", "expected"), [((), ()), ((7,), (0,))])
def test_with_less_than_two_there_is_no_choice(loads, expected):
    assert two_choices(loads, lambda: 0.5) == expected


def test_the_two_are_different_and_the_less_loaded_is_first():
    chance = random.Random(1)  # noqa: S311 - chance of a test
    for _ in range(5_000):
        loads = [chance.randrange(4) for _ in range(chance.randrange(2, 9))]
        first, second = two_choices(loads, chance.random)
        assert first != second
        assert loads[first] <= loads[second]


def test_every_pair_is_drawn_alike():
    chance = random.Random(2)  # noqa: S311 - chance of a test
    pairs = Counter(frozenset(two_choices([0, 0, 0, 0], chance.random)) for _ in range(12_000))
    assert len(pairs) == 6
    assert min(pairs.values()) > 1_800


def test_requests_spread_evenly_over_equal_replicas():
    chance = random.Random(3)  # noqa: S311 - chance of a test
    loads = [0, 0, 0]
    for _ in range(30_000):
        loads[two_choices(loads, chance.random)[0]] += 1
    assert max(loads) - min(loads) < 10
