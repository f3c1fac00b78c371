"""The values of tensors as JSON. Pure.

Nothing is converted silently: a boolean is no number, a fraction no integer, and what a type cannot hold is refused
(Triton wraps integers around).
"""

import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from local_runtime.errors import InferenceError, invalid
from local_runtime.messages import Array
from local_runtime.protocol.oip_tensors import Malformed, check_tensor, to_bytes
from local_runtime.repository.model_config import NUMPY_TYPES
from local_runtime.scheduling.byte_strings import of_objects
from local_runtime.scheduling.validation import datatype_of

_INTEGERS = frozenset({int})
_NUMBERS = frozenset({int, float})
# Types of JSON values that may stand for each datatype; FP16 and BF16 have no form in JSON, as in Triton.
_ELEMENT_TYPES: Mapping[str, frozenset[type]] = MappingProxyType(
    {
        "BOOL": frozenset({bool}),
        **dict.fromkeys(("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"), _INTEGERS),
        "FP32": _NUMBERS,
        "FP64": _NUMBERS,
        "BYTES": frozenset({str}),
    }
)
# The letters of Python's `struct`, little-endian like all that is sent.
_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "?",
        "INT8": "b",
        "INT16": "h",
        "INT32": "i",
        "INT64": "q",
        "UINT8": "B",
        "UINT16": "H",
        "UINT32": "I",
        "UINT64": "Q",
        "FP32": "f",
        "FP64": "d",
    }
)
_WORDS: Mapping[frozenset[type], str] = MappingProxyType(
    {_INTEGERS: "integers", _NUMBERS: "numbers", frozenset({bool}): "booleans", frozenset({str}): "strings"}
)


def from_json(name: str, datatype: str, shape: Sequence[int], data: Any) -> Array:
    """A tensor (read-only, except for BYTES) from JSON values, flat or nested as its shape says.

    Raises Malformed naming the input.
    """
    values = _values(name, datatype, shape, data)
    if datatype == "BYTES":
        return of_objects(_texts(name, values)).reshape(tuple(shape))
    return np.ndarray(tuple(shape), NUMPY_TYPES[datatype], _packed(name, datatype, values))


def bytes_from_json(name: str, datatype: str, shape: Sequence[int], data: Any) -> bytes:
    """The binary form of such a tensor. Raises Malformed naming the input."""
    values = _values(name, datatype, shape, data)
    if datatype == "BYTES":
        return to_bytes(of_objects(_texts(name, values)))
    return _packed(name, datatype, values)


def _values(name: str, datatype: str, shape: Sequence[int], data: Any) -> list[Any]:
    """The values in row order, as many and of such types as shape and datatype say."""
    check_tensor(name, datatype, shape)
    if not isinstance(data, list):
        raise Malformed(f"Unable to parse 'data' of input '{name}': must be an array")
    values: list[Any] = _flat(name, data, shape) if data and type(data[0]) is list else data
    if len(values) != math.prod(shape):
        raise _wrong_count(name)
    allowed = _ELEMENT_TYPES.get(datatype)
    if allowed is None:
        raise Malformed(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    if not set(map(type, values)) <= allowed:
        raise Malformed(f"Unable to parse 'data' of input '{name}': {datatype} values must be {_WORDS[allowed]}")
    return values


def to_json(name: str, array: Array) -> "Array | list[str]":
    """A tensor as what the JSON writer takes: row order, one dimension. INVALID_ARG if JSON has no form for it."""
    if array.dtype.kind == "O":
        try:
            return [item.decode() for item in array.reshape(-1)]
        except UnicodeDecodeError as error:
            raise invalid(
                f"output '{name}' holds bytes that are not UTF-8, which JSON cannot carry. Please ask for it in the "
                "binary data format"
            ) from error
    datatype = datatype_of(array)
    if datatype not in _ELEMENT_TYPES:
        raise no_json_form(name, datatype)
    flat = array.ravel()
    if datatype != "FP32":
        return flat
    with np.errstate(invalid="ignore"):  # a NaN of the signalling kind is a NaN: nothing to warn of
        return flat.astype(np.float64)  # all its digits, as Triton writes it


def no_json_form(name: str, datatype: str) -> InferenceError:
    """An output of this datatype was asked for as JSON."""
    return invalid(
        f"sending {datatype} data via JSON is not supported. Please use the binary data format for output {name}"
    )


def _texts(name: str, values: list[str]) -> list[bytes]:
    try:
        return [value.encode() for value in values]
    except UnicodeEncodeError as error:
        raise Malformed(f"Unable to parse 'data' of input '{name}': a string is not valid Unicode") from error


def _packed(name: str, datatype: str, values: list[Any]) -> bytes:
    try:
        # Not np.array, which lets FP32 overflow to infinity and takes twice as long.
        return struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)
    except (OverflowError, struct.error) as error:
        raise Malformed(f"Unable to parse 'data' of input '{name}': a value is out of range of {datatype}") from error


def _flat(name: str, data: list[Any], shape: Sequence[int]) -> list[Any]:
    """Nested lists in row order; every level must be as long as the shape says."""
    level = data
    count = 1
    for at, dim in enumerate(shape):
        count *= dim
        if len(level) != count:
            raise _wrong_count(name)
        if at + 1 == len(shape):
            return level
        if any(type(row) is not list or len(row) != shape[at + 1] for row in level):
            raise _wrong_count(name)
        level = list(itertools.chain.from_iterable(level))
    raise _wrong_count(name)


def _wrong_count(name: str) -> Malformed:
    return Malformed(f"Unable to parse 'data': Shape does not match true shape of 'data' field of input '{name}'")
