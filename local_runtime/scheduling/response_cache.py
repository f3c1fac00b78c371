"""Answers kept for requests that come again (`response_cache { enable: true }`), least recently used first to go.

As in Triton, concurrent equal requests are all executed. Unlike Triton's 64-bit key, ours cannot collide by accident
(128 bits of BLAKE2b) and includes which outputs were asked for. Pure.
"""

import hashlib
from collections import OrderedDict
from types import MappingProxyType

import numpy as np

from local_runtime.messages import Annotated, Array, Parameters, Tensors
from local_runtime.scheduling.validation import CheckedRequest

_DIGEST_BYTES = 16
# What an entry and an array cost beside their values (measured, CPython 3.11), so that empty answers count, too.
_ENTRY_BYTES = 700
_ARRAY_BYTES = 200
_NO_PARAMETERS: Parameters = MappingProxyType({})


def cache_key(owner: int, request: CheckedRequest) -> bytes:
    """What makes two requests equal: the loaded model version (`owner`), the inputs, the wanted outputs."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    digest.update(repr((owner, request.outputs)).encode())
    for name, array in request.inputs.items():
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        if array.dtype.kind == "O":
            for item in array.reshape(-1):
                digest.update(len(item).to_bytes(8, "little"))
                digest.update(item)
        else:
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


class ResponseCache:
    """Holds outputs up to `capacity_bytes` together; an answer larger than that is not kept."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[bytes, tuple[Annotated, int]] = OrderedDict()

    def __len__(self) -> int:
        """Answers kept now."""
        return len(self._entries)

    def get(self, key: bytes) -> Annotated | None:
        """The answer kept under the key (its arrays are read-only), or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return Annotated(outputs=dict(entry[0].outputs), parameters=entry[0].parameters)

    def put(self, key: bytes, outputs: Tensors, parameters: Parameters = _NO_PARAMETERS) -> None:
        """Keep a copy of the outputs, with the response's parameters.

        It takes the room of those that were not asked for the longest time.
        """
        size = _ENTRY_BYTES + sum(_ARRAY_BYTES + _bytes(array) for array in outputs.values())
        if size > self._capacity_bytes:
            return
        self._remove(key)
        while self._used_bytes + size > self._capacity_bytes:
            self._remove(next(iter(self._entries)))
        kept = {name: _frozen(array) for name, array in outputs.items()}
        self._entries[key] = (Annotated(outputs=kept, parameters=parameters), size)
        self._used_bytes += size

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= entry[1]


def _bytes(array: Array) -> int:
    if array.dtype.kind == "O":
        return array.nbytes + sum(len(item) for item in array.reshape(-1))
    return array.nbytes


def _frozen(array: Array) -> Array:
    copy = array.copy()
    copy.setflags(write=False)
    return copy
