# ruff: noqa: INP001 - Triton loads this file by its path, not as part of a package
"""Triton's `onnxruntime` backend for servers that ship only the Python backend.

Triton loads this file for every model with `platform: "onnxruntime_onnx"` when its backend folder holds no
`libtriton_onnxruntime.so`. It follows the C++ backend's conventions and parameter names, so that a model folder runs
unchanged on either. The CPU only.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Runs one ONNX file; the requests of a batch go through it together. Tensors find each other by name."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Leave the configuration as it is."""
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the ONNX file; `args` is what Triton gives every Python model.

        Raises `ValueError` for a GPU and for a declared tensor that the file lacks, else what onnxruntime raises.
        """
        if args["model_instance_kind"] == "GPU":
            raise ValueError("this backend has no CUDA: say KIND_CPU in the instance_group")
        config = json.loads(args["model_config"])
        self._name = args["model_name"]
        self._batched = config["max_batch_size"] > 0
        folder = Path(args["model_repository"]) / args["model_version"]
        file = folder / (config.get("default_model_filename") or "model.onnx")
        options = _options(config.get("parameters", {}))
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._inputs = _declared(config["input"], self._session.get_inputs())
        self._outputs = _declared(config["output"], self._session.get_outputs())

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request, in order. When a batch fails, each of its requests runs once more by itself."""
        batches = [requests] if self._batched else [[request] for request in requests]
        return [answer for batch in batches for answer in self._answers(batch)]

    def _answers(self, requests: list[Any]) -> list[Any]:
        try:
            return self._run(requests)
        except Exception as error:  # noqa: BLE001 - onnxruntime raises many kinds; their text goes to the log, not to the caller
            if len(requests) > 1:
                return [answer for request in requests for answer in self._answers([request])]
            pb_utils.Logger.log_error(f"model '{self._name}' failed: {error}")
            text = f"{self._name}: the model failed on this request"
            refusal = pb_utils.TritonError(text, pb_utils.TritonError.INTERNAL)
            return [pb_utils.InferenceResponse(output_tensors=[], error=refusal)]

    def _run(self, requests: list[Any]) -> list[Any]:
        columns = {
            name: [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            for name in self._inputs
        }
        rows = [len(array) for array in columns[self._inputs[0]]]
        feeds = {name: _texts(np.ascontiguousarray(np.concatenate(arrays))) for name, arrays in columns.items()}
        arrays = self._session.run(self._outputs, feeds)
        if len(requests) == 1:
            return [_response(self._outputs, arrays)]
        if any(len(array) != sum(rows) for array in arrays):
            raise ValueError(f"gave shapes {[array.shape for array in arrays]} for a batch of {sum(rows)}")
        ends = np.cumsum(rows)[:-1]
        return [_response(self._outputs, parts) for parts in zip(*(np.split(a, ends) for a in arrays), strict=True)]


def _options(parameters: dict[str, dict[str, str]]) -> Any:
    """The C++ backend's parameters for threads; 0, its default, is one for each core."""
    options = onnxruntime.SessionOptions()
    for field in ("intra_op_thread_count", "inter_op_thread_count"):
        count = int(parameters.get(field, {}).get("string_value", "0"))
        setattr(options, field.replace("thread_count", "num_threads"), count)
    # Threads that wait by spinning take the CPU from the other models.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors: what the optimiser thinks of a sound file is no news
    return options


def _declared(tensors: list[dict[str, Any]], offered: list[Any]) -> list[str]:
    """The declared names; raises `ValueError` for one that the file lacks."""
    names = [tensor["name"] for tensor in tensors]
    known = [tensor.name for tensor in offered]
    for name in names:
        if name not in known:
            raise ValueError(f"the file has no tensor '{name}', but {', '.join(known)}")
    return names


def _texts(array: np.ndarray) -> np.ndarray:
    """Bytes as the str that onnxruntime takes; anything else as it is."""
    if array.dtype != np.object_:
        return array
    texts = np.empty(array.size, np.object_)
    texts[:] = [item.decode() for item in array.reshape(-1)]
    return texts.reshape(array.shape)


def _response(names: list[str], arrays: Any) -> Any:
    tensors = [pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in zip(names, arrays, strict=True)]
    return pb_utils.InferenceResponse(output_tensors=tensors)
