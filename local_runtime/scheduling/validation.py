"""A request against the model's configuration before it may enter the queue, and the model's answer. Pure.

The checks of requests stand in Triton's order and speak with its texts (core `src/infer_request.cc`,
Normalize), so that a wrong request gets the same answer from either. Nothing wrong ever reaches a batch, where
it would hurt others. Answers are checked more strictly than in Triton, which sends on whatever a Python model
returns: a model that breaks its own configuration is an error, not a wrong answer.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence

import numpy as np

from local_runtime.errors import InferenceError, invalid, model_fault, with_request_id, wrong_inputs
from local_runtime.messages import Array, InferRequest, Tensors
from local_runtime.repository.model_config import NUMPY_TYPES, ModelConfig, TensorSpec

_DATATYPES = {np.dtype(numpy_type): name for name, numpy_type in NUMPY_TYPES.items()}
_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended "
    "to each input shape. If you want to specify the full shape including the batch dim in your input dims "
    "config, try setting max_batch_size to zero. See the model configuration docs for more info on "
    "max_batch_size."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request that fits the model. `rows` is 1 for a model without a batch dimension.

    Requests with equal `batch_key` may be concatenated. `outputs` names the wanted outputs in config order.
    """

    inputs: Tensors
    rows: int
    batch_key: Hashable
    outputs: tuple[str, ...]
    request_id: str


def check(request: InferRequest, config: ModelConfig) -> CheckedRequest:
    """The request in the form that batches need, or INVALID_ARG with Triton's text."""
    outputs = _wanted_outputs(request, config)
    _check_names(request, config)
    inputs = {spec.name: _as_array(request.inputs[spec.name], request, spec) for spec in config.inputs}
    rows = _rows(inputs, request, config) if config.max_batch_size > 0 else 1
    for spec in config.inputs:
        _check_tensor(inputs[spec.name], spec, request, config)
    inner = 1 if config.max_batch_size > 0 else 0
    return CheckedRequest(
        inputs=inputs,
        rows=rows,
        batch_key=tuple(array.shape[inner:] for array in inputs.values()),
        outputs=outputs,
        request_id=request.request_id,
    )


def check_outputs(outputs: Tensors, config: ModelConfig, *, wanted: Sequence[str]) -> Tensors:
    """The wanted outputs, in the order asked for, or INTERNAL naming how the model broke its configuration.

    The number of rows is not judged here: `collate.split` knows what it must be.
    """
    checked: dict[str, Array] = {}
    for spec in config.outputs:
        if spec.name not in wanted:
            continue
        if spec.name not in outputs:
            raise model_fault(config.name, f"did not return output '{spec.name}'")
        array = outputs[spec.name]
        datatype = datatype_of(array)
        if datatype != spec.datatype:
            raise model_fault(
                config.name,
                f"returned output '{spec.name}' as '{datatype}', but its config says '{spec.datatype}'",
            )
        expected = config.full_shape(spec)
        if not fits(array.shape, expected):
            raise model_fault(
                config.name,
                f"returned output '{spec.name}' of shape {_dims(array.shape)}, but its config says {_dims(expected)}",
            )
        checked[spec.name] = array
    return checked


def datatype_of(array: Array) -> str:
    """The protocol's name of an array's type: FP32, BYTES, ...; "INVALID" if it has none."""
    if array.dtype.kind in "OSU":
        return "BYTES"
    return _DATATYPES.get(array.dtype, "INVALID")


def _wanted_outputs(request: InferRequest, config: ModelConfig) -> tuple[str, ...]:
    known = tuple(spec.name for spec in config.outputs)
    for name in request.outputs:
        if name not in known:
            raise invalid(f"unexpected inference output '{name}' for model '{config.name}'")
    return tuple(name for name in known if name in request.outputs) if request.outputs else known


def _check_names(request: InferRequest, config: ModelConfig) -> None:
    required = [spec.name for spec in config.inputs]
    if len(request.inputs) != len(required):
        raise _refused(request, wrong_inputs(config.name, required=required, got=request.inputs))
    for name in request.inputs:
        if name not in required:
            raise invalid(f"unexpected inference input '{name}' for model '{config.name}'")


def _as_array(array: Array, request: InferRequest, spec: TensorSpec) -> Array:
    try:
        return bytes_array(array)
    except TypeError as error:
        raise _refused(request, f"input '{spec.name}': {error}") from error


def bytes_array(array: Array) -> Array:
    """Strings in any of numpy's forms as an object array of bytes (str as UTF-8); other arrays as they are.

    Raises TypeError for an object array that holds anything else.
    """
    if array.dtype.kind not in "OSU":
        return array
    flat = array.astype(np.object_).reshape(-1)
    for position, item in enumerate(flat):
        if isinstance(item, str):
            flat[position] = item.encode()
        elif not isinstance(item, bytes):
            raise TypeError(f"an element of a BYTES tensor is {type(item).__name__}, not bytes or str")
    return flat.reshape(array.shape)


def _rows(inputs: Tensors, request: InferRequest, config: ModelConfig) -> int:
    rows: int | None = None
    for spec in config.inputs:
        array = inputs[spec.name]
        if array.ndim == 0:
            raise _unexpected_shape(array, spec, request, config)
        if rows is not None and array.shape[0] != rows:
            raise _refused(request, f"input '{spec.name}' batch size does not match other inputs for '{config.name}'")
        rows = int(array.shape[0])
    if rows is None or rows > config.max_batch_size:
        raise _refused(
            request,
            f"inference request batch-size must be <= {config.max_batch_size} for '{config.name}'",
        )
    return rows


def _check_tensor(array: Array, spec: TensorSpec, request: InferRequest, config: ModelConfig) -> None:
    datatype = datatype_of(array)
    if datatype != spec.datatype:
        raise _refused(
            request,
            f"inference input '{spec.name}' data-type is '{datatype}', but model '{config.name}' expects "
            f"'{spec.datatype}'",
        )
    expected = config.full_shape(spec)
    if not fits(array.shape, expected):
        raise _unexpected_shape(array, spec, request, config)
    if config.max_batch_size > 0 and array.shape[0] == 0:
        one_row = math.prod(array.shape[1:]) * array.dtype.itemsize
        raise _refused(
            request,
            f"input byte size mismatch for input '{spec.name}' for model '{config.name}'. Expected {one_row}, got 0",
        )


def fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether a shape agrees with one that may hold -1 for free dimensions."""
    return len(shape) == len(expected) and all(want in (-1, have) for have, want in zip(shape, expected, strict=True))


def _unexpected_shape(array: Array, spec: TensorSpec, request: InferRequest, config: ModelConfig) -> InferenceError:
    note = _BATCH_NOTE if config.max_batch_size > 0 else ""
    return _refused(
        request,
        f"unexpected shape for input '{spec.name}' for model '{config.name}'. "
        f"Expected {_dims(config.full_shape(spec))}, got {_dims(array.shape)}.{note}",
    )


def _dims(shape: Sequence[int]) -> str:
    return "[" + ",".join(str(dim) for dim in shape) + "]"


def _refused(request: InferRequest, text: str) -> InferenceError:
    return invalid(with_request_id(request.request_id, text))
