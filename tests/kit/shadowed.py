"""Requests that are copied to a shadow, over scripted backends: the walk itself, without HTTP before it."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gateway.backends.scripted import ScriptedBackend
from gateway.core.breaker import BreakerBoard
from gateway.core.cost import parse_prices
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.shadows.shadow_reports import ShadowResult
from gateway.core.types import Caller, Event, InferenceRequest
from gateway.core.watching.figures import Series
from gateway.gate import Gate
from gateway.pipeline import Pipeline, Task
from gateway.ports import Backend
from gateway.recall import Recalls
from gateway.sequences import PinnedSequences
from gateway.shadowing import Shadows
from gateway.stores.memory import MemoryRuleSource, MemorySequenceStore
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.memory_answers import MemoryAnswers
from gateway.tasks.chat import Chat
from gateway.tasks.contract import Contract
from gateway.tasks.text_embedding import TextEmbedding, TextInput
from gateway.wiring import monotonic_us, wall_us
from tests.kit.app import DIMENSIONS, Recorder
from tests.kit.wait import until

RULE = {
    "name": "nlu/en",
    "match": {"task": "*"},
    "split": [{"backend": "triton", "model": "m"}],
    "shadow": {"backend": "shadow", "model": "s"},
}


@dataclass
class Told:
    """See `ports.ShadowResults`, and `shadowing.Compared`."""

    results: list[ShadowResult] = field(default_factory=list)
    compared: list[tuple[Series, bool]] = field(default_factory=list)

    def told(self, result: ShadowResult) -> None:
        self.results.append(result)

    def agreed(self, series: Series, *, agreed: bool) -> None:
        self.compared.append((series, agreed))

    @property
    def outcomes(self) -> list[str]:
        return [result.failure or result.outcome for result in self.results]


@dataclass
class Shadowed:
    pipeline: Pipeline
    shadows: Shadows
    told: Told
    seen: Recorder
    rules: MemoryRuleSource

    @property
    def loads(self) -> dict[str, int]:
        """Requests and copies that are at a backend or wait for it, by backend."""
        found = {
            name: sum(gate.load(replica) for replica in self.pipeline.backends[name].replicas() or ("",))
            for name, gate in self.pipeline.gates.items()
        }
        for (name, _), server in self.pipeline.loads._servers.items():
            found[name] = max(found[name], server.requests)
        return {name: count for name, count in found.items() if count}

    async def ask(self, asked: InferenceRequest | None = None) -> list[Event]:
        """A request's answer; its copy may be under way when this returns."""
        async with aclosing(self.pipeline.handle(asked or request())) as events:
            return [event async for event in events]

    async def result(self, count: int = 1) -> ShadowResult:
        """The newest of so many."""
        await until(lambda: len(self.told.results) >= count)
        return self.told.results[count - 1]

    async def idle(self) -> None:
        """Until no copy is under way."""
        await until(lambda: not self.shadows.in_flight)


def request(task: str = "text-embedding", parsed: Any = None, **changes: Any) -> InferenceRequest:
    now_us = monotonic_us()
    plain = InferenceRequest(
        id="r1",
        task=task,
        caller=Caller(key_id="k", tenant="t"),
        input=parsed or TextInput(texts=("a text",), is_list=False),
        received_us=now_us,
        deadline_us=now_us + 5_000_000,
    )
    return dataclasses.replace(plain, **changes)


@contextlib.asynccontextmanager
async def shadowed(
    *backends: Backend,
    rules: Sequence[Any] = (RULE,),
    max_in_flight: int = 256,
    draw: Callable[[], float] = lambda: 0.0,
    timeout_us: int = 5_000_000,
    more_tasks: Mapping[str, Contract] = MappingProxyType({}),
    prices: Mapping[str, Any] = MappingProxyType({}),
) -> AsyncIterator[Shadowed]:
    """`backends` under `rules`, with what becomes of copies kept. Scripted ones called `llm...` are generative."""
    told, seen, board = Told(), Recorder(), BreakerBoard()
    contracts = {"text-embedding": TextEmbedding(dimensions=DIMENSIONS), "general_llm": Chat(), **more_tasks}
    for backend in backends:
        if isinstance(backend, ScriptedBackend):
            backend.speaks = "openai" if backend.name.startswith("llm") else "tensors"
    by_name = {backend.name: backend for backend in backends}
    gates = {name: Gate(max_in_flight=max_in_flight, max_queue_size=1024) for name in by_name}
    recalls = Recalls(MemoryAnswers(monotonic_us, max_bytes=2**20), monotonic_us)
    shadows = Shadows(
        has_room=lambda place: gates[place.backend].has_room(place.replica),
        results=told,
        compared=told.agreed,
    )
    source = MemoryRuleSource(RuleSet(revision=7, rules=parse_rules(rules)))
    pipeline = Pipeline(
        tasks={
            name: Task(name=name, contract=contract, timeout_us=timeout_us, attempt_timeout_us=1_000_000)
            for name, contract in contracts.items()
        },
        backends=by_name,
        gates=gates,
        admissions=MemoryAdmissions(wall_us),
        rules=source,
        recalls=recalls,
        sequences=PinnedSequences(MemorySequenceStore(monotonic_us), by_name, board=board, clock=monotonic_us),
        board=board,
        observer=seen,
        clock=monotonic_us,
        wall_clock=wall_us,
        draw=draw,
        prices=parse_prices({"prices": dict(prices)}),
        shadows=shadows,
    )
    try:
        yield Shadowed(pipeline=pipeline, shadows=shadows, told=told, seen=seen, rules=source)
    finally:
        await shadows.close()
        await recalls.close()
