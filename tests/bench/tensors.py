"""`python -m tests.bench.tensors`: raw tensors through the gateway beside straight `grpc.aio`, to one real Triton.

Triton and the load (wrk) have the last core. The first core is the gateway's in one run, and in the next that of a
`grpc.aio` client with its request ready made: each has the whole work of talking to Triton on one core. Runs take
turns; medians are told.
"""

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import numpy as np
import typer
import uvloop
import yaml
from rich.console import Console
from rich.table import Table
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from tests.bench.runtime import Target, free_port, served, wrk_run
from tests.kit.servers import running

KEY = "bench"
ROUNDS = 5
CASES = ((8, 1), (8, 16), (8, 64), (3 * 224 * 224, 1), (3 * 224 * 224, 16))  # floats in and out, requests in flight
TIMEOUT_S = 10.0
CONFIG = """
name: "identity"
backend: "python"
max_batch_size: 64
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
dynamic_batching { }
"""
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "X")
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", tensor.as_numpy())]))
        return answers
"""


def main(
    seconds: float = typer.Option(2.0, help="Length of each run."),
    straight: str = typer.Option("", hidden=True, help="Be the straight client of this address."),
    in_flight: int = typer.Option(1, hidden=True),
    floats: int = typer.Option(8, hidden=True),
) -> None:
    """Measure; about two minutes."""
    if straight:
        print(json.dumps(uvloop.run(straight_run(straight, floats, in_flight, seconds))))
    else:
        Console().print(compared(seconds))


def compared(seconds: float) -> Table | str:
    """The comparison, or one line that says what is missing for it."""
    wrk = shutil.which("wrk")
    if wrk is None:
        return "raw tensors skipped: there is no wrk (apt install wrk)"
    cores = sorted(os.sched_getaffinity(0))
    table = Table(
        "raw tensors to Triton",
        "in flight",
        "straight rps",
        "gateway rps",
        "ratio",
        "straight p50 ms",
        "gateway p50 ms",
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.sched_setaffinity(0, {cores[-1]})  # what Triton inherits
        with running("triton", folder / "triton") as triton:
            os.sched_setaffinity(0, set(cores))
            triton.add_model("identity", config=CONFIG, model=MODEL)
            load_model(triton.http)
            with gateway(folder, triton.grpc, cores[0]) as url:
                for floats, count in CASES:
                    target = request_to(url, floats)
                    command = [wrk, f"-c{count}", f"-d{max(1, round(seconds))}s"]
                    runs = [
                        (
                            one_straight(triton.grpc, floats, count, seconds=seconds, core=cores[0]),
                            wrk_run(target, command, folder, cores[-1]),
                        )
                        for _ in range(ROUNDS + 1)
                    ][1:]  # the first round warms up
                    a_rps, a_p50, b_rps, b_p50 = (
                        statistics.median(run[side][at] for run in runs) for side in (0, 1) for at in (0, 1)
                    )
                    ratio = statistics.median(b[0] / a[0] for a, b in runs)
                    row = (f"{a_rps:,.0f}", f"{b_rps:,.0f}", f"{ratio:.2f}", f"{a_p50:.3f}", f"{b_p50:.3f}")
                    table.add_row(f"FP32[{floats}]", str(count), *row)
    return table


def load_model(http: str) -> None:
    """Load the model, over HTTP as a person would."""
    url = f"http://{http}/v2/repository/models/identity/load"
    subprocess.run(["curl", "-sSf", "-X", "POST", url], check=True, capture_output=True)


def one_straight(address: str, floats: int, count: int, *, seconds: float, core: int) -> tuple[float, float]:
    """Requests per second and the median latency in ms of the straight client, a process on that core."""
    command = (sys.executable, "-m", "tests.bench.tensors", "--straight", address)
    options = ("--floats", str(floats), "--in-flight", str(count), "--seconds", str(seconds))
    said = subprocess.run(["taskset", "-c", str(core), *command, *options], check=True, capture_output=True, text=True)
    rps, p50_ms = json.loads(said.stdout)
    return rps, p50_ms


async def straight_run(address: str, floats: int, in_flight: int, seconds: float) -> tuple[float, float]:
    """A closed loop with a request that is made once and an answer that is taken as it is."""
    request = pb.ModelInferRequest(model_name="identity", raw_input_contents=[row(floats)])
    request.inputs.add(name="X", datatype="FP32", shape=[1, floats])
    latencies: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(50):
            await stub.ModelInfer(request, timeout=TIMEOUT_S)
        end = time.perf_counter() + seconds

        async def one() -> None:
            while (began := time.perf_counter()) < end:
                await stub.ModelInfer(request, timeout=TIMEOUT_S)
                latencies.append(time.perf_counter() - began)

        await asyncio.gather(*(one() for _ in range(in_flight)))
    return len(latencies) / seconds, statistics.median(latencies) * 1000


@contextlib.contextmanager
def gateway(folder: Path, triton: str, core: int) -> Iterator[str]:
    """`gateway serve` with one worker on that core; key check, rules, limits, checks, metrics and access log on."""
    port, ops_port = free_port(), free_port()
    document = {
        "server": {"port": port, "ops_port": ops_port},
        "backends": {"triton": {"kind": "triton", "url": triton}},
        "tasks": {"tensor": {"contract": "tensor"}},
        "rules": [{"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}],
        "limits": [{"per": "minute", "requests": 10**9}],
        "keys": [{"id": "bench", "tenant": "bench", "key_env": "BENCH_KEY"}],
    }
    config = folder / "gateway.yaml"
    config.write_text(yaml.safe_dump(document))
    os.environ["BENCH_KEY"] = KEY
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
    with served(command, core, f"http://127.0.0.1:{port}/healthz/ready"):
        yield f"http://127.0.0.1:{port}/v2/models/identity/infer"


def request_to(url: str, floats: int) -> Target:
    """The same request over HTTP, tensors as bytes both ways."""
    body = row(floats)
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, floats], "parameters": {"binary_data_size": len(body)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {
        "authorization": f"Bearer {KEY}",
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(len(head)),
    }
    return Target(name="gateway", url=url, body=head + body, headers=headers)


def row(floats: int) -> bytes:
    """A tensor's bytes."""
    return np.arange(floats, dtype=np.float32).tobytes()


if __name__ == "__main__":
    typer.run(main)
