"""ONNX files (`model.onnx`) through onnxruntime, where it is installed. Tensors find each other by name."""

import importlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.executors.outcomes import answers, compute_between, input_specs, isolated, one_by_one, output_specs
from local_runtime.messages import Array
from local_runtime.repository.completion import Placement
from local_runtime.repository.model_config import InstanceKind, ModelConfig, TensorSpec
from local_runtime.scheduling import collate
from local_runtime.scheduling.execution import Executed
from local_runtime.scheduling.validation import CheckedRequest, bytes_array

# onnxruntime's name of each type. BF16 is missing: onnxruntime takes and gives no numpy arrays of it.
_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "tensor(bool)": "BOOL",
        "tensor(uint8)": "UINT8",
        "tensor(uint16)": "UINT16",
        "tensor(uint32)": "UINT32",
        "tensor(uint64)": "UINT64",
        "tensor(int8)": "INT8",
        "tensor(int16)": "INT16",
        "tensor(int32)": "INT32",
        "tensor(int64)": "INT64",
        "tensor(float16)": "FP16",
        "tensor(float)": "FP32",
        "tensor(double)": "FP64",
        "tensor(string)": "BYTES",
    }
)


class OnnxModel:
    """One instance, on the CPU with so many threads, or on the GPU where its placement and onnxruntime say so."""

    def __init__(self, *, config: ModelConfig, file: Path, placement: Placement, threads: int) -> None:
        try:
            # Optional, and only a process with such a model needs it.
            onnxruntime: Any = importlib.import_module("onnxruntime")
        except ImportError as error:
            raise ModelLoadError(f"model '{config.name}' needs the package onnxruntime, which is absent") from error
        self._config = config
        try:
            self._session: Any = onnxruntime.InferenceSession(
                str(file),
                _options(onnxruntime, threads),
                providers=_providers(onnxruntime, placement),
            )
        except Exception as error:
            raise ModelLoadError(f"failed to load model '{config.name}': {error}") from error
        _check(config.name, "input", input_specs(config), self._session.get_inputs())
        _check(config.name, "output", output_specs(config), self._session.get_outputs())
        self._output_names = [spec.name for spec in output_specs(config)]

    def execute(self, members: Sequence[CheckedRequest]) -> Executed:
        """Run the members as one batch; if that fails, each alone, so that only the bad one fails."""
        run = one_by_one if self._config.max_batch_size == 0 else isolated
        return run(members, self._run, failure=_execute_failure)

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
    # Threads that wait by spinning take the CPU from the other instances.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _providers(onnxruntime: Any, placement: Placement) -> list[Any]:
    cpu = "CPUExecutionProvider"
    cuda = "CUDAExecutionProvider"
    if placement.kind is not InstanceKind.GPU or cuda not in onnxruntime.get_available_providers():
        return [cpu]
    return [(cuda, {"device_id": placement.device_id}), cpu]


def _check(model: str, what: str, specs: Iterable[TensorSpec], offered: Iterable[Any]) -> None:
    """The names and types of the config against those of the file; texts as in Triton's ONNX Runtime backend."""
    types = {tensor.name: tensor.type for tensor in offered}
    for spec in specs:
        if spec.name not in types:
            allowed = ", ".join(sorted(types))
            raise ModelLoadError(f"unexpected inference {what} '{spec.name}', allowed {what}s are: {allowed}")
        datatype = _TYPES.get(types[spec.name])
        if datatype is None:
            raise ModelLoadError(f"{types[spec.name]} of {what} '{spec.name}' of model '{model}' is not supported")
        if datatype != spec.datatype:
            raise ModelLoadError(
                f"unable to load model '{model}', configuration expects datatype {_config_word(spec.datatype)} for "
                f"{what} '{spec.name}', model provides {_config_word(datatype)}"
            )


def _config_word(datatype: str) -> str:
    return f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}"


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
        return InferenceError(ErrorCode.INVALID_ARG, f"onnxruntime takes text as UTF-8 only: {error}")
    return InferenceError(ErrorCode.INTERNAL, f"onnx runtime error: {error}")
