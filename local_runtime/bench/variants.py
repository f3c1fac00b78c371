"""One model under several batching settings: a repository in which each setting is a model of its own."""

import dataclasses
import enum
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from local_runtime.repository.schedulers import ADAPTIVE_BATCHING, ADAPTIVE_LATENCY_TARGET


class Kind(enum.StrEnum):
    """How a variant batches."""

    NAIVE = "naive"
    STATIC = "static"
    ADAPTIVE = "adaptive"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One setting. `delay_us` counts for static ones; naive runs every request alone whatever the size."""

    kind: Kind
    max_batch_size: int
    delay_us: int = 0

    @property
    def name(self) -> str:
        """Also the name of its model."""
        if self.kind is Kind.NAIVE:
            return self.kind.value
        if self.kind is Kind.ADAPTIVE:
            return f"adaptive_{self.max_batch_size}"
        return f"static_{self.max_batch_size}_{self.delay_us}us"


def sweep(sizes: Iterable[int], delays_us: Iterable[int]) -> list[Variant]:
    """Naive, then for each size Triton's rule with each delay, and adaptive.

    Of size 1 there is one static variant: nobody joins, so a delay has nothing to wait for.
    """
    sizes, delays_us = sorted(set(sizes)), sorted(set(delays_us))
    variants = [Variant(kind=Kind.NAIVE, max_batch_size=sizes[-1])]
    for size in sizes:
        delays = delays_us if size > 1 else delays_us[:1]
        variants += [Variant(kind=Kind.STATIC, max_batch_size=size, delay_us=delay_us) for delay_us in delays]
        variants.append(Variant(kind=Kind.ADAPTIVE, max_batch_size=size))
    return variants


def configured(message: Any, variant: Variant) -> Any:
    """The `ModelConfig` message with the variant's batching; everything else stays as it was written.

    A warm-up of more rows than the variant takes gets as many as it takes.
    """
    changed = type(message)()
    changed.CopyFrom(message)
    changed.max_batch_size = variant.max_batch_size
    for warmup in changed.model_warmup:
        warmup.batch_size = min(warmup.batch_size, variant.max_batch_size)
    for parameter in (ADAPTIVE_BATCHING, ADAPTIVE_LATENCY_TARGET):
        changed.parameters.pop(parameter, None)
    if variant.kind is Kind.NAIVE:
        changed.ClearField("dynamic_batching")
        return changed
    changed.dynamic_batching.SetInParent()
    changed.dynamic_batching.ClearField("preferred_batch_size")
    changed.dynamic_batching.ClearField("max_queue_delay_microseconds")
    if variant.kind is Kind.ADAPTIVE:
        changed.parameters[ADAPTIVE_BATCHING].string_value = "true"
    elif variant.delay_us:
        changed.dynamic_batching.max_queue_delay_microseconds = variant.delay_us
    return changed


def left_out(message: Any) -> list[str]:
    """What the model has and its measured copies lack: it would distort the figures or refuse requests."""
    batching = message.dynamic_batching
    there = {
        "response_cache": message.HasField("response_cache"),
        "model_warmup": bool(message.model_warmup),
        "default_queue_policy": batching.HasField("default_queue_policy"),
        "priority_queue_policy": bool(batching.priority_queue_policy),
    }
    return [name for name, is_there in there.items() if is_there]


def leave_out(message: Any) -> None:
    """Take what `left_out` names out of the `ModelConfig` message."""
    message.ClearField("response_cache")
    message.ClearField("model_warmup")
    if message.HasField("dynamic_batching"):
        message.dynamic_batching.ClearField("default_queue_policy")
        message.dynamic_batching.ClearField("priority_queue_policy")


def measurable(message: Any, variant: Variant, *, threads: int) -> Any:
    """The message of the variant's own model, to be measured: `configured`, without what `left_out` names.

    Label files are not needed, and would have to lie inside the copy's folder.
    """
    config = configured(message, variant)
    config.name = variant.name
    leave_out(config)
    for output in config.output:
        output.ClearField("label_filename")
    config.parameters["INTRA_OP_THREAD_COUNT"].string_value = str(threads)
    return config


def config_text(message: Any) -> str:
    """As it stands in a `config.pbtxt`."""
    return str(text_format.MessageToString(message))


def write(source: Path, message: Any, variants: Iterable[Variant], repository: Path, *, threads: int) -> None:
    """Make a model of each variant; all that is in its folder but the config are links into `source`.

    Every variant keeps the same CPU threads, however many variants there are.
    """
    for variant in variants:
        folder = repository / variant.name
        folder.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name != "config.pbtxt":
                (folder / entry.name).symlink_to(entry.resolve())
        (folder / "config.pbtxt").write_text(config_text(measurable(message, variant, threads=threads)))
