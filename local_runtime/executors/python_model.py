"""Triton's Python backend in this process: loads `<model>/<version>/model.py` and runs it.

The model sees what it would see in Triton: `triton_python_backend_utils`, the same arguments of
`initialize`, lists of requests in `execute`. Each instance executes the file anew as a module of its own, so
instances share no globals, as the separate processes of Triton share none.
"""

import importlib.util
import logging
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.executors import triton_python_backend_utils as pb_utils
from local_runtime.messages import Array
from local_runtime.repository.completion import Placement, completed, triton_json
from local_runtime.repository.model_config import ModelConfig
from local_runtime.scheduling import collate
from local_runtime.scheduling.collate import Outcome
from local_runtime.scheduling.validation import CheckedRequest, bytes_array, check_outputs

_log = logging.getLogger(__name__)
_SHIM = "triton_python_backend_utils"
# sys.path and sys.modules are the process's: one model file at a time may be executed.
_import_lock = threading.Lock()

_CODES = {
    pb_utils.TritonError.NOT_FOUND: ErrorCode.NOT_FOUND,
    pb_utils.TritonError.INVALID_ARG: ErrorCode.INVALID_ARG,
    pb_utils.TritonError.UNAVAILABLE: ErrorCode.UNAVAILABLE,
    pb_utils.TritonError.UNSUPPORTED: ErrorCode.UNSUPPORTED,
    # The closed list has no such code; like INVALID_ARG it is the caller's to change and HTTP 400.
    pb_utils.TritonError.ALREADY_EXISTS: ErrorCode.INVALID_ARG,
    pb_utils.TritonError.CANCELLED: ErrorCode.CANCELLED,
}


class PythonModel:
    """One instance of a `TritonPythonModel`, loaded and initialized.

    Args:
        config: the model's configuration.
        file: the model.py inside the version folder.
        version: name of the version folder.
        placement: which instance this is and where it runs.
        placements: all instances of the model, as the completed config lists them.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        file: Path,
        version: str,
        placement: Placement,
        placements: Sequence[Placement],
    ) -> None:
        if not file.is_file():
            raise ModelLoadError(f"no such file: {file.parent.name}/{file.name}")
        self._config = config
        self._version = int(version)
        self._instance_name = placement.name
        pb_utils.enter_model_dir(str(file.parent))
        module = _execute_file(file, name=f"triton_model_{placement.name}_v{version}")
        model_class = getattr(module, "TritonPythonModel", None)
        if model_class is None:
            raise ModelLoadError(f"{file.name} of model '{config.name}' has no class TritonPythonModel")
        self._model: Any = model_class()
        if hasattr(self._model, "initialize"):
            self._model.initialize(
                {
                    "model_config": triton_json(completed(config, placements)),
                    "model_instance_kind": placement.kind.value.removeprefix("KIND_"),
                    "model_instance_name": placement.name,
                    "model_instance_device_id": str(placement.device_id),
                    "model_repository": str(file.parent.parent),
                    "model_version": version,
                    "model_name": config.name,
                }
            )

    def execute(self, members: Sequence[CheckedRequest]) -> Sequence[Outcome]:
        """One outcome per member. An exception fails all of them, an error in a response only its own."""
        try:
            responses = self._model.execute([self._request(member) for member in members])
        except Exception as error:  # noqa: BLE001 - model code may raise anything; it becomes the outcome
            return [self._failure(_describe(error))] * len(members)
        if not isinstance(responses, list | tuple):
            failure = self._failure(f"execute must return a list of InferenceResponse, not {type(responses)}")
            return [failure] * len(members)
        if len(responses) != len(members):
            failure = self._failure(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(members)}, and "
                f"InferenceResponse(s) size is:{len(responses)}\n"
            )
            return [failure] * len(members)
        return [self._outcome(response, member) for response, member in zip(responses, members, strict=True)]

    def close(self) -> None:
        """Let the model finalize."""
        if hasattr(self._model, "finalize"):
            self._model.finalize()

    def _request(self, member: CheckedRequest) -> pb_utils.InferenceRequest:
        return pb_utils.InferenceRequest(
            # Copies, as in Triton: a model may work in place, and others may read the same memory.
            inputs=[pb_utils.Tensor(name, array.copy()) for name, array in member.inputs.items()],
            request_id=member.request_id,
            requested_output_names=member.outputs,
            model_name=self._config.name,
            model_version=self._version,
        )

    def _outcome(self, response: Any, member: CheckedRequest) -> Outcome:
        if not isinstance(response, pb_utils.InferenceResponse):
            return self._failure(f"execute returned {type(response)} instead of an InferenceResponse")
        error = response.error()
        if error is not None:
            return InferenceError(_CODES.get(error.code(), ErrorCode.INTERNAL), error.message())
        try:
            outputs: dict[str, Array] = {
                tensor.name(): bytes_array(tensor.as_numpy()) for tensor in response.output_tensors()
            }
            checked = check_outputs(outputs, self._config, wanted=member.outputs)
        except TypeError as fault:
            return self._failure(str(fault))
        except InferenceError as fault:
            return fault
        if self._config.max_batch_size == 0:
            return checked
        return collate.split(checked, rows=[member.rows], model=self._config.name)[0]

    def _failure(self, text: str) -> InferenceError:
        return InferenceError(
            ErrorCode.INTERNAL,
            f"Failed to process the request(s) for model '{self._instance_name}', message: {text}",
        )


def _execute_file(file: Path, *, name: str) -> ModuleType:
    """Execute a model file as a new module. Modules that lie beside it belong to this instance alone."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModelLoadError(f"{file.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(file.parent)
    with _import_lock:
        sys.modules[_SHIM] = pb_utils
        sys.modules[name] = module
        sys.path.append(folder)
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(folder)
            _forget_siblings(folder, keep=name)
    return module


def _forget_siblings(folder: str, *, keep: str) -> None:
    """Take the modules loaded from that folder out of sys.modules, so that no other model finds them."""
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if name != keep and origin is not None and Path(origin).parent == Path(folder):
            del sys.modules[name]


def _describe(error: Exception) -> str:
    """The exception as Triton writes it: type and text, then where, innermost frame first."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    where = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames))
    return f"{type(error).__name__}: {error}\n\nAt:\n{where}"
