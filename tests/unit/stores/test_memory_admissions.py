"""Admissions of one process: turns that are waited for, what is given back, and what it keeps in memory."""

import asyncio
from dataclasses import replace

import pytest

from gateway.core.admissions import Wanted
from gateway.core.errors import DeadlineExceeded, OrderingUnavailable
from gateway.core.rate_limit import counters, takes
from gateway.core.types import Caller, Limit
from gateway.stores.memory_admissions import FORGET_EVERY, MemoryAdmission, MemoryAdmissions
from tests.kit.limited import NOW, SECOND, concurrent, requests, tokens, usd

SOON_US, LONG_US = 10_000, 10_000_000


class Clock:
    now_us = NOW

    def __call__(self) -> int:
        return self.now_us


def wanted(*limits: Limit, key: str = "", tenant: str = "acme", cost: int = 1, bound: int = 10) -> Wanted:
    counted = counters(Caller(key_id=tenant, tenant=tenant, limits=limits), "t", "", "interactive")
    return Wanted(
        tenant=tenant,
        takes=takes(counted, tokens=cost, nano_usd=cost),
        ordering_key=key,
        queue_bound=bound,
    )


async def waiting(admission: MemoryAdmission) -> asyncio.Task[None]:
    """One that waits for its turn by now."""
    task = asyncio.create_task(admission.turn(within_us=LONG_US))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_it_follows_its_clock():
    clock = Clock()
    admissions = MemoryAdmissions(clock)
    two = wanted(requests(2, "second"))
    assert [(await admissions.admit(two)).verdict.allowed for _ in range(3)] == [True, True, False]
    clock.now_us += SECOND
    assert [(await admissions.admit(two)).verdict.allowed for _ in range(3)] == [True, True, False]


async def test_each_has_its_turn_when_the_one_before_has_ended():
    admissions = MemoryAdmissions(Clock())
    first, second, third = [await admissions.admit(wanted(key="a")) for _ in range(3)]
    assert [one.verdict.ticket for one in (first, second, third)] == [1, 2, 3]
    await first.turn(within_us=SOON_US)
    tasks = [await waiting(second), await waiting(third)]
    first.settle(tokens=0, nano_usd=0)
    await tasks[0]
    await asyncio.sleep(0)
    assert not tasks[1].done()
    second.settle(tokens=0, nano_usd=0)
    await tasks[1]
    third.settle(tokens=0, nano_usd=0)
    assert not admissions._turns


async def test_one_that_leaves_makes_way_and_others_wait_for_nobody():
    admissions = MemoryAdmissions(Clock())
    first, second, third = [await admissions.admit(wanted(key="a")) for _ in range(3)]
    last = await waiting(third)
    second.settle(tokens=0, nano_usd=0)
    await asyncio.sleep(0)
    assert not last.done()
    first.settle(tokens=0, nano_usd=0)
    await last
    for other in (wanted(key="b"), wanted(key="a", tenant="other"), wanted()):
        await (await admissions.admit(other)).turn(within_us=SOON_US)


async def test_waiting_has_an_end():
    admissions = MemoryAdmissions(Clock())
    first, second = [await admissions.admit(wanted(key="a")) for _ in range(2)]
    with pytest.raises(DeadlineExceeded):
        await second.turn(within_us=SOON_US)
    with pytest.raises(DeadlineExceeded):
        await second.turn(within_us=-1)
    first.settle(tokens=0, nano_usd=0)
    await second.turn(within_us=-1)  # it has it: there is nothing to wait for
    assert not admissions._turns


async def test_one_that_is_cancelled_while_it_waits_leaves_nothing():
    admissions = MemoryAdmissions(Clock())
    first, second, third = [await admissions.admit(wanted(key="a")) for _ in range(3)]
    task = await waiting(second)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    second.settle(tokens=0, nano_usd=0)
    first.settle(tokens=0, nano_usd=0)
    await third.turn(within_us=SOON_US)
    assert not admissions._turns


async def test_the_queue_is_bounded():
    admissions = MemoryAdmissions(Clock())
    both = [await admissions.admit(wanted(key="a", bound=2)) for _ in range(2)]
    full = await admissions.admit(wanted(key="a", bound=2))
    assert (full.verdict.allowed, full.verdict.is_queue_full) == (False, True)
    full.settle(tokens=0, nano_usd=0)
    await full.turn(within_us=SOON_US)
    both[1].settle(tokens=0, nano_usd=0)
    assert (await admissions.admit(wanted(key="a", bound=2))).verdict.ticket == 3


async def test_what_was_used_is_put_in_the_stead_of_what_was_reserved_and_once_only():
    admissions = MemoryAdmissions(Clock())
    limits = (tokens(100, "day"), usd(100), concurrent(1))
    first = await admissions.admit(wanted(*limits, cost=90))
    assert not (await admissions.admit(wanted(*limits, cost=1))).verdict.allowed
    for _ in range(2):
        first.settle(tokens=30, nano_usd=20)
    left = (await admissions.admit(wanted(*limits))).verdict.states
    assert [state.remaining for state in left] == [69, 79, 0]


async def test_a_refusal_has_nothing_to_give_back():
    admissions = MemoryAdmissions(Clock())
    first = await admissions.admit(wanted(concurrent(1)))
    for _ in range(3):
        (await admissions.admit(wanted(concurrent(1)))).settle(tokens=0, nano_usd=0)
    assert not (await admissions.admit(wanted(concurrent(1)))).verdict.allowed
    first.settle(tokens=0, nano_usd=0)
    assert (await admissions.admit(wanted(concurrent(1)))).verdict.allowed


async def test_one_of_several_workers_keeps_its_part_and_says_that_it_decides_alone():
    admissions = MemoryAdmissions(Clock(), workers=lambda: 4, is_degraded=True)
    told = [(await admissions.admit(wanted(requests(12, "minute")))).verdict for _ in range(4)]
    assert [one.allowed for one in told] == [True, True, True, False]
    assert all(one.degraded for one in told)
    assert [one.states[0].remaining for one in told] == [2, 1, 0, 0]


async def test_what_it_keeps_is_bounded():
    clock = Clock()
    admissions = MemoryAdmissions(clock)
    for number in range(3 * FORGET_EVERY):
        clock.now_us += SECOND // 100  # a hundred callers are within their second
        one = await admissions.admit(wanted(requests(1, "second"), tenant=f"t{number}"))
        one.settle(tokens=0, nano_usd=0)
    own = admissions._book._owners["here"]
    assert 100 <= len(own.tats_us) <= FORGET_EVERY + 101
    assert not own.open


async def test_several_workers_without_redis_share_a_limit_out_and_keep_no_order():
    admissions = MemoryAdmissions(Clock(), workers=lambda: 2)
    four = wanted(requests(4, "second"))
    assert [(await admissions.admit(four)).verdict.allowed for _ in range(3)] == [True, True, False]
    with pytest.raises(OrderingUnavailable, match="several workers need Redis"):
        await admissions.admit(wanted(key="k"))
    alone = await admissions.admit(replace(wanted(key="k"), orders_alone=True))
    assert alone.verdict.ticket == 1
