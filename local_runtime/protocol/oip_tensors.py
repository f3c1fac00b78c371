"""Tensors as bytes, the same over gRPC and HTTP. Pure.

Binary form: little-endian values in row order; BYTES elements as a 4-byte little-endian length and the bytes
(Triton's binary tensor data extension, `protocol/extension_binary_data.md`).
"""

import contextlib
import math
import struct
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from local_runtime.errors import invalid
from local_runtime.messages import Array
from local_runtime.repository.model_config import NUMPY_TYPES
from local_runtime.scheduling.byte_strings import from_serialized

_MAX_RANK: Final = 64  # numpy's
_MAX_BYTES: Final = 2**63 - 1
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
    itemsize = _ITEM_SIZES.get(datatype)
    if itemsize is None:
        raise Malformed(f"invalid datatype for input '{name}': '{datatype:.100}'")
    if len(shape) > _MAX_RANK:
        raise Malformed(
            f"invalid shape for input '{name}': it has {len(shape)} dimensions, and a tensor at most {_MAX_RANK}"
        )
    if shape and (min(shape) < 0 or max(shape) > _MAX_BYTES or math.prod(shape) * itemsize > _MAX_BYTES):
        raise _bad_shape(name, shape)


def shaped(name: str, array: Array, shape: Sequence[int]) -> Array:
    """The same values in another shape; Malformed if they are not as many, or numpy cannot address the shape."""
    expected = math.prod(shape)
    if array.size != expected:
        what = "string elements" if array.dtype.kind == "O" else "elements"
        raise Malformed(f"unexpected number of {what} {array.size} for inference input '{name}', expecting {expected}")
    try:
        return array.reshape(tuple(shape))
    except (ValueError, OverflowError) as error:  # dimensions beyond what numpy can address beside a 0
        raise _bad_shape(name, shape) from error


def from_bytes(name: str, datatype: str, shape: Sequence[int], *, raw: "bytes | memoryview", model: str) -> Array:
    """A tensor from its binary form: a read-only view of `raw`, except for BYTES. Raises Malformed."""
    check_tensor(name, datatype, shape)
    if datatype == "BYTES":
        try:
            items = from_serialized(bytes(raw))
        except ValueError as error:
            raise Malformed(f"{error} for inference input '{name}'") from error
        return shaped(name, items, shape)
    dtype: np.dtype[Any] = np.dtype(NUMPY_TYPES[datatype])
    expected = math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise Malformed(
            f"input byte size mismatch for input '{name}' for model '{model}'. Expected {expected}, got {len(raw)}"
        )
    return shaped(name, np.frombuffer(raw, dtype=dtype), shape)


def to_bytes(array: Array) -> bytes:
    """The binary form of a tensor."""
    if array.dtype.kind == "O":
        return b"".join(struct.pack("<I", len(item)) + item for item in array.reshape(-1))
    return array.tobytes()


def _bad_shape(name: str, shape: Sequence[int]) -> Malformed:
    """For a shape whose rank was checked."""
    return Malformed(f"invalid shape for input '{name}': {list(shape)}")
