"""`gateway sweep` on real Triton: whatever happens, the server ends as it was found."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson
from tritonclient import grpc as client
from tritonclient.utils import InferenceServerException

from gateway.tuning.curves import parse_curve
from gateway.tuning.sweep import local, triton
from gateway.tuning.sweep.settings import SweepError, found_setting
from local_runtime.bench import models
from tests.kit.servers import ROOT, running
from tests.kit.serving import free_port
from tests.kit.wait import until

ECHO = """import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]) for x in inputs]
"""
CONFIG = """backend: "python" max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
SHORT = ("--duration", "50ms", "--max-batch-size", "1,4", "--delay-us", "0", "--concurrency", "4")
TWO = ("--duration", "50ms", "--max-batch-size", "4", "--delay-us", "0", "--count", "1", "--concurrency", "4")
ENDLESS = ("--duration", "60s", "--max-batch-size", "1,4", "--concurrency", "4")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running("triton", tmp_path_factory.mktemp("triton")) as server:
        server.add_model("seed", config=CONFIG, model=ECHO)
        server.add_model("other", config=CONFIG, model=ECHO)
        yield server


@pytest.fixture
def asked(server):
    with client.InferenceServerClient(server.grpc) as asked:
        asked.load_model("seed")
        yield asked
        asked.unload_model("seed")


def served(asked, model="seed"):
    return asked.get_model_config(model)


def command(server, *arguments, model="seed"):
    where = ("--triton", server.grpc, "--model", model)
    return [sys.executable, "-m", "gateway", "sweep", *where, *map(str, arguments)]


def swept(server, *arguments, model="seed"):
    return subprocess.run(
        command(server, *arguments, model=model), cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )


@contextlib.asynccontextmanager
async def sweeping(server, asked, log: Path, *arguments, model="seed"):
    """A sweep that has begun to change the model; it is killed at the end if nothing else has ended it."""
    with log.open("wb") as written:
        process = subprocess.Popen(  # noqa: ASYNC220 - as quick as any other start
            command(server, *arguments, model=model), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=written
        )
    try:
        await until(lambda: is_swept(asked, model), timeout_s=40)
        yield process
    finally:
        process.kill()
        process.wait()


def is_swept(asked, model="seed"):
    with contextlib.suppress(InferenceServerException):  # it is being loaded
        return "GATEWAY_SWEEP" in served(asked, model).config.parameters
    return False


def test_a_sweep_measures_triton_and_leaves_it_as_it_was(server, asked, tmp_path):
    before = served(asked)
    done = swept(server, *SHORT, "--count", "1,2", "--memory-gb", "100", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert served(asked) == before
    document = json.loads((tmp_path / "sweep.json").read_text())
    assert document["place"] == f"Triton at {server.grpc}"
    assert all(run["report"]["whole"]["qps"] > 0 for run in document["runs"])
    assert all(run["report"]["servers"][0]["executions"] > 0 for run in document["runs"])
    assert all(run["memory_bytes"] > 2**20 for run in document["runs"])
    curve = parse_curve(json.loads((tmp_path / "curve.json").read_text()))
    assert sorted(curve.compute_us) == [1, 4, 8]
    assert curve.overhead_us[-1] > 0
    assert "GATEWAY_SWEEP" not in (tmp_path / "config.pbtxt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_stopped_sweep_leaves_it_as_it_was_and_can_go_on(server, asked, tmp_path, number):
    before = served(asked)
    async with sweeping(server, asked, tmp_path / "log", *ENDLESS, "--output", tmp_path / "out") as process:
        process.send_signal(number)
        process.send_signal(number)  # an impatient one changes nothing
        assert await asyncio.to_thread(process.wait, 60) == 130
    assert served(asked) == before
    assert "go on with --resume" in (tmp_path / "log").read_text()


def test_a_model_that_was_not_loaded_is_not_loaded_afterwards(server, tmp_path):
    with client.InferenceServerClient(server.grpc) as asked:
        assert not asked.is_model_ready("seed")
        done = swept(server, *TWO, "--output", tmp_path)
        assert done.returncode == 0, done.stderr
        assert not asked.is_model_ready("seed")


def test_a_sweep_that_fails_leaves_it_as_it_was(server, asked, tmp_path):
    before = served(asked)
    done = swept(server, *SHORT, "--shape", "X:3", "--output", tmp_path)
    assert done.returncode == 1
    assert "seed: no answer to made-up inputs" in done.stderr
    assert served(asked) == before


def test_what_was_loaded_with_a_config_of_its_own_is_put_back_with_it(server, asked, tmp_path):
    own = {
        "name": "seed",
        "backend": "python",
        "max_batch_size": 6,
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    asked.load_model("seed", config=json.dumps(own))
    before = served(asked)
    assert before.config.max_batch_size == 6
    done = swept(server, *TWO, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert served(asked) == before


async def test_two_sweeps_at_once_are_refused_and_a_killed_one_can_be_put_back(server, asked, tmp_path):
    before = served(asked)
    async with sweeping(server, asked, tmp_path / "log", *ENDLESS, "--output", tmp_path / "one") as process:
        second = await asyncio.to_thread(swept, server, *SHORT, "--output", tmp_path / "two")
        assert second.returncode == 2
        assert f"'seed' is being swept by process {process.pid} on " in second.stderr
        other = await asyncio.to_thread(swept, server, *SHORT, "--output", tmp_path / "two", model="other")
        assert other.returncode == 2
        assert "'seed' is being swept by" in other.stderr
        process.kill()
        process.wait()
    assert is_swept(asked)
    done = await asyncio.to_thread(swept, server, "--restore")
    assert done.returncode == 0, done.stderr
    assert "seed: served as it was found" in done.stderr + done.stdout
    assert served(asked) == before
    again = await asyncio.to_thread(swept, server, "--restore")
    assert "no sweep has left anything" in again.stderr + again.stdout


async def test_the_next_sweep_puts_back_what_a_killed_one_on_this_machine_has_left(server, asked, tmp_path):
    before = served(asked)
    async with sweeping(server, asked, tmp_path / "log", *ENDLESS, "--output", tmp_path / "one") as process:
        process.kill()
        process.wait()
    assert is_swept(asked)
    done = await asyncio.to_thread(swept, server, *TWO, "--output", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert served(asked) == before


@pytest.mark.parametrize(
    ("arguments", "model", "words"),
    [
        ((), "absent", "--model absent: is not on"),
        (("--max-batch-size", "64"), "seed", "--max-batch-size 64: 'seed' takes 8 rows at most"),
        (("--shape", "Z:1"), "seed", "--shape Z: the model's inputs are X"),
    ],
)
def test_bad_options_are_refused_and_change_nothing(server, asked, tmp_path, arguments, model, words):
    before = served(asked)
    done = swept(server, "--output", tmp_path, *arguments, model=model)
    assert done.returncode == 2
    assert words in done.stderr
    assert served(asked) == before


async def test_a_server_that_is_not_in_explicit_mode_is_told(tmp_path):
    models.build(models.Builtin.MLP, tmp_path / "models", max_batch_size=8)
    http, grpc = free_port(), free_port()
    address = f"127.0.0.1:{grpc}"
    process = subprocess.Popen(  # noqa: ASYNC220 - the same
        [
            *(sys.executable, "-m", "local_runtime", "serve", "--repository", str(tmp_path / "models")),
            *("--http", f"127.0.0.1:{http}", "--grpc", address),
        ],
        cwd=ROOT,
    )
    try:
        with client.InferenceServerClient(address) as asked:

            def is_ready():
                with contextlib.suppress(InferenceServerException):
                    return asked.is_model_ready("seed")
                return False

            await until(is_ready, timeout_s=40)
        done = await asyncio.to_thread(
            subprocess.run,
            [
                sys.executable,
                "-m",
                "gateway",
                "sweep",
                "--triton",
                address,
                "--model",
                "seed",
                "--output",
                str(tmp_path),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert "models can be loaded here only with --model-control-mode=explicit" in done.stderr
    finally:
        process.terminate()
        process.wait()


async def test_of_two_that_began_at_once_one_gives_way_and_leaves_the_model_to_the_other(server, asked):
    async with triton.opened(server.grpc, "seed", {}) as first:
        await first.begin()
        mark = json.dumps({"host": "elsewhere", "pid": 1, "was_loaded": True, "found": "{}"})
        theirs = {**json.loads(MessageToJson(first.message, preserving_proto_field_name=True))}
        theirs["parameters"] = {triton.MARK: {"string_value": mark}}
        asked.load_model("seed", config=json.dumps(theirs))
        with pytest.raises(SweepError, match="another sweep of 'seed' began at the same time"):
            await first.load(found_setting(first.message))
    assert served(asked).config.parameters[triton.MARK].string_value == mark
    asked.load_model("seed")


SLEEPY = """import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        time.sleep(1)
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]) for x in inputs]
"""


async def test_one_in_this_process_that_is_stopped_waits_for_the_batch_under_way(tmp_path, caplog):
    (tmp_path / "sleepy" / "1").mkdir(parents=True)
    (tmp_path / "sleepy" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "sleepy" / "1" / "model.py").write_text(SLEEPY)
    async with local.opened(tmp_path, "sleepy", {}) as here:
        await here.load(found_setting(here.message))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(here.ask(), 0.2)
    assert "did not unload" not in caplog.text


async def test_a_server_that_dies_meanwhile_has_a_status_of_its_own_and_keeps_the_runs(tmp_path):
    models.build(models.Builtin.MLP, tmp_path / "models", max_batch_size=8)
    (name,) = (folder.name for folder in (tmp_path / "models").iterdir() if folder.is_dir())
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(  # noqa: ASYNC220 - as quick as any other start
        [
            *(sys.executable, "-m", "local_runtime", "serve", "--repository", str(tmp_path / "models")),
            *("--http", f"127.0.0.1:{free_port()}", "--grpc", address, "--model-control-mode", "explicit"),
        ],
        cwd=ROOT,
    )
    options = ("--triton", address, "--model", name, "--output", str(tmp_path / "out"), "--brute-force")
    runs = tmp_path / "out" / "runs.jsonl"
    sweep = None
    try:
        with client.InferenceServerClient(address) as asked:

            def is_live():
                with contextlib.suppress(InferenceServerException):
                    return asked.is_server_live()
                return False

            await until(is_live, timeout_s=40)
        sweep = subprocess.Popen(  # noqa: ASYNC220 - the same
            [sys.executable, "-m", "gateway", "sweep", *options, "--duration", "1s", "--concurrency", "4"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        await until(lambda: runs.is_file() and runs.read_text().count("\n") > 1, timeout_s=60)
        process.kill()
        _, said = await asyncio.to_thread(sweep.communicate, timeout=60)
        assert sweep.returncode == 3, said
        assert f"--triton {address}: " in said
        assert runs.read_text().count("\n") > 1
    finally:
        for one in filter(None, (sweep, process)):
            one.kill()
            one.wait()
