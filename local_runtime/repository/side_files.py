"""What lies in a model's folder beside its config and versions: names of classes, first values of states. Blocking."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from local_runtime.errors import ModelLoadError
from local_runtime.messages import Array
from local_runtime.repository.model_config import ModelConfig, SequenceState

_STATES = "initial_state"  # Triton's folder for them


def read_labels(config: ModelConfig, folder: Path) -> Mapping[str, tuple[str, ...]]:
    """The labels (`label_filename`) of every output that has a file of them, by output, in the order of its lines.

    The file is known to exist inside the model's folder. Raises ModelLoadError if it is not UTF-8 text.
    """
    labels: dict[str, tuple[str, ...]] = {}
    for spec in config.outputs:
        if not spec.label_filename:
            continue
        try:
            labels[spec.name] = tuple((folder / spec.label_filename).read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"failed to read label file {config.name}/{spec.label_filename}: {error}") from error
    return labels


def initial_states(config: ModelConfig, folder: Path) -> Mapping[str, Array]:
    """The first value of every implicit state by input name: [1, dims...] with a batch dimension, else [dims...].

    Zeros (empty strings for BYTES), with 1 for free dimensions, unless the config names a file: raw little-endian
    values. Raises ModelLoadError where the file is absent or of the wrong size.
    """
    if config.sequence_batching is None:
        return {}
    rows = (1,) if config.max_batch_size > 0 else ()
    return {state.input_name: _initial(state, folder, rows) for state in config.sequence_batching.states}


def _initial(state: SequenceState, folder: Path, rows: tuple[int, ...]) -> Array:
    dims = tuple(1 if dim == -1 else dim for dim in (state.dims if state.initial_dims is None else state.initial_dims))
    numpy_type: np.dtype[Any] = np.dtype(state.numpy_type)
    if not state.initial_file:
        try:
            return np.full((*rows, *dims), b"" if state.datatype == "BYTES" else 0, dtype=numpy_type)
        except (MemoryError, ValueError) as error:
            raise ModelLoadError(
                f"state '{state.input_name}' of shape {list(dims)} does not fit into memory"
            ) from error
    below = Path(state.initial_file)
    if ".." in below.parts or below.is_absolute():
        raise ModelLoadError(f"initial state '{state.initial_file}' lies outside of the model's folder")
    file = folder / _STATES / below
    if not file.is_file():  # a pipe would never end
        raise ModelLoadError(f"failed to read initial state '{state.initial_file}': no such file")
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"failed to read initial state '{state.initial_file}': {error.strerror}") from error
    expected = math.prod(dims) * numpy_type.itemsize
    if state.datatype == "BYTES" or len(raw) != expected:
        raise ModelLoadError(
            f"initial state '{state.initial_file}' of '{state.input_name}' must hold {expected} bytes of "
            f"{state.datatype}, got {len(raw)}"
        )
    return np.frombuffer(raw, dtype=numpy_type).reshape((*rows, *dims)).copy()
