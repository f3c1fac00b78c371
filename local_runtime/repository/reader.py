"""A Triton model repository on disk: `<model>/config.pbtxt` and `<model>/<version>/...`.

Blocking: call it from a thread.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from local_runtime.errors import ModelLoadError
from local_runtime.repository import model_config
from local_runtime.repository.completion import model_filename
from local_runtime.repository.model_config import Backend, ModelConfig

_CONFIG = "config.pbtxt"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model as it lies in the repository. `version` is the folder that will be served."""

    folder: Path
    version: str
    config: ModelConfig

    @property
    def file(self) -> Path:
        """The file that holds the model (meaningless for an ensemble)."""
        return self.folder / self.version / model_filename(self.config)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A model that cannot even be tried, and why."""

    name: str
    reason: str


def read(repository: Path, names: Iterable[str] | None = None) -> dict[str, ModelSource | Unreadable]:
    """The models of the repository by name, sorted: all, or the named ones and what their ensembles are made of.

    A folder without a config.pbtxt is no model unless it was named. Raises ModelLoadError if there is no such
    repository; what is wrong with one model is told in its place.
    """
    if not repository.is_dir():
        raise ModelLoadError(f"model repository {repository} is not a folder")
    wanted = _all_names(repository) if names is None else list(names)
    found: dict[str, ModelSource | Unreadable] = {}
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found[name] = source = _read_one(repository, name)
        if isinstance(source, ModelSource):
            wanted.extend(step.model_name for step in source.config.ensemble_steps)
    return dict(sorted(found.items()))


def _all_names(repository: Path) -> list[str]:
    return [path.parent.name for path in repository.glob(f"*/{_CONFIG}")]


def _read_one(repository: Path, name: str) -> ModelSource | Unreadable:
    try:
        return _source(repository / name)
    except ModelLoadError as error:
        return Unreadable(name=name, reason=str(error))


def _source(folder: Path) -> ModelSource:
    try:
        text = (folder / _CONFIG).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"failed to read {folder.name}/{_CONFIG}: {error}") from error
    config = model_config.parse(text, folder_name=folder.name)
    versions = [path.name for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]
    if not versions:
        raise ModelLoadError(
            f"at least one version must be available under the version policy of model '{config.name}'"
        )
    source = ModelSource(folder=folder, version=max(versions, key=int), config=config)
    _check_files(source)
    return source


def _check_files(source: ModelSource) -> None:
    config = source.config
    if config.backend is not Backend.ENSEMBLE and not source.file.is_file():
        raise ModelLoadError(f"no such file: {config.name}/{source.version}/{model_filename(config)}")
    for spec in config.outputs:
        if spec.label_filename and not (source.folder / spec.label_filename).is_file():
            raise ModelLoadError(f"no such label file: {config.name}/{spec.label_filename}")
