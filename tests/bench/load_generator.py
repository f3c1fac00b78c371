"""What `gateway load` itself can offer: `python -m tests.bench.load_generator`.

A server that answers at once stands on one core, the generator, one process, on another. Told are how much was asked
of it and offered, its own processor time for each request, and how late requests were sent.
"""

import asyncio
import os
import platform
import subprocess
import sys
import time

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from gateway.tuning.load import runner, targets
from gateway.tuning.load.asks import Ask
from gateway.tuning.report import Report
from gateway.tuning.traffic import TrafficClass
from tests.kit.serving import free_port

BODY = b'{"output":{"embeddings":[[0.25,0.5]],"dimensions":2}}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-request-id: 1\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
RATES = (1_000.0, 5_000.0, 10_000.0)


class Responder(asyncio.Protocol):
    """The smallest server there is: requests here come in one piece, one at a time for each connection."""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, _):
        self.transport.write(ANSWER)


async def respond(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Responder, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


async def offer(port: int, traffic: TrafficClass, seconds: float) -> tuple[Report, float]:
    """The run, and microseconds of processor time for each of its requests."""
    async with targets.clients() as clients:
        ask = Ask(url=f"http://127.0.0.1:{port}", task="text-embedding", input={"text": "a cat"})
        target = await clients.target(ask, traffic)
        begun = time.process_time()
        report = await runner.run(target, [traffic], duration_s=seconds)
        return report, (time.process_time() - begun) / report.whole.sent * 1e6


def main(seconds: float = typer.Option(5.0, help="Length of each run."), responder: int = typer.Option(0)) -> None:
    """Measure."""
    if responder:
        uvloop.run(respond(responder))
        return
    cores, port = sorted(os.sched_getaffinity(0)), free_port()
    console = Console(width=100)
    console.print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    table = Table("asked", "offered/s", "answered/s", "us each", "p50 ms", "p99 ms", "sent late by p99")
    command = (sys.executable, "-m", "tests.bench.load_generator", "--responder", str(port))
    with subprocess.Popen(("taskset", "-c", str(cores[0]), *command), stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        os.sched_setaffinity(0, {cores[-1]})
        try:
            asked = [TrafficClass(rate=rate, arrivals=shape) for rate in RATES for shape in ("constant", "poisson")]
            for traffic in (*asked, TrafficClass(concurrency=32)):
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as own:
                    report, each_us = own.run(offer(port, traffic, seconds))
                whole = report.whole
                assert whole.codes == {"ok": whole.sent}, whole.codes
                late = report.setting["generator"].partition("late by p99 ")[2]
                what = f"{traffic.rate:,.0f}/s {traffic.arrivals}" if traffic.is_open else "32 callers"
                figures = (f"{whole.offered:,.0f}", f"{whole.qps:,.0f}", f"{each_us:.0f}")
                table.add_row(what, *figures, f"{whole.latency.p50:.2f}", f"{whole.latency.p99:.2f}", late or "-")
        finally:
            server.terminate()
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
