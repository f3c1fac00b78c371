"""The words of `ModelConfig`'s enumerations, shared by what turns the message into typed values. Pure."""

from typing import Any

from tritonclient.grpc import model_config_pb2

from local_runtime.errors import ModelLoadError


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
