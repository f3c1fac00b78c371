"""One model version from its files to something that can be asked: instances started and warmed up, scheduler made."""

import asyncio
import dataclasses
import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

from local_runtime.errors import InferenceError, ModelLoadError
from local_runtime.executors import models
from local_runtime.executors.instance import Instance
from local_runtime.executors.services import Services
from local_runtime.executors.warmup import warmup_batches
from local_runtime.messages import BatchExecuted
from local_runtime.repository.completion import Placement, completed, place
from local_runtime.repository.devices import cuda_devices
from local_runtime.repository.model_config import Backend, InstanceKind, ModelConfig
from local_runtime.repository.reader import ModelSource
from local_runtime.repository.side_files import initial_states, read_labels
from local_runtime.scheduling.execution import Executed
from local_runtime.scheduling.policies import policy_of, preserves_ordering
from local_runtime.scheduling.scheduler import ModelScheduler
from local_runtime.scheduling.sequence_inputs import SequenceInputs
from local_runtime.scheduling.stats import StatsRecorder
from local_runtime.scheduling.validation import CheckedRequest, RequestChecker

_log = logging.getLogger(__name__)
# Unloading is freeing memory; only a model that never returns from execute takes longer.
_UNLOAD_TIMEOUT_S = 5.0
_STUCK_TIMEOUT_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load; see `RuntimeOptions` for `threads` and `max_queue_size`."""

    threads: int | None
    max_queue_size: int
    observer: Callable[[BatchExecuted], None] | None
    services: Services


def monotonic_us() -> int:
    """The clock of queues and deadlines, in microseconds."""
    return time.monotonic_ns() // 1000


class ServedModel:
    """One loaded version of a model. An ensemble has neither placements, scheduler nor instances.

    Args:
        source: where it came from; temporary folders last as long as this.
        version: name of the version folder.
        labels: names of classes, by output.
        stats: its counters.
        placements: where its instances run.
        instances: what runs its batches.
        scheduler: its queue.
    """

    _numbers = itertools.count(1)

    def __init__(
        self,
        *,
        source: ModelSource,
        version: str,
        labels: Mapping[str, tuple[str, ...]],
        stats: StatsRecorder,
        placements: Sequence[Placement] = (),
        instances: Sequence[Instance] = (),
        scheduler: ModelScheduler | None = None,
    ) -> None:
        self.number = next(self._numbers)  # no other loaded version of any model in this process has it
        self.source = source
        self.config = source.config
        self.version = version
        self.labels = labels
        self.message = completed(source.config, placements)
        self.stats = stats
        self.instances = instances
        self.scheduler = scheduler
        self.checker = RequestChecker(source.config)
        # What to tell when the version goes before all of its requests have ended; for answers that go on after the
        # scheduler has done its part.
        self.on_unload: set[Callable[[], None]] = set()
        self._in_flight = 0
        self._drained = asyncio.Event()
        self._drained.set()

    def __enter__(self) -> Self:
        """A request has begun: until it leaves again, the version is not unloaded."""
        self._in_flight += 1
        self._drained.clear()
        return self

    def __exit__(self, *_: object) -> None:
        """A request has ended."""
        self._in_flight -= 1
        if self._in_flight == 0:
            self._drained.set()

    async def drained(self) -> None:
        """Return when no accepted request is left."""
        await self._drained.wait()

    async def unload(self) -> None:
        """Give up the instances; requests that are left fail.

        A model that does not return is left to its daemon thread.
        """
        if self._in_flight:
            fields = {"model": self.config.name, "in_flight": self._in_flight}
            _log.warning("unloading with requests in flight", extra=fields)
        is_stuck = self._in_flight > 0 or (self.scheduler is not None and self.scheduler.is_running)
        if self.scheduler is not None:
            self.scheduler.close()
        for tell in tuple(self.on_unload):
            tell()
        # An instance that is stuck in a request will not come back for this.
        await _stop(self.instances, timeout_s=_STUCK_TIMEOUT_S if is_stuck else _UNLOAD_TIMEOUT_S)


async def load_version(source: ModelSource, version: str, *, threads: int, options: LoadOptions) -> ServedModel:
    """Start every instance of this version and warm it up; `threads` is the CPU share of each.

    Raises ModelLoadError; nothing is left running then.
    """
    try:
        return await _load(source, version, threads=threads, options=options)
    except (ModelLoadError, asyncio.CancelledError):
        raise
    except Exception as error:  # whatever one model does, the others are served
        _log.exception("loading a model failed in an unforeseen way", extra={"model": source.config.name})
        raise ModelLoadError(f"{type(error).__name__}: {error}") from error


async def _load(source: ModelSource, version: str, *, threads: int, options: LoadOptions) -> ServedModel:
    config = source.config
    began_us = monotonic_us()
    stats = StatsRecorder(name=config.name, version=version)
    labels = await asyncio.to_thread(read_labels, config, source.folder)
    if config.backend is Backend.ENSEMBLE:
        return ServedModel(source=source, version=version, labels=labels, stats=stats)
    sequence_inputs = await asyncio.to_thread(_sequence_inputs, source)
    devices = await asyncio.to_thread(cuda_devices) if _may_use_gpu(config) else 0
    placements = place(config, cuda_devices=devices)
    instances = await _start_instances(
        source, version, placements, threads=_own_threads(config, threads), services=options.services
    )
    try:
        await _warm_up(source, instances, stats)
    except BaseException:
        await _stop(instances, timeout_s=_UNLOAD_TIMEOUT_S)
        raise
    scheduler = ModelScheduler(
        stats=stats,
        policy=policy_of(config, instances=len(instances), max_queue_size=options.max_queue_size),
        instances=instances,
        clock_us=monotonic_us,
        observer=options.observer,
        preserve_ordering=preserves_ordering(config),
        sequence_inputs=sequence_inputs,
    )
    stats.loaded(load_us=monotonic_us() - began_us)
    return ServedModel(
        source=source,
        version=version,
        labels=labels,
        stats=stats,
        placements=placements,
        instances=instances,
        scheduler=scheduler,
    )


def _sequence_inputs(source: ModelSource) -> SequenceInputs | None:
    config = source.config
    if config.sequence_batching is None:
        return None
    return SequenceInputs(
        config=config.sequence_batching,
        max_batch_size=config.max_batch_size,
        initial_states=initial_states(config, source.folder),
    )


def thread_share(configs: Iterable[ModelConfig], *, threads: int | None) -> int:
    """CPU threads of each instance: an even share, counting the instances that use a tensor library for certain."""
    budget = threads or len(os.sched_getaffinity(0))
    instances = sum(
        group.count
        for config in configs
        if config.backend in (Backend.PYTORCH, Backend.ONNXRUNTIME)
        for group in config.instance_groups
    )
    return max(1, budget // max(1, instances))


def _own_threads(config: ModelConfig, share: int) -> int:
    """The model's own INTRA_OP_THREAD_COUNT (a parameter of Triton's PyTorch backend), or its share."""
    text = config.parameters.get("INTRA_OP_THREAD_COUNT", str(share))
    if not text.isdecimal() or int(text) < 1:
        raise ModelLoadError(f"INTRA_OP_THREAD_COUNT of {config.name} must be a positive number, not '{text}'")
    return int(text)


def _may_use_gpu(config: ModelConfig) -> bool:
    return any(group.kind in (InstanceKind.AUTO, InstanceKind.GPU) for group in config.instance_groups)


async def _start_instances(
    source: ModelSource, version: str, placements: Sequence[Placement], *, threads: int, services: Services
) -> Sequence[Instance]:
    """All instances, loaded; if one fails, or the caller gives up, those that did load are stopped again."""
    instances = [
        Instance(
            name=placement.name,
            load=functools.partial(
                models.load_model,
                config=source.config,
                folder=source.folder,
                file=source.file(version),
                version=version,
                placement=placement,
                placements=placements,
                services=services,
            ),
            threads=threads,
        )
        for placement in placements
    ]
    started: list[Instance] = []
    try:
        loads = []
        for instance in instances:
            loads.append(asyncio.wrap_future(instance.start()))
            started.append(instance)
        results = await asyncio.gather(*loads, return_exceptions=True)
    except BaseException:  # the caller has given up, or the system has no thread left
        for instance in started:
            instance.stop()
        raise
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        for instance in instances:
            instance.stop()
        raise failures[0]
    return instances


async def _warm_up(source: ModelSource, instances: Sequence[Instance], stats: StatsRecorder) -> None:
    """Run `model_warmup` on every instance; as in Triton it counts in the statistics. ModelLoadError if it fails."""
    batches = await asyncio.to_thread(warmup_batches, source.config, source.folder)
    runs = [asyncio.create_task(_warm_up_one(instance, batches, stats)) for instance in instances]
    try:
        await asyncio.gather(*runs)
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def _warm_up_one(
    instance: Instance, batches: Sequence[tuple[Sequence[CheckedRequest], int]], stats: StatsRecorder
) -> None:
    loop = asyncio.get_running_loop()
    for members, count in batches:
        for _ in range(count):
            ended: asyncio.Future[Executed] = loop.create_future()

            def done(executed: Executed, ended: "asyncio.Future[Executed]" = ended) -> None:
                loop.call_soon_threadsafe(_set_result, ended, executed)

            instance.submit(members, done)
            executed = await ended
            for outcome in executed.outcomes:
                if isinstance(outcome, InferenceError):
                    raise ModelLoadError(f"failed to run warmup sample: {outcome.message}")
            stats.executed(rows=sum(member.rows for member in members), compute=executed.compute)
            at_ms = time.time_ns() // 1_000_000
            for member in members:
                stats.answered(rows=member.rows, queue_us=0, compute=executed.compute, at_ms=at_ms)


def _set_result(ended: "asyncio.Future[Executed]", executed: Executed) -> None:
    if not ended.done():
        ended.set_result(executed)


async def _stop(instances: Sequence[Instance], *, timeout_s: float) -> None:
    ends = [asyncio.wrap_future(instance.stop()) for instance in instances]
    if not ends:
        return
    _, stuck = await asyncio.wait(ends, timeout=timeout_s)
    if stuck:
        _log.error("instances did not unload", extra={"count": len(stuck)})
