"""A real Triton that can be killed and started again on its ports: what `servers.running` does not allow."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gateway.stack import leftovers, ports
from gateway.stack.state import Leftovers
from tests.kit import servers


class Triton:
    """A server with a repository of its own, all of whose models it loads when it starts; explicit model control."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.repository = folder / "repository"
        self.repository.mkdir(parents=True)
        self._ports = ports.free_ports()
        self._run_id = f"pool{os.getpid()}{self._ports.triton_http}"
        self._process: subprocess.Popen[bytes] | None = None
        self.server = servers.Server(
            name="triton",
            repository=self.repository,
            http=f"{ports.HOST}:{self._ports.triton_http}",
            grpc=f"{ports.HOST}:{self._ports.triton_grpc}",
            metrics=f"{ports.HOST}:{self._ports.triton_metrics}",
            log_file=folder / "server.log",
        )

    def launch(self) -> None:
        """Start it and return at once."""
        command, environ = servers.triton_command(self.repository, self._folder, self._ports, self._run_id)
        environ[leftovers.MARK] = self._run_id
        with self.server.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=servers.ROOT
            )

    def wait_ready(self) -> None:
        """Return when its models are loaded."""
        assert self._process is not None
        servers.wait_ready(self.server, self._process)

    def kill(self) -> None:
        """kill -9 of the server and its models' processes."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        leftovers.end(Leftovers(run_id=self._run_id, processes={}), grace_s=0)

    def stop(self) -> None:
        """Tell it to end, as an operator would, and wait until it has."""
        assert self._process is not None
        servers.stop(self._process)
        leftovers.end(Leftovers(run_id=self._run_id, processes={}), grace_s=0)

    def hang(self) -> None:
        """Stop it in its tracks: connections stay open, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `hang`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill_model(self, model: str) -> None:
        """kill -9 of a model's processes alone."""
        pids = self.processes(model)
        assert pids, f"no process of the model '{model}'"
        for pid in pids:
            os.kill(pid, 9)

    def processes(self, model: str) -> list[int]:
        """The processes of a model's instances."""
        found = []
        for one in leftovers.survivors(Leftovers(run_id=self._run_id, processes={})):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{one.pid}/cmdline").read_bytes().split(b"\0")
                script = f"{self.repository}/{model}/".encode()
                if b"triton_python_backend_stub" in command[0] and any(script in part for part in command):
                    found.append(one.pid)
        return found


@contextlib.contextmanager
def tritons(folder: Path, count: int, models: Iterator[tuple[str, str, str]]) -> Iterator[list[Triton]]:
    """So many servers, each with all `models`: name, config and model file."""
    started = [Triton(folder / f"triton{number}") for number in range(count)]
    for name, config, source in models:
        for one in started:
            one.server.add_model(name, config=config, model=source)
    try:
        for one in started:
            one.launch()
        for one in started:
            one.wait_ready()
        yield started
    finally:
        for one in started:
            one.kill()
