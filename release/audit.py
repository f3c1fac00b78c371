"""`make audit`: is what is installed here what requirements/ pins, and are its files those that were installed?

    python -m release.audit

Nothing is fetched. Every package of both environments must be pinned, in that very version, and every file must have
the SHA-256 that its wheel gave for it (RECORD, PEP 376), byte code aside. Whether a pinned version has known
weaknesses, only an index of them can tell: `make audit` asks pip-audit too, where that is installed.
"""

import base64
import hashlib
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from release.packages import PROJECT, ROOT

REQUIREMENTS: Final = ROOT / "requirements"
ENVIRONMENTS: Final = {".venv": ("constraints.txt", "weights.txt"), ".venv-triton": ("triton.txt",)}
UNPINNED: Final = frozenset({PROJECT, "pip", "setuptools", "wheel"})  # ours; and what comes with an environment


def main() -> int:
    """Print each fault; the exit status is 1 where there is one."""
    count = 0
    for name, files in ENVIRONMENTS.items():
        for site in sorted((ROOT / name).glob("lib/python*/site-packages")):
            for fault in faults(site, pinned(*files)):
                count += 1
                print(f"{name}: {fault}")  # noqa: T201 - a command
    print(f"{count} faults" if count else "Every package is as pinned, every file as installed.")  # noqa: T201 - a command
    return 1 if count else 0


def pinned(*files: str) -> Mapping[str, Version]:
    """The version of each package that these files of requirements/ name. Raises `ValueError` for what is no pin."""
    found: dict[str, Version] = {}
    for file in files:
        for line in (REQUIREMENTS / file).read_text().splitlines():
            text = line.partition("#")[0].strip()
            if text and not text.startswith("-"):
                requirement = Requirement(text)
                (specifier,) = requirement.specifier
                if specifier.operator != "==" or "*" in specifier.version:
                    raise ValueError(f"requirements/{file}: '{text}' is no pin")
                found[canonicalize_name(requirement.name)] = Version(specifier.version)
    return found


def faults(site: Path, pins: Mapping[str, Version]) -> Iterator[str]:
    """What is wrong with the packages in a folder of them."""
    for one in sorted(distributions(path=[str(site)]), key=lambda one: one.name):
        name = canonicalize_name(one.name)
        # A build of torch for CPUs is of the same version: `2.13.0+cpu`.
        if name in pins and Version(one.version).public != pins[name].public:
            yield f"{name} {one.version}: pinned is {pins[name]}"
        elif name not in pins and name not in UNPINNED:
            yield f"{name} {one.version}: is pinned nowhere"
        yield from _changed(one, name)


def _changed(one: Distribution, name: str) -> Iterator[str]:
    for file in one.files or ():
        if file.hash is None or file.suffix == ".pyc":  # RECORD itself; byte code, which Python writes anew
            continue
        try:
            with Path(str(one.locate_file(file))).open("rb") as content:
                digest = hashlib.file_digest(content, file.hash.mode).digest()
        except OSError:
            yield f"{name} {one.version}: {file} is missing"
            continue
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            yield f"{name} {one.version}: {file} is not the file that was installed"


if __name__ == "__main__":
    sys.exit(main())
