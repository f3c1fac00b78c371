"""The elements of BYTES tensors, one after the other in bytes. Pure.

Triton's form (`protocol/extension_binary_data.md`): each element is a 4-byte little-endian length and the bytes.
"""

import struct
from collections.abc import Sequence

import numpy as np

from local_runtime.messages import Array


def of_objects(items: Sequence[bytes]) -> Array:
    """A one-dimensional BYTES tensor."""
    array = np.empty(len(items), dtype=np.object_)
    array[:] = items
    return array


def from_serialized(raw: bytes) -> Array:
    """The elements as a one-dimensional BYTES tensor; ValueError if the last of them is not whole."""
    items: list[bytes] = []
    at = 0
    while at < len(raw):
        start = at + 4
        end = start + struct.unpack_from("<I", raw, at)[0] if start <= len(raw) else start
        if end > len(raw):
            raise ValueError("unexpected end of string elements")
        items.append(raw[start:end])
        at = end
    return of_objects(items)
