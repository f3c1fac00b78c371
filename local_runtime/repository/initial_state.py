"""What implicit state holds before the first request of a sequence. Blocking where it comes from files."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from local_runtime.errors import ModelLoadError
from local_runtime.messages import Array
from local_runtime.repository.model_config import ModelConfig, SequenceState

_FOLDER = "initial_state"  # Triton's, below the model's folder


def initial_states(config: ModelConfig, folder: Path) -> Mapping[str, Array]:
    """The first value of every state by input name: [1, dims...] with a batch dimension, else [dims...].

    Zeros (empty strings for BYTES), with 1 for free dimensions, unless the config names a file: raw little-endian
    values. Raises ModelLoadError where the file is absent or of the wrong size.
    """
    if config.sequence_batching is None:
        return {}
    rows = (1,) if config.max_batch_size > 0 else ()
    return {state.input_name: _initial(state, folder, rows) for state in config.sequence_batching.states}


def _initial(state: SequenceState, folder: Path, rows: tuple[int, ...]) -> Array:
    dims = tuple(1 if dim == -1 else dim for dim in state.initial_dims or state.dims)
    numpy_type: np.dtype[Any] = np.dtype(state.numpy_type)
    if not state.initial_file:
        return np.full((*rows, *dims), b"" if state.datatype == "BYTES" else 0, dtype=numpy_type)
    file = folder / _FOLDER / state.initial_file
    if ".." in file.parts or Path(state.initial_file).is_absolute():
        raise ModelLoadError(f"initial state '{state.initial_file}' lies outside of the model's folder")
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
