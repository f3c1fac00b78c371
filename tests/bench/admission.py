"""`python -m tests.bench.admission`: what an admission in Redis costs; with `--whole`, that it is right under fire.

Redis has the last core, the admissions of one worker have the first. `us each` is the worker's processor time for
`admit` and `settle` together, with that of the same loop over admissions that ask nobody taken off. Round trips are
the script's calls as Redis counts them: below one where requests that wait go together. Latency is of `admit`: in the
closed loop it is the loop's own work for the other requests, at a steady rate what a request really waits; the row
`PING` is what the machine lets any round trip wait there.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer
import uvloop
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from gateway.core.admissions import Wanted
from gateway.ports import Admission
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_script import connect
from tests.kit.redis import RedisServer
from tests.kit.replica_order import order_run
from tests.kit.replica_runs import limits_run
from tests.kit.wanted import FOUR, ONE, wanted

ROUNDS: Final = 5
RATE: Final = 1000  # requests per second of the steady run
IN_FLIGHT: Final = (1, 32)
PATIENT_S: Final = 5.0  # a busy machine shall show in the figures, not make the worker decide alone
PREFIX: Final = "bench:"
CASES: Final = (("1 limit", ONE, False), ("4 limits of all kinds", FOUR, False), ("1 limit, ordering key", ONE, True))

Admit = Callable[[Wanted], Awaitable[Admission]]


class Cost(NamedTuple):
    """Of one run; `calls` of the script and latencies in milliseconds."""

    cpu_us: float
    calls: float
    p50_ms: float
    p99_ms: float


def main(
    count: int = typer.Option(20_000, help="Admissions in each run."),
    seed: int = typer.Option(0, help="Of what is drawn in the runs over 3 processes."),
    whole: bool = typer.Option(False, help="Also the runs over 3 processes of 4 workers: about three minutes."),
) -> None:
    """Measure; about two minutes."""
    console, cores = Console(), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})  # what Redis inherits
    with RedisServer() as server:
        os.sched_setaffinity(0, {cores[0]})
        console.print(uvloop.run(costs(server.url, count)))
    os.sched_setaffinity(0, set(cores))
    if whole:
        asyncio.run(at_large(console, seed))


async def costs(url: str, count: int) -> Table:
    """The table."""
    names = ("in flight", "us each", "round trips each", "admit p50 ms", "admit p99 ms")
    table = Table("admission in Redis", *names)
    client = connect(url)
    admissions = RedisAdmissions(client, PREFIX, MemoryAdmissions(lambda: time.time_ns() // 1000), timeout_s=PATIENT_S)
    admissions.start()
    for name, limits, is_ordered in CASES:
        for in_flight in IN_FLIGHT:
            asked = [wanted(limits, f"key-{lane}" if is_ordered else "") for lane in range(in_flight)]
            runs = [await closed(client, admissions.admit, asked, count) for _ in range(ROUNDS + 1)][1:]
            table.add_row(name, str(in_flight), *shown(runs))
        table.add_row(name, f"{RATE:,}/s", *shown([await steady(client, admissions.admit, asked)]))
    nothing = await admissions.admit(Wanted(tenant="t"))

    async def ping(_: Wanted) -> Admission:
        await client.ping()
        return nothing

    table.add_row("PING", f"{RATE:,}/s", *shown([await steady(client, ping, asked)]))
    assert not admissions.is_degraded
    await admissions.close()
    await client.aclose()
    return table


async def closed(client: Redis, admit: Admit, asked: list[Wanted], count: int) -> Cost:
    """A closed loop of as many lanes as there are `asked`."""
    latencies, each = list[float](), count // len(asked)

    async def lane(one: Wanted, admit: Admit) -> None:
        for _ in range(each):
            began = time.perf_counter()
            admission = await admit(one)
            latencies.append(time.perf_counter() - began)
            await asyncio.sleep(0)  # the request itself
            admission.settle(tokens=400, nano_usd=900)

    async def nobody(_: Wanted) -> Admission:
        await asyncio.sleep(0)
        return nothing

    nothing = await admit(Wanted(tenant="t"))
    calls, began_s = await script_calls(client), time.process_time()
    await asyncio.gather(*(lane(one, admit) for one in asked))
    spent_s, made = time.process_time() - began_s, await script_calls(client) - calls
    p50, p99 = percentiles(latencies)
    began_s = time.process_time()
    await asyncio.gather(*(lane(one, nobody) for one in asked))
    spent_s -= time.process_time() - began_s
    done = each * len(asked)
    return Cost(spent_s / done * 1e6, made / done, p50, p99)


async def steady(client: Redis, admit: Admit, asked: list[Wanted], seconds: float = 4.0) -> Cost:
    """Requests that come one by one at `RATE`, each 20 ms long, whatever became of those before them."""
    nothing = await admit(Wanted(tenant="t"))

    async def nobody(_: Wanted) -> Admission:
        await asyncio.sleep(0)
        return nothing

    calls = await script_calls(client)
    latencies, spent_s = await _paced(admit, asked, seconds)
    made = await script_calls(client) - calls
    _, spent_without_s = await _paced(nobody, asked, seconds)
    done = len(latencies)
    return Cost((spent_s - spent_without_s) / done * 1e6, made / done, *percentiles(latencies))


async def _paced(admit: Admit, asked: list[Wanted], seconds: float) -> tuple[list[float], float]:
    """Latencies, and processor time."""
    latencies, loop = list[float](), asyncio.get_running_loop()

    async def request(one: Wanted) -> None:
        began = time.perf_counter()
        admission = await admit(one)
        latencies.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)
        admission.settle(tokens=400, nano_usd=900)

    began_s, start = time.process_time(), loop.time()
    async with asyncio.TaskGroup() as requests:
        for number in range(round(seconds * RATE)):
            await asyncio.sleep(max(0.0, start + number / RATE - loop.time()))
            requests.create_task(request(asked[number % len(asked)]))
    return latencies, time.process_time() - began_s


async def script_calls(client: Redis) -> int:
    """How often Redis has run a script so far."""
    told: dict[str, Any] = await client.info("commandstats")
    return sum(int(told.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("eval", "evalsha"))


def percentiles(latencies: list[float]) -> tuple[float, float]:
    """The median and the 99th, in milliseconds."""
    cuts = statistics.quantiles(latencies, n=100)
    return cuts[49] * 1000, cuts[98] * 1000


def shown(runs: list[Cost]) -> tuple[str, str, str, str]:
    """The medians of the runs."""
    cpu_us, calls, p50, p99 = (statistics.median(column) for column in zip(*runs, strict=True))
    return f"{cpu_us:.1f}", f"{calls:.2f}", f"{p50:.3f}", f"{p99:.3f}"


async def at_large(console: Console, seed: int) -> None:
    """3 processes of 4 workers: 10,000 requests under each kind of limit, and under 50 ordering keys, one killed."""
    with RedisServer() as server, tempfile.TemporaryDirectory() as temporary:
        client = connect(server.url)
        for name in ("limits", "order"):
            (Path(temporary) / name).mkdir()
        limits, order = Path(temporary) / "limits", Path(temporary) / "order"
        found = await limits_run(
            limits, server.url, client, "limits:", workers=4, count=10_000, in_flight=64, amount=1000, seed=seed
        )
        for kind, line in found.items():
            console.print(f"{kind}: {line}")
        console.print(await order_run(order, server.url, client, "order:", workers=4, names=50, each=200, seed=seed))
        await client.aclose()


if __name__ == "__main__":
    typer.run(main)
