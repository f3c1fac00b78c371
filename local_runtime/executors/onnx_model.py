"""ONNX files (`model.onnx`) through onnxruntime, where it is installed. Tensors find each other by name."""

import importlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.executors.faults import text_of
from local_runtime.executors.outcomes import answers, compute_between, executed, input_specs
from local_runtime.messages import Array
from local_runtime.repository.completion import Placement
from local_runtime.repository.config_words import ONNX_DATATYPES, config_word
from local_runtime.repository.model_config import InstanceKind, ModelConfig, TensorSpec
from local_runtime.scheduling import collate
from local_runtime.scheduling.execution import Executed
from local_runtime.scheduling.validation import CheckedRequest, bytes_array, output_specs

_CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"


class OnnxModel:
    """One instance, on the CPU with so many threads, or on the GPU where its placement says so.

    Raises ModelLoadError, also where onnxruntime cannot use the GPU: never does it run elsewhere instead.
    """

    def __init__(self, *, config: ModelConfig, file: Path, placement: Placement, threads: int) -> None:
        try:
            # Optional, and only a process with such a model needs it.
            onnxruntime: Any = importlib.import_module("onnxruntime")
        except ImportError as error:
            raise ModelLoadError(f"model '{config.name}' needs the package onnxruntime, which is absent") from error
        self._config = config
        providers = _providers(onnxruntime, placement, model=config.name)
        try:
            self._session: Any = onnxruntime.InferenceSession(
                str(file),
                _options(onnxruntime, threads),
                providers=providers,
            )
        except Exception as error:
            raise ModelLoadError(f"failed to load model '{config.name}': {text_of(error)}") from error
        if placement.kind is InstanceKind.GPU and _CUDA not in self._session.get_providers():
            # onnxruntime was built for CUDA, yet could not start it and went on with the CPU.
            raise _no_cuda(config.name)
        _check(config.name, "input", input_specs(config), self._session.get_inputs())
        _check(config.name, "output", output_specs(config), self._session.get_outputs())
        self._output_names = [spec.name for spec in output_specs(config)]

    def execute(self, members: Sequence[CheckedRequest]) -> Executed:
        """Run the members as one batch; see `outcomes.executed` for what becomes of a failure."""
        return executed(members, self._run, config=self._config, failure=_execute_failure)

    def close(self) -> None:
        """Let go of the weights."""
        self._session = None

    def _run(self, members: Sequence[CheckedRequest]) -> Executed:
        start_ns = time.perf_counter_ns()
        batch = collate.concatenate([member.inputs for member in members])
        inputs = {name: _texts(array) for name, array in batch.items()}
        ready_ns = time.perf_counter_ns()
        returned = self._session.run(self._output_names, inputs)
        ran_ns = time.perf_counter_ns()
        outputs = {name: bytes_array(array) for name, array in zip(self._output_names, returned, strict=True)}
        outcomes = answers(outputs, members, self._config)
        return Executed(outcomes=outcomes, compute=compute_between(start_ns, ready_ns, ran_ns, time.perf_counter_ns()))


def _options(onnxruntime: Any, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors: what its optimizer thinks of a sound file is no news
    # Threads that wait by spinning take the CPU from the other instances.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _providers(onnxruntime: Any, placement: Placement, *, model: str) -> list[Any]:
    if placement.kind is not InstanceKind.GPU:
        return [_CPU]
    if _CUDA not in onnxruntime.get_available_providers():
        raise _no_cuda(model)
    # What CUDA lacks an operator for runs on the CPU.
    return [(_CUDA, {"device_id": placement.device_id}), _CPU]


def _no_cuda(model: str) -> ModelLoadError:
    return ModelLoadError(
        f"model '{model}' is to run on a GPU, but onnxruntime cannot use CUDA here: install onnxruntime-gpu or say "
        "KIND_CPU in its instance_group"
    )


def _check(model: str, what: str, specs: Iterable[TensorSpec], offered: Iterable[Any]) -> None:
    """The names and types of the config against those of the file; texts as in Triton's ONNX Runtime backend."""
    types = {tensor.name: tensor.type for tensor in offered}
    for spec in specs:
        if spec.name not in types:
            allowed = ", ".join(sorted(types))
            raise ModelLoadError(f"unexpected inference {what} '{spec.name}', allowed {what}s are: {allowed}")
        datatype = ONNX_DATATYPES.get(types[spec.name])
        if datatype is None:
            raise ModelLoadError(f"{types[spec.name]} of {what} '{spec.name}' of model '{model}' is not supported")
        if datatype != spec.datatype:
            raise ModelLoadError(
                f"unable to load model '{model}', configuration expects datatype {config_word(spec.datatype)} for "
                f"{what} '{spec.name}', model provides {config_word(datatype)}"
            )


def _texts(array: Array) -> Array:
    """Bytes as the str that onnxruntime takes; UnicodeDecodeError for what is not UTF-8."""
    if array.dtype != object:
        return array
    texts = np.empty(array.size, object)
    texts[:] = [item.decode() for item in array.reshape(-1)]
    return texts.reshape(array.shape)


def _execute_failure(error: BaseException) -> InferenceError:
    if isinstance(error, InferenceError):
        return error
    if isinstance(error, UnicodeDecodeError):
        return InferenceError(ErrorCode.INVALID_ARG, f"onnxruntime takes text as UTF-8 only: {text_of(error)}")
    return InferenceError(ErrorCode.INTERNAL, f"onnx runtime error: {text_of(error)}")
