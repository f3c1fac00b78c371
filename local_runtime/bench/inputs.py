"""Made-up inputs for a model that is measured."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from local_runtime.messages import TensorMetadata
from local_runtime.repository.model_config import NUMPY_TYPES


def tensor(spec: TensorMetadata, shapes: Mapping[str, tuple[int, ...]]) -> "np.ndarray[Any, Any]":
    """One row: noise for floating-point inputs, ones for others.

    `spec.shape` begins with the batch; `shapes` says by an input's name what stands behind it, free dimensions are 1.
    """
    shape = (1, *shapes.get(spec.name, tuple(max(1, size) for size in spec.shape[1:])))
    if spec.datatype == "BYTES":
        return np.full(shape, b"hello", dtype=np.object_)
    numpy_type = NUMPY_TYPES[spec.datatype]
    if spec.datatype.startswith(("FP", "BF")):
        return np.random.default_rng(0).standard_normal(shape).astype(numpy_type)
    return np.ones(shape, dtype=numpy_type)
