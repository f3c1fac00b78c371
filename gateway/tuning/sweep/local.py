"""A sweep inside this process: the local runtime over the folder of models that it is given, which stays as it is."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format

from gateway.tuning.sweep.callers import AskFailed
from gateway.tuning.sweep.memory import resident_bytes
from gateway.tuning.sweep.servers import Counters
from gateway.tuning.sweep.settings import Setting, SweepError, measurable, refusal
from local_runtime.bench.inputs import tensor
from local_runtime.errors import InferenceError, ModelLoadError
from local_runtime.executors.model_files import python_auto_complete
from local_runtime.messages import InferRequest, ModelControl, TensorMetadata
from local_runtime.repository import parsing, reader
from local_runtime.repository.model_config import ModelConfig
from local_runtime.runtime import LocalRuntime, RuntimeOptions

CLOSE_GRACE_US: Final = 60_000_000
"""For batches under way when a sweep is stopped: a process that ends while a library computes is aborted by it."""


class LocalServer:
    """The model in a runtime of this process; made by `opened`."""

    name = "local"

    def __init__(
        self, runtime: LocalRuntime, config: ModelConfig, *, written: Any, request: InferRequest, files: str
    ) -> None:
        self.place = f"local runtime, {os.cpu_count()} CPUs"
        self.message = config.message
        self.written = written
        self.files = files
        self._runtime = runtime
        self._request = request

    async def begin(self) -> None:
        """Nothing to do: nobody else uses this runtime."""

    async def load(self, setting: Setting) -> None:
        """Serve the model this way. Raises SweepError with the runtime's reason."""
        config = json_format.MessageToJson(measurable(self.message, setting), preserving_proto_field_name=True)
        model = self._request.model
        try:
            await self._runtime.load(model, config=config)
        except InferenceError as error:
            reasons = [one.reason for one in self._runtime.index() if one.name == model and one.reason]
            raise SweepError(f"{model}: cannot be loaded as '{setting}': {'; '.join(reasons) or error}") from error

    async def ask(self) -> None:
        """One request of one row. Raises AskFailed."""
        asked = asyncio.ensure_future(self._runtime.infer(self._request))
        asked.add_done_callback(_seen)
        try:
            await asyncio.shield(asked)  # a batch that runs cannot be stopped: `close` waits for what is under way
        except InferenceError as error:
            raise AskFailed(error.code.value.lower(), error.message) from error

    async def answers(self) -> None:
        """It does: it is in this process."""

    async def counters(self) -> Counters:
        """What the runtime has counted."""
        found = self._runtime.statistics(self._request.model)
        executions: dict[int, int] = {}
        compute_us: dict[int, float] = {}
        for one in found:
            for rows, stats in one.batch_stats.items():
                parts = (stats.compute_input, stats.compute_infer, stats.compute_output)
                executions[rows] = executions.get(rows, 0) + stats.compute_infer.count
                compute_us[rows] = compute_us.get(rows, 0.0) + sum(part.total_us for part in parts)
        return Counters(
            requests=sum(one.success.count for one in found),
            queue_us=sum(one.queue.total_us for one in found),
            executions=executions,
            compute_us=compute_us,
        )

    def memory_bytes(self) -> int | None:
        """Of this process: callers and all."""
        return resident_bytes(os.getpid())


@contextlib.asynccontextmanager
async def opened(
    repository: Path, model: str | None, shapes: Mapping[str, tuple[int, ...]]
) -> AsyncIterator[LocalServer]:
    """A runtime with nothing loaded yet. Raises SweepError naming the option that is wrong."""
    # In a thread: a Python model may complete its config by its own code, which must not be interrupted.
    config, written = await asyncio.to_thread(_read, repository, model)
    request = InferRequest(model=config.name, inputs=_inputs(config, shapes))
    try:
        files = await asyncio.to_thread(digest, repository / config.name)
    except OSError as error:
        raise SweepError(f"--model {config.name}: {error}") from error
    runtime = await LocalRuntime.open(
        repository, options=RuntimeOptions(control_mode=ModelControl.EXPLICIT, close_grace_us=CLOSE_GRACE_US)
    )
    try:
        yield LocalServer(runtime, config, written=written, request=request, files=files)
    finally:
        await runtime.close()


def _seen(asked: "asyncio.Future[Any]") -> None:
    """Nobody waits any more for one that fails after the sweep was stopped."""
    if not asked.cancelled():
        asked.exception()


def _read(repository: Path, model: str | None) -> tuple[ModelConfig, Any]:
    if not repository.is_dir():
        raise SweepError(f"--repository {repository}: is not a folder")
    names = reader.names(repository)
    model = names[0] if model is None and len(names) == 1 else model
    if model not in names:
        wrong = "" if model is None else f" {model}: is not in {repository}"
        raise SweepError(f"--model{wrong}: must be one of {', '.join(names) or 'none, the repository is empty'}")
    file = repository / model / "config.pbtxt"
    try:
        config = reader.read_model(repository, model, complete_python=python_auto_complete).config
        written = parsing.read_text(file.read_text(), folder_name=model) if file.is_file() else config.message
    except ModelLoadError as error:
        raise SweepError(f"--model {model}: {error}") from error
    if reason := refusal(config.message):
        raise SweepError(f"--model {model}: {reason}")
    return config, written


def digest(folder: Path) -> str:
    """Of all files of a model, by name and contents, but for what Python keeps beside them. Raises OSError."""
    digested = hashlib.sha256()
    versions = (one for one in folder.iterdir() if one.is_dir())  # which may be links, that `rglob` does not follow
    files = {*folder.rglob("*"), *(one for version in versions for one in version.rglob("*"))}
    for file in sorted(one for one in files if one.is_file() and "__pycache__" not in one.parts):
        with file.open("rb") as opened_file:
            contents = hashlib.file_digest(opened_file, "sha256").hexdigest()
        digested.update(f"{file.relative_to(folder)}\0{contents}\n".encode(errors="surrogateescape"))
    return f"sha256:{digested.hexdigest()}"


def _inputs(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    check_shapes(shapes, [spec.name for spec in config.inputs])
    return {
        spec.name: one_row(
            TensorMetadata(name=spec.name, datatype=spec.datatype, shape=config.full_shape(spec)),
            shapes,
            has_batch=config.max_batch_size > 0,
        )
        for spec in config.inputs
    }


def one_row(spec: TensorMetadata, shapes: Mapping[str, tuple[int, ...]], *, has_batch: bool) -> Any:
    """A made-up row for an input; where the model takes no batches, without a batch dimension."""
    if has_batch:
        return tensor(spec, shapes)
    return tensor(TensorMetadata(name=spec.name, datatype=spec.datatype, shape=(1, *spec.shape)), shapes)[0]


def check_shapes(shapes: Mapping[str, tuple[int, ...]], names: list[str]) -> None:
    """Raises SweepError for a shape of an input that is not there."""
    if unknown := sorted(shapes.keys() - set(names)):
        raise SweepError(f"--shape {unknown[0]}: the model's inputs are {', '.join(names)}")
