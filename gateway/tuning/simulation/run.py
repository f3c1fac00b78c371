"""`simulate`: a world for as long as it says, by the gateway's own code on a simulated clock, as a report."""

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from gateway.core.breaker import Breaker, BreakerBoard
from gateway.core.errors import GatewayError, InternalError
from gateway.core.loads import LoadBoard
from gateway.core.models import ModelFigures
from gateway.core.rules import RuleSet
from gateway.core.sequences import Pin
from gateway.core.types import (
    Answer,
    Caller,
    Delta,
    EngineLoad,
    InferenceRequest,
    Message,
    Place,
    SequenceStep,
    Speech,
    Tensor,
    TensorPayload,
    Tensors,
)
from gateway.core.watching.record import RequestRecord
from gateway.gate import Gate
from gateway.health import INTERVAL_S, Prober
from gateway.pipeline import Pipeline, Task
from gateway.ports import Clock
from gateway.recall import Recalls
from gateway.sequences import PinnedSequences
from gateway.shadowing import Shadows
from gateway.stores.memory import MemoryRuleSource, MemorySequenceStore
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.memory_answers import MemoryAnswers
from gateway.tasks.contract import Form
from gateway.tuning.report import OK, Report, Tally
from gateway.tuning.simulation.clock import SimulatedLoop
from gateway.tuning.simulation.outcome import Counts, Course, report_of
from gateway.tuning.simulation.servers import SimulatedServers, Surroundings
from gateway.tuning.simulation.world import SimulatedTraffic, World
from gateway.tuning.traffic import arrivals

_KEPT_BYTES: Final = 2**20  # of answers, of which none is ever kept: requests have no idempotency key
_STEPS: Final = 100  # of progress
_PROBES: Final = 10_000  # rounds of them: in a run of days there would be more of them than of requests
_MAX_PINS: Final = 2**40  # of sequences: a store that runs full is none of the servers' doing
_REFUSED_PAUSE_S: Final = 0.001  # of a caller that was refused at once: without it, it would ask without end in no time
_ANSWER: Final = Answer(output={})


class RowsTask:
    """The contract of simulated tasks: some rows in, nothing out. The input is the payload itself."""

    name: ClassVar[str] = "simulated"
    is_sequence: ClassVar[bool] = False
    tensor_fields: ClassVar[Mapping[str, str]] = {}
    speaks: ClassVar[frozenset[Speech]] = frozenset({"tensors"})
    input_schema: Mapping[str, Any] = {}
    output_schema: Mapping[str, Any] = {}

    @property
    def forms(self) -> Mapping[Speech, Form]:
        """Tensors alone."""
        return {"tensors": self}

    def parse(self, given: object, parameters: Mapping[str, Any]) -> Any:  # noqa: ARG002 - the contract's form
        """As it is."""
        return given

    def payload(self, parsed: TensorPayload) -> TensorPayload:
        """As it is."""
        return parsed

    def answer(self, event: Tensors | Message | Delta, parsed: TensorPayload) -> Answer:  # noqa: ARG002 - as above
        """Nothing, whatever came."""
        return _ANSWER


class _Silence:
    """Hears of requests and of health, and tells nobody: the tallies know what the report needs."""

    def began(self, task: str) -> None:
        """See `ports.Observer`."""

    def ended(self, record: RequestRecord) -> None:
        """See `ports.Observer`."""

    def refused(self, record: RequestRecord) -> None:
        """See `ports.Observer`."""

    def health(self, breakers: Mapping[Place, Breaker], rules: RuleSet) -> None:
        """See `ports.HealthObserver`."""

    def figures(self, backend: str, figures: Sequence[ModelFigures]) -> None:
        """See `ports.HealthObserver`."""

    def waiting(self, counts: Mapping[str, int]) -> None:
        """See `ports.HealthObserver`."""

    def engines(self, backend: str, loads: Mapping[str, EngineLoad]) -> None:
        """See `ports.HealthObserver`."""

    def healed(self, place: Place, outcome: str) -> None:
        """See `ports.HealthObserver`."""


class _Pins(MemorySequenceStore):
    """As it is, and counts the sequences that were lost, by the backend and the replica that had kept them."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, max_keys=_MAX_PINS)
        self.lost: Counter[tuple[str, str]] = Counter()

    async def lose(self, owner: str, pin: Pin) -> None:
        """See `ports.SequenceStore`."""
        self.lost[pin.place.backend, pin.place.replica] += 1
        await super().lose(owner, pin)


def simulate(world: World, *, seed: int = 0, on_progress: Callable[[float], object] | None = None) -> Report:
    """Let `world` run, and tell what came of it. Same world and seed, same report.

    Requests come until `world.duration_s`; those that are under way then still end, as their tasks' time allows.
    `on_progress` is told now and then how much simulated time has passed, in seconds. Not to be called where an event
    loop runs.
    """
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimulatedLoop)  # noqa: S101 - as it was made
        run = _Run(world, loop, seed)
        with _rarely_collected():
            runner.run(run.run(on_progress))
    return run.report()


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Look for garbage in cycles a hundred times less often: with 1,000 replicas it was a third of a request's cost.

    Never to look for it takes as much time, and 2 kB of memory more for each request, 4 where many are refused
    (measured over 60,000).
    """
    before = gc.get_threshold()
    gc.set_threshold(100 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(slots=True)
class _Source:
    """A class of traffic while it is simulated."""

    of: SimulatedTraffic
    payload: TensorPayload
    caller: Caller
    tally: Tally
    timeout_us: int
    count: int = 0
    begun: int = 0


class _Run:
    """One world on one loop."""

    def __init__(self, world: World, loop: SimulatedLoop, seed: int) -> None:
        self._world = world
        self._loop = loop
        self._seed = seed
        around = Surroundings(
            loop=loop,
            models=world.models,
            chance=self._chance("servers"),
            from_s=world.warmup_s,
            until_s=world.duration_s,
        )
        self._servers = {name: SimulatedServers(backend, around) for name, backend in world.backends.items()}
        self._pins = _Pins(loop.now_us)
        self._pipeline, self._prober = self._planes()
        self._sources = [self._source(one) for one in world.traffic]
        self._first: Counts = {}
        self._last: Counts = {}

    def _chance(self, name: str) -> random.Random:
        """One for each purpose: what one of them draws changes nothing for the others."""
        return random.Random(f"{self._seed}/{name}")

    def _planes(self) -> tuple[Pipeline, Prober]:
        """As `gateway.wiring` makes them, for one worker without Redis."""
        world, clock, backends, silence = self._world, self._loop.now_us, self._servers, _Silence()
        gates = {
            name: Gate(max_in_flight=one.max_in_flight, max_queue_size=one.max_queue_size)
            for name, one in world.backends.items()
        }
        tasks = {
            name: Task(
                name=name,
                contract=RowsTask(),
                timeout_us=one.timeout_ms * 1000,
                attempt_timeout_us=one.attempt_timeout_ms * 1000,
            )
            for name, one in world.tasks.items()
        }
        board, loads = BreakerBoard(), LoadBoard()
        rules = MemoryRuleSource(RuleSet(revision=1, rules=world.rules))
        prober = Prober(
            backends=backends,
            rules=rules,
            board=board,
            clock=clock,
            observer=silence,
            gates=gates,
            loads=loads,
            interval_s=INTERVAL_S if _changes(world) else max(INTERVAL_S, world.duration_s / _PROBES),
        )
        pipeline = Pipeline(
            tasks=tasks,
            backends=backends,
            gates=gates,
            admissions=MemoryAdmissions(clock),
            rules=rules,
            recalls=Recalls(MemoryAnswers(clock, max_bytes=_KEPT_BYTES), clock),
            sequences=PinnedSequences(self._pins, backends, board=board, clock=clock),
            board=board,
            observer=silence,
            clock=clock,
            draw=self._chance("choices").random,
            loads=loads,
            shadows=Shadows(has_room=lambda at: gates[at.backend].has_room(at.replica)),
            wall_clock=clock,
        )
        return pipeline, prober

    def _source(self, one: SimulatedTraffic) -> _Source:
        world, traffic = self._world, one.traffic
        rows = Tensor(name="ANY", datatype="FP32", shape=(traffic.rows, 1), data=b"")
        return _Source(
            of=one,
            payload=TensorPayload(inputs=(rows,), priority=one.model_priority, queue_timeout_us=one.queue_timeout_us),
            caller=Caller(key_id=traffic.tenant, tenant=traffic.tenant, limits=world.limits.get(traffic.tenant, ())),
            tally=Tally(
                name=traffic.name,
                slo_ms=traffic.slo_ms,
                rows=traffic.rows,
                from_s=world.warmup_s,
                until_s=world.duration_s,
            ),
            timeout_us=world.tasks[one.task].timeout_ms * 1000,
        )

    # --- while it runs ----------------------------------------------------------------------------

    async def run(self, on_progress: Callable[[float], object] | None) -> None:
        """All of it, until the last request has ended."""
        world = self._world
        await self._prober.start()
        aside = [asyncio.create_task(self._servers[one.backend].fail(one)) for one in world.failures]
        look = asyncio.create_task(self._look())
        if on_progress is not None:
            aside.append(asyncio.create_task(self._tell(on_progress)))
        async with asyncio.TaskGroup() as requests:
            for source in self._sources:
                if source.of.traffic.is_open:
                    requests.create_task(self._open(source, requests))
                else:
                    for _ in range(source.of.traffic.concurrency):
                        requests.create_task(self._caller(source))
        await look
        for task in aside:
            task.cancel()
        if self._pipeline.shadows is not None:
            await self._pipeline.shadows.close()
        await self._pipeline.recalls.close()
        await self._prober.close()

    async def _until(self, at_s: float) -> None:
        left_s = at_s - self._loop.time()
        if left_s > 0:
            await asyncio.sleep(left_s)

    async def _open(self, source: _Source, requests: asyncio.TaskGroup) -> None:
        """Requests come whatever the answers do."""
        traffic = source.of.traffic
        chance = self._chance(f"arrivals/{traffic.name}")
        for due_s in arrivals(traffic, chance, duration_s=self._world.duration_s):
            await self._until(due_s)
            requests.create_task(self._asked(source, due_s))

    async def _caller(self, source: _Source) -> None:
        """One that asks again when it has its answer."""
        loop, think_s = self._loop, source.of.traffic.think_ms / 1e3
        while (due_s := loop.time()) < self._world.duration_s:
            await self._asked(source, due_s)
            pause_s = think_s if think_s or loop.time() > due_s else _REFUSED_PAUSE_S
            if loop.time() + pause_s >= self._world.duration_s:
                return
            await asyncio.sleep(pause_s)

    async def _asked(self, source: _Source, due_s: float) -> None:
        """What comes of one arrival: a request, or a sequence of them until one fails or the time is over."""
        traffic, loop = source.of.traffic, self._loop
        if not traffic.sequence_length:
            await self._one(source, due_s)
            return
        source.begun += 1
        name, last = f"{traffic.name}-{source.begun}", traffic.sequence_length - 1
        for place in range(traffic.sequence_length):
            step = SequenceStep(id=name, is_start=place == 0, is_end=place == last)
            if await self._one(source, due_s, step) != OK or place == last:
                return
            due_s = loop.time() + traffic.sequence_gap_ms / 1e3
            if due_s >= self._world.duration_s:
                return
            await self._until(due_s)

    async def _one(self, source: _Source, due_s: float, step: SequenceStep | None = None) -> str:
        """One request, from when it is due to its end; how it ended."""
        of, now_us = source.of, self._loop.now_us()
        source.tally.due(due_s)
        source.count += 1
        request = InferenceRequest(
            id=f"{of.traffic.name}-{source.count}",
            task=of.task,
            caller=source.caller,
            input=source.payload,
            received_us=now_us,
            deadline_us=now_us + source.timeout_us,
            priority=of.traffic.priority,
            ordering_key=str(source.count % of.ordering_keys) if of.ordering_keys else "",
            sequence=step,
        )
        code = OK
        try:
            async with aclosing(self._pipeline.handle(request)) as events:
                async for _ in events:
                    pass
        except InternalError:
            raise
        except GatewayError as refused:
            code = refused.code
        source.tally.ended(due_s, self._loop.time(), code)
        return code

    async def _look(self) -> None:
        """Read the servers' counters when the counted time begins, and when it ends."""
        for at_s, into in ((self._world.warmup_s, self._first), (self._world.duration_s, self._last)):
            await self._until(at_s)
            for name, servers in self._servers.items():
                into.update({(name, model): books.stats.snapshot() for model, books in servers.books.items()})

    async def _tell(self, on_progress: Callable[[float], object]) -> None:
        while True:
            on_progress(self._loop.time())
            await asyncio.sleep(self._world.duration_s / _STEPS)

    def report(self) -> Report:
        """What came of it, when it has run."""
        tallies = [source.tally for source in self._sources]
        busy_us = {
            (name, model): books.busy_us for name, one in self._servers.items() for model, books in one.books.items()
        }
        course = Course(counts=(self._first, self._last), busy_us=busy_us, lost=self._pins.lost)
        return report_of(self._world, tallies, course, seed=self._seed)


def _changes(world: World) -> bool:
    """Whether a replica's health does, while it runs."""
    return any(one.at_s > 0 or one.for_s < world.duration_s for one in world.failures)
