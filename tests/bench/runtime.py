"""The local runtime side by side with Mosec: JSON of 128 floats -> MLP 128-512-512-10 -> 10 floats, 64 in flight.

Both batch up to 32 and compute on one torch thread. Servers share core 0, wrk has the last core; runs take turns, and
medians are told.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from gateway.http_server import bind
from local_runtime.bench.models import NAME, Builtin, build
from local_runtime.bench.variants import Kind, Variant, config_text, configured
from local_runtime.repository.parsing import parse

MAX_BATCH_SIZE = 32
DELAY_US = 2000
IN_FLIGHT = 64
ROUNDS = 5
ROW = [round((number * 37 % 200) / 100 - 1, 4) for number in range(128)]
UNITS_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    name: str
    url: str
    body: bytes
    headers: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"content-type": "application/json"})


def against_mosec(seconds: float, mosec_python: str | None) -> Table | str:
    """The comparison, or one line that says what is missing for it."""
    wrk = shutil.which("wrk")
    if wrk is None:
        return "Mosec comparison skipped: there is no wrk (apt install wrk)"
    if not mosec_python or not Path(mosec_python).exists():
        return (
            "Mosec comparison skipped: give the Python of an environment that has it by --mosec-python or MOSEC_PYTHON "
            "(python -m venv E && E/bin/pip install mosec torch; then E/bin/python)"
        )
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        targets = [
            *stack.enter_context(ours(folder / "ours", cores[0])),
            stack.enter_context(mosec(folder / "mosec", mosec_python, cores[0])),
        ]
        return measure(targets, [wrk, f"-c{IN_FLIGHT}", f"-d{max(1, round(seconds))}s"], folder, cores[-1])


def measure(targets: Sequence[Target], wrk: list[str], folder: Path, core: int) -> Table:
    """Round by round, one target after the other."""
    runs: dict[str, list[tuple[float, float, float]]] = {target.name: [] for target in targets}
    for number in range(ROUNDS + 1):
        for target in targets:
            run = wrk_run(target, wrk, folder, core)
            if number:  # the first round warms up
                runs[target.name].append(run)
    table = Table("JSON, MLP, 64 in flight", "rps", "p50 ms", "p99 ms", "x Mosec")
    reference = statistics.median(rps for rps, _, _ in runs[targets[-1].name])
    for name, of_target in runs.items():
        rps, p50_ms, p99_ms = (statistics.median(column) for column in zip(*of_target, strict=True))
        table.add_row(name, f"{rps:,.0f}", f"{p50_ms:.2f}", f"{p99_ms:.2f}", f"{rps / reference:.2f}")
    return table


def wrk_run(target: Target, wrk: list[str], folder: Path, core: int) -> tuple[float, float, float]:
    """Requests per second, p50 and p99 in ms, as wrk tells them."""
    script = folder / "post.lua"
    headers = "".join(f"wrk.headers['{name}']='{value}'\n" for name, value in target.headers.items())
    body = "".join(f"\\{byte:03d}" for byte in target.body)
    script.write_text(f"wrk.method='POST'\n{headers}wrk.body='{body}'\n")
    command = ["taskset", "-c", str(core), *wrk, "-t1", "--latency", "-s", str(script), target.url]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in said or "Socket errors" in said:
        raise SystemExit(f"{target.name} failed under load:\n{said}")
    rps = float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1])
    p50_ms, p99_ms = (
        float(found[1]) * UNITS_MS[found[2]]
        for found in (re.search(rf"\b{percent}%\s+([\d.]+)(us|ms|s)", said) for percent in (50, 99))
    )
    return rps, p50_ms, p99_ms


@contextlib.contextmanager
def ours(folder: Path, core: int) -> Iterator[list[Target]]:
    """`local_runtime serve` with the model twice: batched as Mosec is, and adaptive."""
    build(Builtin.MLP, folder, max_batch_size=MAX_BATCH_SIZE)
    source = folder / NAME
    message = parse((source / "config.pbtxt").read_text(), folder_name=NAME).message
    message.parameters["INTRA_OP_THREAD_COUNT"].string_value = "1"
    names = {
        "mlp": Variant(kind=Kind.STATIC, max_batch_size=MAX_BATCH_SIZE, delay_us=DELAY_US),
        "mlp_adaptive": Variant(kind=Kind.ADAPTIVE, max_batch_size=MAX_BATCH_SIZE),
    }
    for name, variant in names.items():
        shutil.copytree(source / "1", folder / name / "1")
        config = configured(message, variant)
        config.name = name
        (folder / name / "config.pbtxt").write_text(config_text(config))
    shutil.rmtree(source)
    body = _json({"inputs": [{"name": "INPUT__0", "datatype": "FP32", "shape": [1, 128], "data": ROW}]})
    port = free_port()
    arguments = ("serve", "--repository", str(folder), "--http", f"127.0.0.1:{port}", "--grpc", "none")
    with served([sys.executable, "-m", "local_runtime", *arguments], core, f"http://127.0.0.1:{port}/v2/health/ready"):
        yield [
            Target(name=f"ours, {title}", url=f"http://127.0.0.1:{port}/v2/models/{name}/infer", body=body)
            for name, title in (("mlp", "delay 2 ms"), ("mlp_adaptive", "adaptive"))
        ]


@contextlib.contextmanager
def mosec(folder: Path, python: str, core: int) -> Iterator[Target]:
    """`mosec_server.py` in its own environment."""
    folder.mkdir()
    port = free_port()
    server = Path(__file__).parent / "mosec_server.py"
    command = [python, str(server), "--address", "127.0.0.1", "--port", str(port), "--path", str(folder)]
    with served(command, core, f"http://127.0.0.1:{port}/"):
        yield Target(name="Mosec", url=f"http://127.0.0.1:{port}/inference", body=_json(ROW))


@contextlib.contextmanager
def served(command: list[str], core: int, ready_url: str) -> Iterator[None]:
    """A server process on that core, from the first good answer on; stopped as a person would stop it."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(["taskset", "-c", str(core), *command], stdout=log, stderr=log)
        try:
            for _ in range(300):
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(ready_url, timeout=5).close()  # noqa: S310 - our own address
                    break
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"{command} ended:\n{log.read().decode()}")
                time.sleep(0.1)
            else:
                raise SystemExit(f"{command} was not ready in time")
            yield
        finally:
            process.terminate()
            process.wait(30)


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def free_port() -> int:
    with bind("127.0.0.1", 0) as free:
        return free.getsockname()[1]
