"""Requests that `model_warmup` describes; what they make a model do is done before it is served."""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from local_runtime.errors import InferenceError, ModelLoadError
from local_runtime.executors.outcomes import output_specs
from local_runtime.messages import Annotated, Array, InferRequest, Tensors
from local_runtime.repository.initial_state import initial_states
from local_runtime.repository.model_config import NUMPY_TYPES, ModelConfig, Warmup, WarmupData, WarmupInput
from local_runtime.scheduling.decisions import Slot
from local_runtime.scheduling.sequence_inputs import SequenceInputs
from local_runtime.scheduling.validation import CheckedRequest, check

_FOLDER = "warmup"
# Random integers stay small, so that they are valid indices for most models that look something up.
_RANDOM_BELOW = 100


def warmup_batches(config: ModelConfig, folder: Path) -> Sequence[tuple[CheckedRequest, int]]:
    """For each `model_warmup` a request of `batch_size` equal rows and how often every instance is to run it.

    Random values are the same every time. Requests of decoupled models answer into nothing. Raises ModelLoadError
    for values that cannot be read and for inputs that the model does not take. `folder` is the model's.
    """
    return [(_request(warmup, config, folder), warmup.count or 1) for warmup in config.warmups]


def _request(warmup: Warmup, config: ModelConfig, folder: Path) -> CheckedRequest:
    where = f"warm-up '{warmup.name}' of model '{config.name}'"
    inner = (np.newaxis,) if config.max_batch_size > 0 else ()
    given = {tensor.name: _array(tensor, folder / _FOLDER, where=where)[(*inner, ...)] for tensor in warmup.inputs}
    own = {spec.name for spec in config.inputs}
    request = InferRequest(
        model=config.name,
        inputs={name: array for name, array in given.items() if name in own},
        request_id=warmup.name,
    )
    try:
        checked = check(request, config, respond=_ignore if config.is_decoupled else None)
    except InferenceError as error:
        raise ModelLoadError(f"{where}: {error}") from error
    added = {name: array for name, array in given.items() if name not in own}
    inputs = {**_whole_sequence(checked.inputs, config, folder), **added}
    rows = max(1, warmup.batch_size) if config.max_batch_size > 0 else 1
    return msgspec.structs.replace(
        checked,
        inputs={name: array.repeat(rows, axis=0) if inner else array for name, array in inputs.items()},
        rows=rows,
        outputs=tuple(spec.name for spec in output_specs(config)),
    )


def _whole_sequence(inputs: Tensors, config: ModelConfig, folder: Path) -> Tensors:
    """With the controls and states of a sequence of one request, where the model has sequences."""
    sequence = config.sequence_batching
    if sequence is None:
        return inputs
    states = initial_states(config, folder)
    filler = SequenceInputs(config=sequence, max_batch_size=config.max_batch_size, initial_states=states)
    return filler.inputs_for(Slot(request=0, correlation_id=1, is_start=True, is_end=True), inputs)


def _array(tensor: WarmupInput, folder: Path, *, where: str) -> Array:
    if any(dim < 0 for dim in tensor.dims):
        raise ModelLoadError(f"{where} must give input '{tensor.name}' a fixed shape, not {list(tensor.dims)}")
    if tensor.data is WarmupData.FILE:
        return _from_file(tensor, folder / tensor.file, where=where)
    numpy_type = np.dtype(NUMPY_TYPES[tensor.datatype])
    if tensor.data is WarmupData.ZERO:
        return (
            np.full(tensor.dims, b"", dtype=object) if tensor.datatype == "BYTES" else np.zeros(tensor.dims, numpy_type)
        )
    generator = np.random.default_rng(0)
    if tensor.datatype == "BYTES":
        texts = [b"%d" % number for number in generator.integers(_RANDOM_BELOW, size=math.prod(tensor.dims))]
        return _objects(texts, tensor.dims)
    if numpy_type.kind in "iub":
        return generator.integers(2 if numpy_type.kind == "b" else _RANDOM_BELOW, size=tensor.dims).astype(numpy_type)
    return generator.random(tensor.dims).astype(numpy_type)


def _from_file(tensor: WarmupInput, file: Path, *, where: str) -> Array:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{where} cannot read {_FOLDER}/{tensor.file}: {error.strerror}") from error
    elements = math.prod(tensor.dims)
    try:
        if tensor.datatype == "BYTES":
            return _objects(_strings(content, elements), tensor.dims)
        return np.frombuffer(content, NUMPY_TYPES[tensor.datatype]).reshape(tensor.dims)
    except ValueError as error:
        raise ModelLoadError(
            f"{where}: {_FOLDER}/{tensor.file} does not hold {elements} elements of {tensor.datatype}"
        ) from error


def _strings(content: bytes, elements: int) -> list[bytes]:
    """The elements of a serialized BYTES tensor: each a little-endian length of 4 bytes, then itself."""
    strings = []
    position = 0
    while position + 4 <= len(content):
        (length,) = struct.unpack_from("<I", content, position)
        strings.append(content[position + 4 : position + 4 + length])
        position += 4 + length
    if position != len(content) or len(strings) != elements:
        raise ValueError(f"{len(strings)} strings in {len(content)} bytes")
    return strings


def _objects(values: Sequence[bytes], shape: Sequence[int]) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array.reshape(shape)


def _ignore(outcome: Tensors | Annotated | InferenceError | None, is_final: bool) -> None:  # noqa: FBT001 - a Respond
    """Warm-up needs no answer."""
