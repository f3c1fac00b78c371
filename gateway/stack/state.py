"""What the stack leaves on disk for others: `stack.json`, `pids.json`, the two secrets, and the lock.

`stack.json` exists only while the stack is ready: clients of the stack read it. `pids.json` exists from the
first process on: a later `gateway up` or `down` reads it to end what a killed supervisor left behind.
"""

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRIVATE_FILE = 0o600
PRIVATE_DIR = 0o700
_LOCK_TRIES = 4
_LOCK_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folder of one stack (`.run`): where each file lies."""

    path: Path

    @property
    def stack(self) -> Path:
        """`stack.json`."""
        return self.path / "stack.json"

    @property
    def pids(self) -> Path:
        """`pids.json`."""
        return self.path / "pids.json"

    @property
    def logs(self) -> Path:
        """The folder of the parts' logs."""
        return self.path / "logs"

    def log(self, part: str) -> Path:
        """The log of one part."""
        return self.logs / f"{part}.log"

    def create(self) -> None:
        """Make the folder, for the owner only: it holds a key and an admin token."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(PRIVATE_DIR)
        self.logs.mkdir(exist_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A process that can be recognised later: its pid and its start time in clock ticks since boot."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What `pids.json` says of a run: its processes, and the mark in the environment of each of them."""

    run_id: str
    processes: Mapping[str, Identity]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write atomically and for the owner only: a reader sees the old file, the new one, or none."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp: mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
        Path(name).replace(path)
    except BaseException:  # Ctrl-C too: no half-written file with a secret may stay behind
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None when there is no such file or it is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def secret(path: Path, prefix: str) -> str:
    """The secret kept in `path`, made at first use: the same key works after a restart."""
    with contextlib.suppress(OSError):
        kept = path.read_text(encoding="ascii").strip()
        if kept.startswith(prefix):
            path.chmod(PRIVATE_FILE)
            return kept
    made = prefix + secrets.token_urlsafe(24)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(made + "\n")
    return made


def write_pids(run: RunDir, left: Leftovers) -> None:
    """Record the processes of this run, so that they can be found if the supervisor is killed."""
    processes = {name: {"pid": identity.pid, "started": identity.started} for name, identity in left.processes.items()}
    write_json(run.pids, {"run_id": left.run_id, "processes": processes})


def read_pids(run: RunDir) -> Leftovers | None:
    """The processes recorded last; None when none are, or the record is damaged."""
    value = read_json(run.pids)
    if value is None:
        return None
    try:
        processes = {
            str(name): Identity(pid=int(one["pid"]), started=int(one["started"]))
            for name, one in value["processes"].items()
        }
        return Leftovers(run_id=str(value["run_id"]), processes=processes)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


class AlreadyRunningError(Exception):
    """Another supervisor holds this run directory."""


@contextlib.contextmanager
def lock(run: RunDir) -> Iterator[None]:
    """Hold the run directory. The kernel frees it when the holder dies, however it dies."""
    descriptor = os.open(run.path / "lock", os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
    try:
        _take(descriptor)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> None:
    """Lock, or raise `AlreadyRunningError`. It tries for a moment: `is_running` holds the lock for an instant."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_RETRY_S)
    raise AlreadyRunningError


def is_running(run: RunDir) -> bool:
    """Whether a supervisor holds this run directory now."""
    if not (run.path / "lock").exists():
        return False
    try:
        with lock(run):
            return False
    except AlreadyRunningError:
        return True
