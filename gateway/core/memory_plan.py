"""GPU memory of a model repository: does it fit, and what to change so that it does. Arithmetic on integers, no I/O.

The memory of one GPU is divided in three: 85 % for weights, 10 % for what batches need while they are computed (and for
the KV cache of LLMs), 5 % for the runtime (the CUDA context, libraries, the allocator's loss). Each part has to hold.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Protocol

GIB = 2**30
MIB = 2**20
WEIGHTS_PERCENT, BATCHING_PERCENT, RUNTIME_PERCENT = 85, 10, 5
# One CUDA context with cuBLAS and cuDNN takes a third to a half of a GiB on current GPUs; a server process has one.
RUNTIME_BYTES = 512 * MIB
HALF = 16  # bits
# What a row needs at its peak, in multiples of its inputs and outputs, where nothing better is known: the greatest of
# the five networks measured in docs/models.md (Whisper's encoder 50, BERT-base 25 to 43, ResNet-50 12).
ROW_FACTOR = 50
# What `nvidia-smi` shows as memory.total, in MiB, ascending.
GPUS = {
    "T4": 15360,
    "L4": 23034,
    "A100 40 GB": 40960,
    "L40S": 46068,
    "H100 80 GB": 81559,
    "H200": 143771,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What one model needs of one GPU.

    Args:
        name: the model's name.
        weight_bytes: of one copy of the weights.
        bits: of a weight; those of 16 or less are not halved any more.
        instances: on this GPU; each has its own weights and its own batch.
        copies: versions that are loaded at the same time: 2 while one is replaced without downtime.
        max_batch_size: rows that an instance computes at once, at least 1.
        row_bytes: what one row needs while it is computed.
        kv_token_bytes: of an LLM's KV cache, for one token (`kv_token_bytes`).
        tokens: that the KV cache has to hold at once, over all requests.
    """

    name: str
    weight_bytes: int
    bits: int = 32
    instances: int = 1
    copies: int = 1
    max_batch_size: int = 1
    row_bytes: int = 0
    kv_token_bytes: int = 0
    tokens: int = 0

    @property
    def weights(self) -> int:
        """Bytes of all its weights."""
        return self.weight_bytes * self.instances * self.copies

    @property
    def rows(self) -> int:
        """Bytes of all its batches."""
        return self.row_bytes * self.max_batch_size * self.instances * self.copies

    @property
    def kv_cache(self) -> int:
        """Bytes of its KV caches."""
        return self.kv_token_bytes * self.tokens * self.instances * self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the three parts of the memory, in bytes."""

    name: str
    needed: int
    budget: int

    @property
    def fits(self) -> bool:
        """Whether the need is within the budget."""
        return self.needed <= self.budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One way that does fit: what to change, and what the plan is made of then."""

    title: str
    changes: tuple[str, ...]
    models: tuple[Model, ...]
    gpu_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The need against the budget of one GPU; `suggestions` is empty where it fits, or where nothing helps."""

    models: tuple[Model, ...]
    gpu_bytes: int
    runtime_bytes: int
    parts: tuple[Part, ...]
    suggestions: tuple[Suggestion, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether all three parts do."""
        return all(part.fits for part in self.parts)


def kv_token_bytes(*, layers: int, kv_heads: int, head_dim: int, value_bytes: int = 2) -> int:
    """Bytes of the KV cache for one token: a key and a value for each head of each layer."""
    return layers * 2 * kv_heads * head_dim * value_bytes


def parts(models: Sequence[Model], *, gpu_bytes: int, runtime_bytes: int = RUNTIME_BYTES) -> tuple[Part, ...]:
    """Need and budget of weights, batching and runtime."""
    needs = (
        ("weights", sum(model.weights for model in models), WEIGHTS_PERCENT),
        ("batching", sum(model.rows + model.kv_cache for model in models), BATCHING_PERCENT),
        ("runtime", runtime_bytes, RUNTIME_PERCENT),
    )
    return tuple(Part(name=name, needed=needed, budget=gpu_bytes * percent // 100) for name, needed, percent in needs)


def fits(models: Sequence[Model], *, gpu_bytes: int, runtime_bytes: int = RUNTIME_BYTES) -> bool:
    """Whether all parts are within their budgets."""
    return all(part.fits for part in parts(models, gpu_bytes=gpu_bytes, runtime_bytes=runtime_bytes))


def plan(models: Sequence[Model], *, gpu_bytes: int, runtime_bytes: int = RUNTIME_BYTES) -> MemoryPlan:
    """The plan for one GPU, with suggestions that are proven to fit where it does not."""
    found = parts(models, gpu_bytes=gpu_bytes, runtime_bytes=runtime_bytes)
    own = MemoryPlan(models=tuple(models), gpu_bytes=gpu_bytes, runtime_bytes=runtime_bytes, parts=found)
    return own if own.fits else replace(own, suggestions=tuple(_suggestions(own)))


def tokens_that_fit(model: Model, models: Sequence[Model], *, gpu_bytes: int) -> int:
    """How many tokens the KV cache of `model` may hold beside all that the others need of the batching part."""
    budget = gpu_bytes * BATCHING_PERCENT // 100
    others = sum(other.rows + other.kv_cache for other in models if other.name != model.name) + model.rows
    per_token = model.kv_token_bytes * model.instances * model.copies
    return max(0, budget - others) // per_token if per_token else 0


def _suggestions(own: MemoryPlan) -> Iterator[Suggestion]:
    """The ways that are enough alone; else the pairs, and so on; and the smallest GPU that takes all as it is."""
    for size in range(1, len(_WAYS) + 1):
        found = [made for ways in combinations(_WAYS, size) if (made := _made(ways, own)) is not None]
        if found:
            yield from found
            break
    for name, mib in GPUS.items():
        gpu_bytes = mib * MIB
        if gpu_bytes > own.gpu_bytes and fits(own.models, gpu_bytes=gpu_bytes, runtime_bytes=own.runtime_bytes):
            changes = (f"{name}: {gpu_bytes / GIB:.1f} GiB instead of {own.gpu_bytes / GIB:.1f} GiB",)
            yield Suggestion(title="another GPU", changes=changes, models=own.models, gpu_bytes=gpu_bytes)
            return


def _made(ways: tuple["_Way", ...], own: MemoryPlan) -> Suggestion | None:
    """What these ways make of the plan one after the other, if it fits then and each has changed something."""
    # Where a way that is about batches alone comes later, those before it need to mind the weights alone.
    later: set[_Change] = {_smaller_batches, _fewer_tokens}
    models = own.models
    for place, way in enumerate(ways):
        rest = {way.change for way in ways[place + 1 :]}
        changed = way.change(models, replace(own, models=models), only_weights=bool(rest & later))
        if changed == models:
            return None
        models = changed
    if not fits(models, gpu_bytes=own.gpu_bytes, runtime_bytes=own.runtime_bytes):
        return None
    return _suggestion(" and ".join(way.title for way in ways), models, own)


def _suggestion(title: str, changed: tuple[Model, ...], own: MemoryPlan) -> Suggestion:
    changes = tuple(line for old, new in zip(own.models, changed, strict=True) for line in _changes(old, new))
    return Suggestion(title=title, changes=changes, models=changed, gpu_bytes=own.gpu_bytes)


def _changes(old: Model, new: Model) -> Iterator[str]:
    for field in ("instances", "max_batch_size", "tokens", "bits"):
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            yield f"{old.name}: {field} {before} -> {after}"


def _fewer_instances(models: tuple[Model, ...], own: MemoryPlan, *, only_weights: bool) -> tuple[Model, ...]:
    """One instance less of the model that needs the most, until it fits or none has more than one."""
    while share := _over(models, own, only_weights=only_weights):
        several = [model for model in models if model.instances > 1 and share(model) > 0]
        if not several:
            break
        most = max(several, key=share)
        models = _replaced(models, most, replace(most, instances=most.instances - 1))
    return models


def _half_precision(models: tuple[Model, ...], own: MemoryPlan, *, only_weights: bool) -> tuple[Model, ...]:
    """16 bits for the model that needs the most, until it fits or all have them."""
    while share := _over(models, own, only_weights=only_weights):
        full = [model for model in models if model.bits > HALF and share(model) > 0]
        if not full:
            break
        most = max(full, key=share)
        models = _replaced(models, most, _halved(most))
    return models


def _smaller_batches(models: tuple[Model, ...], own: MemoryPlan, *, only_weights: bool) -> tuple[Model, ...]:  # noqa: ARG001 - all ways are called alike
    """Half the max_batch_size of the model whose batches need the most, until batching fits."""
    while not _batching(models, own).fits:
        large = [model for model in models if model.max_batch_size > 1 and model.rows > 0]
        if not large:
            break
        most = max(large, key=lambda model: model.rows)
        models = _replaced(models, most, replace(most, max_batch_size=most.max_batch_size // 2))
    return models


def _fewer_tokens(models: tuple[Model, ...], own: MemoryPlan, *, only_weights: bool) -> tuple[Model, ...]:  # noqa: ARG001 - as above
    """As many tokens as fit, for the LLM whose KV cache needs the most first; none is left without any."""
    for model in sorted(models, key=lambda model: model.kv_cache, reverse=True):
        tokens = tokens_that_fit(model, models, gpu_bytes=own.gpu_bytes)
        if 0 < tokens < model.tokens:
            models = _replaced(models, model, replace(model, tokens=tokens))
    return models


def _halved(model: Model) -> Model:
    """With weights and activations of 16 bits."""
    weights = -(-model.weight_bytes * HALF // model.bits)
    return replace(model, bits=HALF, weight_bytes=weights, row_bytes=-(-model.row_bytes * HALF // model.bits))


def _over(models: Sequence[Model], own: MemoryPlan, *, only_weights: bool) -> Callable[[Model], int] | None:
    """How to tell a model's share of the part that is over its budget, weights before batching; None if none is."""
    weights, batching, _ = parts(models, gpu_bytes=own.gpu_bytes)
    if not weights.fits:
        return _share_of_weights
    return None if batching.fits or only_weights else _share_of_batching


def _share_of_weights(model: Model) -> int:
    return model.weights


def _share_of_batching(model: Model) -> int:
    return model.rows + model.kv_cache


def _batching(models: Sequence[Model], own: MemoryPlan) -> Part:
    return parts(models, gpu_bytes=own.gpu_bytes)[1]


def _replaced(models: tuple[Model, ...], old: Model, new: Model) -> tuple[Model, ...]:
    return tuple(new if model is old else model for model in models)


class _Change(Protocol):
    def __call__(self, models: tuple[Model, ...], own: MemoryPlan, /, *, only_weights: bool) -> tuple[Model, ...]:
        """The changed models; the same ones where this way does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    title: str
    change: _Change


_WAYS = (
    _Way(title="fewer instances", change=_fewer_instances),
    _Way(title="16-bit weights (export anew in half precision)", change=_half_precision),
    _Way(title="smaller batches", change=_smaller_batches),
    _Way(title="fewer tokens in the KV cache", change=_fewer_tokens),
)
