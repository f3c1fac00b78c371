"""Raw tensors through the gateway beside straight `grpc.aio`, to one real Triton.

Triton and wrk have the load's core. The row's core is the gateway's in one run, and in the next that of a `grpc.aio`
client with its request ready made: each has the whole work of talking to Triton on one core.
"""

import json
from contextlib import AsyncExitStack

import httpx
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.bench.suite.bench import Bench, Row
from tests.bench.suite.goals import OURS, Goal
from tests.bench.suite.load import wrk
from tests.bench.suite.routers import BEARER
from tests.bench.suite.servers import Target, gateway
from tests.bench.suite.straight import straight
from tests.kit import identity_model
from tests.kit.servers import Server, running

SMALL, IMAGE = 8, 3 * 224 * 224
CASES = ((SMALL, 64), (SMALL, 16), (SMALL, 1), (IMAGE, 16))  # floats in and out, requests in flight
QUICK = ((SMALL, 64), (SMALL, 1))
STRAIGHT = "straight grpc.aio"
AT = "{}, FP32[{}], {} in flight".format
GOALS = (
    *(
        Goal(figure="rps", at="least", bound=0.85, subject=AT(OURS, *case), against=AT(STRAIGHT, *case))
        for case in CASES
        if case[1] > 1
    ),
    Goal(
        figure="p50 ms",
        at="most",
        bound=0.5,
        subject=AT(OURS, SMALL, 1),
        against=AT(STRAIGHT, SMALL, 1),
        by="difference",
    ),
)


async def measure(bench: Bench) -> None:
    """Case by case, the two in turns."""
    async with AsyncExitStack() as stack:
        triton = stack.enter_context(running("triton", bench.folder / "triton"))  # on the core of this process
        triton.add_model(identity_model.NAME, config=identity_model.CONFIG, model=identity_model.SOURCE)
        await load_model(triton, identity_model.NAME)
        ours = await stack.enter_async_context(
            gateway(
                bench,
                backends={"triton": {"kind": "triton", "url": triton.grpc}},
                tasks={"tensor": {"contract": "tensor"}},
                rule={"name": "tensors", "split": [{"backend": "triton", "model": "*"}]},
            )
        )
        if bench.is_quick:
            bench.note("the quick form has the smallest tensors alone, at 64 and at 1 in flight")
        for floats, count in QUICK if bench.is_quick else CASES:
            target = request_to(f"{ours.url}/v2/models/{identity_model.NAME}/infer", floats, ours.pid)
            file = bench.folder / f"request-{floats}"
            file.write_bytes(request(floats).SerializeToString())
            await bench.in_turns(
                {
                    AT(STRAIGHT, floats, count): lambda file=file, count=count: straight(
                        bench, triton.grpc, file, count, bench.seconds
                    ),
                    AT(OURS, floats, count): lambda target=target, count=count: wrk(bench, target, count),
                }
            )


async def load_model(server: Server, name: str) -> None:
    """Load a model and all that it is made of."""
    async with httpx.AsyncClient(base_url=f"http://{server.http}", trust_env=False, timeout=60) as http:
        (await http.post(f"/v2/repository/models/{name}/load")).raise_for_status()


def request(floats: int) -> pb.ModelInferRequest:
    """As `grpc.aio` sends it."""
    made = pb.ModelInferRequest(model_name=identity_model.NAME, raw_input_contents=[_row(floats)])
    made.inputs.add(name="X", datatype="FP32", shape=[1, floats])
    return made


def request_to(url: str, floats: int, pid: int) -> Target:
    """The same request over HTTP, tensors as bytes both ways."""
    body = _row(floats)
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, floats], "parameters": {"binary_data_size": len(body)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {
        **BEARER,
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(len(head)),
    }
    return Target(name=f"ours-{floats}", url=url, body=head + body, headers=headers, pid=pid)


def _row(floats: int) -> bytes:
    return np.arange(floats, dtype=np.float32).tobytes()


ROW = Row(name="tensors", title="raw tensors to Triton", goals=GOALS, measure=measure)
