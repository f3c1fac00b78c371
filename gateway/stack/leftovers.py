"""Finding and ending what a killed supervisor left behind, and nothing else.

A recorded pid counts only while the process with that pid has the recorded start time: pids are used again.
Children of the parts (Triton's stubs) are found by the mark of their run in their environment.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from gateway.stack.state import Identity, Leftovers

MARK = "GATEWAY_STACK_RUN"
SHM_PREFIX = "gwstack"

_PROC = Path("/proc")
_SHM = Path("/dev/shm")  # noqa: S108 - not a temporary file: where Triton keeps its shared memory
_STATE_FIELD = 0  # fields of /proc/PID/stat counted from after the command's name, see proc(5)
_START_FIELD = 19
_POLL_S = 0.05


def identity(pid: int) -> Identity | None:
    """Who `pid` is now; None when there is no such process, or only its zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    if fields[_STATE_FIELD] in {"Z", "X"}:
        return None
    return Identity(pid=pid, started=int(fields[_START_FIELD]))


def survivors(left: Leftovers) -> list[Identity]:
    """The processes of that run which still live; the supervisor's own record is not among them."""
    found = {one.pid: one for name, one in left.processes.items() if name != "supervisor" and identity(one.pid) == one}
    mark = f"{MARK}={left.run_id}".encode()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) in found or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                one = identity(int(entry.name))
                if one is not None:
                    found[one.pid] = one
    return list(found.values())


def end(left: Leftovers, *, grace_s: float) -> int:
    """End the survivors of a run, SIGTERM first and SIGKILL after `grace_s`; says how many there were."""
    ended: set[int] = set()
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
        until = time.monotonic() + wait_s
        living = survivors(left)
        for one in living:
            ended.add(one.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, number)
        while any(identity(one.pid) == one for one in living) and time.monotonic() < until:
            time.sleep(_POLL_S)
    remove_shared_memory(left.run_id)
    return len(ended)


def remove_shared_memory(run_id: str) -> None:
    """Remove the shared memory of this run's Triton; a server that was killed leaves about 1 MB a model."""
    for region in _SHM.glob(f"{SHM_PREFIX}_{run_id}_*"):
        region.unlink(missing_ok=True)
