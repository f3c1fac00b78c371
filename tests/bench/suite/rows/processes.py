"""The data plane as processes: what a second worker adds, what memory a worker keeps, how soon it is ready."""

import os
from contextlib import AsyncExitStack
from pathlib import Path

from tests.bench.suite.bench import Bench, Figures, Measure, Row
from tests.bench.suite.goals import OURS, Goal
from tests.bench.suite.load import wrk
from tests.bench.suite.routers import BEARER, PATH
from tests.bench.suite.rows.relay import BODY
from tests.bench.suite.servers import Target, chat_gateway, cpu_s, family, nginx, resident_kib, worker_of

IN_FLIGHT = 32  # for each worker
ONE, TWO = "1 worker", "2 workers"
ENOUGH_CORES = 3  # for two workers and the load
REQUESTS, FEW_REQUESTS = 1_000_000, 20_000
WARM, FEW_WARM = 100_000, 10_000  # until then memory may grow: what is kept of the last requests, allocators' pools
PIECE_S, FEW_PIECE_S = 5, 2
TOLD = 20  # samples
POLL_S = 0.005


async def workers(bench: Bench) -> None:
    """One worker, then two, each with a core of its own where the load has another one; else all with both cores."""
    has_room = len(bench.cores) >= ENOUGH_CORES
    if not has_room:
        bench.note(
            "Two cores are too few for two workers and their load: `workers' capacity` is what the workers' processor "
            "time for a request leaves of a core each. All that runs has both cores, with one worker and with two."
        )
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(nginx(bench))
        subjects = {}
        for name, count in ((ONE, 1), (TWO, 2)):
            ours = await stack.enter_async_context(
                chat_gateway(bench, upstream, workers=count, cores=bench.cores[: count if has_room else 2])
            )
            target = Target(name=name, url=f"{ours.url}{PATH}", body=BODY, headers=BEARER, pid=ours.pid)
            subjects[name] = _capacity(bench, target, count, has_room=has_room)
        await bench.in_turns(subjects)


def _capacity(bench: Bench, target: Target, workers: int, *, has_room: bool) -> Measure:
    async def run() -> Figures:
        figures = await wrk(bench, target, IN_FLIGHT * workers)
        capacity = figures["rps"] if has_room else workers * 1e6 / figures["cpu us"]
        return {**figures, "workers' capacity": capacity}

    return run


async def memory(bench: Bench) -> None:
    """Resident memory of one worker, sampled while many requests go through it."""
    total, warm, piece_s = (FEW_REQUESTS, FEW_WARM, FEW_PIECE_S) if bench.is_quick else (REQUESTS, WARM, PIECE_S)
    async with nginx(bench) as upstream, chat_gateway(bench, upstream) as ours:
        worker = worker_of(ours.pid)
        target = Target(name=OURS, url=f"{ours.url}{PATH}", body=BODY, headers=BEARER, pid=ours.pid)
        done, samples = 0.0, [(0.0, resident_kib([worker]) / 1024)]
        while done < total:
            done += piece_s * (await wrk(bench, target, IN_FLIGHT, piece_s))["rps"]
            samples.append((done, resident_kib([worker]) / 1024))
            bench.say(f"{done:,.0f} of {total:,} requests: {samples[-1][1]:.1f} MiB")
            os.truncate(ours.log, 0)  # the access log: it is appended to
        bench.record(OURS, 0, {**grown(samples, warm), "torch is loaded": has_torch(worker)})
        told = samples[:: max(1, len(samples) // TOLD)]
        bench.note("MiB after so many requests: " + "; ".join(f"{after:,.0f}: {mib:.1f}" for after, mib in told))


def grown(samples: list[tuple[float, float]], warm: float) -> dict[str, float]:
    """Requests and MiB of each sample -> what there was, what there is, what it grew by after `warm` requests."""
    from_then = next(mib for after, mib in samples if after >= warm)
    last, mib = samples[-1]
    return {"MiB at start": samples[0][1], "MiB": mib, "MiB grown": mib - from_then, "requests": last}


async def start(bench: Bench) -> None:
    """From the command until it is ready for requests; Redis and the LLM server are there."""

    async with nginx(bench) as upstream:

        async def run() -> Figures:
            async with chat_gateway(bench, upstream, pause_s=POLL_S) as ours:
                return {
                    "s": ours.start_s,
                    "cpu s": cpu_s(family(ours.pid)),
                    "torch is loaded": has_torch(worker_of(ours.pid)),
                }

        await bench.in_turns({OURS: run}, warms_up=not bench.is_quick)


def has_torch(pid: int) -> float:
    """1 where the process has torch's libraries."""
    return float("libtorch" in Path(f"/proc/{pid}/maps").read_text())


WORKERS = Row(
    name="workers",
    title="workers 1 -> 2",
    goals=(Goal(figure="workers' capacity", at="least", bound=1.8, subject=TWO, against=ONE),),
    measure=workers,
)
MEMORY = Row(
    name="memory",
    title="memory of a worker without torch",
    goals=(
        Goal(figure="MiB", at="most", bound=120),
        Goal(figure="MiB grown", at="most", bound=2),
        Goal(figure="torch is loaded", at="most", bound=0),
    ),
    measure=memory,
)
START = Row(
    name="start",
    title="start of the data plane",
    goals=(Goal(figure="s", at="most", bound=1.5), Goal(figure="torch is loaded", at="most", bound=0)),
    measure=start,
)
