"""`python -m tests.bench.shared_memory`: what large tensors cost by message and by shared memory, to a real Triton.

Both ways take turns, request by request, so that what else the machine does falls on both alike; the medians of a run
are told, and the CPU time of this process, which is what a gateway's worker pays. Compare within one run.
"""

import asyncio
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tritonclient.grpc import service_pb2 as pb

from gateway.backends.grpc.channel import GrpcChannel
from gateway.backends.triton import codec as triton_codec
from gateway.backends.triton.replica import TritonReplica
from gateway.backends.triton.shared_memory import SharedMemoryLane, Slot
from gateway.core.tensors import from_numpy
from gateway.core.types import BackendCall, Tensor, TensorPayload
from tests.kit.servers import running
from tests.kit.wait import until

KIB, MIB = 2**10, 2**20
SIZES = (64 * KIB, 128 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
DIRECTIONS = ("in", "out", "both")
INFER = b"/inference.GRPCInferenceService/ModelInfer"

# Takes IN, gives SIZE bytes back; the work itself is next to nothing.
MODEL = (
    """name: "bytes"
backend: "python"
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_UINT8 dims: [ -1 ] }, { name: "SIZE" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] } ]
""",
    """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.zeros = np.zeros(2**24, np.uint8)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        size = int(pb_utils.get_input_tensor_by_name(request, "SIZE").as_numpy()[0])
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.zeros[:size])])
""",
)


@dataclass(frozen=True, kw_only=True)
class Took:
    """One request: wall time and this process's CPU time, in milliseconds."""

    wall_ms: float
    cpu_ms: float


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The server, and a lane to it."""

    channel: GrpcChannel
    lane: SharedMemoryLane

    async def infer(self, tensors: tuple[Tensor, ...], out: int, *, slot: Slot | None) -> None:
        """As a replica does it."""
        if slot is None:
            call = BackendCall(request_id="", model="bytes", version="", payload=TensorPayload(inputs=tensors))
            parts = triton_codec.encode(call, call.payload, None)
            message = await self.channel.unary(INFER, *parts, timeout_s=60)
            assert len(triton_codec.decode(message, ("OUT",)).outputs[0].data) == out
            return
        with slot:
            request = pb.ModelInferRequest(model_name="bytes")
            for tensor in tensors:
                added = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
                if not slot.put(added, tensor.data):
                    request.raw_input_contents.append(bytes(tensor.data))
            slot.ask(request.outputs.add(name="OUT"), out)
            message = await self.channel.unary(INFER, request.SerializeToString(), timeout_s=60)
            response = pb.ModelInferResponse.FromString(message)
            (content,) = slot.contents(response.outputs, response.raw_output_contents)
            assert len(content) == out

    async def pair(self, direction: str, size: int) -> tuple[Took, Took]:
        """The same request both ways."""
        into, out = (1 if direction == "out" else size), (1 if direction == "in" else size)
        tensors = (from_numpy("IN", np.zeros(into, np.uint8)), from_numpy("SIZE", np.array([out])))
        slots = [self.lane.take([into], [out])]
        if slots[0] is None:
            await until(lambda: slots.append(self.lane.take([into], [out])) or slots[-1])
        by_message = await timed(self.infer(tensors, out, slot=None))
        by_memory = await timed(self.infer(tensors, out, slot=slots[-1]))
        return by_message, by_memory


async def timed(answer) -> Took:
    """Wait for it."""
    began, cpu = time.perf_counter(), time.process_time()
    await answer
    return Took(wall_ms=(time.perf_counter() - began) * 1e3, cpu_ms=(time.process_time() - cpu) * 1e3)


async def measure(address: str, requests: int) -> Table:
    """The table of all sizes and directions."""
    table = Table(
        "size", "direction", "message ms", "memory ms", "faster", "CPU message ms", "CPU memory ms", "less CPU"
    )
    channel = GrpcChannel(address)
    replica = TritonReplica(address, channel)
    await replica.ask(pb.RepositoryModelLoadRequest(model_name="bytes"), "RepositoryModelLoad", timeout_us=60_000_000)
    subject = Subject(channel=channel, lane=SharedMemoryLane(replica.ask, threshold=SIZES[0]))
    for size in SIZES:
        for direction in DIRECTIONS:
            pairs = [await subject.pair(direction, size) for _ in range(requests)][requests // 10 :]
            table.add_row(*row(size, direction, pairs))
    await subject.lane.close()
    await replica.close()
    return table


def row(size: int, direction: str, pairs: list[tuple[Took, Took]]) -> tuple[str, ...]:
    """The medians, and the ratio of each."""
    wall = [statistics.median(pair[way].wall_ms for pair in pairs) for way in (0, 1)]
    cpu = [statistics.median(pair[way].cpu_ms for pair in pairs) for way in (0, 1)]
    figures = (*(f"{ms:.2f}" for ms in wall), f"{wall[0] / wall[1]:.1f}x")
    return f"{size // KIB} KiB", direction, *figures, *(f"{ms:.2f}" for ms in cpu), f"{cpu[0] / cpu[1]:.1f}x"


def main(requests: int = typer.Option(200, help="Requests each way, for each row.")) -> None:
    """Measure; about a minute."""
    console = Console(width=120)
    console.print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder, running("triton", Path(folder)) as server:
        server.add_model("bytes", config=MODEL[0], model=MODEL[1])
        console.print(asyncio.run(measure(server.grpc, requests)))


if __name__ == "__main__":
    typer.run(main)
