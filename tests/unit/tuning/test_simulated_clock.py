"""The loop whose clock jumps: it is asyncio, it never waits, and it keeps the order of what is due at once."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tuning.simulation.clock import NothingDue, SimulatedLoop


def simulated(work):
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.3, 1e-9, 7.0]), max_size=30))
def test_what_is_due_happens_in_the_order_of_its_time_and_of_its_asking(delays_s: list[float]):
    async def work():
        loop, seen = asyncio.get_running_loop(), []
        for place, delay_s in enumerate(delays_s):
            loop.call_at(delay_s, lambda place=place: seen.append((loop.time(), place)))
        await asyncio.sleep(8.0)
        return seen

    assert simulated(work()) == sorted((delay_s, place) for place, delay_s in enumerate(delays_s))


def test_two_instants_are_never_made_one():
    async def work():
        loop, seen = asyncio.get_running_loop(), []
        for at_s in (1000.0, 1000.0 + 2e-13, 1000.0 + 1e-10):
            loop.call_at(at_s, lambda: seen.append(loop.time()))
        await asyncio.sleep(1001)
        return seen

    assert simulated(work()) == [1000.0, 1000.0 + 2e-13, 1000.0 + 1e-10]


def test_a_year_takes_no_time_and_a_timeout_comes_when_it_is_due():
    async def work():
        await asyncio.sleep(365 * 86_400)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().now_us()

    assert simulated(work()) == (365 * 86_400 + 5) * 1_000_000


def test_what_waits_for_itself_is_told_and_not_waited_for():
    async def work():
        await asyncio.get_running_loop().create_future()

    loop = SimulatedLoop()
    task = loop.create_task(work())
    with pytest.raises(NothingDue):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
