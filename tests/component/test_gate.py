"""The queue before each server: bounded, fair, and left without a trace."""

import asyncio
import contextlib
import random

import pytest

from gateway.core.errors import BackendError, FaultKind
from gateway.gate import Gate
from tests.kit.wait import until

LONG_US = 60_000_000


def enter(gate: Gate, replica: str = "a", *, priority="interactive", within_us: int = LONG_US):
    return asyncio.ensure_future(gate.enter(replica, priority=priority, within_us=within_us))


async def fault_of(task) -> FaultKind:
    with pytest.raises(BackendError) as failed:
        await task
    return failed.value.fault.kind


async def test_so_many_pass_and_the_next_waits_until_one_leaves():
    gate = Gate(max_in_flight=2, max_queue_size=10)
    assert [await enter(gate), await enter(gate)] == [False, False]
    waiting = enter(gate)
    await until(gate.waiting)
    assert gate.load("a") == 3
    gate.leave("a")
    assert await waiting is True
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


async def test_random_comings_and_goings_leave_nothing_behind():
    chance = random.Random(5)  # noqa: S311 - chance of a test
    gate = Gate(max_in_flight=3, max_queue_size=5)
    highest = 0

    async def visit() -> None:
        nonlocal highest
        with contextlib.suppress(BackendError):
            await gate.enter(
                "a", priority=chance.choice(["interactive", "batch"]), within_us=chance.choice([500, LONG_US])
            )
            highest = max(highest, gate.load("a") - sum(gate.waiting().values()))
            try:
                await asyncio.sleep(chance.random() / 1000)
            finally:
                gate.leave("a")

    visits = []
    for _ in range(2_000):
        visits.append(asyncio.ensure_future(visit()))
        if chance.random() < 0.3:
            chance.choice(visits).cancel()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.wait(visits)
    assert highest == 3
    assert (gate.load("a"), gate.waiting()) == (0, {})
