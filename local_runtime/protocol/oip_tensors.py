"""Tensors as bytes, the same over gRPC and HTTP. Pure.

Binary form: little-endian values in row order; BYTES elements as a 4-byte little-endian length and the bytes
(Triton's binary tensor data extension, `protocol/extension_binary_data.md`).
"""

import contextlib
import math
import struct
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from local_runtime.errors import invalid
from local_runtime.messages import Array
from local_runtime.repository.model_config import NUMPY_TYPES
from local_runtime.scheduling.byte_strings import from_serialized

_MAX_RANK: Final = 64  # numpy's
_MAX_BYTES: Final = 2**63 - 1
_LARGEST_ITEM: Final = 8
MAX_TEXTS: Final = (
    500_000  # elements of a tensor of BYTES: they are taken one by one, each in a quarter of a microsecond
)
_ITEM_SIZES: Mapping[str, int] = MappingProxyType(
    {datatype: np.dtype(numpy_type).itemsize for datatype, numpy_type in NUMPY_TYPES.items()}
)


class Malformed(Exception):
    """A request does not hold what it says it holds; the text names the field. The caller's fault."""


@contextlib.contextmanager
def refusing() -> Generator[None, None, None]:
    """What is malformed within is an INVALID_ARG without."""
    try:
        yield
    except Malformed as error:
        raise invalid(str(error)) from error


def check_tensor(name: str, datatype: str, shape: Sequence[int]) -> None:
    """Raise Malformed for a datatype that does not exist, or a shape that no array can have.

    Asked before anything is computed from a shape: it is what a client says, of any length.
    """
    if datatype not in _ITEM_SIZES:
        raise Malformed(f"invalid datatype for input '{name}': '{datatype:.100}'")
    if len(shape) > _MAX_RANK:
        raise Malformed(
            f"invalid shape for input '{name}': it has {len(shape)} dimensions, and a tensor at most {_MAX_RANK}"
        )
    if shape and not (min(shape) >= 0 and max(shape) <= _MAX_BYTES and _room(shape) <= _MAX_BYTES):
        raise _bad_shape(name, shape)
    if datatype == "BYTES" and math.prod(shape) > MAX_TEXTS:
        raise Malformed(f"invalid shape for input '{name}': a tensor of BYTES has at most {MAX_TEXTS} elements")


def item_size(datatype: str) -> int:
    """Bytes of one element; of BYTES, whose elements have none of their own, that of a pointer."""
    return _ITEM_SIZES[datatype]


def shaped(name: str, array: Array, shape: Sequence[int]) -> Array:
    """The same values in another shape, which was checked; Malformed if they are not as many."""
    check_count(name, array.size, shape, is_text=array.dtype.kind == "O")
    return array.reshape(tuple(shape))


def check_count(name: str, count: int, shape: Sequence[int], *, is_text: bool) -> None:
    """Raise Malformed unless `count` elements are what the shape says."""
    expected = math.prod(shape)
    if count != expected:
        what = "string elements" if is_text else "elements"
        raise Malformed(f"unexpected number of {what} {count} for inference input '{name}', expecting {expected}")


def check_size(name: str, datatype: str, shape: Sequence[int], size: int, *, model: str) -> None:
    """Raise Malformed unless `size` bytes are what datatype (not BYTES) and shape say; checks these, too."""
    check_tensor(name, datatype, shape)
    expected = math.prod(shape) * _ITEM_SIZES[datatype]
    if size != expected:
        raise Malformed(
            f"input byte size mismatch for input '{name}' for model '{model}'. Expected {expected}, got {size}"
        )


def from_bytes(name: str, datatype: str, shape: Sequence[int], *, raw: "bytes | memoryview", model: str) -> Array:
    """A tensor from its binary form: a read-only view of `raw`, except for BYTES. Raises Malformed."""
    if datatype == "BYTES":
        check_tensor(name, datatype, shape)
        try:
            items = from_serialized(bytes(raw))
        except ValueError as error:
            raise Malformed(f"{error} for inference input '{name}'") from error
        return shaped(name, items, shape)
    check_size(name, datatype, shape, len(raw), model=model)
    return np.frombuffer(raw, dtype=NUMPY_TYPES[datatype]).reshape(tuple(shape))


def to_bytes(array: Array) -> bytes:
    """The binary form of a tensor."""
    if array.dtype.kind == "O":
        return b"".join(struct.pack("<I", len(item)) + item for item in array.reshape(-1))
    return array.tobytes()


def _room(shape: Sequence[int]) -> int:
    """Bytes that the shape spans, with 1 in place of each 0: numpy must be able to address even an empty tensor.

    Elements count 8 bytes each, whatever they are: an answer of the same shape may have larger ones.
    """
    return (math.prod(shape) or math.prod(dim or 1 for dim in shape)) * _LARGEST_ITEM


def _bad_shape(name: str, shape: Sequence[int]) -> Malformed:
    """For a shape whose rank was checked."""
    return Malformed(f"invalid shape for input '{name}': {list(shape)}")
