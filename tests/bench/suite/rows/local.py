"""The task API with the local runtime, the bare runtime, and Mosec: JSON of 128 floats -> MLP 128-512-512-10 -> 10.

64 in flight; all batch up to 32 and compute on one torch thread of the same torch. Servers share a core, wrk has the
other one.
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from local_runtime.bench.models import NAME, Builtin, build
from local_runtime.bench.variants import Kind, Variant, config_text, configured
from local_runtime.repository.parsing import parse
from tests.bench.suite.bench import Bench, Failed, Row
from tests.bench.suite.goals import OURS, Goal
from tests.bench.suite.load import wrk
from tests.bench.suite.peers import installed, missing
from tests.bench.suite.routers import BEARER, JSON
from tests.bench.suite.servers import HOST, Target, answers, gateway, is_ok, process
from tests.kit.serving import free_port

MAX_BATCH_SIZE = 32
DELAY_US = 2000
IN_FLIGHT = 64
NUMBERS = [round((number * 37 % 200) / 100 - 1, 4) for number in range(128)]
TENSORS = [{"name": "INPUT__0", "datatype": "FP32", "shape": [1, 128], "data": NUMBERS}]
BARE, ADAPTIVE, PEER = "bare runtime", "bare runtime, adaptive", "mosec"
ADAPTIVE_OURS = f"{OURS}, adaptive"
MODELS = {"mlp": (OURS, BARE), "mlp_adaptive": (ADAPTIVE_OURS, ADAPTIVE)}
SERVER = Path(__file__).resolve().parents[2] / "mosec_server.py"
GOALS = (
    Goal(figure="rps", at="least", bound=6_000),
    Goal(figure="p99 ms", at="most", bound=1.0, against=PEER),
    Goal(figure="rps", at="least", bound=1.0, subject=BARE, against=PEER),
)


async def measure(bench: Bench) -> None:
    """All in turns."""
    repository = bench.folder / "models"
    write_models(repository)
    async with AsyncExitStack() as stack:
        targets = [
            *await stack.enter_async_context(_gateway(bench, repository)),
            *await stack.enter_async_context(_runtime(bench, repository)),
        ]
        try:
            targets += await stack.enter_async_context(_mosec(bench))
        except Failed as error:
            bench.failed(f"{PEER}: {error}")
        if bench.is_quick:
            targets = [one for one in targets if one.name not in (ADAPTIVE, ADAPTIVE_OURS)]
        await bench.in_turns({one.name: lambda one=one: wrk(bench, one, IN_FLIGHT) for one in targets})


def write_models(folder: Path) -> None:
    """The model twice: batched as Mosec is, and adaptive."""
    build(Builtin.MLP, folder, max_batch_size=MAX_BATCH_SIZE)
    source = folder / NAME
    message = parse((source / "config.pbtxt").read_text(), folder_name=NAME).message
    message.parameters["INTRA_OP_THREAD_COUNT"].string_value = "1"
    variants = (
        Variant(kind=Kind.STATIC, max_batch_size=MAX_BATCH_SIZE, delay_us=DELAY_US),
        Variant(kind=Kind.ADAPTIVE, max_batch_size=MAX_BATCH_SIZE),
    )
    made = folder / "made"
    for name, variant in zip(MODELS, variants, strict=True):
        shutil.copytree(source / "1", made / name / "1")
        config = configured(message, variant)
        config.name = name
        (made / name / "config.pbtxt").write_text(config_text(config))
    shutil.rmtree(source)
    for name in MODELS:
        (made / name).rename(folder / name)
    made.rmdir()


@asynccontextmanager
async def _gateway(bench: Bench, repository: Path) -> AsyncIterator[list[Target]]:
    """The task API; the runtime is in the worker's own process."""
    rule = {"name": "tensors", "split": [{"backend": "local", "model": "*"}]}
    local = {"kind": "local", "repository": str(repository)}
    async with gateway(bench, backends={"local": local}, tasks={"tensor": {"contract": "tensor"}}, rule=rule) as ours:
        yield [
            Target(
                name=through,
                url=f"{ours.url}/v1/tasks/tensor",
                body=_json({"input": {"model": name, "inputs": TENSORS}}),
                headers=BEARER,
                pid=ours.pid,
            )
            for name, (through, _) in MODELS.items()
        ]


@asynccontextmanager
async def _runtime(bench: Bench, repository: Path) -> AsyncIterator[list[Target]]:
    """`local_runtime serve`."""
    port = free_port()
    listens = ("--http", f"{HOST}:{port}", "--grpc", "none")
    command = (sys.executable, "-m", "local_runtime", "serve", "--repository", str(repository), *listens)
    url = f"http://{HOST}:{port}/v2"
    async with process(
        command,
        cores=(bench.core,),
        log=bench.folder / "runtime.log",
        ready=lambda: is_ok(f"{url}/health/ready"),
    ) as pid:
        body = _json({"inputs": TENSORS})
        yield [
            Target(name=bare, url=f"{url}/models/{name}/infer", body=body, headers=JSON, pid=pid)
            for name, (_, bare) in MODELS.items()
        ]


@asynccontextmanager
async def _mosec(bench: Bench) -> AsyncIterator[list[Target]]:
    """`mosec_server.py` in an environment of its own; nothing, and a note, where it is not installed."""
    own = installed(bench.peers, PEER)
    if own is None:
        bench.note(missing(PEER))
        yield []
        return
    port, folder = free_port(), bench.folder / PEER
    folder.mkdir()
    listens = ("--address", HOST, "--port", str(port), "--path", str(folder))
    target = Target(name=PEER, url=f"http://{HOST}:{port}/inference", body=_json(NUMBERS), headers=JSON)
    async with process(
        (str(own / "bin" / "python"), str(SERVER), *listens),
        cores=(bench.core,),
        log=bench.folder / "mosec.log",
        ready=lambda: answers(target),
    ) as pid:
        yield [dataclasses.replace(target, pid=pid)]


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


ROW = Row(name="local", title="task API to the local runtime, MLP, 64 in flight", goals=GOALS, measure=measure)
