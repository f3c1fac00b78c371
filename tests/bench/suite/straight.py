"""`python -m tests.bench.suite.straight ADDRESS REQUEST IN_FLIGHT SECONDS`: a `grpc.aio` client without a gateway.

A closed loop with one request that is made before (REQUEST is the file of a serialized `ModelInferRequest`) and
answers that are taken as they are: the least that a Python client of Triton does. Prints its figures as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Final

import grpc.aio
import uvloop
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from tests.bench.suite.bench import Bench, Failed
from tests.bench.suite.load import closed_loop
from tests.bench.suite.servers import ROOT

WARM: Final = 20
TIMEOUT_S: Final = 30.0
OPTIONS: Final = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


async def straight(bench: Bench, address: str, request: Path, in_flight: int, seconds: float) -> dict[str, float]:
    """The figures of such a client on the row's core: `rps`, `p50 ms`, `p99 ms`, `cpu us`. Raises `Failed`."""
    options = (address, str(request), str(in_flight), str(seconds))
    child = await asyncio.create_subprocess_exec(
        *("taskset", "-c", str(bench.core), sys.executable, "-m", "tests.bench.suite.straight", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        said, wrong = await child.communicate()
    finally:
        if child.returncode is None:  # interrupted
            child.kill()
            await child.wait()
    if child.returncode:
        raise Failed(f"the straight client failed: {wrong.decode()[-1000:]}")
    figures: dict[str, float] = json.loads(said)
    return figures


async def run(address: str, request: pb.ModelInferRequest, in_flight: int, seconds: float) -> dict[str, float]:
    """Ask, and ask again."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(min(WARM, in_flight)):
            await stub.ModelInfer(request, timeout=TIMEOUT_S)
        return await closed_loop(lambda: stub.ModelInfer(request, timeout=TIMEOUT_S), in_flight, seconds)


if __name__ == "__main__":
    where, file, count, length = sys.argv[1:]
    asked = pb.ModelInferRequest.FromString(Path(file).read_bytes())
    print(json.dumps(uvloop.run(run(where, asked, int(count), float(length)))))
