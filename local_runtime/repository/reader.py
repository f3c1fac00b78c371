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
from local_runtime.repository.model_config import Backend, ModelConfig, VersionPolicy

_log = logging.getLogger(__name__)
_CONFIG = "config.pbtxt"
# Triton serves positive numbers and passes over names with leading zeros (core `src/model_lifecycle.cc`).
_VERSION = re.compile(r"[1-9][0-9]*", re.ASCII)
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
        return tuple(entry for entry in self.fingerprint if not _VERSION.fullmatch(entry[0].partition("/")[0]))


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
    """The folders of the repository that hold a model, sorted: with a config, or a file that may do without."""
    return sorted(folder.name for folder in repository.iterdir() if folder.is_dir() and _is_model(folder))


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
    waiting = names(repository) if wanted is None else list(wanted)
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
    if not folder.is_dir():
        raise _unknown(name)
    return _source(folder, config_json=config_json, complete_python=complete_python)


def fingerprints(repository: Path) -> dict[str, Fingerprint]:
    """The fingerprint of every model of the repository, by name."""
    return {name: fingerprint(repository / name) for name in names(repository)}


def fingerprint(folder: Path) -> Fingerprint:
    """What changes when a file below the folder comes, goes or is written.

    An empty folder counts, too: it may be an ensemble's version. Python's own caches do not.
    """
    entries: list[tuple[str, int, int]] = []
    for place, below, files in os.walk(folder, followlinks=True):
        below[:] = [name for name in below if name != "__pycache__"]
        path = Path(place)
        entries += [(f"{(path / name).relative_to(folder).as_posix()}/", 0, 0) for name in below]
        for name in files:
            try:
                found = (path / name).stat()
            except OSError:
                continue  # gone since it was listed
            entries.append(((path / name).relative_to(folder).as_posix(), found.st_size, found.st_mtime_ns))
    return tuple(sorted(entries))


def _unknown(name: str) -> ModelLoadError:
    return ModelLoadError(f"failed to load '{name}', failed to poll from model repository")


def _is_model(folder: Path) -> bool:
    return (folder / _CONFIG).is_file() or any(
        (version / file).is_file() for version in _version_folders(folder) for file in autocomplete.MODEL_FILES
    )


def _version_folders(folder: Path) -> list[Path]:
    """The version folders, ascending."""
    found = [path for path in folder.iterdir() if _VERSION.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name))


def _write(owned: OwnedFolder, name: str, files: Mapping[str, bytes]) -> Path:
    folder = owned.path / name
    for key, content in files.items():
        path = PurePosixPath(key)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in key or "\\" in key:
            raise ModelLoadError(f"failed to load '{name}', unsafe file path '{key}'")
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        except OSError as error:
            raise ModelLoadError(f"failed to load '{name}', cannot write file '{key}': {error.strerror}") from error
    return folder


def _source(folder: Path, *, config_json: str | None, complete_python: CompletePython | None) -> ModelSource:
    taken = fingerprint(folder)
    message = _read_config(folder) if config_json is None else parsing.read_json(config_json, folder_name=folder.name)
    versions = _served(folder, parsing.version_policy(message))
    if versions:
        message = autocomplete.completed(message, folder / versions[-1], complete_python)
    config = parsing.parse_message(message, folder_name=folder.name)
    if not versions:
        raise NoServedVersion(
            f"at least one version must be available under the version policy of model '{config.name}'"
        )
    source = ModelSource(folder=folder, versions=versions, config=config, fingerprint=taken)
    _check_files(source)
    return source


def _read_config(folder: Path) -> object:
    """The message in the model's file; an empty one where there is no file but a model that may do without."""
    path = folder / _CONFIG
    if not path.exists() and _is_model(folder):
        return parsing.read_text("", folder_name=folder.name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"failed to read {folder.name}/{_CONFIG}: {error}") from error
    return parsing.read_text(text, folder_name=folder.name)


def _served(folder: Path, policy: VersionPolicy) -> tuple[str, ...]:
    """The versions that the policy wants, as far as there are folders for them; others are told in the log."""
    there = [path.name for path in _version_folders(folder)]
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
            if not source.file(version).exists():
                raise ModelLoadError(f"no such file: {config.name}/{version}/{model_filename(config)}")
    for spec in config.outputs:
        if not spec.label_filename:
            continue
        path = source.folder / spec.label_filename
        if not path.resolve().is_relative_to(source.folder.resolve()):
            raise ModelLoadError(
                f"label file path '{spec.label_filename}' for output '{spec.name}' in model '{config.name}' is outside "
                "model directory"
            )
        if not path.is_file():
            raise ModelLoadError(f"no such label file: {config.name}/{spec.label_filename}")
