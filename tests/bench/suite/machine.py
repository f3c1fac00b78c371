"""Where and with what it was measured."""

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from tests.bench.suite.peers import PEERS, installed
from tests.kit.redis import binary

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = ("torch", "numpy", "uvicorn", "uvloop", "httptools", "redis", "grpcio", "tritonclient")


def described(peers: Path) -> dict[str, str]:
    """What has to be the same for two reports to be compared."""
    of_peers = [f"{name} {peer.version}" for name, peer in PEERS.items() if installed(peers, name)]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_cpu()}, {_memory_gib():.0f} GiB",
        "system": f"Linux {platform.release()}, {_distribution()}",
        "python": platform.python_version(),
        "libraries": ", ".join(f"{name} {_version(name)}" for name in LIBRARIES),
        "servers": "; ".join(filter(None, (_said("nginx", "-v"), _said("wrk", "-v"), _redis(), _triton()))),
        "peers": ", ".join(of_peers) or "none installed",
    }


def revision() -> str:
    """The checkout's commit; `+` where files differ from it."""
    commit = _said("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "no repository"
    is_changed = bool(_said("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"))
    return f"{commit}{'+' if is_changed else ''}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "an unknown CPU"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _distribution() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return "an unknown distribution"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _said(*command: str) -> str:
    """The first line that a command says of itself, on either stream; empty where there is no such command."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return _first_line((done.stdout, done.stderr))


def _first_line(texts: Sequence[str]) -> str:
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    return lines[0].partition("[")[0].partition("Copyright")[0].strip() if lines else ""


def _redis() -> str:
    done = subprocess.run([binary(), "--version"], capture_output=True, text=True, check=False)
    return " ".join(done.stdout.split()[:3])


def _triton() -> str:
    found = sorted((ROOT / ".venv-triton").glob("lib/python3*/site-packages/nvidia_pytriton-*.dist-info"))
    return f"Triton of {found[0].name.removesuffix('.dist-info')}" if found else ""
