"""What the simulator says of batches that are formed ahead is what real Triton does.

A batch runs until a file lets it go. Waited for is what nobody tells: that Triton's delay is over. Its batcher wakes up
twice a second by itself; where this machine stood still for that long, the play is played again.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferInput
from tritonclient.grpc import aio as client

from gateway.tuning.simulation.run import simulate
from gateway.tuning.simulation.world import parse_world
from tests.kit.servers import running
from tests.kit.wait import until

DELAY_S = 0.05
OVER_S = 0.15  # beyond the delay
PLAYS = 5
CONFIG = """
backend: "python"
max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
dynamic_batching {{ max_queue_delay_microseconds: 50000 }}
parameters {{ key: "FOLDER" value: {{ string_value: "{folder}" }} }}
"""
# Each answer says with how many it ran.
MODEL = """
import json
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.folder = Path(json.loads(args["model_config"])["parameters"]["FOLDER"]["string_value"])

    def execute(self, requests):
        (self.folder / "runs").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.005)
        size = np.full((1, 1), len(requests), np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", size)]) for _ in requests]
"""


async def ran(grpc: str, model: str, folder: Path) -> list[int]:
    """One request runs; one comes, and when its delay is long over three more; then the first is let go."""
    async with client.InferenceServerClient(grpc) as asked:

        def ask() -> "asyncio.Task[int]":
            given = InferInput("X", [1, 1], "FP32")
            given.set_data_from_numpy(np.zeros((1, 1), np.float32))

            async def one() -> int:
                return int((await asked.infer(model, [given])).as_numpy("Y")[0, 0])

            return asyncio.create_task(one())

        answers = [ask()]
        await until((folder / "runs").exists, timeout_s=30)
        answers.append(ask())
        await asyncio.sleep(OVER_S)
        answers += [ask() for _ in range(3)]
        await asyncio.sleep(OVER_S)
        (folder / "go").touch()
        sizes = await asyncio.gather(*answers)
        (folder / "runs").unlink()
        (folder / "go").unlink()
        return sizes


def simulated(config: Path, engine: str) -> dict[int, int]:
    """The same, where a batch takes as long as that."""
    world = {
        "models": {"m": {"curve": {"compute_us": {"1": 2e6 * OVER_S}}, "config": config.name}},
        "backends": {"server": {"engine": engine}},
        "traffic": [{"trace": [0.0, 2 * DELAY_S, *(2 * DELAY_S + OVER_S,) * 3]}],
        "duration_s": 10.0,
    }
    return dict(simulate(parse_world(world, folder=config.parent)).servers[0].batch_sizes)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory):
    with running("triton", tmp_path_factory.mktemp("triton")) as server:
        yield server


@pytest.mark.parametrize(("dims", "answers"), [(1, [1, 1, 3, 3, 3]), (-1, [1, 4, 4, 4, 4])])
def test_real_triton_forms_the_batches_that_are_simulated(triton, tmp_path: Path, dims: int, answers: list[int]):
    name = f"gated{abs(dims)}{'fixed' if dims > 0 else 'any'}"
    folder = triton.add_model(name, config=CONFIG.format(dims=dims, folder=tmp_path), model=MODEL)

    async def play() -> list[int]:
        async with client.InferenceServerClient(triton.grpc) as asked:
            await asked.load_model(name)
        found: list[int] = []
        for _ in range(PLAYS):
            if (found := await ran(triton.grpc, name, tmp_path)) == answers:
                break
        return found

    assert asyncio.run(play()) == answers
    sizes = {size: answers.count(size) // size for size in set(answers)}
    assert simulated(folder / "config.pbtxt", "triton") == sizes
    assert simulated(folder / "config.pbtxt", "local") == {1: 1, 4: 1}
