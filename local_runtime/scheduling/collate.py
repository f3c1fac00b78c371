"""Requests into one batch, and the batch's outputs back into one answer per request. Pure numpy."""

import itertools
from collections.abc import Sequence

import numpy as np

from local_runtime.errors import InferenceError, model_fault
from local_runtime.messages import Tensors


def concatenate(members: Sequence[Tensors]) -> Tensors:
    """All members' rows, in order, along the first dimension.

    The members have the same names, types and inner shapes. The arrays are always new and writable: a model may
    work in place, and what it got may be the caller's own memory or an ensemble's tensor that others read, too.
    """
    if len(members) == 1:
        return {name: array.copy() for name, array in members[0].items()}
    return {name: np.concatenate([member[name] for member in members]) for name in members[0]}


def split(outputs: Tensors, *, rows: Sequence[int], model: str) -> list[Tensors | InferenceError]:
    """One outcome per member, as views of the batch's outputs.

    A model that returned another number of rows than it got has mixed up its rows; nobody can tell whose they
    are, so every member gets the INTERNAL error and none gets a neighbour's answer.
    """
    total = sum(rows)
    for name, array in outputs.items():
        got = array.shape[0] if array.ndim else 0
        if got != total:
            error = model_fault(model, f"returned {got} rows in output '{name}' for a batch of {total} rows")
            return [error] * len(rows)
    bounds = itertools.accumulate(rows, initial=0)
    return [{name: array[start:end] for name, array in outputs.items()} for start, end in itertools.pairwise(bounds)]
