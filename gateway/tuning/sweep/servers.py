"""What a sweep asks of a server, whichever it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.tuning.report import ServerReport
from gateway.tuning.sweep.settings import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """A model's counters since it was loaded, all versions together.

    Attributes:
        requests / queue_us: that were answered, and how long they waited together.
        executions / compute_us: by the rows of a batch, how many there were and how long they took together.
    """

    requests: int = 0
    queue_us: float = 0.0
    executions: Mapping[int, int] = field(default_factory=dict)
    compute_us: Mapping[int, float] = field(default_factory=dict)

    def since(self, before: "Counters") -> "Counters":
        """What has come since `before`."""
        return Counters(
            requests=self.requests - before.requests,
            queue_us=self.queue_us - before.queue_us,
            executions={
                rows: more for rows, n in self.executions.items() if (more := n - before.executions.get(rows, 0))
            },
            compute_us={rows: us - before.compute_us.get(rows, 0.0) for rows, us in self.compute_us.items()},
        )

    def report(self, *, backend: str, model: str, seconds: float, instances: int) -> ServerReport:
        """As traffic reports have it."""
        executions = sum(self.executions.values())
        rows = sum(rows * n for rows, n in self.executions.items())
        compute_us = sum(self.compute_us.values())
        # requests, not executions: each is there for as long as its batch is computed
        waited, computed = self.queue_us, sum(us * size for size, us in self.compute_us.items())
        return ServerReport(
            backend=backend,
            model=model,
            executions=executions,
            mean_batch=rows / executions if executions else 0.0,
            queue_ms=waited / self.requests / 1e3 if self.requests else 0.0,
            compute_ms=compute_us / executions / 1e3 if executions else 0.0,
            queue_share=waited / (waited + computed) if waited + computed else 0.0,
            batch_sizes=dict(sorted(self.executions.items())),
            busy=min(1.0, compute_us / 1e6 / seconds / instances),
        )


class Server(Protocol):
    """A server of the model that is swept.

    Attributes:
        name: `local` or `triton`, for reports.
        place: where it is, in words.
        message: the completed `ModelConfig` that was found.
        written: the one to write the advice into: as its owner wrote it, where that is known.
        files: what the model is made of, in words that differ once it does: a digest, or its versions where its files
            cannot be seen.
    """

    name: str
    place: str
    message: Any
    written: Any
    files: str

    async def begin(self) -> None:
        """From here on the model is changed; before, nothing is but that it may be loaded. Raises SweepError."""
        ...

    async def load(self, setting: Setting) -> None:
        """Serve the model this way. Raises SweepError with the server's reason."""
        ...

    async def ask(self) -> None:
        """One request of one row. Raises AskFailed."""
        ...

    async def answers(self) -> None:
        """Raises Unreachable where nobody does any more."""
        ...

    async def counters(self) -> Counters:
        """What the server has counted."""
        ...

    def memory_bytes(self) -> int | None:
        """Resident memory of the server's process and its children; None where it cannot be seen."""
        ...
