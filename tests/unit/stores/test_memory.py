from dataclasses import replace

from gateway.core.rate_limit import Charge
from gateway.core.rules import RuleSet
from gateway.stores.memory import MemoryLimiter, MemoryRuleSource

SECOND = 1_000_000
ONE = Charge(key="k", name="n", emission_interval_us=SECOND, burst=2)


class Clock:
    now_us = 0

    def __call__(self) -> int:
        return self.now_us


async def test_it_follows_its_clock():
    clock = Clock()
    limiter = MemoryLimiter(clock)
    assert [(await limiter.charge([ONE])).allowed for _ in range(3)] == [True, True, False]
    clock.now_us = SECOND
    assert [(await limiter.charge([ONE])).allowed for _ in range(2)] == [True, False]


async def test_counters_whose_time_has_passed_are_dropped():
    clock = Clock()
    limiter = MemoryLimiter(clock)
    for n in range(20_000):
        clock.now_us += SECOND // 100  # a hundred callers are within their second
        await limiter.charge([replace(ONE, key=f"k{n}")])
        assert len(limiter._tats_us) <= 1025
    assert len(limiter._tats_us) >= 100


async def test_the_number_of_counters_is_bounded_and_the_fullest_stay():
    limiter = MemoryLimiter(Clock(), max_keys=100)
    for _ in range(2):
        await limiter.charge([replace(ONE, key="busy")])
    for n in range(1000):
        await limiter.charge([replace(ONE, key=f"k{n}")])
        assert len(limiter._tats_us) <= 101
    assert not (await limiter.charge([replace(ONE, key="busy")])).allowed


def test_rules_are_replaced_whole():
    first, second = (RuleSet(revision=n, rules=()) for n in (1, 2))
    rules = MemoryRuleSource(first)
    assert rules.current() is first
    rules.replace(second)
    assert rules.current() is second
