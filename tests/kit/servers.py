"""The two servers that read the same model repository, each as a process with an empty repository of its own.

`triton` is NVIDIA's out of the wheel in .venv-triton, `local` is `python -m local_runtime serve`; both with explicit
model control, HTTP and gRPC on free ports of the loopback address. `gateway_to` puts a `gateway serve` before one.
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
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from gateway.stack import leftovers, ports, triton
from tests.kit.serving import KEY, free_port

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("triton", "local")
START_S = 60
STOP_S = 20
GATEWAY_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server. `http`, `grpc`, `metrics` are HOST:PORT, `log` is what it wrote; `key` opens its HTTP."""

    name: str
    repository: Path
    http: str
    grpc: str
    metrics: str
    log_file: Path
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def add_model(self, name: str, *, config: str, model: Path | str) -> Path:
        """Write a Python model's folder (not loaded yet); `model` is a file to copy, or the source text."""
        folder = self.repository / name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(config)
        (folder / "1" / "model.py").write_text(model if isinstance(model, str) else model.read_text())
        return folder


@contextlib.contextmanager
def running(name: str, folder: Path, *options: str) -> Iterator[Server]:
    """Start the server called `name` (one of TARGETS) with its files under `folder`; stop it at the end.

    `options` are more words of its command line.
    """
    repository = folder / "repository"
    repository.mkdir(parents=True)
    free = ports.free_ports()
    run_id = f"parity{os.getpid()}{free.triton_http}"
    command, environ = (
        triton_command(repository, folder, free, run_id) if name == "triton" else _local(repository, free)
    )
    server = Server(
        name=name,
        repository=repository,
        http=f"{ports.HOST}:{free.triton_http}",
        grpc=f"{ports.HOST}:{free.triton_grpc}",
        metrics=f"{ports.HOST}:{free.triton_metrics if name == 'triton' else free.triton_http}",
        log_file=folder / "server.log",
    )
    with server.log_file.open("wb") as log:
        process = subprocess.Popen((*command, *options), stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=ROOT)
    try:
        wait_ready(server, process)
        yield server
    finally:
        status = stop(process)
        leftovers.remove_shared_memory(run_id)
    assert status == 0, f"{name} ended with status {status}:\n{server.log[-4000:]}"


@contextlib.contextmanager
def gateway_to(server: Server, folder: Path) -> Iterator[Server]:
    """A gateway before `server`: its HTTP is the gateway's, all else (what tests set models up by) the server's own."""
    port, ops_port = free_port(), free_port()
    config = {
        "server": {"port": port, "ops_port": ops_port, "max_body_bytes": GATEWAY_BODY_BYTES},
        "backends": {"triton": {"kind": "triton", "url": server.grpc}},
        "tasks": {"tensor": {"contract": "tensor", "timeout_ms": 60_000, "attempt_timeout_ms": 30_000}},
        "rules": [{"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}],
        "keys": [{"id": "test", "tenant": "test", "key_env": "SERVING_KEY", "admin": True}],
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(config))
    log_file = folder / "gateway.log"
    before = replace(server, name="gateway", http=f"{ports.HOST}:{port}", log_file=log_file, key=KEY)
    with before.log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "--config", str(path)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SERVING_KEY": KEY},
            cwd=ROOT,
        )
    try:
        wait_ready(before, process)
        yield before
    finally:
        status = stop(process)
    assert status == 0, f"the gateway ended with status {status}:\n{before.log[-4000:]}"


def triton_command(
    repository: Path, folder: Path, free: ports.Ports, run_id: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The words of its command line, and its environment."""
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


def wait_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    """Return when it says that it is ready. Raises `AssertionError` with its log where it does not."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"http://{server.http}/v2/health/ready", timeout=5).close()
            return
        time.sleep(0.05)
    raise AssertionError(f"{server.name} did not start:\n{server.log[-4000:]}")


def stop(process: subprocess.Popen[bytes]) -> int:
    """SIGTERM, and SIGKILL `STOP_S` later; its exit status."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def copy_model(server: Server, folder: Path) -> None:
    """Copy a whole model folder into the repository (not loaded yet)."""
    shutil.copytree(folder, server.repository / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
