"""Instances: one thread each, that loads a model, runs its batches one after the other, and unloads it.

Everything slow or foreign happens in that thread (import torch, load, execute), so the event loop never waits
for a model, and a model object is only ever touched by the thread that made it.
"""

import concurrent.futures
import dataclasses
import logging
import queue
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.messages import Array, Tensors
from local_runtime.repository.completion import Placement
from local_runtime.repository.model_config import InstanceKind, ModelConfig, TensorSpec
from local_runtime.scheduling import collate
from local_runtime.scheduling.collate import Outcome
from local_runtime.scheduling.validation import CheckedRequest, check_outputs

_log = logging.getLogger(__name__)


class Model(Protocol):
    """A loaded model, whatever its backend. Used from one thread only."""

    def execute(self, members: Sequence[CheckedRequest]) -> Sequence[Outcome]:
        """One outcome per member, in order; one member's fault stays with it where the backend can tell."""

    def close(self) -> None:
        """Give up what the model holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """What came of one batch, and how long the model took, in microseconds."""

    outcomes: Sequence[Outcome]
    compute_us: int


Done = Callable[[Executed], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    members: Sequence[CheckedRequest]
    done: Done


class Instance:
    """One thread with one loaded copy of a model.

    Args:
        name: Triton's instance name, also the thread's.
        load: makes the model; called in the thread.
        threads: CPU threads that torch may use for this instance, so that instances do not fight.
    """

    def __init__(self, *, name: str, load: Callable[[], Model], threads: int) -> None:
        self.name = name
        self._load = load
        self._threads = threads
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon: a model that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loaded: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start(self) -> concurrent.futures.Future[None]:
        """Begin to load; the future ends when the model can run, or with ModelLoadError."""
        self._thread.start()
        return self._loaded

    def submit(self, members: Sequence[CheckedRequest], done: Done) -> None:
        """Run the batch; `done` is called in this instance's thread, always exactly once."""
        self._jobs.put(_Job(members=members, done=done))

    def stop(self) -> concurrent.futures.Future[None]:
        """Unload after the batches already submitted; the future ends when that is done."""
        self._jobs.put(None)
        return self._ended

    def _run(self) -> None:
        try:
            model = self._load_bounded()
        except Exception as error:  # noqa: BLE001 - a model's own code may raise anything while loading
            self._loaded.set_exception(_load_error(error))
            self._ended.set_result(None)
            return
        self._loaded.set_result(None)
        while (job := self._jobs.get()) is not None:
            job.done(_timed(model, job.members))
        try:
            model.close()
        except Exception:  # noqa: BLE001 - model code again; the instance ends in any case
            _log.exception("model failed to unload", extra={"instance": self.name})
        self._ended.set_result(None)

    def _load_bounded(self) -> Model:
        model = self._load()
        # A model that uses torch has imported it by now; half of it may stand there while another thread does.
        set_num_threads = getattr(sys.modules.get("torch"), "set_num_threads", None)
        if set_num_threads is not None:
            # OpenMP keeps this number per thread, so each instance has its own share.
            set_num_threads(self._threads)
        return model


def _load_error(error: Exception) -> ModelLoadError:
    if isinstance(error, ModelLoadError):
        return error
    load_error = ModelLoadError(f"{type(error).__name__}: {error}")
    load_error.__cause__ = error
    return load_error


def _timed(model: Model, members: Sequence[CheckedRequest]) -> Executed:
    start_ns = time.perf_counter_ns()
    outcomes: Sequence[Outcome]
    try:
        outcomes = model.execute(members)
    except Exception as error:  # noqa: BLE001 - the boundary: whatever happens, every member gets an outcome
        _log.exception("model failed outside its own error handling")
        outcomes = [InferenceError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")] * len(members)
    return Executed(outcomes=outcomes, compute_us=(time.perf_counter_ns() - start_ns) // 1000)


class TorchScriptModel:
    """A TorchScript file run with Triton's `NAME__INDEX` convention.

    The index is the position of the argument of `forward`, or of the output in the tuple it returns.
    """

    def __init__(self, *, config: ModelConfig, file: Path, placement: Placement) -> None:
        import torch  # noqa: PLC0415 - takes seconds, and only a process with such a model needs it

        _refuse_strings(config)
        self._torch: Any = torch
        self._config = config
        # The parameter of Triton's PyTorch backend: true spares models of many shapes a compilation per shape.
        self._is_optimized = config.parameters.get("DISABLE_OPTIMIZED_EXECUTION", "false").lower() != "true"
        self._inputs = _by_position(config.inputs, "input")
        self._outputs = _by_position(config.outputs, "output")
        is_gpu = placement.kind is InstanceKind.GPU
        self._device = torch.device(f"cuda:{placement.device_id}" if is_gpu else "cpu")
        if not file.is_file():
            raise ModelLoadError(f"no such file: {file.parent.name}/{file.name}")
        # Triton's file format for PyTorch is TorchScript; that torch would rather have another is no news here.
        warnings.filterwarnings("ignore", message="`torch.jit.load` is deprecated", category=DeprecationWarning)
        try:
            self._module = self._torch.jit.load(str(file), map_location=self._device).eval()
        except RuntimeError as error:
            raise ModelLoadError(f"failed to load model '{config.name}': {error}") from error

    def execute(self, members: Sequence[CheckedRequest]) -> Sequence[Outcome]:
        """Run the members as one batch; if that fails, each alone, so that only the bad one fails."""
        try:
            return self._run(members)
        except Exception as error:  # noqa: BLE001 - TorchScript may raise anything; it becomes an outcome
            if len(members) == 1:
                return [_execute_failure(error)]
        return [outcome for member in members for outcome in self.execute([member])]

    def close(self) -> None:
        """Let go of the weights."""
        self._module = None

    def _run(self, members: Sequence[CheckedRequest]) -> Sequence[Outcome]:
        batch = collate.concatenate([member.inputs for member in members])
        with self._torch.inference_mode(), self._torch.jit.optimized_execution(self._is_optimized):
            returned = self._module(*(self._to_torch(batch[spec.name]) for _, spec in self._inputs))
            outputs = self._named(returned)
        checked = check_outputs(outputs, self._config, wanted=tuple(outputs))
        if self._config.max_batch_size == 0:
            return [{name: checked[name] for name in members[0].outputs}]
        outcomes = collate.split(checked, rows=[member.rows for member in members], model=self._config.name)
        return [_wanted(outcome, member.outputs) for outcome, member in zip(outcomes, members, strict=True)]

    def _to_torch(self, array: Array) -> Any:
        return self._torch.from_numpy(array).to(self._device)

    def _named(self, returned: Any) -> Tensors:
        values = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        outputs: dict[str, Array] = {}
        for position, spec in self._outputs:
            if position >= len(values):
                raise InferenceError(
                    ErrorCode.INTERNAL,
                    f"model '{self._config.name}' returned {len(values)} outputs, none for '{spec.name}'",
                )
            outputs[spec.name] = values[position].cpu().numpy()
        return outputs


def _execute_failure(error: Exception) -> InferenceError:
    if isinstance(error, InferenceError):
        return error
    return InferenceError(ErrorCode.INTERNAL, f"PyTorch execute failure: {error}")


def _wanted(outcome: Outcome, names: Sequence[str]) -> Outcome:
    return outcome if isinstance(outcome, InferenceError) else {name: outcome[name] for name in names}


def _refuse_strings(config: ModelConfig) -> None:
    for spec in (*config.inputs, *config.outputs):
        if spec.datatype == "BYTES":
            raise ModelLoadError(f"TYPE_STRING of '{spec.name}' is not supported for TorchScript models")


def _by_position(specs: Sequence[TensorSpec], what: str) -> list[tuple[int, TensorSpec]]:
    """The tensors with the position that their name ends in, in that order."""
    positioned = []
    for spec in specs:
        match = re.fullmatch(r".+__(\d+)", spec.name)
        if match is None:
            raise ModelLoadError(
                f"{what} '{spec.name}' does not follow <name>__<index> naming convention for TorchScript"
            )
        positioned.append((int(match[1]), spec))
    positioned.sort(key=lambda pair: pair[0])
    positions = [position for position, _ in positioned]
    if len(set(positions)) != len(positions) or (what == "input" and positions != list(range(len(positions)))):
        raise ModelLoadError(f"{what} positions must be 0, 1, ... without gap or repetition, got {positions}")
    return positioned
