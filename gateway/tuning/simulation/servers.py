"""Simulated servers: the runtime's own schedulers on every replica, over instances that only take time."""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tritonclient.grpc import service_pb2 as pb

from gateway.backends.local import GRPC_NAMES
from gateway.backends.triton import documents
from gateway.backends.triton.faults import fault_of, lost
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFacts, ModelFigures
from gateway.core.types import ANY, BackendCall, BackendEvent, Place, SequenceStep, TensorPayload, Tensors
from gateway.core.waiting import items_of
from gateway.tuning.simulation.ahead import triton_policy
from gateway.tuning.simulation.clock import SimulatedLoop
from gateway.tuning.simulation.models import SimulatedModel
from gateway.tuning.simulation.world import Engine, Failure, SimulatedBackend
from local_runtime.errors import InferenceError
from local_runtime.messages import InferRequest
from local_runtime.repository.model_config import ModelConfig
from local_runtime.runtime import RuntimeOptions
from local_runtime.scheduling.execution import Done, Executed
from local_runtime.scheduling.policies import policy_of, preserves_ordering
from local_runtime.scheduling.scheduler import ModelScheduler
from local_runtime.scheduling.sequence_inputs import SequenceInputs
from local_runtime.scheduling.stats import Compute, StatsRecorder
from local_runtime.scheduling.validation import CheckedRequest

MAX_QUEUE_SIZE: Final = RuntimeOptions().max_queue_size
_VERSION: Final = "1"
_NO_SEQUENCE: Final = SequenceStep(id=0)


@dataclass(slots=True, kw_only=True)
class ModelBooks:
    """What all replicas of a backend count of a model; `busy_us` of all their instances, within the counted time."""

    stats: StatsRecorder
    busy_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What simulated servers have in common.

    Attributes:
        chance: of how long things take.
        from_s / until_s: the counted time.
    """

    loop: SimulatedLoop
    models: Mapping[str, SimulatedModel]
    chance: random.Random
    from_s: float
    until_s: float


class SimulatedReplica:
    """One server, from its start to its end: a scheduler for each model that is asked for.

    Attributes:
        busy: instances that compute now, of all models; each batch is as slow as so many make it.
        times: how many times as long everything takes.
        is_refusing / is_dead: see `world.FailureKind`.
    """

    def __init__(self, around: Surroundings, books: Mapping[str, ModelBooks], *, engine: Engine = "local") -> None:
        self.around = around
        self._policy_of = triton_policy if engine == "triton" else policy_of
        self.busy = 0
        self.times = 1.0
        self.is_refusing = False
        self.is_dead = False
        self._books = books
        self._schedulers: dict[str, ModelScheduler] = {}

    def scheduler(self, model: str) -> ModelScheduler:
        """The model's queue."""
        found = self._schedulers.get(model)
        if found is None:
            found = self._schedulers[model] = self._made(self.around.models[model])
        return found

    def _made(self, model: SimulatedModel) -> ModelScheduler:
        books = self._books[model.name]
        return ModelScheduler(
            stats=books.stats,
            policy=self._policy_of(model.config, instances=model.instances, max_queue_size=MAX_QUEUE_SIZE),
            instances=[SimulatedInstance(model, self, books)] * model.instances,
            clock_us=self.around.loop.now_us,
            preserve_ordering=preserves_ordering(model.config),
            sequence_inputs=slot_rows(model.config),
            timer_resolution_us=0,
        )

    def die(self) -> None:
        """All that it had to do is lost."""
        self.is_dead = True
        for scheduler in self._schedulers.values():
            scheduler.close()

    def check(self, model: str) -> None:
        """Raise the `BackendError` of one that asks it for `model`."""
        if self.is_dead:
            raise BackendError(lost("UNAVAILABLE", "connection refused"))
        if self.is_refusing:
            raise BackendError(fault_of("UNAVAILABLE", f"model '{model}' is not ready"))


def slot_rows(config: ModelConfig) -> SequenceInputs | None:
    """For a model that keeps sequences: a row of the batch for each slot, empty ones too, without their tensors."""
    batching = config.sequence_batching
    if batching is None:
        return None
    bare = replace(batching, controls=(), states=())
    return SequenceInputs(config=bare, max_batch_size=config.max_batch_size, initial_states={})


class SimulatedInstance:
    """See `local_runtime.scheduling.execution.Instance`: each batch takes a time out of the model's curve.

    It keeps nothing of its own, so that one object stands for all instances of a model on a replica.
    """

    def __init__(self, model: SimulatedModel, replica: SimulatedReplica, books: ModelBooks) -> None:
        self._curve = model.curve
        self._replica = replica
        self._books = books

    def submit(self, members: Sequence[CheckedRequest], done: Done) -> None:
        """Be busy for as long as the batch takes, then answer each member with nothing.

        A batch that dies with its server counts whole for how busy it was.
        """
        replica, around = self._replica, self._replica.around
        replica.busy += 1
        rows = sum([member.rows for member in members])
        took_us = self._curve.draw_us(rows, around.chance, busy=replica.busy) * replica.times
        began_s = around.loop.time()
        counted_s = min(began_s + took_us / 1e6, around.until_s) - max(began_s, around.from_s)
        self._books.busy_us += max(0.0, counted_s) * 1e6
        around.loop.call_later(took_us / 1e6, self._end, len(members), took_us, done)

    def _end(self, count: int, took_us: float, done: Done) -> None:
        self._replica.busy -= 1
        done(Executed(outcomes=[{}] * count, compute=Compute(infer_us=round(took_us))))


class SimulatedServers:
    """See `ports.Backend` and `ports.KnowsModels`: the replicas of one backend.

    Attributes:
        books: by model.
    """

    speaks: Final = "tensors"
    is_probed: Final = True

    def __init__(self, backend: SimulatedBackend, around: Surroundings) -> None:
        self.backend = backend
        self.books = {name: ModelBooks(stats=StatsRecorder(name=name, version=_VERSION)) for name in around.models}
        self._around = around
        self._names = backend.names
        self._failures: dict[str, list[Failure]] = {name: [] for name in backend.names or ("",)}
        self._replicas = {
            name: SimulatedReplica(around, self.books, engine=backend.engine) for name in backend.names or ("",)
        }
        self._facts = {
            name: documents.facts(pb.ModelMetadataResponse(name=name, versions=[_VERSION]), model.config.message)
            for name, model in around.models.items()
        }

    def replicas(self) -> Sequence[str]:
        """See `ports.Backend`."""
        return self._names

    def engine_load(self, replica: str) -> None:  # noqa: ARG002 - the port's
        """Nothing: these are no LLM servers."""
        return

    async def facts(self, place: Place) -> ModelFacts:
        """See `ports.KnowsModels`. They were asked for when all was well, and are kept."""
        return self._facts[place.model]

    async def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """One answer without outputs, after the time that it would take."""
        if not isinstance(call.payload, TensorPayload):
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message="a chat call to a tensor backend"))
        try:
            async with asyncio.timeout(timeout_us / 1e6):
                queue_us = await self._answered(call, call.payload, timeout_us)
        except TimeoutError:
            raise BackendError(lost("DEADLINE_EXCEEDED", "Deadline Exceeded")) from None
        yield Tensors(outputs=(), version=_VERSION, queue_us=queue_us)

    async def _answered(self, call: BackendCall, payload: TensorPayload, timeout_us: int) -> int:
        """Go there, through its queue, and back; how long it was in the queue, in microseconds."""
        deadline_us = self._around.loop.now_us() + timeout_us
        way_us = self._way_us(call.model)
        if way_us:
            await asyncio.sleep(way_us / 2e6)
        replica = self._replicas[call.replica]
        replica.check(call.model)
        step = call.sequence or _NO_SEQUENCE
        source = InferRequest(
            model=call.model,
            inputs={},
            request_id=call.request_id,
            priority=payload.priority,
            queue_timeout_us=payload.queue_timeout_us,
            sequence_id=step.id,
            sequence_start=step.is_start,
            sequence_end=step.is_end,
        )
        asked = CheckedRequest(source=source, inputs={}, rows=items_of(payload), batch_key=0, outputs=())
        try:
            answered = await replica.scheduler(call.model).infer(asked, deadline_us=deadline_us)
        except InferenceError as error:
            if replica.is_dead:
                raise BackendError(lost("UNAVAILABLE", "connection reset")) from error
            raise BackendError(fault_of(GRPC_NAMES[error.code], error.message)) from error
        if way_us:
            await asyncio.sleep(way_us / 2e6)
        return answered.queue_us

    def _way_us(self, model: str) -> float:
        """The way there and back: the curve's own and the backend's, one sample of each."""
        chance = self._around.chance
        return sum(
            samples[int(chance.random() * len(samples))] if len(samples) > 1 else samples[0]
            for samples in (self._around.models[model].curve.overhead_us, self.backend.overhead_us)
            if samples
        )

    async def probe(self, place: Place) -> None:
        """See `ports.Backend`."""
        replica = self._replicas[place.replica]
        if replica.is_dead or place.model != ANY:
            replica.check(place.model)

    async def figures(self) -> Sequence[ModelFigures]:
        """None: the report has them."""
        return ()

    async def close(self) -> None:
        """There is nothing to let go of."""

    async def fail(self, failure: Failure) -> None:
        """Be unwell as `failure` says, once its time has come, until it is over."""
        loop, name = self._around.loop, self._names[failure.replica] if self._names else ""
        await asyncio.sleep(failure.at_s - loop.time())
        self._failures[name].append(failure)
        self._apply(name)
        await asyncio.sleep(failure.for_s)
        self._failures[name].remove(failure)
        self._apply(name)

    def _apply(self, name: str) -> None:
        """What all failures make of a replica that it has now."""
        now, replica = self._failures[name], self._replicas[name]
        is_dead = any(one.kind == "dead" for one in now)
        if is_dead and not replica.is_dead:
            replica.die()
        elif replica.is_dead and not is_dead:
            replica = self._replicas[name] = SimulatedReplica(self._around, self.books, engine=self.backend.engine)
        replica.times = math.prod(one.times for one in now)
        replica.is_refusing = any(one.kind == "refusing" for one in now)
