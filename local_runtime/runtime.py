"""The face of the local runtime: open a model repository, ask it, close it."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from local_runtime.errors import (
    ErrorCode,
    InferenceError,
    ModelLoadError,
    deadline_passed,
    no_available_versions,
    stopping,
    unknown_model,
    unknown_version,
    version_not_a_number,
)
from local_runtime.lifecycle import Loaded, LoadOptions, ServedModel, load, monotonic_us
from local_runtime.messages import (
    BatchExecuted,
    InferAnswer,
    InferRequest,
    ModelMetadata,
    ModelState,
    ModelStatus,
    TensorMetadata,
)
from local_runtime.repository.model_config import ModelConfig, TensorSpec
from local_runtime.scheduling import ensemble
from local_runtime.scheduling.stats import ModelStatistics
from local_runtime.scheduling.validation import CheckedRequest, check

__all__ = [
    "BatchExecuted",
    "ErrorCode",
    "InferAnswer",
    "InferRequest",
    "InferenceError",
    "LocalRuntime",
    "ModelLoadError",
    "ModelMetadata",
    "ModelState",
    "ModelStatistics",
    "ModelStatus",
    "RuntimeOptions",
    "TensorMetadata",
]


_log = logging.getLogger(__name__)
# Unloading is freeing memory; only a model that never returns from execute takes longer.
_UNLOAD_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """What an operator may set.

    Args:
        threads: CPU threads for all instances together; None takes all CPUs there are. Shared out evenly, since
            two instances with all CPUs each slow each other down many times over; a model that shall have more
            sets Triton's parameter INTRA_OP_THREAD_COUNT.
        max_queue_size: requests (not rows) that may wait per model; one more is refused with UNAVAILABLE.
        load_threads: models loaded at the same time (4 is Triton's default, too).
        close_grace_us: how long `close` lets accepted work finish (30 s is Triton's default, too).
    """

    threads: int | None = None
    max_queue_size: int = 1024
    load_threads: int = 4
    close_grace_us: int = 30_000_000


class LocalRuntime:
    """Serves the models of one repository inside this process, batching by Triton's rules.

    Made by `open`; belongs to the event loop that opened it.
    """

    def __init__(self, loaded: Loaded, options: RuntimeOptions) -> None:
        self._served = loaded.served
        self._failed = loaded.failed
        self._options = options
        self._in_flight = 0
        self._is_closing = False
        self._drained = asyncio.Event()
        self._drained.set()

    @classmethod
    async def open(
        cls,
        repository: Path,
        *,
        models: Sequence[str] | None = None,
        observer: Callable[[BatchExecuted], None] | None = None,
        options: RuntimeOptions | None = None,
    ) -> Self:
        """Load all models of the repository, or the named ones, and return when all loads have ended.

        A named ensemble brings the models that it is made of. A model that cannot be loaded does not stop the
        others: `index()` tells why. Raises ModelLoadError only if there is no such repository.
        `observer` is called on the event loop after every execution and must not block.
        """
        options = options or RuntimeOptions()
        load_options = LoadOptions(
            threads=options.threads,
            max_queue_size=options.max_queue_size,
            load_threads=options.load_threads,
            observer=observer,
        )
        return cls(await load(repository, models, load_options), options)

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answer one request, or raise one `InferenceError`. Cancelling the call removes a queued request."""
        if self._is_closing:
            raise stopping(request.model)
        self._in_flight += 1
        self._drained.clear()
        try:
            if request.timeout_us is None:
                return await self._answer(request, deadline_us=None)
            deadline_us = monotonic_us() + request.timeout_us
            try:
                async with asyncio.timeout(request.timeout_us / 1_000_000):
                    return await self._answer(request, deadline_us=deadline_us)
            except TimeoutError as error:
                raise deadline_passed(request.model) from error
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._drained.set()

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether the model, in this version if one is given, can be asked now."""
        served = self._served.get(model)
        return served is not None and version in ("", served.version) and not self._is_closing

    def index(self) -> tuple[ModelStatus, ...]:
        """Every model that was to be loaded, by name, with its state."""
        ready = [
            ModelStatus(name=name, version=model.version, state=ModelState.READY, reason="")
            for name, model in self._served.items()
        ]
        broken = [
            ModelStatus(name=name, version="", state=ModelState.UNAVAILABLE, reason=entry.reason)
            for name, entry in self._failed.items()
        ]
        return tuple(sorted(ready + broken, key=lambda status: status.name))

    def model_metadata(self, model: str, version: str = "") -> ModelMetadata:
        """What the protocol tells about a model; NOT_FOUND if it is not served."""
        served = self._find(model, version)
        config = served.config
        return ModelMetadata(
            name=config.name,
            versions=(served.version,),
            platform=config.platform or config.backend.value,
            inputs=tuple(_tensor_metadata(spec, config) for spec in config.inputs),
            outputs=tuple(_tensor_metadata(spec, config) for spec in config.outputs),
        )

    def model_config(self, model: str, version: str = "") -> Any:
        """The completed `ModelConfig` protobuf message of a served model; NOT_FOUND if it is not served."""
        return self._find(model, version).message

    def statistics(self) -> tuple[ModelStatistics, ...]:
        """Counters of every served model, by name."""
        return tuple(model.stats.snapshot() for model in self._served.values())

    async def close(self) -> None:
        """Refuse new requests, finish accepted ones within the grace time, fail the rest, unload models."""
        if self._is_closing:
            return
        self._is_closing = True
        try:
            async with asyncio.timeout(self._options.close_grace_us / 1_000_000):
                await self._drained.wait()
        except TimeoutError:
            _log.warning("stopping with requests in flight", extra={"in_flight": self._in_flight})
        finally:
            await self._stop_models()

    async def _stop_models(self) -> None:
        """Fail what is left and unload. A model that does not return is left to its daemon thread."""
        instances = [instance for model in self._served.values() for instance in model.instances]
        for model in self._served.values():
            if model.scheduler is not None:
                model.scheduler.close()
        ends = [asyncio.wrap_future(instance.stop()) for instance in instances]
        if not ends:
            return
        _, stuck = await asyncio.wait(ends, timeout=_UNLOAD_TIMEOUT_S)
        if stuck:
            _log.error("instances did not unload", extra={"count": len(stuck)})

    async def _answer(self, request: InferRequest, *, deadline_us: int | None) -> InferAnswer:
        served = self._find(request.model, request.version)
        checked = check(request, served.config)
        if served.scheduler is None:
            return await self._answer_ensemble(served, checked, deadline_us=deadline_us)
        answered = await served.scheduler.infer(checked, deadline_us=deadline_us)
        return InferAnswer(
            model=request.model,
            version=served.version,
            outputs=answered.outputs,
            queue_us=answered.queue_us,
            compute_us=answered.compute_us,
            batch_size=answered.batch_size,
        )

    async def _answer_ensemble(
        self, served: ServedModel, checked: CheckedRequest, *, deadline_us: int | None
    ) -> InferAnswer:
        async def infer_step(inner: InferRequest) -> InferAnswer:
            return await self._answer(inner, deadline_us=deadline_us)

        try:
            result = await ensemble.run(checked, config=served.config, infer=infer_step)
        except BaseException:
            served.stats.failed()
            raise
        served.stats.answered(rows=checked.rows, queue_us=result.queue_us)
        served.stats.executed(rows=checked.rows, compute_us=result.compute_us)
        return InferAnswer(
            model=served.config.name,
            version=served.version,
            outputs=result.outputs,
            queue_us=result.queue_us,
            compute_us=result.compute_us,
            batch_size=checked.rows,
        )

    def _find(self, model: str, version: str) -> ServedModel:
        if version and not version.lstrip("-").isdecimal():
            raise version_not_a_number(version)
        served = self._served.get(model)
        if served is None:
            raise no_available_versions(model) if model in self._failed else unknown_model(model)
        if version not in ("", "-1", served.version):
            raise unknown_version(model, version)
        return served


def _tensor_metadata(spec: TensorSpec, config: ModelConfig) -> TensorMetadata:
    return TensorMetadata(name=spec.name, datatype=spec.datatype, shape=config.full_shape(spec))
