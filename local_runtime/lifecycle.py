"""From a repository on disk to models that can be asked: instances started, schedulers set up, ensembles checked.

The one place that knows which backend is run by what.
"""

import asyncio
import dataclasses
import functools
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from local_runtime.errors import ModelLoadError
from local_runtime.executors.instance import Instance, Model, TorchScriptModel
from local_runtime.executors.python_model import PythonModel
from local_runtime.messages import BatchExecuted
from local_runtime.repository import reader as repository
from local_runtime.repository.completion import Placement, completed, place
from local_runtime.repository.model_config import Backend, InstanceKind, ModelConfig
from local_runtime.repository.reader import ModelSource, Unreadable
from local_runtime.scheduling import ensemble
from local_runtime.scheduling.batching import Batcher, BatchingRules
from local_runtime.scheduling.scheduler import ModelScheduler
from local_runtime.scheduling.stats import StatsRecorder

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load; see `RuntimeOptions` for the first three."""

    threads: int | None
    max_queue_size: int
    load_threads: int
    observer: Callable[[BatchExecuted], None] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that can be asked. An ensemble has neither scheduler nor instances. `message` is its full config."""

    config: ModelConfig
    version: str
    message: Any
    stats: StatsRecorder
    scheduler: ModelScheduler | None = None
    instances: Sequence[Instance] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What became of every model: served, or the version (if known) and reason why not."""

    served: Mapping[str, ServedModel]
    failed: Mapping[str, Unreadable]


def monotonic_us() -> int:
    """The clock of queues and deadlines, in microseconds."""
    return time.monotonic_ns() // 1000


async def load(folder: Path, names: Sequence[str] | None, options: LoadOptions) -> Loaded:
    """Load the repository's models, or the named ones; one that fails does not stop the others.

    Raises ModelLoadError only if there is no such repository.
    """
    found = await asyncio.to_thread(repository.read, folder, names)
    failed = {name: entry for name, entry in found.items() if isinstance(entry, Unreadable)}
    sources = [entry for entry in found.values() if isinstance(entry, ModelSource)]
    devices = await asyncio.to_thread(_cuda_devices) if any(map(_may_use_gpu, sources)) else 0
    gate = asyncio.Semaphore(options.load_threads)
    threads = _thread_share(sources, options)

    async def start(source: ModelSource) -> ServedModel | Unreadable:
        async with gate:
            return await _start(source, cuda_devices=devices, threads=threads, options=options)

    executed = [source for source in sources if source.config.backend is not Backend.ENSEMBLE]
    served: dict[str, ServedModel] = {}
    for entry in await asyncio.gather(*map(start, executed)):
        if isinstance(entry, ServedModel):
            served[entry.config.name] = entry
        else:
            failed[entry.name] = entry
    _add_ensembles([source for source in sources if source not in executed], served, failed)
    for entry in failed.values():
        _log.error("model failed to load", extra={"model": entry.name, "reason": entry.reason})
    return Loaded(served=dict(sorted(served.items())), failed=dict(sorted(failed.items())))


def _may_use_gpu(source: ModelSource) -> bool:
    config = source.config
    is_ensemble = config.backend is Backend.ENSEMBLE
    return not is_ensemble and any(group.kind is not InstanceKind.CPU for group in config.instance_groups)


def _cuda_devices() -> int:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return 0
    count: int = torch.cuda.device_count()
    return count


def _thread_share(sources: Iterable[ModelSource], options: LoadOptions) -> int:
    """CPU threads of each instance: an even share, counting the instances that use torch for certain."""
    budget = options.threads or len(os.sched_getaffinity(0))
    instances = sum(
        group.count
        for source in sources
        if source.config.backend is Backend.PYTORCH
        for group in source.config.instance_groups
    )
    return max(1, budget // max(1, instances))


def _own_threads(config: ModelConfig, share: int) -> int:
    """The model's own INTRA_OP_THREAD_COUNT (a parameter of Triton's PyTorch backend), or its share."""
    text = config.parameters.get("INTRA_OP_THREAD_COUNT", str(share))
    if not text.isdecimal() or int(text) < 1:
        raise ModelLoadError(f"INTRA_OP_THREAD_COUNT of {config.name} must be a positive number, not '{text}'")
    return int(text)


async def _start(
    source: ModelSource, *, cuda_devices: int, threads: int, options: LoadOptions
) -> ServedModel | Unreadable:
    config = source.config
    try:
        placements = place(config, cuda_devices=cuda_devices)
        instances = await _start_instances(source, placements, threads=_own_threads(config, threads))
    except ModelLoadError as error:
        return Unreadable(name=config.name, reason=str(error))
    stats = StatsRecorder(name=config.name, version=source.version)
    scheduler = ModelScheduler(
        model=config.name,
        version=source.version,
        batcher=Batcher(_rules(config, options)),
        instances=instances,
        stats=stats,
        clock_us=monotonic_us,
        observer=options.observer,
    )
    return ServedModel(
        config=config,
        version=source.version,
        message=completed(config, placements),
        stats=stats,
        scheduler=scheduler,
        instances=instances,
    )


async def _start_instances(source: ModelSource, placements: Sequence[Placement], *, threads: int) -> Sequence[Instance]:
    """All instances, loaded; if one fails, those that did load are stopped again."""
    instances = [
        Instance(
            name=placement.name,
            load=functools.partial(_make_model, source, placement, placements),
            threads=threads,
        )
        for placement in placements
    ]
    loads = [asyncio.wrap_future(instance.start()) for instance in instances]
    results = await asyncio.gather(*loads, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            for instance in instances:
                instance.stop()
            raise result
    return instances


def _make_model(source: ModelSource, placement: Placement, placements: Sequence[Placement]) -> Model:
    """In the instance's thread: load the file with what its backend needs."""
    if source.config.backend is Backend.PYTHON:
        return PythonModel(
            config=source.config,
            file=source.file,
            version=source.version,
            placement=placement,
            placements=placements,
        )
    return TorchScriptModel(config=source.config, file=source.file, placement=placement)


def _rules(config: ModelConfig, options: LoadOptions) -> BatchingRules:
    batching = config.dynamic_batching
    return BatchingRules(
        max_batch_size=config.max_batch_size,
        dynamic=batching is not None,
        preferred_batch_sizes=batching.preferred_batch_size if batching else (),
        max_queue_delay_us=batching.max_queue_delay_microseconds if batching else 0,
        max_queue_size=options.max_queue_size,
    )


def _add_ensembles(
    sources: Sequence[ModelSource], served: dict[str, ServedModel], failed: dict[str, Unreadable]
) -> None:
    """Admit ensembles whose models are served; innermost first, since ensembles may contain ensembles."""
    waiting = {source.config.name: source for source in sources}
    while waiting:
        ready = [source for source in waiting.values() if not _inner_names(source) & waiting.keys()]
        if not ready:
            for name in waiting:
                failed[name] = Unreadable(name=name, reason=f"circular dependency of ensemble '{name}'")
            return
        for source in ready:
            del waiting[source.config.name]
            _add_ensemble(source, served, failed)


def _inner_names(source: ModelSource) -> set[str]:
    return {step.model_name for step in source.config.ensemble_steps}


def _add_ensemble(source: ModelSource, served: dict[str, ServedModel], failed: dict[str, Unreadable]) -> None:
    config = source.config
    try:
        ensemble.check_steps(config, {name: model.config for name, model in served.items()})
    except ModelLoadError as error:
        failed[config.name] = Unreadable(name=config.name, reason=str(error))
        return
    served[config.name] = ServedModel(
        config=config,
        version=source.version,
        message=completed(config, ()),
        stats=StatsRecorder(name=config.name, version=source.version),
    )
