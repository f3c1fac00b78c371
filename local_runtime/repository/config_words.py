"""The words of a `ModelConfig`: its enumerations, the platforms and files of each backend, and datatypes. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tritonclient.grpc import model_config_pb2

from local_runtime.errors import ModelLoadError
from local_runtime.repository.model_config import Backend

# `platform` names a backend, too (core `src/model_config_utils.cc`, AutoCompleteBackendFields).
PLATFORMS: Mapping[str, Backend] = MappingProxyType(
    {
        "pytorch_libtorch": Backend.PYTORCH,
        "onnxruntime_onnx": Backend.ONNXRUNTIME,
        "python": Backend.PYTHON,
        "ensemble": Backend.ENSEMBLE,
    }
)
# Files that may lie in a version folder, and the backend that each belongs to. A backend's first is its default; of
# a model that names neither backend nor file, the first that is there counts.
MODEL_FILES: Mapping[str, Backend] = MappingProxyType(
    {
        "model.onnx": Backend.ONNXRUNTIME,
        "model.pt": Backend.PYTORCH,
        "model.pt2": Backend.PYTORCH,
        "model.py": Backend.PYTHON,
    }
)
# onnxruntime's name of each type. BF16 is missing: onnxruntime takes and gives no numpy arrays of it.
ONNX_DATATYPES: Mapping[str, str] = MappingProxyType(
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


def default_file(backend: Backend) -> str:
    """The file that a backend loads unless `default_model_filename` says otherwise; "" for an ensemble."""
    return next((file for file, owner in MODEL_FILES.items() if owner is backend), "")


def word(enumeration: Any, number: int) -> str:
    """The name of an enumeration's value; ModelLoadError for a number that it does not have."""
    try:
        name: str = enumeration.Name(number)
    except ValueError as error:
        raise ModelLoadError(f"{number} is not a value of {enumeration.DESCRIPTOR.name}") from error
    return name


def datatype(number: int) -> str:
    """The protocol's name of a DataType: TYPE_FP32 -> FP32, TYPE_STRING -> BYTES, unset -> INVALID."""
    name = word(model_config_pb2.DataType, number).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def config_word(name: str) -> str:
    """The DataType of a protocol's name: FP32 -> TYPE_FP32, BYTES -> TYPE_STRING."""
    return "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"
