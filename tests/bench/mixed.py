"""`python -m tests.bench.mixed`: the presets of deploy/presets, with and without, on real servers through a gateway.

The model stands for one on a GPU: a batch takes 4 ms and 0.25 ms more for each of its rows, asleep, so that what is
measured is waiting and not this machine's arithmetic. Traffic, rules, gates and batching are the presets' own files.
Figures are medians over the rounds; in brackets the largest p99, which on a shared machine is often another's doing.
"""

import asyncio
import contextlib
import os
import statistics
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import httpx
import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table

from gateway.backends.grpc.channel import GrpcChannel
from gateway.backends.triton import codec
from gateway.core.models import ModelFacts
from gateway.core.tensors import from_numpy
from gateway.core.types import BackendCall, TensorPayload
from gateway.tuning.load import runner, targets, traffic_file
from gateway.tuning.load.outcomes import Target
from gateway.tuning.load.targets import GrpcTarget
from gateway.tuning.load.traffic_file import Part
from gateway.tuning.report import Report
from tests.kit.servers import ROOT, TARGETS, Server, running
from tests.kit.serving import free_port, serving_at

PRESETS: Final = ROOT / "deploy" / "presets"
ROUNDS: Final = 3
KEYS: Final = {"GATEWAY_KEY_PEOPLE": "bench-people", "GATEWAY_KEY_BULK": "bench-bulk"}
MODEL: Final = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        sizes = [pb_utils.get_input_tensor_by_name(one, "TEXT").as_numpy().shape[0] for one in requests]
        time.sleep(0.004 + 0.00025 * sum(sizes))
        answers = []
        for rows in sizes:
            unit = np.zeros((rows, 384), np.float32)
            unit[:, 0] = 1
            outputs = [pb_utils.Tensor("EMBEDDING", unit), pb_utils.Tensor("TOKENS", np.full((rows, 1), 5, np.int32))]
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""
HEAD: Final = """
backend: "python"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [
  { name: "EMBEDDING" data_type: TYPE_FP32 dims: [ 384 ] },
  { name: "TOKENS" data_type: TYPE_INT32 dims: [ 1 ] }
]
"""


def main(
    seconds: float = typer.Option(6.0, help="Of each round, after 1 s that is not counted."),
    servers: list[str] = typer.Option(list(TARGETS), "--server", help="Of both by default."),  # noqa: B008 - Typer's way
) -> None:
    """Measure; about seven minutes."""
    console = Console(width=120)
    console.print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    heads = ("server", "preset", "setting", "interactive p50 ms", "p99 ms", "bulk rows/s", "not ok")
    table = Table(*heads)
    with mock.patch.dict(os.environ, KEYS):
        for name in servers:
            for row in asyncio.run(measured(name, seconds)):
                table.add_row(name, *row)
    console.print(table)


async def measured(name: str, seconds: float) -> list[tuple[str, ...]]:
    """The rows of one kind of server."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(running(name, Path(folder) / place)) for place in ("one", "two"))
        return [*await mixed(one, Path(folder), seconds), *await split(one, two, Path(folder), seconds)]


async def mixed(server: Server, folder: Path, seconds: float) -> list[tuple[str, ...]]:
    """Both kinds of requests at one server."""
    document = yaml.safe_load((PRESETS / "mixed" / "gateway.yaml").read_text())
    open_gate = {**document, "backends": {"triton": {"kind": "triton", "url": "${GATEWAY_TRITON_URL}"}}}
    at = {"GATEWAY_TRITON_URL": server.grpc}
    await put(server, (PRESETS / "mixed" / "config.pbtxt").read_text())
    rows = []
    for setting, one in (("max_in_flight 256", open_gate), ("max_in_flight 4", document)):
        async with gateway(folder, one, at) as url:
            rows.append(words("mixed", setting, await through(url, "mixed", seconds)))
    rows.append(words("mixed", "no gateway", await straight(server, seconds)))
    await put(server, (PRESETS / "mixed" / "levels.pbtxt").read_text())
    rows.append(words("mixed", "no gateway, priority_levels 2", await straight(server, seconds)))
    return rows


async def split(one: Server, two: Server, folder: Path, seconds: float) -> list[tuple[str, ...]]:
    """Two servers alike, and one of each kind."""
    preset = PRESETS / "throughput-latency"
    document = yaml.safe_load((preset / "gateway.yaml").read_text())
    own, other = ((preset / f"{name}.pbtxt").read_text() for name in ("throughput", "latency"))
    pool = {
        **document,
        "backends": {"both": {"kind": "triton", "url": f"{one.grpc},{two.grpc}", "max_in_flight": 16}},
        "rules": [
            {
                "name": "all",
                "match": {"task": "text-embedding"},
                "split": [{"backend": "both", "model": "text_embedding"}],
            }
        ],
    }
    at = {"GATEWAY_THROUGHPUT_URL": one.grpc, "GATEWAY_LATENCY_URL": two.grpc}
    rows = []
    await put(one, own)
    for setting, with_what, lines in (("two servers alike", pool, own), ("one of each", document, other)):
        await put(two, lines)
        async with gateway(folder, with_what, at) as url:
            rows.append(words("throughput-latency", setting, await through(url, "throughput-latency", seconds)))
    return rows


async def put(server: Server, lines: str) -> None:
    """The model, with these lines in its configuration."""
    groups = "" if "instance_group" in lines else "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
    lines = lines.replace("{ count: 1 }", "{ count: 1 kind: KIND_CPU }")
    server.add_model("text_embedding", config=f"{HEAD}{groups}{lines}", model=MODEL)
    async with httpx.AsyncClient(base_url=f"http://{server.http}", trust_env=False, timeout=60) as http:
        (await http.post("/v2/repository/models/text_embedding/load")).raise_for_status()


@contextlib.asynccontextmanager
async def gateway(folder: Path, document: Mapping[str, Any], at: Mapping[str, str]) -> AsyncIterator[str]:
    """The address of `gateway serve` over a configuration."""
    port, ops_port = free_port(), free_port()
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump({**document, "telemetry": {"access_log": False}}))
    with mock.patch.dict(os.environ, {**at, "GATEWAY_PORT": str(port), "GATEWAY_OPS_PORT": str(ops_port)}):
        async with serving_at(path, port, ops_port) as running:
            yield running.url


def parts(preset: str, url: str) -> list[Part]:
    """The preset's traffic."""
    return traffic_file.read(PRESETS / preset / "traffic.yaml", url=url, key="", environ=KEYS)


async def through(url: str, preset: str, seconds: float) -> list[Report]:
    """The preset's traffic through a gateway."""
    given = parts(preset, url)
    async with targets.clients() as clients:
        asked = [await clients.target(part.ask, part.traffic) for part in given]
        return await offered(asked, given, seconds)


async def straight(server: Server, seconds: float) -> list[Report]:
    """The traffic of `mixed` at the server itself; interactive requests say priority 1, which a plain model ignores."""
    given = parts("mixed", "http://none")
    channel = GrpcChannel(server.grpc)
    async with httpx.AsyncClient(base_url=f"http://{server.http}", trust_env=False) as http:
        config = (await http.get("/v2/models/text_embedding/config")).json()
    has_levels = int(config["dynamic_batching"].get("priority_levels", 0)) > 0
    facts = ModelFacts(name="text_embedding", has_priority_levels=has_levels)
    asked = []
    for part in given:
        priority = {"interactive": 1, "batch": 2}[part.traffic.priority]
        texts = from_numpy("TEXT", np.full((part.traffic.rows, 1), b"a line of the catalogue", object))
        payload = TensorPayload(inputs=(texts,), priority=priority)
        call = BackendCall(request_id="", model="text_embedding", version="", payload=payload)
        asked.append(GrpcTarget(channel, b"".join(codec.encode(call, payload, facts))))
    try:
        return await offered(asked, given, seconds)
    finally:
        await channel.close()


async def offered(asked: Sequence[Target], given: Sequence[Part], seconds: float) -> list[Report]:
    """What came of it, in each round."""
    classes = [part.traffic for part in given]
    return [
        await runner.run(list(asked), classes, duration_s=seconds + 1, warmup_s=1.0, seed=seed)
        for seed in range(ROUNDS)
    ]


def words(preset: str, setting: str, reports: Sequence[Report]) -> tuple[str, ...]:
    """A row."""
    rounds = [{one.name: one for one in report.classes} for report in reports]
    times = [classes["interactive"].latency for classes in rounds]
    wrong = sum(
        report.whole.unfinished + sum(count for code, count in report.whole.codes.items() if code != "ok")
        for report in reports
    )
    p50, p99 = (statistics.median(getattr(one, name) for one in times) for name in ("p50", "p99"))
    bulk = statistics.median(classes["bulk"].rows_per_s for classes in rounds)
    largest = max(one.p99 for one in times)
    return preset, setting, f"{p50:.1f}", f"{p99:.1f} ({largest:.1f})", f"{bulk:,.0f}", str(wrong)


if __name__ == "__main__":
    typer.run(main)
