"""What the runtime offers to the Python models that it runs (Triton's business logic scripting and own metrics)."""

import concurrent.futures
from collections.abc import Iterator, Mapping
from typing import Protocol

from local_runtime.executors.model_metrics import MetricRegistry
from local_runtime.messages import InferAnswer, InferRequest


class Services(Protocol):
    """Callable from any thread but the event loop's. Every call may raise InferenceError."""

    @property
    def metrics(self) -> MetricRegistry:
        """Where models keep metrics of their own."""

    def infer(self, request: InferRequest) -> "concurrent.futures.Future[InferAnswer]":
        """Ask another model; cancelling the future takes the request out of the queue."""

    def stream(self, request: InferRequest) -> Iterator[InferAnswer]:
        """Ask another model, decoupled or not; blocks for each answer. Closing it early drops the rest."""

    def load(self, model: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model, as the repository protocol does; returns when it has ended."""

    def unload(self, model: str, *, unload_dependents: bool = False) -> None:
        """Unload a model; returns at once, as in Triton. With `unload_dependents` an ensemble's models go, too."""

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether that model can be asked now."""
