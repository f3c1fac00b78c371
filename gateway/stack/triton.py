"""NVIDIA Triton out of the `nvidia-pytriton` wheel: where it is, whether it can run, and how.

The wheel carries the server, its Python backend and one stub per Python version. Our repository also has
models of the platform `pytorch_libtorch`; here a small Python-based backend (deploy/triton/backends) serves them.
Standard library only, like all that it imports: `make setup` runs it before anything is installed.
"""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.stack.leftovers import SHM_PREFIX
from gateway.stack.ports import HOST, Ports

EXIT_TIMEOUT_S = 5
# Measured on 2 cores: threads that spin while they wait for work cut the encoder's throughput from 400 to 30 texts a
# second as soon as anything else runs; freed memory that goes back to the system at once costs image batches 3x.
TUNING = {
    "OMP_WAIT_POLICY": "PASSIVE",
    # numpy's own threads are the same trap: a batch of speech_activity took 24 ms with them, 0.3 ms without.
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
MINIMUM_GLIBC = (2, 35)  # what the wheel's binaries were linked against

# Run by the interpreter of .venv-triton: where its own libpython is, and whether the loader finds one anyway.
_ASK_INTERPRETER = """
import ctypes, json, os, sys, sysconfig
soname = sysconfig.get_config_var("INSTSONAME") or ""
if ".so" not in soname:
    soname = "libpython%d.%d.so.1.0" % sys.version_info[:2]
folders = [sysconfig.get_config_var("LIBDIR") or "", os.path.join(sys.base_prefix, "lib")]
folder = next((f for f in folders if os.path.exists(os.path.join(f, soname))), None)
try:
    ctypes.CDLL(soname)
    loads = True
except OSError:
    loads = False
version = "%d.%d" % sys.version_info[:2]
print(json.dumps({"version": version, "soname": soname, "folder": folder, "loads": loads}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonServer:
    """An installed Triton and the interpreter that its stubs run on.

    `libpython_folder` is the folder of that interpreter's libpython, None where there is none;
    `libpython_loads` says whether the system's loader finds one without help.
    """

    venv: Path
    site_packages: Path
    python_version: str
    libpython: str
    libpython_folder: Path | None
    libpython_loads: bool

    @property
    def folder(self) -> Path:
        """The folder of the server inside the wheel."""
        return self.site_packages / "pytriton" / "tritonserver"

    @property
    def stub(self) -> Path:
        """The stub process for this Python version; it may not exist."""
        return self.folder / "python_backend_stubs" / self.python_version / "triton_python_backend_stub"


def unsupported() -> str:
    """Why the wheel cannot run on this machine, empty where it can."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return f"it needs Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    name, version = platform.libc_ver()
    found = tuple(int(number) for number in version.split(".")[:2] if number.isdigit())
    if name != "glibc" or found < MINIMUM_GLIBC:
        wanted = ".".join(map(str, MINIMUM_GLIBC))
        return f"it needs glibc {wanted} or newer, this is {name or 'another C library'} {version}".rstrip()
    return ""


def locate(venv: Path) -> TritonServer | None:
    """The server in `venv`; None when the environment or the wheel in it is not there."""
    site_packages = next(iter(sorted(venv.glob("lib/python3.*/site-packages"))), None)
    if site_packages is None or not (site_packages / "pytriton/tritonserver/bin/tritonserver").exists():
        return None
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter of our own environment
            [str(venv / "bin" / "python"), "-c", _ASK_INTERPRETER],
            capture_output=True,
            check=True,
            timeout=30,
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return TritonServer(
        venv=venv,
        site_packages=site_packages,
        python_version=answer["version"],
        libpython=answer["soname"],
        libpython_folder=Path(answer["folder"]) if answer["folder"] else None,
        libpython_loads=bool(answer["loads"]),
    )


def fault(server: TritonServer) -> str:
    """What is wrong with an installed Triton, and the way out, in one line; empty when nothing is."""
    if not server.stub.exists():
        return (
            f"Triton has no stub for Python {server.python_version}: remove .venv-triton and run "
            "`make setup PYTHON=python3.11`."
        )
    if server.libpython_folder is None and not server.libpython_loads:
        return (
            f"Triton's Python stub needs {server.libpython}: install it (Debian and Ubuntu: "
            f"`apt-get install libpython{server.python_version}`)."
        )
    return ""


def backend_directory(target: Path) -> Path:
    """Where `assemble_backends` puts the backends."""
    return target / "pytriton" / "tritonserver" / "backends"


def assemble_backends(server: TritonServer, *, extra: Path, target: Path) -> None:
    """Lay out the backends under `target`: the wheel's and ours.

    They are copies, since Triton refuses links that lead out of the folder; the depth is the wheel's own,
    since its run paths ($ORIGIN/../../../../nvidia_pytriton.libs) count on it.
    """
    backends = backend_directory(target)
    shutil.rmtree(target, ignore_errors=True)
    python = backends / "python"
    python.mkdir(parents=True)
    for source in (
        server.folder / "backends" / "python" / "libtriton_python.so",
        server.folder / "backends" / "python" / "triton_python_backend_utils.py",
        server.stub,
    ):
        shutil.copy2(source, python / source.name)
    if extra.is_dir():
        shutil.copytree(extra, backends, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "nvidia_pytriton.libs").symlink_to((server.site_packages / "nvidia_pytriton.libs").resolve())


def environment(server: TritonServer, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server: PATH alone decides which Python packages its stubs see."""
    env = {
        name: value
        for name, value in environ.items()
        if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH"}
    }
    for name, value in TUNING.items():
        env.setdefault(name, value)
    env["PATH"] = f"{server.venv / 'bin'}:{environ.get('PATH', '')}"
    if server.libpython_folder is not None:
        env["LD_LIBRARY_PATH"] = str(server.libpython_folder)
    return env


def command(server: TritonServer, *, repository: Path, target: Path, ports: Ports, run_id: str) -> tuple[str, ...]:
    """The command line: all models loaded at start, and free to be loaded and unloaded later.

    A model that fails to load does not stop the server (`--exit-on-error`) and does not turn the readiness of
    the others red (`--strict-readiness`): the gateway asks per model.
    """
    return (
        str(server.folder / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backend_directory(target)}",
        f"--cache-directory={server.folder / 'caches'}",
        *(f"--{kind}-address={HOST}" for kind in ("http", "grpc", "metrics")),
        f"--http-port={ports.triton_http}",
        f"--grpc-port={ports.triton_grpc}",
        f"--metrics-port={ports.triton_metrics}",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        "--model-control-mode=explicit",
        # By name: `*` takes every folder for a model, Python's caches too, and fails on them.
        *(f"--load-model={config.parent.name}" for config in sorted(repository.glob("*/config.pbtxt"))),
        "--disable-auto-complete-config",
        "--exit-on-error=false",
        "--strict-readiness=false",
        # A prefix of our own, so that only our shared memory is removed when the server had to be killed.
        *(
            f"--backend-config={name},shm-region-prefix-name={SHM_PREFIX}_{run_id}_"
            for name in ("python", "pytorch", "onnxruntime")
        ),
    )
