"""The queue before each server: bounded, fair, and left without a trace."""

import asyncio
import contextlib
import random

import pytest

from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.waiting import FEWEST_STAYS
from gateway.gate import MAX_REPLICAS, Gate
from tests.kit.wait import until

LONG_US = 60_000_000


def enter(gate: Gate, replica: str = "a", *, tenant="t", priority="interactive", within_us: int = LONG_US, work=1):
    entering = gate.enter(replica, tenant=tenant, priority=priority, within_us=within_us, work=lambda: work)
    return asyncio.ensure_future(entering)


async def fault(task) -> Fault:
    with pytest.raises(BackendError) as failed:
        await task
    return failed.value.fault


async def fault_of(task) -> FaultKind:
    return (await fault(task)).kind


async def seen(gate: Gate, stayed_us: int, replica: str = "a") -> None:
    """So many requests have come and gone that the gate knows how long they stay."""
    for _ in range(FEWEST_STAYS):
        await enter(gate, replica)
        gate.leave(replica, stayed_us=stayed_us)


async def test_so_many_pass_and_the_next_waits_until_one_leaves():
    gate = Gate(max_in_flight=2, max_queue_size=10)
    assert [await enter(gate), await enter(gate)] == [None, None]
    waiting = enter(gate)
    await until(gate.waiting)
    assert gate.load("a") == 3
    gate.leave("a")
    assert await waiting is not None
    assert gate.load("a") == 2


async def test_each_replica_has_its_own_places():
    gate = Gate(max_in_flight=1, max_queue_size=0)
    await enter(gate, "a")
    await enter(gate, "b")
    assert await fault_of(enter(gate, "a")) is FaultKind.OVERLOADED


async def test_a_full_queue_refuses_at_once_and_batch_before_interactive():
    gate = Gate(max_in_flight=1, max_queue_size=1)
    await enter(gate)
    batch = enter(gate, priority="batch")
    await until(gate.waiting)
    interactive = enter(gate)
    assert await fault_of(batch) is FaultKind.OVERLOADED
    assert await fault_of(enter(gate)) is FaultKind.OVERLOADED
    gate.leave("a")
    assert await interactive


async def test_a_turn_that_does_not_come_in_time_is_an_overload():
    gate = Gate(max_in_flight=1, max_queue_size=10)
    await enter(gate)
    assert await fault_of(enter(gate, within_us=1_000)) is FaultKind.OVERLOADED
    assert gate.waiting() == {}
    gate.leave("a")
    assert gate.load("a") == 0


async def test_who_leaves_the_queue_never_takes_a_place():
    gate = Gate(max_in_flight=1, max_queue_size=10)
    await enter(gate)
    left, stays = enter(gate), enter(gate)
    await until(lambda: gate.waiting() == {"a": 2})
    left.cancel()
    await asyncio.wait([left])
    gate.leave("a")
    assert await stays
    assert gate.load("a") == 1


async def test_a_turn_given_to_one_who_leaves_in_that_moment_goes_to_the_next():
    gate = Gate(max_in_flight=1, max_queue_size=10)
    await enter(gate)
    leaving, after = enter(gate), enter(gate)
    await until(lambda: gate.waiting() == {"a": 2})
    gate.leave("a")
    leaving.cancel()
    await asyncio.wait([leaving])
    assert await after
    gate.leave("a")
    assert gate.load("a") == 0


async def test_who_cannot_have_its_turn_in_time_is_refused_at_once_with_when_it_would_be():
    gate = Gate(max_in_flight=2, max_queue_size=10)
    await seen(gate, 40_000_000)
    assert [await enter(gate), await enter(gate)] == [None, None]  # a free place needs no forecast
    first = enter(gate, within_us=20_000_000)
    await until(gate.waiting)
    refused = await fault(enter(gate, within_us=39_000_000))
    assert (refused.kind, refused.retry_after_us) == (FaultKind.OVERLOADED, 40_000_000)
    assert refused.message == "its turn is expected in 40.000 s, and it may wait for 39.000 s"
    second = enter(gate, within_us=40_000_000)
    await until(lambda: gate.waiting() == {"a": 2})
    for waiting in (first, second):
        gate.leave("a", stayed_us=1)
        assert await waiting
    gate.leave("a")
    gate.leave("a")
    assert (gate.load("a"), gate.waiting()) == (0, {})


async def test_only_those_count_that_go_before_it():
    gate = Gate(max_in_flight=1, max_queue_size=10)
    await seen(gate, 10_000_000)
    await enter(gate)
    waiting = [enter(gate, priority="batch"), enter(gate, priority="batch")]
    await until(lambda: gate.waiting() == {"a": 2})
    assert (await fault(enter(gate, priority="batch", within_us=15_000_000))).retry_after_us == 30_000_000
    interactive = enter(gate, within_us=15_000_000)
    await until(lambda: gate.waiting() == {"a": 3})
    for one in (interactive, *waiting):
        gate.leave("a")
        assert await one
    gate.leave("a")


async def test_one_who_is_refused_for_its_deadline_puts_nobody_out():
    gate = Gate(max_in_flight=1, max_queue_size=1)
    await seen(gate, 10_000_000)
    await enter(gate)
    batch = enter(gate, priority="batch")
    await until(gate.waiting)
    assert (await fault(enter(gate, within_us=5_000_000))).retry_after_us == 10_000_000
    gate.leave("a")
    assert await batch
    gate.leave("a")


async def test_a_tenant_that_has_few_waits_for_its_share_alone():
    gate = Gate(max_in_flight=1, max_queue_size=10)
    await seen(gate, 10_000_000)
    await enter(gate)
    flood = [enter(gate) for _ in range(5)]
    await until(lambda: gate.waiting() == {"a": 5})
    assert (await fault(enter(gate, within_us=25_000_000))).retry_after_us == 60_000_000
    other = enter(gate, tenant="other", within_us=25_000_000)
    await until(lambda: gate.waiting() == {"a": 6})
    for one in (flood[0], other, *flood[1:]):
        gate.leave("a")
        assert await one
    gate.leave("a")


async def test_a_free_place_is_passed_without_a_word_on_its_work():
    gate = Gate(max_in_flight=1, max_queue_size=10)
    assert await gate.enter("a", tenant="t", priority="batch", within_us=1, work=lambda: 1 // 0) is None


async def test_a_turn_that_was_not_taken_costs_nothing():
    gate = Gate(max_in_flight=1, max_queue_size=10)
    await enter(gate)
    leaving, other, after = enter(gate, work=1000), enter(gate, tenant="other", work=5), enter(gate)
    other2 = enter(gate, tenant="other")
    await until(lambda: gate.waiting() == {"a": 4})
    gate.leave("a")
    leaving.cancel()
    await asyncio.wait([leaving])
    for one in (other, after, other2):
        assert await one
        gate.leave("a")
    assert (gate.load("a"), gate._lines) == (0, {})


async def test_until_told_otherwise_a_request_took_what_was_expected():
    gate = Gate(max_in_flight=1, max_queue_size=10)
    await enter(gate)
    first = enter(gate, work=1000)
    second = enter(gate, work=1000)
    other = enter(gate, tenant="other", work=5)
    other2 = enter(gate, tenant="other", work=5)
    await until(lambda: gate.waiting() == {"a": 4})
    gate.leave("a")
    for one, took in ((first, None), (other, 2), (other2, None), (second, None)):
        gate.leave("a", waited=await one, took=took)
    assert (gate.load("a"), gate._lines) == (0, {})


async def test_one_that_took_less_may_be_followed_by_one_of_its_own():
    gate = Gate(max_in_flight=1, max_queue_size=10)
    await enter(gate)
    other = enter(gate, tenant="other", work=5)
    first, second, third = (enter(gate, work=1000) for _ in range(3))
    other2 = enter(gate, tenant="other", work=5)
    await until(lambda: gate.waiting() == {"a": 5})
    gate.leave("a")
    for one in (other, first, second, other2, third):
        gate.leave("a", waited=await one, took=3 if one in (first, second) else None)


async def test_without_measurements_nobody_is_refused_early():
    gate = Gate(max_in_flight=1, max_queue_size=10)
    await seen(gate, 40_000_000, "b")  # another server
    await enter(gate)
    waiting = enter(gate, within_us=30_000_000)
    await until(gate.waiting)
    gate.leave("a")
    assert await waiting
    gate.leave("a")


async def test_of_many_servers_only_the_latest_are_remembered():
    gate = Gate(max_in_flight=1, max_queue_size=10)
    for i in range(MAX_REPLICAS + 5):
        await enter(gate, str(i))
        gate.leave(str(i), stayed_us=5)
    assert len(gate._stays) == MAX_REPLICAS


async def test_random_comings_and_goings_leave_nothing_behind():
    chance = random.Random(5)  # noqa: S311 - chance of a test
    gate = Gate(max_in_flight=3, max_queue_size=5)
    highest = 0

    async def visit() -> None:
        nonlocal highest
        with contextlib.suppress(BackendError):
            waited = await gate.enter(
                "a",
                tenant=chance.choice("xyz"),
                priority=chance.choice(["interactive", "batch"]),
                within_us=chance.choice([500, LONG_US]),
                work=lambda: chance.randint(1, 100),
            )
            highest = max(highest, gate.load("a") - sum(gate.waiting().values()))
            try:
                await asyncio.sleep(chance.random() / 1000)
            finally:
                took = chance.choice([None, chance.randint(0, 200)])
                gate.leave("a", stayed_us=chance.choice([None, 10, 100_000_000]), waited=waited, took=took)

    visits = []
    for _ in range(2_000):
        visits.append(asyncio.ensure_future(visit()))
        if chance.random() < 0.3:
            chance.choice(visits).cancel()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.wait(visits)
    assert highest == 3
    assert (gate.load("a"), gate.waiting(), gate._lines) == (0, {}, {})
