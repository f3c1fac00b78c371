"""Requests that `model_warmup` describes; what they make a model do is done before it is served."""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from local_runtime.errors import InferenceError, ModelLoadError
from local_runtime.messages import Annotated, Array, InferRequest, Tensors
from local_runtime.repository.model_config import NUMPY_TYPES, ModelConfig, Warmup, WarmupData, WarmupInput
from local_runtime.repository.side_files import initial_states
from local_runtime.scheduling.byte_strings import from_serialized, of_objects
from local_runtime.scheduling.decisions import Slot
from local_runtime.scheduling.sequence_inputs import SequenceInputs
from local_runtime.scheduling.validation import CheckedRequest, RequestChecker, output_specs

_FOLDER = "warmup"
# Random integers stay small, so that they are valid indices for most models that look something up.
_RANDOM_BELOW = 100


def warmup_batches(config: ModelConfig, folder: Path) -> Sequence[tuple[Sequence[CheckedRequest], int]]:
    """For each `model_warmup` the members of a batch and how often every instance is to run it.

    As in Triton these are `batch_size` equal requests, of one row each where the model has a batch dimension.
    Random values are the same every time. Requests of decoupled models answer into nothing. Raises ModelLoadError
    for values that cannot be read or do not fit into memory and for inputs that the model does not take. `folder` is
    the model's.
    """
    return [
        ([_made(warmup, config, folder)] * max(1, warmup.batch_size), warmup.count or 1) for warmup in config.warmups
    ]


def _made(warmup: Warmup, config: ModelConfig, folder: Path) -> CheckedRequest:
    where = f"warm-up '{warmup.name}' of model '{config.name}'"
    try:
        return _request(warmup, config, folder, where=where)
    except (MemoryError, OverflowError, ValueError) as error:  # what numpy says of sizes that it cannot have
        raise ModelLoadError(f"{where} cannot be made: {type(error).__name__}: {error}") from error


def _request(warmup: Warmup, config: ModelConfig, folder: Path, *, where: str) -> CheckedRequest:
    inner = (np.newaxis,) if config.max_batch_size > 0 else ()
    given = {tensor.name: _array(tensor, folder / _FOLDER, where=where)[(*inner, ...)] for tensor in warmup.inputs}
    own = {spec.name for spec in config.inputs}
    request = InferRequest(
        model=config.name,
        inputs={name: array for name, array in given.items() if name in own},
        request_id=warmup.name,
    )
    try:
        checked = RequestChecker(config).check(request, respond=_ignore if config.is_decoupled else None)
    except InferenceError as error:
        raise ModelLoadError(f"{where}: {error}") from error
    added = {name: array for name, array in given.items() if name not in own}
    inputs = {**_whole_sequence(checked.inputs, config, folder), **added}
    return msgspec.structs.replace(
        checked,
        inputs=inputs,
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
    if tensor.data is WarmupData.FILE:
        return _from_file(tensor, folder, where=where)
    numpy_type = np.dtype(NUMPY_TYPES[tensor.datatype])
    if tensor.data is WarmupData.ZERO:
        return (
            np.full(tensor.dims, b"", dtype=object) if tensor.datatype == "BYTES" else np.zeros(tensor.dims, numpy_type)
        )
    generator = np.random.default_rng(0)
    if tensor.datatype == "BYTES":
        texts = [b"%d" % number for number in generator.integers(_RANDOM_BELOW, size=math.prod(tensor.dims))]
        return of_objects(texts).reshape(tensor.dims)
    if numpy_type.kind in "iub":
        return generator.integers(2 if numpy_type.kind == "b" else _RANDOM_BELOW, size=tensor.dims).astype(numpy_type)
    return generator.random(tensor.dims).astype(numpy_type)


def _from_file(tensor: WarmupInput, folder: Path, *, where: str) -> Array:
    file = Path(tensor.file)
    if ".." in file.parts or file.is_absolute():
        raise ModelLoadError(f"{where}: the file '{tensor.file}' lies outside of the model's folder")
    if (folder / file).exists() and not (folder / file).is_file():  # a pipe would never end
        raise ModelLoadError(f"{where} cannot read {_FOLDER}/{tensor.file}: not a file")
    try:
        content = (folder / file).read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{where} cannot read {_FOLDER}/{tensor.file}: {error.strerror}") from error
    elements = math.prod(tensor.dims)
    try:
        if tensor.datatype == "BYTES":
            return from_serialized(content).reshape(tensor.dims)
        return np.frombuffer(content, NUMPY_TYPES[tensor.datatype]).reshape(tensor.dims)
    except ValueError as error:
        raise ModelLoadError(
            f"{where}: {_FOLDER}/{tensor.file} does not hold {elements} elements of {tensor.datatype}"
        ) from error


def _ignore(outcome: Tensors | Annotated | InferenceError | None, is_final: bool) -> None:  # noqa: FBT001 - a Respond
    """Warm-up needs no answer."""
