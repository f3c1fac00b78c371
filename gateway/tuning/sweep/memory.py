"""Resident memory of processes on this machine, out of /proc (Linux)."""

import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_LISTENS: Final = "0A"  # TCP_LISTEN, as /proc/net/tcp writes it


def resident_bytes(pid: int) -> int | None:
    """Of the process and all its children, what is shared counted once for each; None where it is not there."""
    children: dict[int, list[int]] = {}
    for one in _pids():
        try:
            parent = int((_PROC / str(one) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(one)
    pages, left = 0, [pid]
    while left:
        one = left.pop()
        left += children.get(one, ())
        try:
            pages += int((_PROC / str(one) / "statm").read_text().split()[1])
        except OSError:
            if one == pid:
                return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def listener(host: str, port: int) -> int | None:
    """The process that listens on a port of this machine; None where none can be seen, or it is another machine."""
    try:
        if host != "localhost" and not ipaddress.ip_address(host.strip("[]")).is_loopback:
            return None
    except ValueError:
        return None
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for pid in _pids():
        try:
            if any(str(entry.readlink()) in sockets for entry in (_PROC / str(pid) / "fd").iterdir()):
                return pid
        except OSError:
            continue  # another user's, or it has ended
    return None


def _pids() -> Iterator[int]:
    yield from (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())


def _listening(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            if columns[3] == _LISTENS and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]
