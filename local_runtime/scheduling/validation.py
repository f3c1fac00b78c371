"""A request against the model's configuration before it may enter the queue, and the model's answer. Pure.

The checks of requests stand in Triton's order and speak with its texts (core `src/infer_request.cc`,
Normalize), so that a wrong request gets the same answer from either. Nothing wrong ever reaches a batch, where
it would hurt others. Answers are checked more strictly than in Triton, which sends on whatever a Python model
returns: a model that breaks its own configuration is an error, not a wrong answer.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from local_runtime.errors import InferenceError, invalid, model_fault, with_request_id, wrong_inputs
from local_runtime.messages import Annotated, Array, InferRequest, Tensors
from local_runtime.repository.model_config import NUMPY_TYPES, ModelConfig, TensorSpec

_DATATYPES = {np.dtype(numpy_type): name for name, numpy_type in NUMPY_TYPES.items()}
_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended "
    "to each input shape. If you want to specify the full shape including the batch dim in your input dims "
    "config, try setting max_batch_size to zero. See the model configuration docs for more info on "
    "max_batch_size."
)


# How a decoupled model answers: outputs, an error or nothing, and whether that was the last. From any thread.
Respond: TypeAlias = Callable[[Tensors | Annotated | InferenceError | None, bool], None]


class Cancellation:
    """Whether a request's caller has left; a Python model may ask while it runs."""

    __slots__ = ("is_cancelled",)

    def __init__(self) -> None:
        self.is_cancelled = False


class CheckedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that fits the model.

    Args:
        source: the request as it came.
        inputs: by name in config order, in the shapes that the model sees (`reshape`); optional ones may lack.
            The scheduler of a sequence model adds its control and state inputs.
        rows: of the batch dimension; 1 for a model without one.
        batch_key: equal for requests that may share a batch.
        outputs: the wanted outputs in config order; the scheduler of a sequence model adds its states.
        cancellation: set when the caller leaves.
        respond: decoupled models only.
    """

    source: InferRequest
    inputs: Tensors
    rows: int
    batch_key: Hashable
    outputs: tuple[str, ...]
    cancellation: Cancellation = msgspec.field(default_factory=Cancellation)
    respond: Respond | None = None

    @property
    def request_id(self) -> str:
        """The caller's name for the request, or ""."""
        return self.source.request_id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """One input's rules, worked out once.

    Args:
        spec: as configured.
        numpy_type: of its arrays, object for BYTES.
        full: the shape that clients send, -1 for free dimensions.
        fixed: `full` without the batch dimension where nothing in it is free, None otherwise.
        is_keyed: whether its inner shape decides with whom a request may share a batch.
    """

    spec: TensorSpec
    numpy_type: "np.dtype[Any]"
    full: tuple[int, ...]
    fixed: tuple[int, ...] | None
    is_keyed: bool


class RequestChecker:
    """Checks the requests to one model. Keeps no state between requests; safe from any thread."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._batches = config.max_batch_size > 0
        self._inner = 1 if self._batches else 0
        self._inputs = tuple(
            _Input(
                spec=spec,
                numpy_type=spec.numpy_type,
                full=config.full_shape(spec),
                fixed=None if -1 in spec.dims else spec.dims,
                is_keyed=-1 in spec.dims and not spec.allow_ragged_batch,
            )
            for spec in config.inputs
        )
        self._names = frozenset(spec.name for spec in config.inputs)
        self._required = tuple(spec.name for spec in config.inputs if not spec.is_optional)
        self._optional = len(config.inputs) - len(self._required)
        self._reshapes = any(spec.reshape is not None for spec in config.inputs)
        self._keyed = tuple(rule for rule in self._inputs if rule.is_keyed or rule.spec.is_optional)
        self._outputs = tuple(spec.name for spec in config.outputs)

    def check(self, request: InferRequest, *, respond: Respond | None = None) -> CheckedRequest:
        """The request in the form that batches need, or INVALID_ARG with Triton's text."""
        if request.sequence_id != 0 or request.priority != 0 or request.queue_timeout_us != 0:
            _check_numbers(request)
        outputs = self._wanted_outputs(request) if request.outputs else self._outputs
        self._check_names(request)
        given = request.inputs
        present = [rule for rule in self._inputs if rule.spec.name in given] if self._optional else self._inputs
        inputs = {rule.spec.name: self._as_array(given[rule.spec.name], request, rule) for rule in present}
        rows = self._rows(inputs, request) if self._batches else 1
        for rule in present:
            self._check_tensor(inputs[rule.spec.name], rule, request)
        if self._reshapes:
            inputs = {rule.spec.name: self._reshaped(inputs[rule.spec.name], rule) for rule in present}
        if rows > 1 and self._config.sequence_batching is not None:
            raise invalid(
                f"inference request to model '{self._config.name}' must specify batch-size 1 due to requirements of "
                "sequence batcher"
            )
        return CheckedRequest(
            source=request,
            inputs=inputs,
            rows=rows,
            batch_key=self._batch_key(inputs),
            outputs=outputs,
            respond=respond,
        )

    def _batch_key(self, inputs: Tensors) -> Hashable:
        """Inner shapes of the inputs that must agree, and which of the optional ones are there."""
        if not self._keyed:
            return ()
        return tuple(
            None
            if (array := inputs.get(rule.spec.name)) is None
            else (array.shape[self._inner :] if rule.is_keyed else True)
            for rule in self._keyed
        )

    def _wanted_outputs(self, request: InferRequest) -> tuple[str, ...]:
        for name in request.outputs:
            if name not in self._outputs:
                raise invalid(f"unexpected inference output '{name}' for model '{self._config.name}'")
        return tuple(name for name in self._outputs if name in request.outputs)

    def _check_names(self, request: InferRequest) -> None:
        names = request.inputs.keys()
        if names == self._names:
            return
        if not len(self._required) <= len(names) <= len(self._inputs):
            raise self._wrong_inputs(request)
        for name in names:
            if name not in self._names:
                raise invalid(f"unexpected inference input '{name}' for model '{self._config.name}'")
        if any(name not in names for name in self._required):
            raise self._wrong_inputs(request)

    def _wrong_inputs(self, request: InferRequest) -> InferenceError:
        text = wrong_inputs(self._config.name, required=self._required, optional=self._optional, got=request.inputs)
        return _refused(request, text)

    def _as_array(self, array: Array, request: InferRequest, rule: _Input) -> Array:
        if array.dtype is rule.numpy_type and array.dtype.kind != "O":
            return array
        try:
            return bytes_array(array)
        except TypeError as error:
            raise _refused(request, f"input '{rule.spec.name}': {error}") from error

    def _rows(self, inputs: Tensors, request: InferRequest) -> int:
        rows: int | None = None
        for rule in self._inputs:
            array = inputs.get(rule.spec.name)
            if array is None:
                continue
            if array.ndim == 0:
                raise self._unexpected_shape(array, rule, request)
            if rows is not None and array.shape[0] != rows:
                raise _refused(
                    request,
                    f"input '{rule.spec.name}' batch size does not match other inputs for '{self._config.name}'",
                )
            rows = array.shape[0]
        if rows is None or rows > self._config.max_batch_size:
            raise _refused(
                request,
                f"inference request batch-size must be <= {self._config.max_batch_size} for '{self._config.name}'",
            )
        return rows

    def _check_tensor(self, array: Array, rule: _Input, request: InferRequest) -> None:
        if array.dtype != rule.numpy_type:
            raise _refused(
                request,
                f"inference input '{rule.spec.name}' data-type is '{datatype_of(array)}', but model "
                f"'{self._config.name}' expects '{rule.spec.datatype}'",
            )
        shape = array.shape
        if not (shape[self._inner :] == rule.fixed if rule.fixed is not None else fits(shape, rule.full)):
            raise self._unexpected_shape(array, rule, request)
        if self._batches and shape[0] == 0:
            one_row = math.prod(shape[1:]) * array.dtype.itemsize
            raise _refused(
                request,
                f"input byte size mismatch for input '{rule.spec.name}' for model '{self._config.name}'. "
                f"Expected {one_row}, got 0",
            )

    def _reshaped(self, array: Array, rule: _Input) -> Array:
        spec = rule.spec
        if spec.reshape is None:
            return array
        return _reshape(array, inner=self._inner, was=spec.dims, becomes=spec.reshape)

    def _unexpected_shape(self, array: Array, rule: _Input, request: InferRequest) -> InferenceError:
        note = _BATCH_NOTE if self._batches else ""
        return _refused(
            request,
            f"unexpected shape for input '{rule.spec.name}' for model '{self._config.name}'. "
            f"Expected {_dims(rule.full)}, got {_dims(array.shape)}.{note}",
        )


def _check_numbers(request: InferRequest) -> None:
    """What the protocols' own types hold, for callers in the process, too. Texts leave out values that may be huge."""
    for name in ("priority", "queue_timeout_us"):
        if not _is_uint64(getattr(request, name)):
            raise _refused(request, f"{name} must be an unsigned 64-bit integer")
    sequence_id = request.sequence_id
    if not (_is_utf8(sequence_id) if isinstance(sequence_id, str) else _is_uint64(sequence_id)):
        raise _refused(request, "sequence_id must be an unsigned 64-bit integer or a UTF-8 string")


def _is_uint64(value: object) -> bool:
    return isinstance(value, int | np.integer) and 0 <= int(value) < 2**64


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def check_outputs(outputs: Tensors, config: ModelConfig, *, wanted: Sequence[str]) -> Tensors:
    """The wanted outputs in the shapes that clients see, or INTERNAL naming how the model broke its configuration.

    In config order, a sequence model's states behind the outputs. The number of rows is not judged here:
    `collate.split` knows what it must be.
    """
    checked: dict[str, Array] = {}
    for spec in output_specs(config):
        if spec.name not in wanted:
            continue
        if spec.name not in outputs:
            raise model_fault(config.name, f"did not return output '{spec.name}'")
        checked[spec.name] = _checked_output(outputs[spec.name], spec, config)
    return checked


def output_specs(config: ModelConfig) -> Sequence[TensorSpec]:
    """All tensors that the model gives: its outputs, then those states that are not among them."""
    states = config.sequence_batching.states if config.sequence_batching is not None else ()
    if not states:
        return config.outputs
    names = {spec.name for spec in config.outputs}
    return (
        *config.outputs,
        *(
            TensorSpec(name=state.output_name, datatype=state.datatype, dims=state.dims)
            for state in states
            if state.output_name not in names
        ),
    )


def _checked_output(array: Array, spec: TensorSpec, config: ModelConfig) -> Array:
    datatype = datatype_of(array)
    if datatype != spec.datatype:
        raise model_fault(
            config.name, f"returned output '{spec.name}' as '{datatype}', but its config says '{spec.datatype}'"
        )
    inner = 1 if config.max_batch_size > 0 else 0
    seen = spec.dims if spec.reshape is None else spec.reshape
    expected = (-1,) * inner + seen
    if not fits(array.shape, expected):
        raise model_fault(
            config.name,
            f"returned output '{spec.name}' of shape {_dims(array.shape)}, but its config says {_dims(expected)}",
        )
    return array if spec.reshape is None else _reshape(array, inner=inner, was=spec.reshape, becomes=spec.dims)


def _reshape(array: Array, *, inner: int, was: Sequence[int], becomes: Sequence[int]) -> Array:
    """The array in another inner shape; free dimensions keep their sizes, in order (core `src/infer_request.cc`)."""
    free = iter([have for have, dim in zip(array.shape[inner:], was, strict=True) if dim == -1])
    return array.reshape(*array.shape[:inner], *(next(free) if dim == -1 else dim for dim in becomes))


def datatype_of(array: Array) -> str:
    """The protocol's name of an array's type: FP32, BYTES, ...; "INVALID" if it has none."""
    if array.dtype.kind in "OSU":
        return "BYTES"
    return _DATATYPES.get(array.dtype, "INVALID")


def bytes_array(array: Array) -> Array:
    """Strings in any of numpy's forms as an object array of bytes (str as UTF-8); other arrays as they are.

    Raises TypeError for an object array that holds anything else.
    """
    if array.dtype.kind not in "OSU":
        return array
    items = array.ravel().tolist()
    kinds = set(map(type, items))
    if kinds <= {bytes}:
        return array if array.dtype.kind == "O" else array.astype(np.object_)
    other = next((kind for kind in kinds if not issubclass(kind, bytes | str)), None)
    if other is not None:
        raise TypeError(f"an element of a BYTES tensor is {other.__name__}, not bytes or str")
    encoded = np.empty(array.size, dtype=np.object_)
    encoded[:] = [item.encode() if isinstance(item, str) else bytes(item) for item in items]
    return encoded.reshape(array.shape)


def fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether a shape agrees with one that may hold -1 for free dimensions."""
    if len(shape) != len(expected):
        return False
    for have, want in zip(shape, expected, strict=True):  # noqa: SIM110 - a generator costs more; this is per request
        if want not in (have, -1):
            return False
    return True


def _dims(shape: Sequence[int]) -> str:
    return "[" + ",".join(str(dim) for dim in shape) + "]"


def _refused(request: InferRequest, text: str) -> InferenceError:
    return invalid(with_request_id(request.request_id, text))
