# ruff: noqa: INP001 - Triton loads this file by its path, not as part of a package
"""Triton's `pytorch` backend for servers that ship only the Python backend.

Triton loads this file for every model with `platform: "pytorch_libtorch"` when its backend folder holds no
`libtriton_pytorch.so`. It serves TorchScript files and follows the C++ backend's conventions and parameter names, so
that a model folder runs unchanged on either.
"""

import json
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

# Thread count for models whose config.pbtxt does not set INTRA_OP_THREAD_COUNT. Each model instance is a process of
# its own here, so a host that serves several busy models may want fewer threads than cores in each.
THREADS_VARIABLE = "PYTORCH_INTRA_OP_THREAD_COUNT"


class ModelFault(Exception):
    """The model's answer cannot be used; the message is meant for the caller."""


class Output(NamedTuple):
    """One declared output: its name and the numpy type its declared data type stands for."""

    name: str
    dtype: np.dtype[Any]


class TritonPythonModel:
    """Runs one TorchScript file; the requests of a batch go through it as one forward pass.

    Inputs are passed by position: `<name>__<index>` names give the index, other names must be those of the arguments
    of `forward`. Outputs are `<name>__<index>`, the index into the returned tensor or tuple.
    """

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Leave the configuration as it is: TorchScript does not say what its shapes are."""
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the TorchScript file; `args` is what Triton gives every Python model.

        Raises `ValueError` for a tensor name that has no position, `RuntimeError` for a file that is no TorchScript.
        """
        config = json.loads(args["model_config"])
        self._name = args["model_name"]
        self._batched = config["max_batch_size"] > 0
        self._parameters = config.get("parameters", {})
        self._device = _device(args)
        self._set_threads()
        folder = Path(args["model_repository"]) / args["model_version"]
        file = folder / (config.get("default_model_filename") or "model.pt")
        with warnings.catch_warnings():
            # PyTorch advises torch.export, which is another platform of Triton's.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._model = torch.jit.load(str(file), map_location=self._device).eval()
        self._inputs = _in_order([item["name"] for item in config["input"]], self._argument_names())
        outputs = {item["name"]: item["data_type"] for item in config["output"]}
        self._outputs = {
            position: Output(name, np.dtype(pb_utils.triton_string_to_numpy(outputs[name])))
            for position, name in _positions(list(outputs)).items()
        }
        # The C++ backend's parameter and default: the profiling executor recompiles for each new shape.
        self._optimized = self._parameter("DISABLE_OPTIMIZED_EXECUTION", "false") != "true"

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request, in order.

        Triton hands over requests of equal shapes only. When the batch fails, each request runs once more by itself,
        so that only the one at fault gets the error.
        """
        batches = [requests] if self._batched else [[request] for request in requests]
        return [answer for batch in batches for answer in self._answers(batch)]

    def _answers(self, requests: list[Any]) -> list[Any]:
        try:
            return self._run(requests)
        except Exception as error:  # noqa: BLE001 - a model raises anything; its text goes to the log, not to the caller
            if len(requests) > 1:
                return [answer for request in requests for answer in self._answers([request])]
            pb_utils.Logger.log_error(f"model '{self._name}' failed: {error}")
            text = str(error) if isinstance(error, ModelFault) else "the model failed on this request"
            refusal = pb_utils.TritonError(f"{self._name}: {text}", pb_utils.TritonError.INTERNAL)
            return [pb_utils.InferenceResponse(output_tensors=[], error=refusal)]

    def _run(self, requests: list[Any]) -> list[Any]:
        """One forward pass over the concatenated rows of all requests."""
        columns = [
            [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            for name in self._inputs
        ]
        rows = [len(array) for array in columns[0]] if self._batched else []
        tensors = [_tensor(arrays).to(self._device) for arrays in columns]
        with torch.inference_mode(), torch.jit.optimized_execution(self._optimized):
            answer = self._model(*tensors)
        arrays = self._arrays(answer, sum(rows) if self._batched else None)
        if not self._batched:
            return [_response(arrays)]
        ends = np.cumsum(rows)
        return [
            _response({name: array[end - count : end] for name, array in arrays.items()})
            for count, end in zip(rows, ends, strict=True)
        ]

    def _arrays(self, answer: Any, rows: int | None) -> dict[str, np.ndarray]:
        """The declared outputs as arrays, checked against the configuration."""
        answers = answer if isinstance(answer, (tuple, list)) else (answer,)
        arrays = {}
        for position, output in self._outputs.items():
            if position >= len(answers):
                raise ModelFault(f"gave {len(answers)} outputs, none for '{output.name}'")
            array = answers[position].cpu().numpy()
            if array.dtype != output.dtype:
                raise ModelFault(f"gave {array.dtype} for '{output.name}', declared as {output.dtype}")
            if rows is not None and (array.ndim == 0 or len(array) != rows):
                raise ModelFault(f"gave shape {list(array.shape)} for '{output.name}' in a batch of {rows}")
            arrays[output.name] = array
        return arrays

    def _argument_names(self) -> list[str]:
        arguments = self._model.forward.schema.arguments
        return [argument.name for argument in arguments if argument.name != "self"]

    def _set_threads(self) -> None:
        """Apply the thread counts; the C++ backend knows both parameters."""
        intra = self._parameter("INTRA_OP_THREAD_COUNT", os.environ.get(THREADS_VARIABLE, ""))
        inter = self._parameter("INTER_OP_THREAD_COUNT", "")
        if intra:
            torch.set_num_threads(int(intra))
        if inter:
            torch.set_num_interop_threads(int(inter))

    def _parameter(self, name: str, default: str) -> str:
        entry = self._parameters.get(name)
        return entry["string_value"] if entry else default


def _device(args: dict[str, str]) -> torch.device:
    if args["model_instance_kind"] == "GPU":
        return torch.device("cuda", int(args["model_instance_device_id"]))
    return torch.device("cpu")


def _positions(names: list[str]) -> dict[int, str]:
    """Read `<name>__<index>`; raises `ValueError` for a name without an index."""
    positions = {}
    for name in names:
        _, separator, index = name.rpartition("__")
        if not separator or not index.isdecimal():
            raise ValueError(f"'{name}' does not follow the naming convention <name>__<index>")
        positions[int(index)] = name
    return positions


def _in_order(names: list[str], arguments: list[str]) -> list[str]:
    """Input names in the order of the arguments of `forward`."""
    if set(names) <= set(arguments):
        return sorted(names, key=arguments.index)
    return [name for _, name in sorted(_positions(names).items())]


def _tensor(arrays: list[np.ndarray]) -> torch.Tensor:
    """One tensor of all rows. It always copies: Triton's memory is neither aligned nor ours to keep."""
    return torch.from_numpy(np.concatenate(arrays) if len(arrays) > 1 else arrays[0].copy())


def _response(arrays: dict[str, np.ndarray]) -> Any:
    tensors = [pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in arrays.items()]
    return pb_utils.InferenceResponse(output_tensors=tensors)
