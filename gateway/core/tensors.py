"""Tensors between their wire form (Open Inference Protocol, binary) and numpy.

Wire form: row-major little-endian. An element of BYTES is a little-endian uint32 length followed by its bytes
(Triton, `docs/protocol/extension_binary_data.md`). BF16 has no numpy form and travels as raw bytes only.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gateway.core.types import Tensor

Array = NDArray[Any]

BYTES: Final = "BYTES"
BF16: Final = "BF16"
MAX_DIM: Final = 2**63 - 1  # a shape travels as int64 in the protocol's protobuf messages
MAX_ELEMENTS: Final = 2**60 - 1  # times 8 bytes just fits int64: numpy refuses more even for an empty array
MAX_RANK: Final = 64  # numpy's own bound; Triton has none that is lower

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype("?"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
ITEM_SIZES: Final[dict[str, int]] = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {BF16: 2}
DATATYPES: Final = frozenset(ITEM_SIZES) | {BYTES}

_NAMES: Final[dict[np.dtype[Any], str]] = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH: Final = struct.Struct("<I")
_TEXT_KINDS: Final = "OSU"  # object, bytes and str arrays all travel as BYTES


def byte_size(datatype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this datatype and shape.

    Raises ValueError for an unknown datatype, for BYTES (its size is not in its shape), and for a shape that no tensor
    can have.
    """
    if datatype not in ITEM_SIZES:
        raise ValueError(_unknown(datatype) if datatype != BYTES else "BYTES has no size of its own")
    return _elements(shape) * ITEM_SIZES[datatype]


def check(tensor: Tensor) -> None:
    """Raise ValueError unless `tensor.data` is exactly what its datatype and shape promise."""
    size = len(tensor.data)
    if tensor.datatype == BYTES:
        expected = _elements(tensor.shape)
        if expected * _LENGTH.size > size:
            raise ValueError(_mismatch(tensor, f"at least {expected * _LENGTH.size} bytes"))
        found = sum(1 for _ in element_spans(tensor.name, tensor.data))
        if found != expected:
            raise ValueError(_mismatch(tensor, f"{expected} elements"))
        return
    expected = byte_size(tensor.datatype, tensor.shape)
    if expected != size:
        raise ValueError(_mismatch(tensor, f"{expected} bytes"))


def to_numpy(tensor: Tensor) -> Array:
    """The tensor as an array; ValueError as `check`, and for BF16.

    Fixed-size types are read-only views of `tensor.data`, without a copy. BYTES become an object array of bytes.
    """
    if tensor.datatype == BF16:
        raise ValueError(f"tensor '{tensor.name}': BF16 has no numpy form")
    if tensor.datatype != BYTES:
        check(tensor)
        return np.ndarray(tensor.shape, DTYPES[tensor.datatype], tensor.data)
    expected = _elements(tensor.shape)
    view = memoryview(tensor.data)
    elements = [bytes(view[start:end]) for start, end in element_spans(tensor.name, tensor.data)]
    if len(elements) != expected:
        raise ValueError(_mismatch(tensor, f"{expected} elements"))
    array = np.empty(expected, dtype=np.object_)
    array[:] = elements
    return array.reshape(tensor.shape)


def from_numpy(name: str, array: Array) -> Tensor:
    """The array in wire form; without a copy where it is contiguous and little-endian already.

    Object, bytes and str arrays become BYTES (str as UTF-8). ValueError for a type that the protocol lacks.
    """
    if array.dtype.kind in _TEXT_KINDS:
        return Tensor(name=name, datatype=BYTES, shape=array.shape, data=_frame(name, array))
    little = array.dtype.newbyteorder("<")
    datatype = _NAMES.get(little)
    if datatype is None:
        raise ValueError(f"tensor '{name}': numpy type {array.dtype} is not in the protocol")
    flat = np.ascontiguousarray(array, dtype=little).reshape(-1)
    return Tensor(name=name, datatype=datatype, shape=array.shape, data=flat.view(np.uint8).data)


def _elements(shape: Sequence[int]) -> int:
    if len(shape) > MAX_RANK:
        raise ValueError(f"a shape of {len(shape)} dimensions is over {MAX_RANK}")
    if shape and not 0 <= min(shape) <= max(shape) <= MAX_DIM:
        raise ValueError(f"shape {list(shape)} holds a dimension outside 0..{MAX_DIM}")
    elements = math.prod(shape)
    if (elements or math.prod(dim or 1 for dim in shape)) > MAX_ELEMENTS:  # Python's integers do not overflow
        raise ValueError(f"shape {list(shape)} is too large for any tensor")
    return elements


def element_spans(name: str, data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Where each element of the BYTES tensor `name` begins and ends; ValueError where a length points past the end."""
    at, end = 0, len(data)
    while at < end:
        start = at + _LENGTH.size
        if start > end:
            raise ValueError(f"tensor '{name}': {end - at} trailing bytes after the last element")
        at = start + _LENGTH.unpack_from(data, at)[0]
        if at > end:
            raise ValueError(f"tensor '{name}': an element is longer than the data left")
        yield start, at


def _frame(name: str, array: Array) -> bytes:
    pieces: list[bytes] = []
    for element in array.reshape(-1).tolist():
        raw = element.encode() if isinstance(element, str) else element
        if not isinstance(raw, bytes):
            raise ValueError(f"tensor '{name}': an object array may hold bytes and str only")  # noqa: TRY004 - documented as ValueError
        pieces += (_LENGTH.pack(len(raw)), raw)
    return b"".join(pieces)


def _mismatch(tensor: Tensor, needed: str) -> str:
    return (
        f"tensor '{tensor.name}': {tensor.datatype} of shape {list(tensor.shape)} needs {needed}, "
        f"got {len(tensor.data)} bytes"
    )


def _unknown(datatype: str) -> str:
    return f"datatype '{datatype[:20]}' is not one of {', '.join(sorted(DATATYPES))}"
