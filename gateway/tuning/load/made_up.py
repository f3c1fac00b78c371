"""Input tensors for a model that nobody gave any: of the right names, types and shapes. Pure."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from gateway.core.tensors import DTYPES, from_numpy
from gateway.core.types import Tensor
from gateway.tuning.load.asks import Ask, AskError

TEXT: Final = b"a cat"
_TYPES: Final = {f"TYPE_{name}": dtype for name, dtype in DTYPES.items()}


def tensors(config: Mapping[str, Any], ask: Ask, *, rows: int, seed: int) -> list[Tensor]:
    """Every input of a configuration (Triton's JSON); what `ask.input` has of one row stands `rows` times.

    Made up are: texts, the ones of integers (a mask then lets everything through), and random numbers from 0 to 1.
    """
    given = ask.inputs[0] if ask.inputs else {}
    names = [str(one["name"]) for one in config.get("input", ())]
    for option, named in (("input", given), ("shape", ask.shape)):
        for name in named:
            if name not in names:
                raise AskError(f"{option}: the model has no '{name}'; it has {', '.join(names) or 'none'}")
    is_batched = int(config.get("max_batch_size") or 0) > 0
    if rows > 1 and not is_batched:
        raise AskError("rows: the model takes no batches")
    rng = np.random.default_rng(random.Random(seed).getrandbits(64))
    found = []
    for one in config["input"]:
        name, kind = str(one["name"]), str(one["data_type"])
        dims = _dims(name, [int(dim) for dim in one["dims"]], ask.shape.get(name))
        array = _said(name, given[name], kind) if name in given else _invented(kind, dims, rng)
        found.append(from_numpy(name, np.repeat(array[None], rows, axis=0) if is_batched else array))
    return found


def _dims(name: str, dims: Sequence[int], wanted: Sequence[int] | None) -> Sequence[int]:
    """What is wanted, where the model can take it; else its own, of which those of any size are 1."""
    if wanted is None:
        return [max(1, dim) for dim in dims]
    if len(wanted) != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, wanted, strict=True)):
        raise AskError(f"shape.{name}: the model takes {list(dims)}, not {list(wanted)}")
    return wanted


def _said(name: str, value: Any, kind: str) -> np.ndarray[Any, Any]:
    try:
        if kind == "TYPE_STRING":
            return np.array(value, object)
        return np.array(value, _TYPES[kind])
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise AskError(f"input.{name}: no value of a {kind}: {error}") from error


def _invented(kind: str, dims: Sequence[int], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if kind == "TYPE_STRING":
        return np.full(dims, TEXT, object)
    if kind not in _TYPES:
        raise AskError(f"tensor: a {kind} cannot be made up")
    dtype = _TYPES[kind]
    return rng.random(dims).astype(dtype) if dtype.kind == "f" else np.ones(dims, dtype)
