"""A JPEG of 200 KB uploaded to the task API and classified by an ensemble on a real Triton, beside straight `grpc.aio`.

Triton computes on the load's core and is the limit: what the gateway costs is its processor time for each request.
"""

import io
from contextlib import AsyncExitStack

import numpy as np
from PIL import Image
from tritonclient.grpc import service_pb2 as pb

from tests.bench.suite.bench import Bench, Figures, Row
from tests.bench.suite.goals import OURS, Goal
from tests.bench.suite.load import wrk
from tests.bench.suite.routers import BEARER
from tests.bench.suite.rows.tensors import load_model
from tests.bench.suite.servers import ROOT, Target, gateway
from tests.bench.suite.straight import straight
from tests.kit.servers import copy_model, running

BYTES = 200_000
SIDES = (1024, 768)
IN_FLIGHT = 8
LENGTH = 2  # times as long as others' runs: Triton answers some tens a second
STRAIGHT = "straight grpc.aio"
TASK, MODEL = "image-classification", "image_classification"
PARTS = (MODEL, "image_preprocess", "image_classifier")
GOALS = (
    Goal(figure="cpu us", at="most", bound=1_500),
    Goal(figure="rps", at="least", bound=0.95, against=STRAIGHT),
)


async def measure(bench: Bench) -> None:
    """The two in turns."""
    models, picture = ROOT / "triton_models", jpeg(BYTES)
    async with AsyncExitStack() as stack:
        triton = stack.enter_context(running("triton", bench.folder / "triton"))  # on the core of this process
        for part in PARTS:
            copy_model(triton, models / part)
        await load_model(triton, MODEL)
        labels = str(models / MODEL / "labels.txt")
        task = {"contract": TASK, "labels_file": labels, "timeout_ms": 60_000, "attempt_timeout_ms": 30_000}
        ours = await stack.enter_async_context(
            gateway(
                bench,
                backends={"triton": {"kind": "triton", "url": triton.grpc}},
                tasks={TASK: task},
                rule={"name": "images", "split": [{"backend": "triton", "model": MODEL}]},
            )
        )
        headers = {**BEARER, "content-type": "image/jpeg"}
        target = Target(name=OURS, url=f"{ours.url}/v1/tasks/{TASK}", body=picture, headers=headers, pid=ours.pid)
        file, seconds = bench.folder / "request", bench.seconds * (1 if bench.is_quick else LENGTH)
        file.write_bytes(request(picture).SerializeToString())

        async def straightly() -> Figures:
            return await straight(bench, triton.grpc, file, IN_FLIGHT, seconds)

        await bench.in_turns({STRAIGHT: straightly, OURS: lambda: wrk(bench, target, IN_FLIGHT, seconds)})


def request(picture: bytes) -> pb.ModelInferRequest:
    """As `grpc.aio` sends it: one element of the type BYTES."""
    raw = len(picture).to_bytes(4, "little") + picture
    made = pb.ModelInferRequest(model_name=MODEL, raw_input_contents=[raw])
    made.inputs.add(name="IMAGE", datatype="BYTES", shape=[1, 1])
    return made


def jpeg(size: int) -> bytes:
    """A picture with noise in it, the largest of at most `size` bytes."""
    drawn = np.random.default_rng(0)
    coarse = Image.fromarray(drawn.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
        SIDES, Image.Resampling.BICUBIC
    )
    noisy = np.asarray(coarse, np.int16) + drawn.integers(-12, 13, (SIDES[1], SIDES[0], 1), dtype=np.int16)
    picture = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    for quality in range(95, 5, -1):
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality)
        if file.tell() <= size:
            return file.getvalue()
    raise ValueError(f"no quality makes it as small as {size} bytes")


ROW = Row(name="image", title="JPEG of 200 KB to a Triton ensemble, 8 in flight", goals=GOALS, measure=measure)
