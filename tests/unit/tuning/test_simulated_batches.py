"""The simulator's batches are the live scheduler's: what a real runtime did is recorded, and played again.

The runtime serves a model of a fixed cost. Recorded are the instants at which requests were queued and batches ended;
on the simulated clock the same happens at the same instants, and the scheduler decides anew what runs with what.
Requests that were queued in one turn of the live loop, after which it decides once, come at one instant there too.
Of models that keep sequences the slots are compared as well: whose a row was, and which rows were empty.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.tuning.simulation.clock import SimulatedLoop
from gateway.tuning.simulation.servers import slot_rows
from local_runtime.messages import BatchExecuted, InferRequest
from local_runtime.repository import parsing
from local_runtime.runtime import LocalRuntime
from local_runtime.scheduling.decisions import Dispatch, Policy
from local_runtime.scheduling.execution import Executed
from local_runtime.scheduling.policies import policy_of
from local_runtime.scheduling.scheduler import ModelScheduler
from local_runtime.scheduling.stats import Compute, StatsRecorder
from local_runtime.scheduling.validation import CheckedRequest
from local_runtime.serving import loader

CONFIG = """
backend: "python" max_batch_size: 6
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
{scheduler}
"""
FIXED_COST = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.004)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
# A delay is over where the script waits for that, at its end, and never before, however late a busy machine is.
SETTINGS = (
    "",
    "preferred_batch_size: [ 3 ]",
    "max_queue_delay_microseconds: 1500000",
    "max_queue_delay_microseconds: 1500000 preferred_batch_size: [ 4, 2 ]",
    "priority_levels: 2 default_priority_level: 2",
)
SEQUENCES = (
    "direct { }",
    "direct { max_queue_delay_microseconds: 1500000 minimum_slot_utilization: 0.5 }",
    "oldest { max_candidate_sequences: 8 }",
    "oldest { max_candidate_sequences: 8 preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 1500000 }",
)


@dataclass
class Recorded:
    """A policy that does as the one inside it, and writes down what happens: instants in microseconds."""

    inside: Policy
    arrived: list[tuple[int, Any]] = field(default_factory=list)
    ended_us: list[int] = field(default_factory=list)
    batches: list[tuple[Any, ...]] = field(default_factory=list)
    is_new_turn: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def __len__(self) -> int:
        return len(self.inside)

    def enqueue(self, request: Any) -> Any:
        if not self.is_new_turn:  # those before it in this turn come when it does
            turn = self.arrived.pop()
            self.arrived.append((request.enqueued_us, [*turn[1], request]))
        else:
            self.arrived.append((request.enqueued_us, [request]))
        self.is_new_turn = False
        return self.inside.enqueue(request)

    def decide(self, now_us: int, *, free: Any) -> Any:
        self.is_new_turn = True
        decision = self.inside.decide(now_us, free=free)
        if isinstance(decision, Dispatch):
            self.batches.append((decision.ids, decision.rows, decision.reason.value, decision.slots))
        return decision

    def finished(self, dispatch: Dispatch, *, now_us: int, compute_us: int) -> None:
        self.ended_us.append(now_us)
        self.inside.finished(dispatch, now_us=now_us, compute_us=compute_us)


def single(rng: random.Random) -> InferRequest:
    """A request of a model that keeps nothing."""
    inputs = {"X": np.zeros((rng.randint(1, 3), 1), np.float32)}
    return InferRequest(model="m", inputs=inputs, priority=rng.choice((0, 1, 2)))


class Steps:
    """The next request of some of many sequences, more than there are slots; its caller does not wait for answers.

    All have an end: when one is ended for its silence would depend on how late a timer is.
    """

    def __init__(self) -> None:
        self.alive: list[int] = []
        self.begun = 0

    def __call__(self, rng: random.Random) -> InferRequest:
        number, is_start = rng.choice(self.alive) if self.alive else 0, False
        if not number or rng.random() < 0.3:
            self.begun += 1
            number, is_start = self.begun, True
            self.alive.append(number)
        is_end = rng.random() < 0.3
        if is_end:
            self.alive.remove(number)
        return self._step(number, is_start=is_start, is_end=is_end)

    def rest(self) -> list[InferRequest]:
        """The ends of all that go on."""
        return [self._step(number, is_start=False, is_end=True) for number in self.alive]

    def _step(self, number: int, *, is_start: bool, is_end: bool) -> InferRequest:
        inputs = {"X": np.zeros((1, 1), np.float32)}
        return InferRequest(model="m", inputs=inputs, sequence_id=number, sequence_start=is_start, sequence_end=is_end)


Made = Callable[[random.Random], InferRequest]


async def live(repository: Path, made: Made, seed: int) -> list[BatchExecuted]:
    """Bursts of requests, some while a batch runs and some when all is done."""
    rng, seen = random.Random(seed), []
    runtime = await LocalRuntime.open(repository, observer=seen.append)
    under_way: set[asyncio.Task[Any]] = set()
    for left in reversed(range(24)):
        requests = [made(rng) for _ in range(rng.randint(1, 9))]
        requests += made.rest() if isinstance(made, Steps) and not left else []
        under_way |= {asyncio.create_task(runtime.infer(one)) for one in requests}
        await asyncio.sleep(rng.choice((0, 0.001, 0.003, 0.008)))
    await asyncio.gather(*under_way)  # as long as the delay lasts
    await runtime.close()
    return seen


def simulated(config: str, played: Recorded) -> tuple[Recorded, list[BatchExecuted]]:
    """The same arrivals, and the same ends of batches, on the simulated clock."""
    read = parsing.parse(config, folder_name="m")
    again = Recorded(policy_of(read, instances=1, max_queue_size=1024))
    seen: list[BatchExecuted] = []
    first_us = played.arrived[0][0]
    ends_us = iter(played.ended_us)

    class Instance:
        def submit(self, members: Any, done: Any) -> None:
            outcome = Executed(outcomes=[{}] * len(members), compute=Compute())
            asyncio.get_running_loop().call_at((next(ends_us) - first_us) / 1e6, done, outcome)

    async def work(loop: SimulatedLoop) -> None:
        scheduler = ModelScheduler(
            stats=StatsRecorder(name="m", version="1"),
            policy=again,
            instances=[Instance()],
            clock_us=loop.now_us,
            observer=seen.append,
            sequence_inputs=slot_rows(read),
            timer_resolution_us=0,
        )
        answers = []
        for at_us, requests in played.arrived:
            await asyncio.sleep((at_us - first_us) / 1e6 - loop.time())
            for one in requests:
                source = InferRequest(
                    model="m",
                    inputs={},
                    priority=one.priority,
                    sequence_id=one.correlation_id,
                    sequence_start=one.is_start,
                    sequence_end=one.is_end,
                )
                asked = CheckedRequest(source=source, inputs={}, rows=one.rows, batch_key=0, outputs=())
                answers.append(asyncio.create_task(scheduler.infer(asked, deadline_us=None)))
        await asyncio.gather(*answers)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimulatedLoop)
        runner.run(work(loop))
    return again, seen


def compared(config: str, made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[BatchExecuted]:
    """Serve, play again, and hold the one against the other; what was executed."""
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text(config)
    (folder / "m" / "1" / "model.py").write_text(FIXED_COST)
    recorded: list[Recorded] = []

    def recording(*given: Any, **named: Any) -> Policy:
        recorded.append(Recorded(policy_of(*given, **named)))
        return recorded[-1]

    monkeypatch.setattr(loader, "policy_of", recording)
    executed = asyncio.run(live(folder, made, seed=len(config)))
    (really,) = recorded
    again, seen = simulated(config, really)
    assert again.batches == really.batches
    told = [(one.batch_size, one.requests, one.reason) for one in executed]
    assert [(one.batch_size, one.requests, one.reason) for one in seen] == told
    return executed


@pytest.mark.parametrize("batching", SETTINGS)
def test_what_a_runtime_batched_is_batched_again(batching: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = CONFIG.format(scheduler=f"dynamic_batching {{ {batching} }}")
    executed = compared(config, single, tmp_path, monkeypatch)
    assert len(executed) >= 24
    assert max(one.batch_size for one in executed) > 2


@pytest.mark.parametrize("strategy", SEQUENCES)
def test_what_a_runtime_did_with_sequences_is_done_again(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    block = f"sequence_batching {{ max_sequence_idle_microseconds: 60000000 {strategy} }}"
    steps = Steps()
    executed = compared(CONFIG.format(scheduler=block), steps, tmp_path, monkeypatch)
    assert steps.begun > 8  # more than there are slots
    assert max(one.requests for one in executed) > 2
    has_holes = any(one.batch_size > one.requests for one in executed)
    assert has_holes == strategy.startswith("direct")
