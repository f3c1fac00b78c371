"""`make bench`: what the pure decisions cost, what the gateway adds to a straight call, what the local runtime bears.

The gateway serves on one core, the load and the upstream on the other; straight and relayed runs take turns, and
the median of the rounds is told. Figures depend on the machine: compare within one run.
"""

import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import typer
import yaml
from rich.console import Console
from rich.table import Table

from gateway.backends.llm.http_client import HttpClient
from gateway.core.rate_limit import Charge, decide
from gateway.core.routing import State, plan
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.sse import SseParser
from gateway.core.types import Caller, InferenceRequest
from gateway.http_server import bind
from tests.bench import llm, runtime, tensors
from tests.kit.upstream import completion

KEY = "bench"
BODY = b'{"model":"general_llm","messages":[{"role":"user","content":"hello"}]}'
ROUNDS = 5
MAX_ANSWER = 65536


def main(
    seconds: float = typer.Option(2.0, help="Length of each run."),
    mosec_python: str = typer.Option(
        "",
        envvar="MOSEC_PYTHON",
        help="Python of an environment with Mosec to compare with: "
        "python -m venv E && E/bin/pip install mosec torch; then E/bin/python. Without it that part is skipped.",
    ),
) -> None:
    """Measure; some seventeen minutes."""
    console = Console()
    console.print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    console.print(decisions())
    console.print(runtime.against_mosec(seconds, mosec_python))
    sweep = (sys.executable, "-m", "local_runtime", "bench", "--builtin", "mlp", "--rounds", "5", "--seconds", "0.4")
    subprocess.run(sweep, check=True)
    console.print(asyncio.run(relay(seconds)))
    console.print(tensors.compared(seconds))
    console.print(llm.compared(rounds=ROUNDS))


def decisions() -> Table:
    """The pure parts, each alone on this core."""
    table = Table("decision", "us each")
    rules = parse_rules(
        [{"name": f"r{i}", "match": {"task": f"t{i}"}, "split": [{"backend": "b", "model": "m"}]} for i in range(200)]
    )
    request = InferenceRequest(
        id="x", task="t199", caller=Caller(key_id="k", tenant="t"), input=None, received_us=0, deadline_us=1
    )
    rule_set = RuleSet(revision=1, rules=rules)
    state = State(why_not=lambda _: None, loads=lambda _: {}, draw=lambda: 0.5)
    charge = Charge(key="k", name="n", emission_interval_us=1_000_000, burst=60)
    event = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
    parser = SseParser()
    for name, call in (
        ("route: the last of 200 rules", lambda: plan(rule_set, request, state)),
        ("limit: one GCRA step", lambda: decide(charge, tat_us=5, now_us=1)),
        ("stream: one event parsed", lambda: parser.feed(event)),
    ):
        table.add_row(name, f"{cost_us(call):.2f}")
    return table


def cost_us(call: Callable[[], object], count: int = 20_000) -> float:
    """Median over five rounds."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - began) / count * 1e6)
    return statistics.median(rounds)


async def relay(seconds: float) -> Table:
    """Chat, not streamed, with key check, rules, limits (in memory), metrics and access log on."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    table = Table("chat relay", "in flight", "straight rps", "gateway rps", "straight p50 ms", "gateway p50 ms")
    async with canned() as upstream, gateway(upstream, cores[0]) as through:
        for in_flight in (1, 32):
            straight, relayed = [], []
            for _ in range(ROUNDS):
                straight.append(await load(upstream, in_flight, seconds))
                relayed.append(await load(through, in_flight, seconds))
            (a_rps, a_p50), (b_rps, b_p50) = (
                tuple(statistics.median(column) for column in zip(*runs, strict=True)) for runs in (straight, relayed)
            )
            table.add_row("", str(in_flight), f"{a_rps:,.0f}", f"{b_rps:,.0f}", f"{a_p50:.3f}", f"{b_p50:.3f}")
    return table


async def load(base_url: str, in_flight: int, seconds: float) -> tuple[float, float]:
    """Closed loop: requests per second, and the median latency in ms."""
    client = HttpClient(base_url, headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"})
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def one() -> None:
        while (began := time.perf_counter()) < end:
            async with client.exchange("POST", "/chat/completions", body=BODY, timeout_us=5_000_000) as answer:
                if answer.status != 200:
                    raise SystemExit(f"the answer was {answer.status}")
                await answer.read_all(MAX_ANSWER)
            latencies.append(time.perf_counter() - began)

    await asyncio.gather(*(one() for _ in range(in_flight)))
    await client.close()
    return len(latencies) / seconds, statistics.median(latencies) * 1000


@contextlib.asynccontextmanager
async def canned() -> AsyncIterator[str]:
    """An upstream that answers every request with one fixed completion."""
    body = json.dumps(completion("hello")).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    class Canned(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            self.transport.write(answer)  # requests here come in one piece, one at a time for each connection

    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@contextlib.asynccontextmanager
async def gateway(upstream: str, core: int) -> AsyncIterator[str]:
    """`gateway serve` with one worker on a core of its own."""
    ports = []
    for _ in range(2):
        with bind("127.0.0.1", 0) as free:
            ports.append(free.getsockname()[1])
    document = {
        "server": {"port": ports[0], "ops_port": ports[1]},
        "backends": {"llm": {"kind": "openai", "base_url": upstream}},
        "tasks": {"general_llm": {"contract": "chat"}},
        "rules": [{"name": "chat", "split": [{"backend": "llm", "model": "m"}]}],
        "limits": [{"per": "minute", "requests": 10**9}],
        "keys": [{"id": "bench", "tenant": "bench", "key_env": "BENCH_KEY"}],
    }
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "gateway.yaml"
        config.write_text(yaml.safe_dump(document))
        with (Path(folder) / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *("taskset", "-c", str(core), sys.executable, "-m", "gateway", "serve", "--config", str(config)),
                env={**os.environ, "BENCH_KEY": KEY},
                stderr=log,
            )
        try:
            await ready(ports[0])
            yield f"http://127.0.0.1:{ports[0]}/v1"
        finally:
            process.terminate()
            await process.wait()


async def ready(port: int) -> None:
    client = HttpClient(f"http://127.0.0.1:{port}", headers={})
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(Exception):
                async with client.exchange("GET", "/healthz/ready", timeout_us=1_000_000) as answer:
                    if answer.status == 200:
                        break
            await asyncio.sleep(0.1)
    await client.close()


if __name__ == "__main__":
    typer.run(main)
