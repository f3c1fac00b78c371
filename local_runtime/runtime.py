"""The face of the local runtime: open a model repository, ask it, change what it serves, close it."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from local_runtime.errors import (
    ErrorCode,
    InferenceError,
    ModelLoadError,
    deadline_passed,
    decoupled_needs_stream,
    stopping,
)
from local_runtime.executors.allocator import keep_freed_memory
from local_runtime.executors.model_metrics import MetricRegistry
from local_runtime.messages import (
    BatchExecuted,
    InferAnswer,
    InferRequest,
    ModelControl,
    ModelMetadata,
    ModelState,
    ModelStatus,
    TensorMetadata,
)
from local_runtime.repository.model_config import ModelConfig, TensorSpec
from local_runtime.scheduling import ensemble
from local_runtime.scheduling.deadline import Deadline
from local_runtime.scheduling.response_cache import ResponseCache, cache_key
from local_runtime.scheduling.stats import Compute, FailureReason, ModelStatistics
from local_runtime.scheduling.validation import CheckedRequest
from local_runtime.serving.decoupled import DecoupledCall
from local_runtime.serving.lifecycle import Lifecycle
from local_runtime.serving.loader import LoadOptions, ServedModel, monotonic_us
from local_runtime.serving.model_services import ModelServices

__all__ = [
    "BatchExecuted",
    "ErrorCode",
    "InferAnswer",
    "InferRequest",
    "InferenceError",
    "LocalRuntime",
    "ModelControl",
    "ModelLoadError",
    "ModelMetadata",
    "ModelState",
    "ModelStatistics",
    "ModelStatus",
    "RuntimeOptions",
    "TensorMetadata",
]

_log = logging.getLogger(__name__)


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
        control_mode: who says which models are served.
        poll_interval_us: how often to look at the repository, in control mode `poll`.
        cache_size_bytes: room for answers of models with `response_cache { enable: true }`; 0 keeps none.
    """

    threads: int | None = None
    max_queue_size: int = 1024
    load_threads: int = 4
    close_grace_us: int = 30_000_000
    control_mode: ModelControl = ModelControl.NONE
    poll_interval_us: int = 15_000_000
    cache_size_bytes: int = 0


class LocalRuntime:
    """Serves the models of one repository inside this process, batching by Triton's rules.

    Made by `open`; belongs to the event loop that opened it.
    """

    def __init__(
        self, repository: Path, *, observer: Callable[[BatchExecuted], None] | None, options: RuntimeOptions
    ) -> None:
        self._options = options
        self.custom_metrics = MetricRegistry()
        load_options = LoadOptions(
            threads=options.threads,
            max_queue_size=options.max_queue_size,
            observer=observer,
            services=ModelServices(self, asyncio.get_running_loop()),
        )
        self._lifecycle = Lifecycle(
            repository, control=options.control_mode, options=load_options, load_threads=options.load_threads
        )
        self._models = self._lifecycle.table
        self._cache = ResponseCache(options.cache_size_bytes) if options.cache_size_bytes else None
        self._is_closing = False
        self._poller: asyncio.Task[None] | None = None

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

        With explicit model control nothing is loaded that is not named; the name "*" stands for all. A named
        ensemble brings the models that it is made of. A model that cannot be loaded does not stop the others:
        `index()` tells why. Raises ModelLoadError only if there is no such repository.
        `observer` is called on the event loop after every execution and must not block.
        """
        keep_freed_memory()
        runtime = cls(repository, observer=observer, options=options or RuntimeOptions())
        if models is None and runtime._options.control_mode is ModelControl.EXPLICIT:
            models = ()
        elif models is not None and "*" in models:
            models = None
        try:
            await runtime._lifecycle.open(models)
        except BaseException:
            await runtime.close()
            raise
        if runtime._options.control_mode is ModelControl.POLL:
            runtime._poller = asyncio.create_task(runtime._poll())
        return runtime

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Answer one request, or raise one `InferenceError`. Cancelling the call removes a queued request.

        UNSUPPORTED for a decoupled model: `stream` it.
        """
        if self._is_closing:
            raise stopping(request.model)
        return await self.infer_accepted(request)

    async def infer_accepted(self, request: InferRequest) -> InferAnswer:
        """`infer` on behalf of a request that was accepted before: not refused while the runtime is closing."""
        if request.timeout_us is None:
            return await self._answer(request, deadline_us=None)
        deadline_us = monotonic_us() + request.timeout_us
        try:
            with Deadline(request.timeout_us):
                return await self._answer(request, deadline_us=deadline_us)
        except TimeoutError as error:
            raise deadline_passed(request.model) from error

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferAnswer, None]:
        """Every answer of one request as it is made; one for a model that is not decoupled.

        Single answers of a decoupled model may be errors (`answer.error`). Raises InferenceError where the request
        as a whole fails. Closing the generator tells the model that the caller has left.
        """
        if self._is_closing:
            raise stopping(request.model)
        async with contextlib.aclosing(self.stream_accepted(request)) as answers:
            async for answer in answers:
                yield answer

    async def stream_accepted(self, request: InferRequest) -> AsyncGenerator[InferAnswer, None]:
        """`stream` on behalf of a request that was accepted before."""
        served = self._models.find(request.model, request.version)
        if not served.config.is_decoupled:
            yield await self.infer_accepted(request)
            return
        deadline_us = None if request.timeout_us is None else monotonic_us() + request.timeout_us
        with served:
            async with contextlib.aclosing(DecoupledCall(served, request).answers(deadline_us=deadline_us)) as answers:
                async for answer in answers:
                    yield answer

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether the model, in this version if one is given, can be asked now."""
        return not self._is_closing and self._models.is_served(model, version)

    def is_server_ready(self) -> bool:
        """Triton's strict readiness: every model that ought to be served is, and the runtime is not closing."""
        return not self._is_closing and self._models.is_ready

    def index(self, *, ready_only: bool = False) -> tuple[ModelStatus, ...]:
        """Every model and version that is known, by name and version, with its state."""
        return tuple(status for status in self._lifecycle.index() if not ready_only or status.state is ModelState.READY)

    def model_metadata(self, model: str, version: str = "") -> ModelMetadata:
        """What the protocol tells about a model; NOT_FOUND if it is not served."""
        config = self._models.find(model, version).config
        versions = [version] if version else [served.version for served in self._models.versions(model)]
        return ModelMetadata(
            name=config.name,
            versions=tuple(versions),
            platform=config.platform or config.backend.value,
            inputs=tuple(_tensor_metadata(spec, config) for spec in config.inputs),
            outputs=tuple(_tensor_metadata(spec, config) for spec in config.outputs),
        )

    def model_config(self, model: str, version: str = "") -> Any:
        """The completed `ModelConfig` protobuf message of a served model; NOT_FOUND if it is not served."""
        return self._models.find(model, version).message

    def labels(self, model: str, version: str, output: str) -> tuple[str, ...]:
        """Names of an output's classes (its `label_filename`), none if it has no such file; NOT_FOUND as above."""
        return self._models.find(model, version).labels.get(output, ())

    def statistics(self, model: str = "", version: str = "") -> tuple[ModelStatistics, ...]:
        """Counters of every served version, of one model's, or of one; NOT_FOUND if that is not served."""
        if version:
            chosen: Sequence[ServedModel] = [self._models.find(model, version)]
        else:
            chosen = self._models.versions(model) if model else list(self._models.served())
        return tuple(
            served.stats.snapshot(pending_count=0 if served.scheduler is None else len(served.scheduler))
            for served in chosen
        )

    async def load(self, model: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model (explicit control only), with no request lost.

        Args:
            model: its name.
            config: a `ModelConfig` as JSON in place of its config.pbtxt.
            files: contents by `<version>/<name>` in place of the files in its folder; needs `config`.

        Raises InferenceError, with what was served before still served.
        """
        await self._lifecycle.load(model, config=config, files=files or {})

    async def unload(self, model: str, *, unload_dependents: bool = False) -> None:
        """Stop to serve a model (explicit control only); requests that it has accepted still end.

        With `unload_dependents` the models that an ensemble is made of go, too.
        """
        await self._lifecycle.unload(model, unload_dependents=unload_dependents)

    async def close(self, *, grace_us: int | None = None) -> None:
        """Refuse new requests, finish accepted ones within the grace time, fail the rest, unload models.

        `grace_us` in place of the options' own, where part of that is spent already.
        """
        if self._is_closing:
            return
        self._is_closing = True
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
        await self._lifecycle.close(grace_us=self._options.close_grace_us if grace_us is None else grace_us)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._options.poll_interval_us / 1_000_000)
            try:
                await self._lifecycle.poll()
            except Exception:  # noqa: BLE001 - whatever it is, the next look may be better
                _log.exception("failed to poll the model repository")

    async def _answer(self, request: InferRequest, *, deadline_us: int | None) -> InferAnswer:
        served = self._models.find(request.model, request.version)
        if served.config.is_decoupled:
            raise decoupled_needs_stream(request.model)
        with served:
            checked = served.checker.check(request)
            if self._cache is not None and served.config.has_response_cache:
                return await self._answer_cached(self._cache, served, checked, deadline_us=deadline_us)
            return await self._execute(served, checked, deadline_us=deadline_us)

    async def _execute(self, served: ServedModel, checked: CheckedRequest, *, deadline_us: int | None) -> InferAnswer:
        if served.scheduler is None:
            return await self._execute_ensemble(served, checked, deadline_us=deadline_us)
        answered = await served.scheduler.infer(checked, deadline_us=deadline_us)
        return InferAnswer(
            model=served.config.name,
            version=served.version,
            outputs=answered.outputs,
            parameters=answered.parameters,
            queue_us=answered.queue_us,
            compute_us=answered.compute.total_us,
            batch_size=answered.batch_size,
        )

    async def _answer_cached(
        self, cache: ResponseCache, served: ServedModel, checked: CheckedRequest, *, deadline_us: int | None
    ) -> InferAnswer:
        began_us = monotonic_us()
        key = cache_key(served.number, checked)
        kept = cache.get(key)
        lookup_us = monotonic_us() - began_us
        if kept is not None:
            served.stats.hit(lookup_us=lookup_us)
            return InferAnswer(
                model=served.config.name,
                version=served.version,
                outputs=kept.outputs,
                parameters=kept.parameters,
                queue_us=0,
                compute_us=0,
                batch_size=checked.rows,
            )
        answer = await self._execute(served, checked, deadline_us=deadline_us)
        began_us = monotonic_us()
        cache.put(key, answer.outputs, answer.parameters)
        served.stats.missed(lookup_us=lookup_us + monotonic_us() - began_us)
        return answer

    async def _execute_ensemble(
        self, served: ServedModel, checked: CheckedRequest, *, deadline_us: int | None
    ) -> InferAnswer:
        async def infer_step(inner: InferRequest) -> InferAnswer:
            return await self._answer(inner, deadline_us=deadline_us)

        began_us = monotonic_us()
        try:
            result = await ensemble.run(checked, config=served.config, infer=infer_step)
        except BaseException as error:
            reason = FailureReason.CANCELED if isinstance(error, asyncio.CancelledError) else FailureReason.OTHER
            served.stats.failed(reason, after_us=monotonic_us() - began_us)
            raise
        compute = Compute(infer_us=result.compute_us)
        served.stats.answered(
            rows=checked.rows, queue_us=result.queue_us, compute=compute, at_ms=time.time_ns() // 1_000_000
        )
        served.stats.executed(rows=checked.rows, compute=compute)
        return InferAnswer(
            model=served.config.name,
            version=served.version,
            outputs=result.outputs,
            queue_us=result.queue_us,
            compute_us=result.compute_us,
            batch_size=checked.rows,
        )


def _tensor_metadata(spec: TensorSpec, config: ModelConfig) -> TensorMetadata:
    return TensorMetadata(name=spec.name, datatype=spec.datatype, shape=config.full_shape(spec))
