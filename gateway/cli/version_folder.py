"""The folder of a model's version on its way into a model repository, and out of it.

Triton takes every folder whose name begins with a digit for a version, even `2.tmp`: what is not a version yet, or no
longer, has a name that begins with a dot. A version appears by a rename, whole.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_BLOCK = 4 * 1024 * 1024
_COMMENT = re.compile(r"#[^\n]*")
_POLICY = re.compile(r"version_policy\s*:?\s*\{")
_NEWEST_ONLY = re.compile(r"version_policy\s*:?\s*\{\s*latest\s*:?\s*\{\s*(?:num_versions\s*:\s*1\s*)?;?\s*\}\s*\}")


class FolderRefused(ValueError):
    """A folder that cannot become a version; one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a version goes: `models` are the model's folders, one in each repository."""

    source: Path
    models: tuple[Path, ...]
    version: str

    @property
    def is_there(self) -> bool:
        """The source is the version's own place already."""
        return len(self.models) == 1 and self.source.resolve() == (self.models[0] / self.version).resolve()

    @property
    def total_bytes(self) -> int:
        """What will be copied."""
        return sum(path.stat().st_size for path in _files(self.source)) * len(self.models)


def plan(source: Path, repositories: Sequence[Path], *, model: str, version: str | None) -> Placement:
    """Which number `source` gets: `version`, else its own name if that is a free number, else the next one.

    Raises `FolderRefused`.
    """
    if not model or model.startswith(".") or "/" in model:
        raise FolderRefused(f"'{model}' is not the name of a model")
    models = tuple(repository / model for repository in repositories)
    for folder in models:
        if not (folder / "config.pbtxt").is_file():
            raise FolderRefused(f"{folder}: no model with a config.pbtxt")
    taken = {number for folder in models for number in versions(folder)}
    own = source.resolve().name
    is_there = len(models) == 1 and source.resolve().parent == models[0].resolve() and own in taken
    chosen = version or (own if _VERSION.fullmatch(own) and (is_there or own not in taken) else str(_next(taken)))
    if not _VERSION.fullmatch(chosen):
        raise FolderRefused(f"'{chosen}' is not a version: it must be a whole number from 1")
    placement = Placement(source=source, models=models, version=chosen)
    if chosen in taken and not placement.is_there:
        raise FolderRefused(f"version {chosen} of '{model}' is there already")
    _check(source)
    _compare(source, models[0], taken - {chosen})
    return placement


def place(placement: Placement, advance: Callable[[int], None]) -> None:
    """Copy it beside the versions of each repository, then rename it to its number; `advance` hears of bytes.

    What was begun is taken away when it fails. Raises `FolderRefused`.
    """
    if placement.is_there:
        return
    waiting = [folder / f".incoming-{placement.version}-{os.getpid()}" for folder in placement.models]
    placed: list[Path] = []
    try:
        for temporary in waiting:
            _copy(placement.source, temporary, advance)
        for temporary in waiting:
            temporary.rename(temporary.parent / placement.version)
            placed.append(temporary.parent / placement.version)
    except OSError as error:
        for folder in placed:
            shutil.rmtree(folder, ignore_errors=True)
        raise FolderRefused(f"{error.filename or placement.source}: {error.strerror}") from error
    finally:
        for temporary in waiting:
            shutil.rmtree(temporary, ignore_errors=True)


def remove(placement: Placement) -> None:
    """Take away what `place` put there."""
    if not placement.is_there:
        for folder in placement.models:
            shutil.rmtree(folder / placement.version, ignore_errors=True)


def set_aside(repositories: Sequence[Path], *, model: str, version: str) -> list[Path]:
    """Rename a version that must not be served again, so that a server that starts does not take it; its new names."""
    moved = []
    for repository in repositories:
        folder = repository / model / version
        aside = folder.with_name(f".rolled-back-{version}")
        if folder.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            moved.append(aside)
    return moved


def bring_back(repositories: Sequence[Path], *, model: str, version: str) -> None:
    """The reverse of `set_aside`, where there is something to bring back."""
    for repository in repositories:
        aside = repository / model / f".rolled-back-{version}"
        if aside.is_dir() and not aside.with_name(version).exists():
            aside.rename(aside.with_name(version))


def advice(model: Path, serves: Sequence[str]) -> str:
    """What to change in config.pbtxt so that a server that starts anew serves the same; empty for nothing."""
    text = _COMMENT.sub("", (model / "config.pbtxt").read_text(encoding="utf-8", errors="replace"))
    newest = max(versions(model), key=int, default="")
    is_newest_only = not _POLICY.search(text) or _NEWEST_ONLY.search(text)
    if is_newest_only and list(serves) == [newest]:
        return ""
    listed = ", ".join(serves)
    return (
        f"{model / 'config.pbtxt'}: set `version_policy {{ specific {{ versions: [ {listed} ] }} }}`, "
        "or a restart of the server serves other versions"
    )


def versions(model: Path) -> list[str]:
    """The version folders of a model."""
    return [path.name for path in model.iterdir() if _VERSION.fullmatch(path.name) and path.is_dir()]


def _next(taken: set[str]) -> int:
    return max(map(int, taken), default=0) + 1


def _check(source: Path) -> None:
    if not source.is_dir():
        raise FolderRefused(f"{source}: not a folder")
    if not any(_files(source)):
        raise FolderRefused(f"{source}: holds no files")
    root = source.resolve()
    for path in source.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise FolderRefused(f"{path}: a link that leads out of the folder")
        if not (path.is_dir() or path.is_file()):
            raise FolderRefused(f"{path}: not a file")


def _compare(source: Path, model: Path, taken: set[str]) -> None:
    """A version without the model file would make Triton wait for ever: it must have what the newest one has."""
    newest = max(taken, key=int, default=None)
    if newest is None:
        return
    for path in sorted((model / newest).glob("model.*")):
        if not (source / path.name).exists():
            raise FolderRefused(f"{source}: has no {path.name}, which version {newest} has")


def _files(source: Path) -> Iterator[Path]:
    return (path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _copy(source: Path, target: Path, advance: Callable[[int], None]) -> None:
    def copy(original: str, copied: str) -> None:
        with Path(original).open("rb") as reader, Path(copied).open("xb") as writer:
            while block := reader.read(_BLOCK):
                writer.write(block)
                advance(len(block))
        shutil.copystat(original, copied)

    # A link inside the folder becomes the file that it stands for.
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), copy_function=copy)
