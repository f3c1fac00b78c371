"""What a `model.py` gets when it imports `triton_python_backend_utils`.

Names and behaviour are those of Triton's Python backend (triton-inference-server/python_backend, README and
`src/pb_stub.cc`), so that the same file runs in both.
"""

import enum
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from local_runtime.errors import InferenceError, ModelLoadError
from local_runtime.executors.shim import context
from local_runtime.executors.shim.configs import ModelConfig
from local_runtime.executors.shim.errors import TritonError, TritonModelException
from local_runtime.executors.shim.metrics import Metric, MetricFamily
from local_runtime.executors.shim.requests import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    PreferredMemory,
    ResponseIterator,
)
from local_runtime.executors.shim.responses import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    InferenceResponseSender,
)
from local_runtime.executors.shim.tensors import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

_log = logging.getLogger("local_runtime.model")


class _LogLevel(enum.IntEnum):
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    VERBOSE = logging.DEBUG


class Logger:
    """Triton's log, which here is the standard one under the name `local_runtime.model`."""

    LogLevel = _LogLevel
    INFO = _LogLevel.INFO
    WARNING = _LogLevel.WARNING
    ERROR = _LogLevel.ERROR
    VERBOSE = _LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = _LogLevel.INFO) -> None:
        """A message of that level, VERBOSE being debug."""
        _log.log(level, message)

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


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the model may send any number of responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def get_model_dir() -> str:
    """The version folder of the calling model."""
    return context.current().folder


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model of the repository; TritonModelException if that fails.

    `config` (JSON) is used in place of the file's; `files` (keys "file:<version>/<name>") in place of the folder's.
    """
    contents = None if files is None else {path.removeprefix("file:"): content for path, content in files.items()}
    try:
        context.services().load(model_name, config=config or None, files=contents)
    except (InferenceError, ModelLoadError) as error:
        raise TritonModelException(f"Failed to load model: {error}") from error


def unload_model(model_name: str, unload_dependents: bool = False) -> None:  # noqa: FBT001, FBT002 - Triton's signature
    """Unload a model; returns at once. With `unload_dependents` the models that an ensemble is made of go, too."""
    try:
        context.services().unload(model_name, unload_dependents=unload_dependents)
    except InferenceError as error:
        raise TritonModelException(f"Failed to unload model: {error}") from error


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether that model can be asked now."""
    try:
        return context.services().is_ready(model_name, model_version)
    except InferenceError as error:
        raise TritonModelException(f"Failed to check model readiness: {error}") from error


def _by_name(tensors: Sequence[Tensor], name: str) -> Tensor | None:
    return next((tensor for tensor in tensors if tensor.name() == name), None)


def _config_by_name(model_config: Mapping[str, Any], what: str, name: str) -> dict[str, Any] | None:
    return next((config for config in model_config.get(what, ()) if config["name"] == name), None)
