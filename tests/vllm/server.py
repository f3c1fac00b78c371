"""The two engines of these tests, each as a process of its own: real vLLM on the CPU, and llama.cpp's server.

Both serve SmolLM2-135M-Instruct under the name `smollm2`. vLLM's log lies in the folder that it is given.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.kit.serving import free_port
from tests.vllm.environment import MODEL, ROOT, VLLM, fault
from tests.vllm.metrics import metric

NAME = "smollm2"
CONTEXT = 1024
SLOTS = 4  # requests that either engine decodes together; more of them wait in its queue
START_S = 300  # 30 s on two idle cores
STOP_S = 30
ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # One thread, and not pinned: the tests, the gateway and the other engine share the cores.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
OPTIONS = (
    *("--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)),
    *("--max-num-seqs", str(SLOTS), "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


@dataclass
class VllmServer:
    """`vllm serve` on a free port of the loopback address, the leader of a process group of its own.

    It may be killed and started again, on the same port.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "vllm.log"

    def start(self) -> None:
        """Return when it answers; at once where it runs already."""
        if self.process is not None and self.process.poll() is None:
            return
        self.kill()  # what is left of one that ended by itself
        assert not fault(), fault()
        environ = {
            **os.environ,
            **ENVIRON,
            "PATH": f"{VLLM.path / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(self.folder),  # its sockets
            "VLLM_CACHE_ROOT": str(VLLM.path / "cache"),
        }
        command = (VLLM.path / "bin" / "vllm", "serve", MODEL, "--host", "127.0.0.1", "--port", str(self.port))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*map(str, command), *OPTIONS],
                stdout=log,
                stderr=log,
                env=environ,
                cwd=self.folder,
                start_new_session=True,
            )
        wait_ready(self.url, self.process, self.log)

    def kill(self) -> None:
        """SIGKILL to every process of it, as the kernel does when memory runs out."""
        if self.process is None:
            return
        group = self.process.pid
        for pid in _members(group):
            # Python's resource tracker lives on for the moment in which it unlinks the others' shared memory.
            if not _is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + STOP_S
        while _members(group) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in _members(group):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()  # last: until it is done, no other process can have this number
        self.process = None

    def stop(self) -> None:
        """SIGTERM, and after a while SIGKILL to what is left."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            deadline = time.monotonic() + STOP_S
            while len(_members(self.process.pid)) and time.monotonic() < deadline:
                time.sleep(0.05)
        self.kill()

    async def running(self) -> float:
        """The requests that it decodes now."""
        return await metric(self.url, "vllm:num_requests_running")

    async def waiting(self) -> float:
        """The requests in its queue."""
        return await metric(self.url, "vllm:num_requests_waiting")


@contextlib.contextmanager
def llama(folder: Path) -> Iterator[str]:
    """llama.cpp's server; gives its URL."""
    port, log_file = free_port(), folder / "llama.log"
    command = (sys.executable, "-m", "gateway.stack.llm_server", "--port", str(port))
    options = ("--threads", "1", "--slots", str(SLOTS))
    with log_file.open("wb") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, cwd=ROOT)
    try:
        wait_ready(f"http://127.0.0.1:{port}", process, log_file)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when `/health` answers 200; fails with the end of the log when the process ends, or in `START_S`."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise AssertionError(f"{process.args} did not start:\n{log.read_text(errors='replace')[-4000:]}")


def _members(group: int) -> Sequence[int]:
    """The living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _parent, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
