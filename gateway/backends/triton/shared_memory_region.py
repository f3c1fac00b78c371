"""One piece of memory that a server on this host can map by name, and whose names tell who made them.

A name is `gateway-HOST-PID-START-NONCE`: HOST stands for this boot and pid namespace, PID and START (in clock ticks
since boot) for the process. So whoever comes later knows what a dead process has left behind. The nonce has 64 bits:
a name cannot be guessed, and no two are equal.
"""

import contextlib
import hashlib
import mmap
import os
import secrets
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import numpy as np

ALIGNMENT: Final = 64  # bytes: a cache line, and what vector instructions like best

_SHM: Final = Path("/dev/shm")  # noqa: S108 - not a temporary file: where shm_open(3) looks
_PROC: Final = Path("/proc")
_STATE_FIELD, _START_FIELD = 0, 19  # of /proc/PID/stat, counted from after the command's name: proc(5)
_KEEP_FREE: Final = 2  # of /dev/shm, one part in so many is left to others: Triton's own models need it


class Region:
    """Memory of `size` bytes under a name of its own, readable by this user alone.

    Raises OSError where it cannot be had: all of it is allocated at once, because touching memory that a full tmpfs
    cannot give kills the process.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        handle = os.open(_SHM / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            self._memory = mmap.mmap(handle, size)
        except OSError:
            self.unlink()
            raise
        finally:
            os.close(handle)

    def unlink(self) -> None:
        """Take the name away. Who has mapped the memory keeps it; it goes with its last user, however that ends."""
        (_SHM / self.name).unlink(missing_ok=True)

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """Copy `content` in."""
        self._memory[offset : offset + len(content)] = content

    def clear(self, offset: int, size: int) -> None:
        """Overwrite with zeros; 0.5 ms for 16 MiB."""
        np.frombuffer(self._memory, np.uint8, size, offset).fill(0)

    def read(self, offset: int, size: int) -> bytes:
        """A copy."""
        return self._memory[offset : offset + size]

    def close(self) -> None:
        """Let go of the memory here; the server keeps what it has mapped."""
        self._memory.close()


def new_name() -> str:
    """A name that no other region has or had."""
    return f"{_host()}-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(8)}"


def abandoned(names: Iterable[str]) -> set[str]:
    """Those whose makers lived on this host and are dead."""
    mine = _host() + "-"
    return {name for name in names if name.startswith(mine) and not _is_alive(name.removeprefix(mine))}


def unlink_abandoned() -> None:
    """Remove the files of processes that were killed between making and unlinking one."""
    for name in abandoned(entry.name for entry in _SHM.glob("gateway-*")):
        with contextlib.suppress(OSError):
            (_SHM / name).unlink(missing_ok=True)


def room() -> int:
    """Bytes of shared memory that may be taken now: a half of all is left to others."""
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return 0
    return max(0, (found.f_bavail - found.f_blocks // _KEEP_FREE) * found.f_frsize)


def is_same_host(address: str) -> bool:
    """Whether `address` (`HOST:PORT` or `unix:/PATH`) leads to this host, as far as that shows without asking anyone.

    Names other than localhost are not looked up. A container's published port looks like this host and is not: there
    the server refuses to register what it cannot see.
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        ip = ip_address(host)
        family = socket.AF_INET if ip.version == 4 else socket.AF_INET6  # noqa: PLR2004 - IP's own version numbers
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # succeeds for the host's own addresses alone; sends nothing
    except (ValueError, OSError):
        return False
    return not ip.is_unspecified


def _host() -> str:
    """This boot and this pid namespace: within both, a pid and its start name one process."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_bytes()
    pids = (_PROC / "self/ns/pid").readlink()
    return "gateway-" + hashlib.blake2s(boot + bytes(pids), digest_size=6).hexdigest()


def _is_alive(rest: str) -> bool:
    """Whether the maker of `PID-START-NONCE` lives; a name of another form is nobody's business."""
    parts = rest.split("-")
    if len(parts) != 3 or not (parts[0].isdigit() and parts[1].isdigit()):  # noqa: PLR2004 - the parts named above
        return True
    return _started(int(parts[0])) == int(parts[1])


def _started(pid: int) -> int | None:
    """When the process with that pid started, in clock ticks since boot; None where it is no more."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return None if fields[_STATE_FIELD] in {"Z", "X"} else int(fields[_START_FIELD])
