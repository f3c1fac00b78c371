import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as triton

from local_runtime.__main__ import main
from tests.kit.wait import until, until_async

# Runs until the file `open` lies beside it; `entered` says that it runs.
GATED = """
import pathlib
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        here = pathlib.Path(__file__).parent
        (here / "entered").touch()
        while not (here / "open").exists():
            time.sleep(0.005)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
REQUEST = {"inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as left:
        main(["serve", "--help"])
    assert left.value.code == 0
    assert "python -m local_runtime serve --repository triton_models" in capsys.readouterr().out


def test_no_such_repository_is_said_in_one_line(tmp_path, capsys):
    names = ["--model-repository", str(tmp_path / "absent"), "--exit-timeout-secs", "3"]  # Triton's
    for repository in (["--repository", str(tmp_path / "absent")], names):
        assert main(["serve", *repository, "--grpc", f"unix:{tmp_path}/s"]) == 78
    assert capsys.readouterr().err.strip().endswith("is not a folder")


def test_a_port_in_use_is_said_and_ends_the_start(repository, write_python, capsys):
    write_python("double")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["serve", "--repository", str(repository), "--http", address, "--grpc", "none"]) == 78
    assert f"cannot listen on {address}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--http", "none", "--grpc", "none"], "leave nothing to serve"),
        (["--http", "8100"], "must be HOST:PORT or none, not '8100'"),
        (["--http", "localhost:99999"], "must be HOST:PORT or none"),
        (["--threads", "0"], "must be at least 1, not 0"),
        (["--cache-size-bytes", "-1"], "must be at least 0, not -1"),
        (["--model-control-mode", "auto"], "--model-control-mode"),
    ],
)
def test_options_that_cannot_be_are_said(tmp_path, capsys, arguments, text):
    with pytest.raises(SystemExit) as left:
        main(["serve", "--repository", str(tmp_path), *arguments])
    assert left.value.code == 2
    assert text in capsys.readouterr().err


@contextlib.asynccontextmanager
async def started(repository, *arguments):
    """The command in a process of its own, serving: the process, its start line, a client of its HTTP server."""
    command = ["-m", "local_runtime", "serve", "--repository", str(repository), "--http", "127.0.0.1:0", *arguments]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stderr=asyncio.subprocess.PIPE, env={**os.environ}
    )
    try:
        line = b""
        while b"local_runtime: serving" not in line:
            line = await asyncio.wait_for(process.stderr.readline(), 60)
            assert line
        address = re.search(r"http ([\d.]+:\d+)", line.decode())[1]
        async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=60) as client:
            yield process, line.decode(), client
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process):
    rest = (await asyncio.wait_for(process.stderr.read(), 60)).decode()
    return await process.wait(), rest


async def test_the_log_says_what_failed_and_why_in_one_line(repository, write_config):
    write_config("broken", "nonsense")
    async with started(repository, "--grpc", "none", "--model-control-mode", "explicit") as (process, _, client):
        assert (await client.post("/v2/repository/models/broken/load")).is_error
        process.send_signal(signal.SIGTERM)
        _, rest = await ended(process)
    assert "ERROR" in rest.splitlines()[0]
    assert "failed to load model model='broken' reason=" in rest.splitlines()[0]


async def test_serves_both_protocols_until_sigterm(repository, tmp_path, write_python):
    write_python("double")
    write_python("broken", "1 / 0")
    async with started(repository, "--grpc", f"unix:{tmp_path}/s") as (process, line, client):
        async with triton.InferenceServerClient(f"unix:{tmp_path}/s") as grpc_client:
            assert await grpc_client.is_model_ready("double")
        told = await client.post("/v2/models/double/infer", json=REQUEST)
        assert told.json()["outputs"][0]["data"] == [2.0, 4.0]
        assert 'nv_inference_count{model="double",version="1"} 1' in (await client.get("/metrics")).text
        # The client's connection stays open and idle: it must not hold up the end.
        process.send_signal(signal.SIGTERM)
        status, rest = await ended(process)
    assert status == 0
    assert f"serving 1 model on grpc unix:{tmp_path}/s and http 127.0.0.1:" in line
    assert line.strip().endswith(": double/1; not served: broken")
    assert rest.strip().endswith("local_runtime: stopped")


async def test_a_stop_finishes_what_runs_and_what_waits_on_both_servers(repository, tmp_path, write_python):
    model = write_python("gated", GATED) / "1"
    async with started(repository, "--grpc", f"unix:{tmp_path}/s") as (process, _, client):
        running = asyncio.create_task(client.post("/v2/models/gated/infer", json=REQUEST))

        async def three_wait():
            return 'pending_request_count{model="gated",version="1"} 3' in (await client.get("/metrics")).text

        async with triton.InferenceServerClient(f"unix:{tmp_path}/s") as grpc_client:
            await until((model / "entered").exists, timeout_s=60)
            made = triton.InferInput("X", [1, 2], "FP32").set_data_from_numpy(np.ones((1, 2), np.float32))
            waiting = [asyncio.create_task(grpc_client.infer("gated", [made])) for _ in range(3)]
            await until_async(three_wait, timeout_s=60)
            process.send_signal(signal.SIGTERM)
            assert b"stopping" in await process.stderr.readline()
            (model / "open").touch()
            assert (await running).status_code == 200
            assert len(await asyncio.gather(*waiting)) == 3
        assert (await ended(process))[0] == 0


async def test_a_second_signal_ends_it_at_once(repository, write_python):
    model = write_python("gated", GATED) / "1"
    async with started(repository, "--grpc", "none") as (process, _, client):
        running = asyncio.create_task(client.post("/v2/models/gated/infer", json=REQUEST))
        async with asyncio.timeout(60):
            await until((model / "entered").exists, timeout_s=60)
            process.send_signal(signal.SIGTERM)
            assert b"stopping" in await process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 128 + signal.SIGTERM
        with contextlib.suppress(httpx.HTTPError):
            await running


async def test_explicit_control_loads_by_request(repository, write_python):
    write_python("double")
    write_python("other")
    options = ("--grpc", "none", "--model-control-mode", "explicit", "--load-model", "other")
    async with started(repository, *options) as (process, line, client):
        assert "serving 1 model on" in line
        before = await client.get("/v2/models/double/ready")
        loaded = await client.post("/v2/repository/models/double/load")
        index = await client.post("/v2/repository/index", content=json.dumps({"ready": True}))
        unloaded = await client.post("/v2/repository/models/other/unload")
        outside = [
            await client.post("/v2/repository/models/..%2Fmodels%2Fdouble/load"),
            await client.post(
                "/v2/repository/models/new/load", json={"parameters": {"config": "{}", "file:../x": "eA=="}}
            ),
        ]
        process.send_signal(signal.SIGINT)
        status, _ = await ended(process)
    assert [before.status_code, loaded.status_code, unloaded.status_code, status] == [503, 200, 200, 0]
    assert all(told.status_code >= 400 for told in outside)
    assert not (repository / "x").exists()
    assert {entry["name"] for entry in index.json()} == {"double", "other"}


async def test_stops_when_standard_input_ends(repository, write_python):
    write_python("double")
    command = ["-m", "local_runtime", "serve", "--repository", str(repository), "--grpc", "none"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        *("--http", "127.0.0.1:0", "--until-stdin-closes"),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert b"serving" in await asyncio.wait_for(process.stderr.readline(), 60)
    process.stdin.close()
    assert (await ended(process))[0] == 0


def test_a_second_repository_is_refused_rather_than_taken_for_the_first(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--repository", "a", "--model-repository", "b"])
    assert "--model-repository can be given once" in capsys.readouterr().err


async def test_a_stop_waits_neither_for_a_stuck_model_nor_for_threads_it_left_behind(repository, write_python):
    code = """
    import threading

    class TritonPythonModel:
        def initialize(self, args):
            threading.Thread(target=threading.Event().wait).start()

        def execute(self, requests):
            threading.Event().wait()
    """
    write_python("stuck", code)
    async with started(repository, "--grpc", "none", "--exit-timeout-s", "1") as (process, _, client):
        asked = asyncio.create_task(client.post("/v2/models/stuck/infer", json=REQUEST))
        await asyncio.sleep(0.1)  # on its way; whether it has arrived changes nothing
        process.send_signal(signal.SIGTERM)
        status, rest = await ended(process)
        await asyncio.gather(asked, return_exceptions=True)
    assert status == 0
    assert rest.strip().endswith("local_runtime: stopped")


async def test_a_signal_during_a_load_that_does_not_end_stops_the_process(repository, tmp_path, write_python):
    begun = tmp_path / "begun"
    write_python("slow", f"import pathlib, threading\npathlib.Path({str(begun)!r}).touch()\nthreading.Event().wait()")
    command = ["-m", "local_runtime", "serve", "--repository", str(repository), "--http", "none"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--grpc", f"unix:{tmp_path}/s", stderr=asyncio.subprocess.PIPE
    )
    await until(begun.exists, timeout_s=60)
    process.send_signal(signal.SIGINT)
    status, _ = await ended(process)
    assert status == 128 + signal.SIGINT


@pytest.mark.parametrize("stdin", ["/dev/null", "/etc/hostname"])
async def test_watching_a_standard_input_that_never_ends_is_refused(repository, stdin):
    command = ["-m", "local_runtime", "serve", "--repository", str(repository), "--until-stdin-closes"]
    with open(stdin) as given:  # noqa: ASYNC230, PTH123 - opened once, for the process
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=given, stderr=asyncio.subprocess.PIPE
        )
        status, rest = await ended(process)
    assert (status, "needs a pipe" in rest) == (78, True)
