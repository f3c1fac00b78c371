"""`python -m tests.bench.grpc_client`: what one unary call costs the client, ours beside `grpc.aio`.

A tiny FP32[8] identity model in a real Triton on one core, the client on another; both clients encode and decode the
same protobufs under uvloop. Runs take turns, and medians are told. The CPU time is of the whole client process, the
threads of gRPC included.

Where other processes want the same cores, calls/s say little: a client that is done early sleeps, and must wait for the
others' time slices. Run it as `chrt -r 1 python -m tests.bench.grpc_client` there, or look at the CPU time alone.
"""

import os
import platform
import statistics
import tempfile
from pathlib import Path

import grpc.aio
import typer
import uvloop
from rich.console import Console
from rich.table import Table
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from gateway.backends.grpc.aio import CHANNEL_OPTIONS
from gateway.backends.grpc.channel import GrpcChannel
from tests.bench.suite.load import closed_loop
from tests.bench.suite.rows import tensors
from tests.kit import identity_model
from tests.kit.servers import running

ROUNDS = 5
IN_FLIGHT = (1, 16, 64)
METHOD = b"/inference.GRPCInferenceService/ModelInfer"
TIMEOUT_S = 10.0
FIGURES = ("rps", "cpu us", "p50 ms")


def main(
    seconds: float = typer.Option(1.5, help="Length of each run."),
    target: str = typer.Option("triton", help="triton, or local for the local runtime."),
) -> None:
    """Measure; about two minutes."""
    cores = sorted(os.sched_getaffinity(0))
    console = Console()
    console.print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {target}")
    with tempfile.TemporaryDirectory() as folder:
        os.sched_setaffinity(0, {cores[-1]})  # what the server inherits
        with running(target, Path(folder)) as server:
            server.add_model(identity_model.NAME, config=identity_model.CONFIG, model=identity_model.SOURCE)
            os.sched_setaffinity(0, {cores[0]})
            console.print(uvloop.run(compared(server.grpc, seconds)))


async def compared(address: str, seconds: float) -> Table:
    """Both clients, in turns."""
    table = Table("in flight", "client", "calls/s", "CPU us per call", "p50 ms")
    ours, request = GrpcChannel(address), tensors.request(tensors.SMALL)

    def checked(answer: pb.ModelInferResponse) -> None:
        if answer.raw_output_contents[0] != request.raw_input_contents[0]:
            raise SystemExit("a wrong answer")

    async def by_ours() -> None:
        answer = await ours.unary(METHOD, request.SerializeToString(), timeout_s=TIMEOUT_S)
        checked(pb.ModelInferResponse.FromString(answer))

    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)

        async def by_grpc() -> None:
            checked(await stub.ModelInfer(request, timeout=TIMEOUT_S))

        await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=identity_model.NAME))
        clients = {"grpc.aio": by_grpc, "ours": by_ours}
        for in_flight in IN_FLIGHT:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
            for call in clients.values():
                await closed_loop(call, in_flight, seconds / 3)
            for _ in range(ROUNDS):
                for name, call in clients.items():
                    runs[name].append(await closed_loop(call, in_flight, seconds))
            for name, each in runs.items():
                rate, cpu, p50 = (statistics.median(run[figure] for run in each) for figure in FIGURES)
                table.add_row(str(in_flight), name, f"{rate:,.0f}", f"{cpu:.1f}", f"{p50:.3f}")
    await ours.close()
    return table


if __name__ == "__main__":
    typer.run(main)
