"""The scheduler over instances that answer when the test says so, on a clock that the test moves."""

import asyncio

import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import InferRequest
from local_runtime.repository.model_config import (
    ControlInput,
    ControlKind,
    DynamicBatching,
    QueuePolicy,
    SequenceBatching,
    SequenceState,
)
from local_runtime.scheduling.batching import Batcher
from local_runtime.scheduling.execution import Executed
from local_runtime.scheduling.scheduler import ModelScheduler
from local_runtime.scheduling.sequence_inputs import SequenceInputs
from local_runtime.scheduling.sequencing import Sequencer
from local_runtime.scheduling.stats import Compute, FailureReason, StatsRecorder
from local_runtime.scheduling.validation import CheckedRequest


class ManualInstance:
    def __init__(self):
        self.batches = []

    def submit(self, members, done):
        self.batches.append((members, done))

    def finish(self, *, error=None, outputs=lambda member: {"Y": member.inputs["X"]}):
        members, done = self.batches.pop(0)
        outcomes = [error or outputs(member) for member in members]
        done(Executed(outcomes=outcomes, compute=Compute(input_us=1, infer_us=4, output_us=2)))


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
        stats=stats,
        policy=Batcher(max_batch_size=4, config=DynamicBatching(), max_queue_size=3),
        instances=[instance],
        clock_us=clock,
        observer=events.append,
    )


def request(value=0, rows=1, **fields):
    inputs = {"X": np.full((rows, 1), value)}
    source = InferRequest(model="m", inputs=inputs, request_id="r", **fields)
    return CheckedRequest(source=source, inputs=inputs, rows=rows, batch_key="k", outputs=("Y",))


async def turn():
    for _ in range(4):
        await asyncio.sleep(0)


def ask(scheduler, *arguments, deadline_us=None, **fields):
    return asyncio.create_task(scheduler.infer(request(*arguments, **fields), deadline_us=deadline_us))


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
    assert [(answer.queue_us, answer.compute.total_us, answer.batch_size) for answer in answers] == [
        (0, 7, 1),
        (15, 7, 3),
    ]
    assert [answer.outputs["Y"][0, 0] for answer in answers] == [1, 2]
    assert [(event.batch_size, event.requests, event.oldest_queue_us, event.reason) for event in events] == [
        (1, 1, 0, "no_delay"),
        (3, 1, 15, "no_delay"),
    ]
    assert stats.snapshot().queue.total_us == 15


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
    assert stats.snapshot().fail.count == 2


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
    assert stats.snapshot().fail.count == 2
    with pytest.raises(InferenceError):
        await scheduler.infer(request(), deadline_us=None)


def test_result_after_the_end_of_the_event_loop_is_dropped(scheduler, instance):
    async def leave_early():
        task = ask(scheduler, 0)
        await turn()
        task.cancel()

    asyncio.run(leave_early())
    instance.finish()


async def test_with_preserve_ordering_a_fast_answer_waits_for_the_slow_one_before_it(clock, stats):
    slow, fast = ManualInstance(), ManualInstance()
    scheduler = ModelScheduler(
        stats=stats,
        policy=Batcher(max_batch_size=1, config=DynamicBatching(preserve_ordering=True)),
        instances=[slow, fast],
        clock_us=clock,
        preserve_ordering=True,
    )
    first, second, third = (ask(scheduler, n) for n in range(3))
    await turn()
    fast.finish()
    await turn()
    fast.finish()
    await turn()
    assert not second.done()
    assert not third.done()
    slow.finish()
    answers = await asyncio.gather(first, second, third)
    assert [answer.outputs["Y"][0, 0] for answer in answers] == [0, 1, 2]


async def test_with_preserve_ordering_a_caller_that_left_holds_nobody_up(clock, stats):
    slow, fast = ManualInstance(), ManualInstance()
    scheduler = ModelScheduler(
        stats=stats,
        policy=Batcher(max_batch_size=1, config=DynamicBatching(preserve_ordering=True)),
        instances=[slow, fast],
        clock_us=clock,
        preserve_ordering=True,
    )
    first, second = (ask(scheduler, n) for n in range(2))
    await turn()
    fast.finish()
    first.cancel()
    assert (await second).outputs["Y"][0, 0] == 1


async def test_a_queue_timeout_is_noticed_while_every_instance_is_busy(clock, instance, stats):
    policy = QueuePolicy(default_timeout_microseconds=5_000)
    scheduler = ModelScheduler(
        stats=stats,
        policy=Batcher(max_batch_size=4, config=DynamicBatching(default_queue_policy=policy)),
        instances=[instance],
        clock_us=clock,
    )
    running = ask(scheduler, 1)
    await turn()
    late = ask(scheduler, 2)
    await turn()
    clock.now_us = 5_000
    with pytest.raises(InferenceError) as refused:
        await late
    assert (refused.value.code, refused.value.message) == (ErrorCode.UNAVAILABLE, "Request timeout expired")
    assert stats.snapshot().failures[FailureReason.REJECTED] == 1
    instance.finish()
    await running


CONTROLS = (
    ControlInput(name="START", kind=ControlKind.START, datatype="INT32", false_true=(0, 1)),
    ControlInput(name="READY", kind=ControlKind.READY, datatype="INT32", false_true=(0, 1)),
)
COUNT = SequenceState(input_name="COUNT", output_name="COUNT_OUT", datatype="INT64", dims=(1,))
SEQUENCES = SequenceBatching(controls=CONTROLS, states=(COUNT,))


@pytest.fixture
def sequences(clock, instance, stats):
    inputs = SequenceInputs(
        config=SEQUENCES,
        max_batch_size=4,
        initial_states={"COUNT": np.zeros((1, 1), np.int64)},
    )
    return ModelScheduler(
        stats=stats,
        policy=Sequencer(max_batch_size=4, config=SEQUENCES, instances=1),
        instances=[instance],
        clock_us=clock,
        sequence_inputs=inputs,
    )


def count_up(member):
    return {"Y": member.inputs["COUNT"] + member.inputs["X"], "COUNT_OUT": member.inputs["COUNT"] + 1}


async def test_state_goes_from_one_request_of_a_sequence_to_its_next(sequences, instance):
    seen = []
    for position in range(3):
        asked = ask(sequences, 10, sequence_id=5, sequence_start=position == 0, sequence_end=position == 2)
        await turn()
        instance.finish(outputs=count_up)
        answer = await asked
        assert set(answer.outputs) == {"Y"}
        seen.append(int(answer.outputs["Y"][0, 0]))
    assert seen == [10, 11, 12]
    again = ask(sequences, 10, sequence_id=5, sequence_start=True, sequence_end=True)
    await turn()
    instance.finish(outputs=count_up)
    assert (await again).outputs["Y"][0, 0] == 10


async def test_slots_without_work_are_told_to_the_model_and_to_nobody_else(sequences, instance):
    opening = [ask(sequences, n, sequence_id=n, sequence_start=True) for n in (1, 2)]
    await turn()
    instance.finish(outputs=count_up)
    await asyncio.gather(*opening)
    second = ask(sequences, 7, sequence_id=2)
    await turn()
    (members, _done) = instance.batches[0]
    assert [int(member.inputs["READY"][0, 0]) for member in members] == [0, 1]
    instance.finish(outputs=count_up)
    assert (await second).outputs["Y"][0, 0] == 8


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        (
            {"sequence_id": 43},
            (
                "inference request for sequence 43 to model 'm' must specify the START flag on the first request of "
                "the sequence"
            ),
        ),
    ],
)
async def test_requests_outside_of_a_sequence_are_refused(sequences, fields, text):
    with pytest.raises(InferenceError) as refused:
        await sequences.infer(request(**fields), deadline_us=None)
    assert (refused.value.code, refused.value.message) == (ErrorCode.INVALID_ARG, text)


async def test_a_cancelled_request_ends_its_sequence(sequences, instance):
    first = ask(sequences, 1, sequence_id=9, sequence_start=True)
    await turn()
    second, third = (ask(sequences, n, sequence_id=9) for n in (2, 3))
    await turn()
    second.cancel()
    with pytest.raises(InferenceError) as broken:
        await third
    assert broken.value.code is ErrorCode.CANCELLED
    instance.finish(outputs=count_up)
    await first
    with pytest.raises(InferenceError, match="START flag"):
        await sequences.infer(request(4, sequence_id=9), deadline_us=None)


async def test_a_batch_that_cannot_be_put_together_fails_and_leaves_the_instance_free(sequences, instance, monkeypatch):
    first = ask(sequences, 1, sequence_id=1, sequence_start=True)
    monkeypatch.setattr(SequenceInputs, "inputs_for", lambda *_: 1 / 0)
    with pytest.raises(InferenceError) as failed:
        await first
    assert failed.value.code is ErrorCode.INTERNAL
    monkeypatch.undo()
    second = ask(sequences, 2, sequence_id=2, sequence_start=True)
    await turn()
    instance.finish(outputs=count_up)
    assert (await second).outputs["Y"][0, 0] == 2


@pytest.mark.parametrize("fault", ["too few outcomes", "no state"])
async def test_a_batch_that_cannot_be_taken_apart_fails_and_leaves_the_instance_free(sequences, instance, fault):
    first = ask(sequences, 1, sequence_id=1, sequence_start=True)
    await turn()
    if fault == "too few outcomes":
        _, done = instance.batches.pop(0)
        done(Executed(outcomes=[], compute=Compute()))
    else:
        instance.finish(outputs=lambda member: {"Y": member.inputs["X"]})
    with pytest.raises(InferenceError) as failed:
        await first
    assert failed.value.code is ErrorCode.INTERNAL
    second = ask(sequences, 2, sequence_id=2, sequence_start=True)
    await turn()
    instance.finish(outputs=count_up)
    assert (await second).outputs["Y"][0, 0] == 2
