"""The load, in closed loop: wrk on its own core, and what it and the kernel tell of a run; or calls of this process."""

import asyncio
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from tests.bench.suite.bench import Bench, Failed
from tests.bench.suite.servers import Target, cpu_s, family

UNITS_MS: Final = {"us": 0.001, "ms": 1.0, "s": 1000.0}
TIMEOUT_S: Final = 20
SETTLE_S: Final = 0.1
SETTLES_IN: Final = 100  # times that: 10 s


async def wrk(bench: Bench, target: Target, in_flight: int, seconds: int = 0) -> dict[str, float]:
    """`rps`, `p50 ms`, `p99 ms` of one run; with a pid also `cpu us`, its processor time for each request.

    Raises `Failed` where not everything was answered by a 2xx.
    """
    if shutil.which("wrk") is None:
        raise Failed("there is no wrk (Debian: apt install wrk)")
    script = _script(bench.folder, target)
    options = (f"-c{in_flight}", "-t1", f"-d{seconds or bench.seconds}s", f"--timeout={TIMEOUT_S}s", "--latency")
    pids = family(target.pid) if target.pid else []
    before_s = cpu_s(pids)
    child = await asyncio.create_subprocess_exec(
        *("taskset", "-c", str(bench.load_core), "wrk", *options, "-s", str(script), target.url),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said = (await child.communicate())[0].decode()
    finally:
        if child.returncode is None:  # interrupted
            child.kill()
            await child.wait()
    spent_s = cpu_s(pids) - before_s
    await _settled(pids)
    requests, figures = read(said)
    return {**figures, "cpu us": spent_s / requests * 1e6} if pids else figures


async def _settled(pids: Sequence[int]) -> None:
    """Until these have done what the run left behind, so that it is not in the way of who comes next."""
    before_s = cpu_s(pids)
    for _ in range(SETTLES_IN):
        await asyncio.sleep(SETTLE_S)
        now_s = cpu_s(pids)
        if now_s - before_s < SETTLE_S / 5:
            return
        before_s = now_s


def read(said: str) -> tuple[int, dict[str, float]]:
    """The number of requests, and the figures, of what wrk says. Raises `Failed`."""
    if "Non-2xx" in said or re.search(r"Socket errors:.*[1-9]", said):
        raise Failed(f"not all requests were answered:\n{said.strip()}")
    rps = re.search(r"Requests/sec:\s+([\d.]+)", said)
    done = re.search(r"(\d+) requests in", said)
    times = [re.search(rf"\b{percent}%\s+([\d.]+)(us|ms|s)", said) for percent in (50, 99)]
    if rps is None or done is None or None in times or int(done[1]) == 0:
        raise Failed(f"wrk says:\n{said.strip()}")
    p50, p99 = (float(found[1]) * UNITS_MS[found[2]] for found in times if found is not None)
    return int(done[1]), {"rps": float(rps[1]), "p50 ms": p50, "p99 ms": p99}


async def closed_loop(call: Callable[[], Awaitable[object]], in_flight: int, seconds: float) -> dict[str, float]:
    """The figures of `wrk` for calls that this process makes; `cpu us` is all that it does, threads included."""
    latencies: list[float] = []
    spent_s, began_s = time.process_time(), time.perf_counter()
    until_s = began_s + seconds

    async def caller() -> None:
        while (sent_s := time.perf_counter()) < until_s:
            await call()
            latencies.append(time.perf_counter() - sent_s)

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    spent_s, took_s = time.process_time() - spent_s, time.perf_counter() - began_s
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "rps": len(latencies) / took_s,
        "p50 ms": cuts[49] * 1000,
        "p99 ms": cuts[98] * 1000,
        "cpu us": spent_s / len(latencies) * 1e6,
    }


def _script(folder: Path, target: Target) -> Path:
    """The request for wrk; the body comes out of a file, so that it may be any bytes."""
    name = re.sub(r"\W+", "-", target.name)
    body, script = folder / f"{name}.body", folder / f"{name}.lua"
    body.write_bytes(target.body)
    headers = "".join(f"wrk.headers['{key}'] = '{value}'\n" for key, value in target.headers.items())
    script.write_text(f"wrk.method = 'POST'\n{headers}wrk.body = io.open('{body}', 'rb'):read('*a')\n")
    return script
