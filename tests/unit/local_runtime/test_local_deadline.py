"""A bound on what is awaited: only its own cancellation becomes a TimeoutError."""

import asyncio

import pytest

from local_runtime.scheduling.deadline import Deadline

SOON_US = 1_000
NEVER_US = 60_000_000


async def test_what_takes_longer_is_ended_with_a_timeout():
    task = asyncio.current_task()
    with pytest.raises(TimeoutError), Deadline(SOON_US):
        await asyncio.Event().wait()
    assert task.cancelling() == 0


@pytest.mark.parametrize("within_us", [0, -5])
async def test_a_deadline_that_has_passed_ends_the_first_wait(within_us):
    with pytest.raises(TimeoutError), Deadline(within_us):
        await asyncio.Event().wait()


async def test_what_ends_in_time_is_left_alone():
    with Deadline(SOON_US):
        await asyncio.sleep(0)
    await asyncio.sleep(3 * SOON_US / 1e6)


async def test_an_error_in_time_goes_on_as_it_is():
    with pytest.raises(KeyError), Deadline(SOON_US):
        raise KeyError
    await asyncio.sleep(3 * SOON_US / 1e6)


async def test_anothers_cancellation_is_no_timeout():
    async def wait():
        with Deadline(NEVER_US):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_beside_the_deadline_is_not_lost():
    async def wait():
        with Deadline(0):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)  # it waits, and its time is over
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_of_two_the_one_that_has_passed_speaks():
    ended = []

    async def wait_within_another():
        try:
            with Deadline(NEVER_US):
                await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            ended.append(error)
            raise

    with pytest.raises(TimeoutError), Deadline(SOON_US):
        await wait_within_another()
    assert ended


async def test_it_is_for_tasks():
    error = []

    def outside_of_any():
        try:
            Deadline(1)
        except RuntimeError as raised:
            error.append(raised)

    asyncio.get_running_loop().call_soon(outside_of_any)
    await asyncio.sleep(0)
    assert error
