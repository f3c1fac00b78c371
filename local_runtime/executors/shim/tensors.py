"""Tensors, and their numbers in Triton's type system."""

import importlib
import sys
from typing import Any

import ml_dtypes
import numpy as np

from local_runtime.executors.shim.errors import TritonModelException
from local_runtime.messages import Array
from local_runtime.repository.model_config import NUMPY_TYPES
from local_runtime.scheduling.byte_strings import from_serialized

# TRITONSERVER_DataType (core tritonserver.h) counts from 1 in the order of NUMPY_TYPES but for the last two.
_NUMBERED = (*(name for name in NUMPY_TYPES if name not in {"BF16", "BYTES"}), "BYTES", "BF16")
_NUMBERS = {np.dtype(NUMPY_TYPES[name]): number for number, name in enumerate(_NUMBERED, start=1)}
_NUMPY = {number: NUMPY_TYPES[name] for number, name in enumerate(_NUMBERED, start=1)}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    f"TYPE_{'STRING' if name == 'BYTES' else name}": numpy_type for name, numpy_type in NUMPY_TYPES.items()
}


class Tensor:
    """A named array in CPU memory. TYPE_STRING tensors are object arrays of bytes.

    BF16 arrays are those of ml_dtypes; Triton itself has them only as DLPack.
    """

    __slots__ = ("_array", "_name")

    def __init__(self, name: str, numpy_array: Array) -> None:
        if not isinstance(name, str):
            raise TritonModelException(f"a tensor's name must be str, not {type(name).__name__}")
        if not isinstance(numpy_array, np.ndarray):
            raise TritonModelException(f"Tensor '{name}' must be made from a numpy array, not {type(numpy_array)}")
        if numpy_array.dtype.kind in "UV" and numpy_array.dtype != _BFLOAT16:
            raise TritonModelException(
                "Tensor dtype used for numpy_array is not support by Python backend. Please use np.object_ instead."
            )
        self._name = name
        self._array = numpy_array

    def name(self) -> str:
        """The tensor's name."""
        return self._name

    def as_numpy(self) -> Array:
        """The values, with the batch dimension first where the model has one."""
        return self._array

    def triton_dtype(self) -> int:
        """The number of its type, see `numpy_to_triton_type`."""
        return numpy_to_triton_type(self._array.dtype)

    def shape(self) -> list[int]:
        """Its dimensions."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Always: this runtime hands Python models their tensors in CPU memory."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule that shares the memory. TritonModelException for strings."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """A tensor with a copy of what a DLPack capsule, or an object that offers one, holds on any device.

        TritonModelException if it is not contiguous in C order, or no such object.
        """
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        return Tensor(name, _imported(tensor))

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if self._array.dtype == object:
            raise TritonModelException("DLPack does not have support for string tensors.")
        if self._array.dtype == _BFLOAT16:
            torch: Any = importlib.import_module("torch")  # numpy cannot name this type to others
            tensor = torch.from_numpy(self._array.view(np.int16)).view(torch.bfloat16)
            return tensor.__dlpack__(max_version=max_version)
        return self._array.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__() if self._array.dtype.kind in "biuf" else (1, 0)


def serialize_byte_tensor(input_tensor: Array) -> bytes | None:
    """The elements in C order as Triton sends them: of each the length (4 bytes, little-endian) and its bytes.

    Elements that are not bytes are written as their text in UTF-8. As in Triton None, if the array is neither of
    objects nor of bytes.
    """
    if input_tensor.dtype.kind not in "OS":
        return None
    items = (item if isinstance(item, bytes) else str(item).encode() for item in input_tensor.reshape(-1).tolist())
    return b"".join(len(item).to_bytes(4, "little") + item for item in items)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The elements (bytes) of a serialized tensor, in one dimension; ValueError if the last of them is not whole."""
    return from_serialized(bytes(encoded_tensor))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a config's data_type: TYPE_FP32 -> float32, TYPE_STRING -> object."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a type number, None for an unknown one."""
    return _NUMPY.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int:
    """The number of a numpy type (BOOL 1 ... FP64 12, BYTES 13, BF16 14); TritonModelException for others."""
    dtype = np.dtype(data_type)
    number = _NUMBERS.get(np.dtype(object) if dtype.kind == "S" else dtype)
    if number is None:
        raise TritonModelException(f"no Triton type for numpy's {dtype}")
    return number


def _imported(source: Any) -> Array:
    is_capsule = type(source).__name__ == "PyCapsule"
    if not is_capsule and not (hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__")):
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and "
            "`__dlpack_device__` attributes"
        )
    # Only torch knows other devices and BF16, and where it is, the tensor is most likely one of its own.
    array = _by_torch(source) if "torch" in sys.modules else np.from_dlpack(_Capsule(source) if is_capsule else source)
    if not array.flags.c_contiguous:
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    return array.copy()


def _by_torch(source: Any) -> Array:
    torch: Any = importlib.import_module("torch")  # waits for another thread that is amidst importing it
    tensor = torch.from_dlpack(source).detach().cpu()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(_BFLOAT16)
    array: Array = tensor.numpy()
    return array


class _Capsule:
    """What numpy wants around a bare capsule; it can only be one of CPU memory."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)
