"""The scheduler over instances that answer when the test says so, on a clock that the test moves."""

import asyncio
import dataclasses

import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.scheduling.batching import Batcher, BatchingRules
from local_runtime.scheduling.scheduler import ModelScheduler
from local_runtime.scheduling.stats import StatsRecorder
from local_runtime.scheduling.validation import CheckedRequest


@dataclasses.dataclass
class Result:
    outcomes: list
    compute_us: int = 7


class ManualInstance:
    def __init__(self):
        self.batches = []

    def submit(self, members, done):
        self.batches.append((members, done))

    def finish(self, *, error=None):
        members, done = self.batches.pop(0)
        done(Result([error or {"Y": member.inputs["X"]} for member in members]))


class Clock:
    def __init__(self):
        self.now_us = 0

    def __call__(self):
        return self.now_us


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def instance():
    return ManualInstance()


@pytest.fixture
def events():
    return []


@pytest.fixture
def stats():
    return StatsRecorder(name="m", version="1")


@pytest.fixture
def scheduler(clock, instance, events, stats):
    return ModelScheduler(
        model="m",
        version="1",
        batcher=Batcher(BatchingRules(max_batch_size=4, dynamic=True, max_queue_size=3)),
        instances=[instance],
        stats=stats,
        clock_us=clock,
        observer=events.append,
    )


def request(value=0, rows=1):
    inputs = {"X": np.full((rows, 1), value)}
    return CheckedRequest(inputs=inputs, rows=rows, batch_key="k", outputs=("Y",), request_id="r")


async def turn():
    for _ in range(4):
        await asyncio.sleep(0)


def ask(scheduler, *arguments, deadline_us=None):
    return asyncio.create_task(scheduler.infer(request(*arguments), deadline_us=deadline_us))


async def test_times_rows_and_the_observers_event(scheduler, clock, instance, events, stats):
    first = ask(scheduler, 1)
    await turn()
    clock.now_us = 10
    second = ask(scheduler, 2, 3)
    await turn()
    clock.now_us = 25
    instance.finish()
    await turn()
    instance.finish()
    answers = await asyncio.gather(first, second)
    assert [(answer.queue_us, answer.compute_us, answer.batch_size) for answer in answers] == [
        (0, 7, 1),
        (15, 7, 3),
    ]
    assert [answer.outputs["Y"][0, 0] for answer in answers] == [1, 2]
    assert [(event.batch_size, event.requests, event.oldest_queue_us, event.reason) for event in events] == [
        (1, 1, 0, "no_delay"),
        (3, 1, 15, "no_delay"),
    ]
    assert stats.snapshot().queue_us == 15


async def test_next_batch_starts_before_the_answers_of_the_last_are_told(scheduler, instance, events):
    tasks = [ask(scheduler, n) for n in range(2)]
    await turn()
    tasks.append(ask(scheduler, 3))
    await turn()
    assert len(instance.batches) == 1
    instance.finish()
    await turn()
    assert len(instance.batches) == 1
    instance.finish()
    await asyncio.gather(*tasks)
    assert [event.requests for event in events] == [2, 1]


async def test_each_caller_gets_its_own_exception(scheduler, instance, stats):
    tasks = [ask(scheduler, n) for n in range(2)]
    await turn()
    instance.finish(error=InferenceError(ErrorCode.INTERNAL, "bad"))
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error.message for error in errors] == ["bad", "bad"]
    assert errors[0] is not errors[1]
    assert stats.snapshot().fail_count == 2


async def test_expired_in_the_queue_is_failed_when_an_instance_is_free(scheduler, clock, instance):
    first = ask(scheduler, 1)
    await turn()
    late = ask(scheduler, 2, deadline_us=50)
    await turn()
    clock.now_us = 50
    instance.finish()
    await turn()
    assert instance.batches == []
    assert (await first).batch_size == 1
    with pytest.raises(InferenceError) as expired:
        await late
    assert expired.value.code is ErrorCode.DEADLINE


async def test_bound_of_the_queue(scheduler, instance):
    tasks = [ask(scheduler, 0)]
    await turn()
    tasks += [ask(scheduler, n) for n in range(3)]
    await turn()
    with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
        await scheduler.infer(request(), deadline_us=None)
    instance.finish()
    await turn()
    instance.finish()
    await asyncio.gather(*tasks)


async def test_cancelled_in_the_turn_of_its_error_leaves_no_lost_exception(scheduler, instance):
    lost = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost.append(context))
    task = ask(scheduler, 0)
    await turn()
    instance.finish(error=InferenceError(ErrorCode.INTERNAL, "bad"))
    await asyncio.sleep(0)  # the answer is set, but its task has not run yet
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    del task
    await turn()
    assert lost == []


async def test_close_fails_queued_and_running_and_ignores_late_results(scheduler, instance, stats):
    tasks = [ask(scheduler, 0)]
    await turn()
    tasks.append(ask(scheduler, 1))
    await turn()
    scheduler.close()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error.code for error in errors] == [ErrorCode.UNAVAILABLE] * 2
    instance.finish()
    await turn()
    assert instance.batches == []
    assert stats.snapshot().fail_count == 2
    with pytest.raises(InferenceError):
        await scheduler.infer(request(), deadline_us=None)


def test_result_after_the_end_of_the_event_loop_is_dropped(scheduler, instance):
    async def leave_early():
        task = ask(scheduler, 0)
        await turn()
        task.cancel()

    asyncio.run(leave_early())
    instance.finish()
