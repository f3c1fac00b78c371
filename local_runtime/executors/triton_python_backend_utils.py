"""What a `model.py` gets when it imports `triton_python_backend_utils`.

Names and behaviour are those of Triton's Python backend (triton-inference-server/python_backend README), so
that the same file runs in both. What this runtime does not have yet (BLS, decoupled answers, DLPack, own
metrics) is absent: a model that needs it fails loudly when it is loaded or run.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from local_runtime.messages import Array
from local_runtime.repository.model_config import NUMPY_TYPES

_log = logging.getLogger("local_runtime.model")
# Every instance has its own thread, so the folder of "this" model is a matter of the thread.
_this_thread = threading.local()

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    f"TYPE_{'STRING' if name == 'BYTES' else name}": numpy_type for name, numpy_type in NUMPY_TYPES.items()
}


class TritonModelException(Exception):
    """Raised by and for models."""


class TritonError:
    """An error to put into a response: it fails that request and no other of the batch."""

    UNKNOWN: ClassVar[int] = 0
    INTERNAL: ClassVar[int] = 1
    NOT_FOUND: ClassVar[int] = 2
    INVALID_ARG: ClassVar[int] = 3
    UNAVAILABLE: ClassVar[int] = 4
    UNSUPPORTED: ClassVar[int] = 5
    ALREADY_EXISTS: ClassVar[int] = 6
    CANCELLED: ClassVar[int] = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        """The text."""
        return self._message

    def code(self) -> int:
        """One of the codes above."""
        return self._code


class Tensor:
    """A named array. TYPE_STRING tensors are object arrays of bytes."""

    def __init__(self, name: str, array: Array) -> None:
        if not isinstance(array, np.ndarray):
            raise TritonModelException(f"Tensor '{name}' must be made from a numpy array, not {type(array)}")
        self._name = name
        self._array = array

    def name(self) -> str:
        """The tensor's name."""
        return self._name

    def as_numpy(self) -> Array:
        """The values, with the batch dimension first where the model has one."""
        return self._array

    def is_cpu(self) -> bool:
        """Always: this runtime hands Python models their tensors in CPU memory."""
        return True


class InferenceRequest:
    """One member of the batch that `execute` gets."""

    def __init__(
        self,
        *,
        inputs: Sequence[Tensor],
        request_id: str,
        requested_output_names: Sequence[str],
        model_name: str,
        model_version: int,
    ) -> None:
        self._inputs = list(inputs)
        self._request_id = request_id
        self._requested_output_names = list(requested_output_names)
        self._model_name = model_name
        self._model_version = model_version

    def inputs(self) -> list[Tensor]:
        """The input tensors, in config order."""
        return self._inputs

    def request_id(self) -> str:
        """The caller's id, or an empty string."""
        return self._request_id

    def requested_output_names(self) -> list[str]:
        """The outputs that the caller wants; others may be left out."""
        return self._requested_output_names

    def model_name(self) -> str:
        """The model that was asked."""
        return self._model_name

    def model_version(self) -> int:
        """Its version."""
        return self._model_version


class InferenceResponse:
    """The answer to one request: tensors, or an error."""

    def __init__(self, output_tensors: Sequence[Tensor] | None = None, error: TritonError | None = None) -> None:
        self._output_tensors = list(output_tensors or ())
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        """The outputs, in the order given."""
        return self._output_tensors

    def has_error(self) -> bool:
        """Whether this answer is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if any."""
        return self._error


class Logger:
    """Triton's log, which here is the standard one under the name `local_runtime.model`."""

    @staticmethod
    def log_info(message: str) -> None:
        """A message of level info."""
        _log.info(message)

    @staticmethod
    def log_warn(message: str) -> None:
        """A message of level warning."""
        _log.warning(message)

    @staticmethod
    def log_error(message: str) -> None:
        """A message of level error."""
        _log.error(message)

    @staticmethod
    def log_verbose(message: str) -> None:
        """A message of level debug."""
        _log.debug(message)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input of that name, or None."""
    return _by_name(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output of that name, or None."""
    return _by_name(inference_response.output_tensors(), name)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The config (JSON form) of the input of that name, or None."""
    return _config_by_name(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The config (JSON form) of the output of that name, or None."""
    return _config_by_name(model_config, "output", name)


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a config's data_type: TYPE_FP32 -> float32, TYPE_STRING -> object."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the model may send any number of responses; refused at load here."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def get_model_dir() -> str:
    """The version folder of the calling model. Only in the instance's own thread."""
    folder: str | None = getattr(_this_thread, "model_dir", None)
    if folder is None:
        raise TritonModelException("get_model_dir works in the thread that loads and runs the model")
    return folder


def enter_model_dir(folder: str) -> None:
    """For the loader, not for models: from now on this thread belongs to the model in that version folder."""
    _this_thread.model_dir = folder


def _by_name(tensors: Sequence[Tensor], name: str) -> Tensor | None:
    return next((tensor for tensor in tensors if tensor.name() == name), None)


def _config_by_name(model_config: Mapping[str, Any], what: str, name: str) -> dict[str, Any] | None:
    return next((config for config in model_config.get(what, ()) if config["name"] == name), None)
