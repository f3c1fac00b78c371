"""`make release`: the wheel, the sdist, the SBOM, the licence list, the pins and the notes, into `dist/`.

    python -m release

Nothing is fetched: the wheel is built by this environment's setuptools, and the rest is read from what is installed.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from release import licences, notes
from release.packages import PROJECT, ROOT, SOURCES, ReleaseError, closure, declared, lay_out, pins, run, version

DIST: Final = ROOT / "dist"
_SPEC_VERSION: Final = "1.6"  # of CycloneDX: the newest that common scanners read


def main() -> int:
    """Make all of it; returns the exit status."""
    try:
        drafts = reasons_for_a_draft()
        with tempfile.TemporaryDirectory() as work:
            make(DIST, Path(work), drafts)
    except ReleaseError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a command
        return 1
    for path in sorted(DIST.iterdir()):
        print(path.relative_to(ROOT))  # noqa: T201 - a command
    for reason in drafts:
        print(f"A draft, not a release: {reason}")  # noqa: T201 - a command
    return 0


def make(dist: Path, work: Path, drafts: list[str]) -> None:
    """Put the files in place of `dist`, which stays as it is where this fails. `work` is an empty folder to work in.

    Raises `ReleaseError` where a licence is not allowed, a tool fails, or the wheel says another version than its own.
    """
    packages = closure(declared())
    found = [licences.licence(one) for one in packages]
    if faults := licences.faults(found):
        raise ReleaseError("\n".join([*faults, "release/licences.py decides what may be used."]))
    fresh = work / "dist"
    wheel = build(work / "source", fresh)
    python = lay_out(work / "environment", packages, wheel)
    told = run([str(python.with_name("gateway")), "--version"]).strip()
    if told != version():
        raise ReleaseError(f"The wheel says {told}, pyproject.toml {version()}: see gateway/__init__.py.")
    stem = f"{PROJECT}-{version()}"
    (fresh / f"{stem}.cdx.json").write_text(sbom(python))
    (fresh / f"{stem}-licences.md").write_text(licences.table(found))
    (fresh / f"{stem}-constraints.txt").write_text(pins(packages))
    (fresh / f"{stem}-notes.md").write_text(release_notes(drafts))
    (fresh / "SHA256SUMS").write_text(sums(fresh))
    shutil.rmtree(dist, ignore_errors=True)
    shutil.copytree(fresh, dist)


def build(source: Path, into: Path) -> Path:
    """Build wheel and sdist from a clean copy, so that nothing left over from earlier builds gets in; the wheel."""
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif path.exists():
            shutil.copy(path, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), str(source)]
    run(command, environ={"SOURCE_DATE_EPOCH": str(_made_at())})
    return next(into.glob("*.whl"))


def sbom(python: Path) -> str:
    """The environment of `python` as CycloneDX JSON, held against its schema; the gateway is what it is about."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", str(ROOT / "pyproject.toml")]
    command += ["--spec-version", _SPEC_VERSION, "--output-format", "JSON", "--output-reproducible", "--validate"]
    document: dict[str, Any] = json.loads(
        run([*command, str(python)], environ={"SOURCE_DATE_EPOCH": str(_made_at())}),
    )
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def release_notes(drafts: list[str]) -> str:
    """What the CHANGELOG says of this version, or of the next one where this is a draft; in its first lines why."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    section = notes.of_version(changelog, version()) or notes.of_draft(changelog)
    title = f"# {version()}" + (f" - {section.date}" if section.date else "")
    return "\n\n".join([title, *(f"A draft, not a release: {reason}" for reason in drafts), section.text]) + "\n"


def sums(folder: Path) -> str:
    """Digests of the files in a folder, as `sha256sum --check` reads them."""
    paths = sorted(folder.iterdir())
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths)


def reasons_for_a_draft() -> list[str]:
    """Why what would be made now is no release; empty where it is one."""
    reasons = []
    if notes.of_version((ROOT / "CHANGELOG.md").read_text(), version()) is None:
        reasons.append(f"CHANGELOG.md has no heading `## [{version()}] - YYYY-MM-DD`.")
    tag = f"v{version()}"
    if tag not in (_git("tag", "--points-at", "HEAD") or "").split():
        reasons.append(f"this commit has no tag {tag}.")
    if _git("status", "--porcelain", "--", *SOURCES) != "":
        reasons.append("the wheel's sources have changes that are in no commit.")
    if not (ROOT / "LICENSE").exists():
        reasons.append("there is no LICENSE: whoever owns the project has to choose one before others get the wheel.")
    return reasons


def _made_at() -> int:
    """The commit's time, so that the same commit makes the same wheel; without a repository, that of pyproject.toml."""
    told = _git("log", "-1", "--format=%ct")
    return int(told) if told else int((ROOT / "pyproject.toml").stat().st_mtime)


def _git(*args: str) -> str | None:
    """What git says of this checkout; None where there is no git or no repository."""
    program = shutil.which("git")
    if program is None:
        return None
    done = subprocess.run(  # noqa: S603 - our own arguments
        [program, "-C", str(ROOT), *args],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    raise SystemExit(main())
