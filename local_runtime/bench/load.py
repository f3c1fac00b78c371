"""Closed-loop load inside the process: so many callers, each of which asks again once it has its answer."""

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Sequence

from local_runtime.messages import InferRequest
from local_runtime.runtime import LocalRuntime

# Of the length of a run, before it and not counted: callers fall into step.
_LEAD_IN = 0.25
# Answers that every run waits for at least: slow models are not judged by a handful.
_LEAST_ANSWERS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run, or the medians of several. Latencies in milliseconds, `mean_batch` in rows per execution."""

    qps: float
    p50_ms: float
    p99_ms: float
    mean_batch: float


@dataclasses.dataclass(slots=True)
class _Counts:
    starts_s: float
    ends_s: float
    latencies_s: list[float] = dataclasses.field(default_factory=list)
    executions: float = 0.0
    last_s: float = 0.0

    def add(self, began_s: float, ended_s: float, batch_size: int) -> None:
        if ended_s >= self.starts_s:
            self.latencies_s.append(ended_s - began_s)
            self.executions += 1 / batch_size
            self.last_s = ended_s

    def is_open(self) -> bool:
        return time.perf_counter() < self.ends_s or len(self.latencies_s) < _LEAST_ANSWERS


async def warm(runtime: LocalRuntime, request: InferRequest, *, concurrency: int, seconds: float) -> None:
    """As `run`, uncounted and for just so long: torch gets warm and adaptive batching learns."""
    now_s = time.perf_counter()
    await _ask(runtime, request, _Counts(starts_s=now_s, ends_s=now_s + seconds), concurrency=concurrency)


async def run(runtime: LocalRuntime, request: InferRequest, *, concurrency: int, seconds: float) -> Measured:
    """Keep `concurrency` requests (each of one row) in flight for `seconds`. Raises InferenceError as it comes."""
    starts_s = time.perf_counter() + _LEAD_IN * seconds
    counts = _Counts(starts_s=starts_s, ends_s=starts_s + seconds)
    await _ask(runtime, request, counts, concurrency=concurrency)
    latencies_s = sorted(counts.latencies_s)
    return Measured(
        qps=len(latencies_s) / (counts.last_s - starts_s),
        p50_ms=1000 * statistics.median(latencies_s),
        p99_ms=1000 * latencies_s[min(len(latencies_s) - 1, int(0.99 * len(latencies_s)))],
        mean_batch=len(latencies_s) / counts.executions,
    )


async def _ask(runtime: LocalRuntime, request: InferRequest, counts: _Counts, *, concurrency: int) -> None:
    async def caller() -> None:
        while counts.is_open():
            began_s = time.perf_counter()
            answer = await runtime.infer(request)
            counts.add(began_s, time.perf_counter(), answer.batch_size)

    try:
        async with asyncio.TaskGroup() as callers:
            for _ in range(concurrency):
                callers.create_task(caller())
    except ExceptionGroup as errors:
        # The callers do the same thing and fail in the same way: one of them speaks for all.
        raise errors.exceptions[0] from None


def medians(runs: Sequence[Measured]) -> Measured:
    """Each figure's median by itself."""
    return Measured(
        qps=statistics.median(one.qps for one in runs),
        p50_ms=statistics.median(one.p50_ms for one in runs),
        p99_ms=statistics.median(one.p99_ms for one in runs),
        mean_batch=statistics.median(one.mean_batch for one in runs),
    )
