"""The two servers that are measured: the local runtime in this process, and real Triton by gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tritonclient import grpc as client

from gateway.tuning.load import targets
from gateway.tuning.load.asks import Ask
from gateway.tuning.load.outcomes import Outcome, Target
from gateway.tuning.traffic import TrafficClass
from local_runtime.messages import InferRequest
from local_runtime.runtime import InferenceError, LocalRuntime, RuntimeOptions
from tests.bench.simulation.subjects import Subject
from tests.kit.servers import running

QUEUE = 100_000
LOAD_S = 120
EXIT_S = 15  # of seven processes with models, on a busy machine


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a server says of a model by itself: every request's computing, in microseconds, and executions by rows."""

    requests: int
    compute_us: int
    batch_sizes: Mapping[int, int]

    def since(self, before: "Counted") -> "Counted":
        """By how much it has grown."""
        grown = {rows: count - before.batch_sizes.get(rows, 0) for rows, count in self.batch_sizes.items()}
        return Counted(
            requests=self.requests - before.requests,
            compute_us=self.compute_us - before.compute_us,
            batch_sizes={rows: count for rows, count in grown.items() if count},
        )

    @property
    def mean_batch(self) -> float:
        """Rows an execution."""
        return self.requests / max(1, sum(self.batch_sizes.values()))


class Engine(Protocol):
    """A server with the models of one subject, each asked for one row at a time."""

    async def target(self, model: str) -> Target:
        """Who asks the model for one row."""

    async def counted(self, model: str) -> Counted:
        """So far."""


@dataclass(frozen=True)
class LocalTarget:
    runtime: LocalRuntime
    request: InferRequest

    async def send(self, _due: float, /) -> Outcome:
        try:
            await self.runtime.infer(self.request)
        except InferenceError as error:
            return Outcome(code=error.code.name.lower())
        return Outcome()


@dataclass(frozen=True)
class Local:
    runtime: LocalRuntime
    subject: Subject

    async def target(self, model: str) -> Target:
        return LocalTarget(self.runtime, InferRequest(model=model, inputs=self.subject.inputs))

    async def counted(self, model: str) -> Counted:
        (one,) = self.runtime.statistics(model)
        parts = (one.compute_input, one.compute_infer, one.compute_output)
        return Counted(
            requests=one.success.count,
            compute_us=sum(part.total_us for part in parts),
            batch_sizes={rows: batch.compute_infer.count for rows, batch in one.batch_stats.items()},
        )


@dataclass(frozen=True)
class Triton:
    clients: targets.Clients
    triton: str
    shape: Mapping[str, Sequence[int]]

    async def target(self, model: str) -> Target:
        ask = Ask(triton=self.triton, tensor=model, shape=self.shape)
        return await self.clients.target(ask, TrafficClass(concurrency=1))

    async def counted(self, model: str) -> Counted:
        (one,) = [one for one in await self.clients.figures(self.triton) if one.model == model]
        return Counted(
            requests=one.requests,
            compute_us=one.compute_input_us + one.compute_infer_us + one.compute_output_us,
            batch_sizes=one.batch_sizes,
        )


@contextlib.asynccontextmanager
async def local(subject: Subject, folder: Path) -> AsyncIterator[Engine]:
    subject.write(folder / "repository")
    runtime = await LocalRuntime.open(
        folder / "repository", options=RuntimeOptions(threads=1, max_queue_size=QUEUE, load_threads=2)
    )
    try:
        not_served = [f"{one.name}: {one.reason}" for one in runtime.index() if not runtime.is_ready(one.name)]
        assert not not_served, not_served
        yield Local(runtime, subject)
    finally:
        await runtime.close()


@contextlib.asynccontextmanager
async def triton(subject: Subject, folder: Path) -> AsyncIterator[Engine]:
    with running("triton", folder, f"--exit-timeout-secs={EXIT_S}") as server:
        names = subject.write(server.repository)

        def load(name: str) -> None:
            with client.InferenceServerClient(server.grpc) as asked:
                asked.load_model(name, client_timeout=LOAD_S)

        await asyncio.gather(*(asyncio.to_thread(load, name) for name in names))
        async with targets.clients() as clients:
            shape = {name: array.shape[1:] for name, array in subject.inputs.items()}
            yield Triton(clients, server.grpc, shape)


ENGINES: dict[str, Callable[[Subject, Path], contextlib.AbstractAsyncContextManager[Engine]]] = {
    "local": local,
    "triton": triton,
}
