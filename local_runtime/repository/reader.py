"""A Triton model repository on disk: `<model>/config.pbtxt` and `<model>/<version>/...`.

Blocking: call it from a thread.
"""

import dataclasses
import logging
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from local_runtime.errors import ModelLoadError
from local_runtime.repository import autocomplete, parsing
from local_runtime.repository.autocomplete import CompletePython
from local_runtime.repository.completion import model_filename
from local_runtime.repository.config_words import MODEL_FILES
from local_runtime.repository.model_config import Backend, ModelConfig, VersionPolicy

_log = logging.getLogger(__name__)
_CONFIG = "config.pbtxt"
# Triton serves positive numbers and passes over names with leading zeros (core `src/model_lifecycle.cc`).
_VERSION = re.compile(r"[1-9][0-9]*", re.ASCII)
_MAX_VERSION = 2**63 - 1  # versions are 64-bit integers in the protocol and in version policies
_MAX_CONFIG_BYTES = 4 * 2**20  # takes seconds to parse; written ones have some kB
_NO_FILES: Mapping[str, bytes] = {}

# Relative path, size in bytes and time of the last change (ns) of every file, by path.
Fingerprint: TypeAlias = tuple[tuple[str, int, int], ...]


class NoServedVersion(ModelLoadError):
    """There is no version folder that the model's version policy wants served (Triton: INVALID_ARG)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model as it lies in the repository, or in a folder of its own where a load request brought its files.

    Args:
        folder: the model's folder.
        versions: the version folders to serve, ascending.
        config: the checked configuration.
        fingerprint: of the folder, taken before anything in it was read.
        owned: keeps the folder on disk as long as something refers to this source, where it is a temporary one.
    """

    folder: Path
    versions: tuple[str, ...]
    config: ModelConfig
    fingerprint: Fingerprint
    owned: "OwnedFolder | None" = dataclasses.field(default=None, repr=False, compare=False)

    def file(self, version: str) -> Path:
        """The file that holds that version of the model (meaningless for an ensemble)."""
        return self.folder / version / model_filename(self.config)

    def version_fingerprint(self, version: str) -> Fingerprint:
        """The part of the fingerprint below one version's folder."""
        return tuple(entry for entry in self.fingerprint if entry[0].startswith(f"{version}/"))

    @property
    def shared_fingerprint(self) -> Fingerprint:
        """The part of the fingerprint that concerns all versions: config, labels, initial states and the like."""
        return tuple(entry for entry in self.fingerprint if not _is_version(entry[0].partition("/")[0]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A model that cannot even be tried, and why."""

    name: str
    reason: str


class OwnedFolder:
    """A temporary folder that is removed when nothing refers to this object any more, at exit at the latest."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="local-runtime-model-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def names(repository: Path) -> list[str]:
    """The folders of the repository that hold a model, sorted: with a config, or a file that may do without.

    Cheap: one listing of the repository, and a look for the config in each folder. Never raises: what cannot be
    read, or vanishes meanwhile, is not there.
    """
    try:
        return _names(repository)
    except ModelLoadError:
        return []


def _names(repository: Path) -> list[str]:
    """As `names`, but a repository that cannot be listed is a ModelLoadError."""
    return sorted(name for name in _folders(repository) if _is_model(repository / name))


def _folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if _is_folder(entry)]
    except OSError as error:
        raise ModelLoadError(f"failed to list {folder}: {error.strerror}") from error


def _is_folder(entry: "os.DirEntry[str] | Path") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself, or into a folder that may not be entered
        return False


def is_model_name(name: str) -> bool:
    """Whether a folder of a repository can have that name: one plain path segment."""
    return name not in ("", ".", "..") and not any(bad in name for bad in ("/", "\\", "\0"))


def read(
    repository: Path, wanted: Iterable[str] | None = None, *, complete_python: CompletePython | None = None
) -> dict[str, ModelSource | Unreadable]:
    """The models of the repository by name, sorted: all, or the named ones and what their ensembles are made of.

    Raises ModelLoadError if there is no such repository; what is wrong with one model is told in its place.
    """
    if not repository.is_dir():
        raise ModelLoadError(f"model repository {repository} is not a folder")
    waiting = _names(repository) if wanted is None else list(wanted)
    found: dict[str, ModelSource | Unreadable] = {}
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = source = read_model(repository, name, complete_python=complete_python)
        except ModelLoadError as error:
            found[name] = Unreadable(name=name, reason=str(error))
        else:
            waiting.extend(step.model_name for step in source.config.ensemble_steps)
    return dict(sorted(found.items()))


def read_model(
    repository: Path,
    name: str,
    *,
    config_json: str | None = None,
    files: Mapping[str, bytes] = _NO_FILES,
    complete_python: CompletePython | None = None,
) -> ModelSource:
    """One model.

    Args:
        repository: the repository's folder.
        name: the model's name.
        config_json: configuration (JSON) in place of the model's own.
        files: the whole content of the model's folder in place of its own, by path below it (`1/model.py`); they
            need `config_json`.
        complete_python: runs the `auto_complete_config` of Python models.

    Raises ModelLoadError: no such model, or a reason why it cannot be served.
    """
    if not is_model_name(name):
        raise _unknown(name)
    if files:
        if config_json is None:
            raise ModelLoadError(f"failed to load '{name}', files can only be given together with a config")
        owned = OwnedFolder()
        source = _source(_write(owned, name, files), config_json=config_json, complete_python=complete_python)
        return dataclasses.replace(source, owned=owned)
    folder = repository / name
    if not _is_folder(folder):
        raise _unknown(name)
    return _source(folder, config_json=config_json, complete_python=complete_python)


def fingerprints(repository: Path) -> dict[str, Fingerprint]:
    """The fingerprint of every model of the repository, by name.

    Raises ModelLoadError where the repository cannot be listed: that is not a repository without models.
    """
    return {name: fingerprint(repository / name) for name in _names(repository)}


def fingerprint(folder: Path) -> Fingerprint:
    """What changes when a file below the folder comes, goes or is written.

    An empty folder counts, too: it may be an ensemble's version. Python's own caches do not. Links are followed
    unless they lead back to a folder that they lie in.
    """
    entries: list[tuple[str, int, int]] = []
    # A folder, its path below the model's, and what it lies in: links may lead back to that.
    waiting: list[tuple[Path, str, frozenset[tuple[int, int]]]] = [(folder, "", frozenset())]
    while waiting:
        place, below, above = waiting.pop()
        try:
            status = place.stat()
            with os.scandir(place) as listing:
                found = [entry for entry in listing if entry.name != "__pycache__"]
        except OSError:
            continue  # gone since it was listed, or not ours to read
        here = (status.st_dev, status.st_ino)
        if here in above:
            continue
        for entry in found:
            path = f"{below}{entry.name}"
            if _is_folder(entry):
                entries.append((f"{path}/", 0, 0))
                waiting.append((place / entry.name, f"{path}/", above | {here}))
            else:
                entries += _file_entry(entry, path)
    return tuple(sorted(entries))


def _file_entry(entry: "os.DirEntry[str]", path: str) -> Fingerprint:
    try:
        status = entry.stat()
    except OSError:
        return ()  # gone, or a link that leads nowhere
    return ((path, status.st_size, status.st_mtime_ns),)


def _unknown(name: str) -> ModelLoadError:
    return ModelLoadError(f"failed to load '{name}', failed to poll from model repository")


def _is_model(folder: Path) -> bool:
    try:
        return (folder / _CONFIG).is_file() or any(
            (folder / version / file).is_file() for version in _versions(folder) for file in MODEL_FILES
        )
    except (OSError, ModelLoadError):
        return False


def _is_version(name: str) -> bool:
    return _VERSION.fullmatch(name) is not None and int(name) <= _MAX_VERSION


def _versions(folder: Path) -> list[str]:
    """The names of the version folders, ascending."""
    return sorted(filter(_is_version, _folders(folder)), key=int)


def _write(owned: OwnedFolder, name: str, files: Mapping[str, bytes]) -> Path:
    folder = owned.path / name
    for key, content in files.items():
        path = PurePosixPath(key)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in key or "\\" in key:
            raise ModelLoadError(f"failed to load '{name}', unsafe file path '{key}'")
        try:
            os.fsencode(path)
        except UnicodeEncodeError as error:
            raise ModelLoadError(f"failed to load '{name}', unsafe file path {key!a}") from error
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        except OSError as error:
            raise ModelLoadError(f"failed to load '{name}', cannot write file '{key}': {error.strerror}") from error
    return folder


def _source(folder: Path, *, config_json: str | None, complete_python: CompletePython | None) -> ModelSource:
    taken = fingerprint(folder)
    try:
        config, versions = _configured(folder, config_json=config_json, complete_python=complete_python)
        source = ModelSource(folder=folder, versions=versions, config=config, fingerprint=taken)
        _check_files(source)
    except OSError as error:  # what may not be read, or vanished meanwhile
        raise ModelLoadError(f"failed to read model '{folder.name}': {error.strerror}") from error
    return source


def _configured(
    folder: Path, *, config_json: str | None, complete_python: CompletePython | None
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The checked configuration, and the versions to serve."""
    message = _read_config(folder) if config_json is None else parsing.read_json(config_json, folder_name=folder.name)
    versions = _served(folder, parsing.version_policy(message))
    if versions:
        message = autocomplete.completed(message, folder / versions[-1], complete_python)
    config = parsing.parse_message(message, folder_name=folder.name)
    if not versions:
        raise NoServedVersion(
            f"at least one version must be available under the version policy of model '{config.name}'"
        )
    return config, versions


def _read_config(folder: Path) -> object:
    """The message in the model's file; an empty one where there is no file but a model that may do without."""
    path = folder / _CONFIG
    if not path.is_file() and _is_model(folder):
        return parsing.read_text("", folder_name=folder.name)
    if not path.is_file():  # a pipe would never end
        raise ModelLoadError(f"failed to read {folder.name}/{_CONFIG}: no such file")
    with path.open("rb") as file:
        content = file.read(_MAX_CONFIG_BYTES + 1)
    if len(content) > _MAX_CONFIG_BYTES:
        raise ModelLoadError(f"failed to read {folder.name}/{_CONFIG}: it is larger than {_MAX_CONFIG_BYTES} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"failed to read {folder.name}/{_CONFIG}: {error}") from error
    return parsing.read_text(text, folder_name=folder.name)


def _served(folder: Path, policy: VersionPolicy) -> tuple[str, ...]:
    """The versions that the policy wants, as far as there are folders for them; others are told in the log."""
    there = _versions(folder)
    if policy.specific is not None:
        for version in policy.specific:
            if str(version) not in there:
                _log.error("no folder for a specified version", extra={"model": folder.name, "version": str(version)})
        return tuple(version for version in there if int(version) in policy.specific)
    if policy.latest is not None:
        return tuple(there[max(0, len(there) - policy.latest) :])
    return tuple(there)


def _check_files(source: ModelSource) -> None:
    config = source.config
    if config.backend is not Backend.ENSEMBLE:
        for version in source.versions:
            if not source.file(version).is_file():
                raise ModelLoadError(f"no such file: {config.name}/{version}/{model_filename(config)}")
    for spec in config.outputs:
        if not spec.label_filename:
            continue
        path = source.folder / spec.label_filename
        if not _lies_below(source.folder, path):
            raise ModelLoadError(
                f"label file path '{spec.label_filename}' for output '{spec.name}' in model '{config.name}' is outside "
                "model directory"
            )
        if not path.is_file():
            raise ModelLoadError(f"no such label file: {config.name}/{spec.label_filename}")


def _lies_below(folder: Path, path: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # links that lead in a circle, or no path at all
        return False
