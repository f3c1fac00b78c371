"""Which model is measured, and whether it can be: read from its folder, before anything is loaded. Blocking."""

import dataclasses
from pathlib import Path
from typing import Any

from local_runtime.errors import ModelLoadError
from local_runtime.executors.model_files import python_auto_complete
from local_runtime.repository import parsing, reader
from local_runtime.repository.model_config import Backend, ModelConfig


class NotBenchable(Exception):
    """The model cannot be measured this way; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model that can be measured.

    Args:
        folder: its folder in the repository.
        config: its configuration, completed by its own file.
        written: the `ModelConfig` message that its user wrote; the completed one where there is no config.pbtxt.
    """

    folder: Path
    config: ModelConfig
    written: Any


def read(repository: Path, name: str | None) -> Subject:
    """The named model, or the only one. Raises ModelLoadError, or NotBenchable where it is of the wrong kind."""
    if not repository.is_dir():
        raise ModelLoadError(f"model repository {repository} is not a folder")
    name = _name(repository, name)
    config = reader.read_model(repository, name, complete_python=python_auto_complete).config
    _refuse(config)
    file = repository / name / "config.pbtxt"
    written = parsing.read_text(file.read_text(), folder_name=name) if file.is_file() else config.message
    return Subject(folder=repository / name, config=config, written=written)


def _name(repository: Path, name: str | None) -> str:
    names = reader.names(repository)
    if not names:
        raise NotBenchable(f"there is no model in {repository}")
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        wrong = "" if name is None else f"there is no model '{name}': "
        raise NotBenchable(f"{wrong}--model must name one of: {', '.join(names)}")
    return name


def _refuse(config: ModelConfig) -> None:
    if config.backend is Backend.ENSEMBLE:
        steps = ", ".join(sorted({step.model_name for step in config.ensemble_steps}))
        reason = f"is an ensemble; measure the models that it is made of: {steps}"
    elif config.sequence_batching is not None:
        reason = "is a sequence model: its requests belong together and its sequence batcher cannot be swapped"
    elif config.is_decoupled:
        reason = "is decoupled: it answers a request any number of times, which can only be streamed"
    elif config.max_batch_size < 1:
        reason = "takes no batches: its max_batch_size must be 1 or more"
    else:
        return
    raise NotBenchable(f"model '{config.name}' cannot be measured by this command, it {reason}")
