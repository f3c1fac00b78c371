"""Other products to be measured beside, each in an environment of its own that is made when it is asked for.

`python -m tests.bench.suite.peers [NAME ...]` installs them into build/peers, or where BENCH_PEERS says.
Their versions are pinned: a report says which they were. Nothing of theirs is needed to run the gateway or its tests.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

MARK: Final = "installed.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A package of PyPI or of npm. `borrows`: it sees this project's packages, so both compute with the same torch."""

    kind: Literal["pip", "npm"]
    package: str
    version: str
    borrows: bool = False

    @property
    def requirement(self) -> str:
        """As its installer takes it."""
        return f"{self.package}{'==' if self.kind == 'pip' else '@'}{self.version}"


PEERS: Final = {
    "sglang-router": Peer(kind="pip", package="sglang-router", version="0.3.2"),
    "vllm-router": Peer(kind="pip", package="vllm-router", version="0.1.17"),
    "mosec": Peer(kind="pip", package="mosec", version="0.9.8", borrows=True),
    "portkey": Peer(kind="npm", package="@portkey-ai/gateway", version="1.15.2"),
    "litellm": Peer(kind="pip", package="litellm[proxy]", version="1.108.0"),
}
HOW: Final = "make bench-peers"
FOLDER: Final = Path(os.environ.get("BENCH_PEERS") or Path(__file__).resolve().parents[3] / "build" / "peers")


def installed(peers: Path, name: str) -> Path | None:
    """The folder of a peer's environment; None where it is not there, or there in another version."""
    mark = peers / name / MARK
    is_there = mark.exists() and mark.read_text() == PEERS[name].requirement
    return peers / name if is_there else None


def missing(name: str) -> str:
    """What to say where it is not there."""
    return f"{name} {PEERS[name].version} is not installed, and is left out: `{HOW}` ({HOW} ARGS={name} for it alone)"


def install(peers: Path, names: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Install what is not there yet; what failed, with the end of what was said."""
    failed = []
    for name in names:
        if installed(peers, name):
            say(f"{name}: {PEERS[name].requirement} is there")
            continue
        say(f"{name}: installing {PEERS[name].requirement} into {peers / name}")
        try:
            _install(peers / name, PEERS[name])
        except (subprocess.CalledProcessError, OSError) as error:
            output = getattr(error, "stderr", "") or str(error)
            failed.append(f"{name}: {output[-1500:]}")
    return failed


def _install(folder: Path, peer: Peer) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if peer.kind == "npm":
        if shutil.which("npm") is None:
            raise OSError("npm is needed (Debian: apt install nodejs npm)")
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), peer.requirement]
    else:
        venv.create(folder, with_pip=True)
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", peer.requirement]
    subprocess.run(command, check=True, capture_output=True, text=True)
    if peer.borrows:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = folder / "lib" / version / "site-packages"
        (own / "project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (folder / MARK).write_text(peer.requirement)


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(PEERS)
    if unknown := sorted(set(chosen) - set(PEERS)):
        raise SystemExit(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    if faults := install(FOLDER, chosen, print):
        raise SystemExit("\n".join(faults))
