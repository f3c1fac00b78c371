"""Triton's classification extension: the best classes of an output as text. Pure.

Source: `protocol/extension_classification.md`.
"""

import math
from collections.abc import Sequence

import numpy as np

from local_runtime.messages import Array
from local_runtime.protocol.oip_tensors import Malformed
from local_runtime.scheduling.byte_strings import of_objects


def top_classes(name: str, array: Array, *, count: int, is_batched: bool, labels: Sequence[str]) -> Array:
    """The `count` largest values of each row as BYTES "value:index" or "value:index:label", largest first.

    `array` has shape [rows, ...] if batched and [...] otherwise; the answer [rows, k] or [k], where k is `count` or
    as many classes as there are. Raises Malformed for tensors without an order.
    """
    if array.dtype.kind not in "biuf":  # BYTES, and BF16, which numpy does not know
        raise Malformed(f"class result not available for output '{name}' due to unsupported type")
    rows = array.reshape(array.shape[0], math.prod(array.shape[1:])) if is_batched else array.reshape(1, array.size)
    k = min(count, rows.shape[1])
    best = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :k]
    texts = [_text(rows[row, at], int(at), labels) for row in range(rows.shape[0]) for at in best[row]]
    return of_objects(texts).reshape((rows.shape[0], k) if is_batched else (k,))


def _text(value: "np.generic", at: int, labels: Sequence[str]) -> bytes:
    number = f"{value:f}" if value.dtype.kind == "f" else f"{int(value)}"
    return (f"{number}:{at}:{labels[at]}" if at < len(labels) else f"{number}:{at}").encode()
