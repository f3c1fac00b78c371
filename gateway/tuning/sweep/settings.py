"""What a sweep varies of a model, and the `ModelConfig` that goes with it. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from local_runtime.bench.variants import leave_out
from local_runtime.repository.schedulers import ADAPTIVE_BATCHING, ADAPTIVE_LATENCY_TARGET

DELAYS_US: Final = (0, 500, 2000, 10_000)
"""What is tried of max_queue_delay_microseconds unless something else is said."""
COUNTS: Final = (1, 2)
CONCURRENCY: Final = 16

Batching = Literal["none", "dynamic", "adaptive"]


class SweepError(Exception):
    """A sweep that cannot be made, or goes no further; the text begins with the option or the model it is about."""


class Unreachable(SweepError):
    """Nobody answers where the server should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to serve the model, in Triton's words.

    `count` is of all instance groups together. `batching` is `none` without dynamic_batching, and `adaptive` for the
    local runtime's own rule: those two are measured where they are found, and not swept.
    """

    max_batch_size: int
    count: int
    delay_us: int = 0
    preferred: tuple[int, ...] = ()
    batching: Batching = "dynamic"

    def __str__(self) -> str:
        instances = f"{self.count} instance{'' if self.count == 1 else 's'}"
        if not self.max_batch_size:
            return f"no batches, {instances}"
        if self.batching != "dynamic":
            words = "no dynamic batching" if self.batching == "none" else "adaptive batching"
            return f"max {self.max_batch_size}, {words}, {instances}"
        preferred = f"preferred {'+'.join(map(str, self.preferred))}, " if self.preferred else ""
        return f"max {self.max_batch_size}, delay {self.delay_us} us, {preferred}{instances}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many callers that wait for their answers, or so many requests per second that come anyway."""

    concurrency: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.rate else f"{self.concurrency} in flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one run measures."""

    setting: Setting
    load: Load

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {"setting": asdict(self.setting), "load": asdict(self.load)}


def parse_cell(given: dict[str, Any]) -> Cell:
    """A cell out of `as_json`. Raises KeyError or TypeError for what is none."""
    setting = {**given["setting"], "preferred": tuple(given["setting"]["preferred"])}
    return Cell(setting=Setting(**setting), load=Load(**given["load"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What is varied; None: the usual values, an empty tuple: as the model has it."""

    max_batch_size: tuple[int, ...] | None = None
    delay_us: tuple[int, ...] | None = None
    preferred: tuple[tuple[int, ...], ...] = ((),)
    count: tuple[int, ...] | None = None
    concurrency: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()


def found_setting(message: Any) -> Setting:
    """The setting of a completed `ModelConfig` message."""
    batching: Batching = "dynamic" if message.HasField("dynamic_batching") else "none"
    is_adaptive = (
        ADAPTIVE_BATCHING in message.parameters  # asking for what is not there would put it there
        and message.parameters[ADAPTIVE_BATCHING].string_value == "true"
    )
    if batching == "dynamic" and is_adaptive:
        batching = "adaptive"
    found = message.dynamic_batching
    return Setting(
        max_batch_size=message.max_batch_size,
        count=sum(group.count or 1 for group in message.instance_group) or 1,
        delay_us=found.max_queue_delay_microseconds,
        preferred=tuple(found.preferred_batch_size),
        batching=batching,
    )


def refusal(message: Any) -> str | None:
    """Why a model of this `ModelConfig` message cannot be swept; None if it can."""
    if message.platform == "ensemble" or message.HasField("ensemble_scheduling"):
        steps = ", ".join(sorted({step.model_name for step in message.ensemble_scheduling.step}))
        return f"is an ensemble; sweep the models that it is made of: {steps}"
    if message.HasField("sequence_batching"):
        return "is a sequence model: its requests belong together, and a sweep's do not"
    if message.model_transaction_policy.decoupled:
        return "is decoupled: it answers a request any number of times, which a sweep does not count"
    return None


def space(message: Any, axes: Axes) -> tuple[Cell, ...]:
    """All that there is to measure, the setting that was found first. Raises SweepError naming the option."""
    found = found_setting(message)
    _check(message, found, axes)
    loads = tuple(Load(concurrency=one) for one in sorted(set(axes.concurrency)))
    loads += tuple(Load(rate=one) for one in sorted(set(axes.rate)))
    loads = loads or (Load(concurrency=CONCURRENCY),)
    settings = dict.fromkeys((found, *_settings(message, found, axes)))
    return tuple(Cell(setting=setting, load=load) for setting in settings for load in loads)


def _settings(message: Any, found: Setting, axes: Axes) -> Iterator[Setting]:
    """Those that differ: of one row nobody joins, and no size is preferred that cannot be."""
    delays = tuple(sorted(set(_given(axes.delay_us, DELAYS_US, found.delay_us))))
    has_one_group = len(message.instance_group) <= 1
    for count in sorted(set(_given(axes.count, (*COUNTS, found.count) if has_one_group else (), found.count))):
        if not found.max_batch_size:
            yield Setting(max_batch_size=0, count=count, batching="none")
            continue
        for size in sorted(set(_given(axes.max_batch_size, _powers(found.max_batch_size), found.max_batch_size))):
            preferences = dict.fromkeys(one for one in axes.preferred if all(rows <= size for rows in one))
            for preferred in preferences if size > 1 else ((),):
                for delay_us in delays if size > 1 else delays[:1]:
                    yield Setting(max_batch_size=size, count=count, delay_us=delay_us, preferred=preferred)


def _given(given: tuple[int, ...] | None, usual: Sequence[int], found: int) -> Sequence[int]:
    return (usual or (found,)) if given is None else given or (found,)


def _powers(most: int) -> tuple[int, ...]:
    """1, 2, 4 ... and `most` itself."""
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


def _check(message: Any, found: Setting, axes: Axes) -> None:
    if not found.max_batch_size:
        for option, given in (
            ("--max-batch-size", axes.max_batch_size),
            ("--delay-us", axes.delay_us),
            ("--preferred", axes.preferred != ((),)),
        ):
            if given:
                raise SweepError(f"{option}: '{message.name}' takes no batches (its max_batch_size is 0)")
    most = message.max_batch_size
    for option, sizes in (
        ("--max-batch-size", axes.max_batch_size or ()),
        ("--preferred", tuple(rows for one in axes.preferred for rows in one)),
    ):
        if sizes and max(sizes) > most:
            raise SweepError(
                f"{option} {max(sizes)}: '{message.name}' takes {most} rows at most (its max_batch_size); "
                "where the network itself takes more, raise it in its config.pbtxt first"
            )
    if axes.count and len(message.instance_group) > 1:
        raise SweepError(f"--count: '{message.name}' has {len(message.instance_group)} instance_groups, not one")


def configured(message: Any, setting: Setting) -> Any:
    """The `ModelConfig` message with the setting, everything else as it was written.

    A warm-up of more rows than the setting takes gets as many as it takes.
    """
    changed = type(message)()
    changed.CopyFrom(message)
    if setting == found_setting(message):
        return changed
    changed.max_batch_size = setting.max_batch_size
    for warmup in changed.model_warmup:
        warmup.batch_size = min(warmup.batch_size, setting.max_batch_size)
    if setting.count != found_setting(message).count:
        if not changed.instance_group:
            changed.instance_group.add()
        changed.instance_group[0].count = setting.count
    for parameter in (ADAPTIVE_BATCHING, ADAPTIVE_LATENCY_TARGET):
        changed.parameters.pop(parameter, None)
    if setting.batching == "none":
        changed.ClearField("dynamic_batching")
        return changed
    changed.dynamic_batching.SetInParent()
    changed.dynamic_batching.max_queue_delay_microseconds = setting.delay_us
    del changed.dynamic_batching.preferred_batch_size[:]
    changed.dynamic_batching.preferred_batch_size.extend(setting.preferred)
    return changed


def measurable(message: Any, setting: Setting) -> Any:
    """`configured`, without what would distort the figures or refuse requests (`local_runtime.bench.variants`)."""
    changed = configured(message, setting)
    leave_out(changed)
    return changed
