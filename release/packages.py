"""What the gateway runs with: its dependencies and theirs, as they are installed here, and nothing else."""

import os
import subprocess
import sys
import tomllib
import venv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[1]
PROJECT: Final = "hybrid-inference-gateway"
EXTRAS: Final = ("onnx", "otel")  # those of the image `gateway` (deploy/docker/gateway.Dockerfile)
# What a wheel is built from; the rest of the checkout could only get into it by mistake.
SOURCES: Final = ("gateway", "local_runtime", "pyproject.toml", "README.md", "LICENSE")


class ReleaseError(Exception):
    """Why there is no release: lines for a person."""


def version() -> str:
    """The version that pyproject.toml says."""
    return str(_project()["version"])


def _project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def declared() -> list[Requirement]:
    """What pyproject.toml asks for: the dependencies, and those of `EXTRAS`."""
    project = _project()
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]  # type: ignore[index, misc] # a TOML file's values; a wrong one fails here
    return [Requirement(line) for line in lines]


def closure(wanted: Iterable[Requirement]) -> list[Distribution]:
    """The installed distributions that `wanted` need on this machine, sorted by name.

    Raises `ReleaseError` for one that is not installed or not of a version that is asked for.
    """
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = list(wanted)
    while waiting:
        requirement = waiting.pop()
        one = _installed(requirement)
        name = canonicalize_name(requirement.name)
        found[name] = one
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += needs(one, extra)
    return [found[name] for name in sorted(found)]


def needs(one: Distribution, extra: str = "") -> Iterator[Requirement]:
    """What a distribution asks for on this machine, for itself (`extra` is empty) or for one of its extras."""
    for line in one.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _installed(requirement: Requirement) -> Distribution:
    try:
        one = distribution(requirement.name)
    except PackageNotFoundError:
        raise ReleaseError(f"{requirement} is not installed here: run `make setup`.") from None
    if not requirement.specifier.contains(one.version, prereleases=True):
        raise ReleaseError(f"{requirement} is asked for, and {one.version} is installed: run `make setup`.")
    return one


def pins(packages: Iterable[Distribution]) -> str:
    """The packages as a constraints file. torch and its like stand without their build (`+cpu`): any will do."""
    return "".join(f"{one.name}=={one.version.partition('+')[0]}\n" for one in packages)


def lay_out(folder: Path, packages: Iterable[Distribution], wheel: Path) -> Path:
    """Make a virtual environment of exactly `packages` and the wheel; returns its interpreter.

    Nothing is fetched and nothing but the wheel is copied: the packages are links to the installed ones. So it is as
    good as an installation for running the gateway and for reading metadata, and made in a second or two.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python*/site-packages"))
    shared = _shared()
    for one in packages:
        for path in _parts(one, shared):
            target = site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(_home(one) / path)
    pip("install", "--no-deps", "--no-index", str(wheel), python=python)
    return python


def _shared() -> frozenset[str]:
    """Folders here in which more than one distribution has files: `google`, `opentelemetry`, `__pycache__`."""
    owners = Counter(top for one in distributions() for top in {file.parts[0] for file in one.files or ()})
    return frozenset(top for top, count in owners.items() if count > 1)


def _parts(one: Distribution, shared: frozenset[str]) -> set[Path]:
    """The paths to link, below the packages' folder: whole folders where they are the distribution's alone."""
    files = [Path(file) for file in one.files or () if file.parts[0] != ".." and (_home(one) / file).exists()]
    return {file if file.parts[0] in shared else Path(file.parts[0]) for file in files}


def _home(one: Distribution) -> Path:
    return Path(str(one.locate_file(""))).absolute()


def pip(*args: str, python: Path) -> None:
    """Let this environment's pip work on another environment."""
    run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python), *args])


def run(command: Sequence[str], *, environ: dict[str, str] | None = None) -> str:
    """Run a program to its end; returns what it printed. Raises `ReleaseError` with its words where it failed."""
    # Where PYTHONPATH leads to a checkout, that would stand in for the wheel.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**inherited, **(environ or {})})  # noqa: S603 - our own commands
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
