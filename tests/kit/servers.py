"""The two servers that read the same model repository, each as a process with an empty repository of its own.

`triton` is NVIDIA's out of the wheel in .venv-triton, `local` is `python -m local_runtime serve`; both with explicit
model control, HTTP and gRPC on free ports of the loopback address.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway.stack import leftovers, ports, triton

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("triton", "local")
START_S = 60
STOP_S = 20


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server. `http` and `grpc` are HOST:PORT, `log` is what it has written so far."""

    name: str
    repository: Path
    http: str
    grpc: str
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def add_model(self, name: str, *, config: str, model: Path | str) -> Path:
        """Write a Python model's folder (not loaded yet); `model` is a file to copy, or the source text."""
        folder = self.repository / name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(config)
        (folder / "1" / "model.py").write_text(model if isinstance(model, str) else model.read_text())
        return folder


@contextlib.contextmanager
def running(name: str, folder: Path) -> Iterator[Server]:
    """Start the server called `name` (one of TARGETS) with its files under `folder`; stop it at the end."""
    repository = folder / "repository"
    repository.mkdir(parents=True)
    free = ports.free_ports()
    run_id = f"parity{os.getpid()}{free.triton_http}"
    command, environ = _triton(repository, folder, free, run_id) if name == "triton" else _local(repository, free)
    server = Server(
        name=name,
        repository=repository,
        http=f"{ports.HOST}:{free.triton_http}",
        grpc=f"{ports.HOST}:{free.triton_grpc}",
        log_file=folder / "server.log",
    )
    with server.log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=ROOT)
    try:
        _wait_ready(server, process)
        yield server
    finally:
        status = _stop(process)
        leftovers.remove_shared_memory(run_id)
    assert status == 0, f"{name} ended with status {status}:\n{server.log[-4000:]}"


def _triton(repository: Path, folder: Path, free: ports.Ports, run_id: str) -> tuple[tuple[str, ...], dict[str, str]]:
    found = None if triton.unsupported() else triton.locate(ROOT / ".venv-triton")
    assert found is not None, f"no real Triton here (run `make setup`): {triton.unsupported() or 'not installed'}"
    assert not triton.fault(found), triton.fault(found)
    triton.assemble_backends(found, extra=ROOT / "deploy/triton/backends", target=folder / "triton")
    command = triton.command(found, repository=repository, target=folder / "triton", ports=free, run_id=run_id)
    return (*command, "--model-load-thread-count=8"), triton.environment(found, os.environ)


def _local(repository: Path, free: ports.Ports) -> tuple[tuple[str, ...], dict[str, str]]:
    command = (
        *(sys.executable, "-m", "local_runtime", "serve", "--repository", str(repository)),
        *("--http", f"{ports.HOST}:{free.triton_http}", "--grpc", f"{ports.HOST}:{free.triton_grpc}"),
        *("--model-control-mode", "explicit"),
    )
    return command, dict(os.environ)


def _wait_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://{server.http}/v2/health/ready", timeout=5).close()
            return
        time.sleep(0.05)
    raise AssertionError(f"{server.name} did not start:\n{server.log[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def copy_model(server: Server, folder: Path) -> None:
    """Copy a whole model folder into the repository (not loaded yet)."""
    shutil.copytree(folder, server.repository / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
