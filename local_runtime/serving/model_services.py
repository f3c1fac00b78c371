"""What Python models may ask of the runtime that runs them, from the threads of their instances."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from local_runtime.executors.model_metrics import MetricRegistry
from local_runtime.messages import InferAnswer, InferRequest

_T = TypeVar("_T")


class Runtime(Protocol):
    """As much of the runtime as models may use; its coroutines run on its event loop."""

    @property
    def custom_metrics(self) -> MetricRegistry:
        """Where models keep metrics of their own."""

    def infer_accepted(self, request: InferRequest) -> Coroutine[Any, Any, InferAnswer]:
        """Answer a request on behalf of one that was accepted before."""

    def stream_accepted(self, request: InferRequest) -> AsyncGenerator[InferAnswer, None]:
        """The same for all answers of a decoupled model."""

    def load(
        self, model: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> Coroutine[Any, Any, None]:
        """Load or reload a model."""

    def unload(self, model: str, *, unload_dependents: bool = False) -> Coroutine[Any, Any, None]:
        """Unload a model."""

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether that model can be asked now."""


class ModelServices:
    """`executors.services.Services` over a runtime on an event loop."""

    def __init__(self, runtime: Runtime, loop: asyncio.AbstractEventLoop) -> None:
        self._runtime = runtime
        self._loop = loop
        self._leaving: set[asyncio.Future[None]] = set()

    @property
    def metrics(self) -> MetricRegistry:
        """Where models keep metrics of their own."""
        return self._runtime.custom_metrics

    def infer(self, request: InferRequest) -> "concurrent.futures.Future[InferAnswer]":
        """Ask another model."""
        return self._start(self._runtime.infer_accepted(request))

    def stream(self, request: InferRequest) -> Iterator[InferAnswer]:
        """Ask another model for all of its answers."""
        answers = self._runtime.stream_accepted(request)

        async def take() -> InferAnswer | None:
            return await anext(answers, None)

        def leave() -> None:
            leaving = asyncio.ensure_future(answers.aclose())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

        try:
            while (answer := self._start(take()).result()) is not None:
                yield answer
        finally:
            # Not waited for: a forgotten iterator may be collected on the event loop's own thread, or after its end.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(leave)

    def load(self, model: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model; returns when that has ended."""
        self._start(self._runtime.load(model, config=config, files=files)).result()

    def unload(self, model: str, *, unload_dependents: bool = False) -> None:
        """Unload a model; its requests may still be ending."""
        self._start(self._runtime.unload(model, unload_dependents=unload_dependents)).result()

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether that model can be asked now."""
        return self._runtime.is_ready(model, version)

    def _start(self, work: Coroutine[Any, Any, _T]) -> "concurrent.futures.Future[_T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)
