"""What the JSON of a request for inference says, apart from the bytes of tensors behind it. Pure."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.protocol.json_text import parse
from local_runtime.protocol.oip_parameters import flag, request_fields
from local_runtime.protocol.oip_tensors import Malformed

MAX_NAME = 1024  # characters of an id or a tensor's name: they come back in errors, which are sent as headers
MAX_CLASSES = 2**31 - 1  # no model has as many
REMEMBERED = 256  # JSON texts before bytes of tensors
MAX_REMEMBERED = 4096  # bytes of such a text
MAX_TENSORS = 4096  # inputs or outputs of a request: the widest tables of features have some hundreds

_INTEGERS = frozenset({int})  # and not bool, which is one of their subclasses
_NO_BINARY: Mapping[str, bool] = MappingProxyType({})
_NO_CLASSES: Mapping[str, int] = MappingProxyType({})


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """How a caller wants its answer.

    Args:
        is_binary: outputs are wanted as bytes, where `binary` does not say otherwise.
        binary: the same, by output.
        classes: how many best classes are wanted in place of an output's values, by output.
    """

    is_binary: bool = False
    binary: Mapping[str, bool] = _NO_BINARY
    classes: Mapping[str, int] = _NO_CLASSES

    def wants_bytes(self, output: str) -> bool:
        """Whether this output is to come in the binary form."""
        return self.binary.get(output, self.is_binary)


class Input(msgspec.Struct, frozen=True):
    """An input as the JSON says it: with its values, or with the number of its bytes."""

    name: str
    datatype: str
    shape: list[int]
    size: Any
    values: Any


class Layout(Wishes, frozen=True, kw_only=True):
    """A request but for the bytes behind its JSON; `Asked` says what the fields are."""

    inputs: tuple[Input, ...]
    request_id: str
    outputs: tuple[str, ...]
    fields: dict[str, Any]


@lru_cache(REMEMBERED)
def known_layout(text: bytes) -> Layout:
    """That of a client's JSON, which is often the same for all that it sends. Raises Malformed, InferenceError."""
    document = parse(text)
    return layout_of(document, read_id(document))


def layout_of(document: dict[str, Any], request_id: str) -> Layout:
    """What a body says. Raises Malformed."""
    tensors = _member_list(document, "inputs")
    if tensors is None:
        raise Malformed("Unable to parse 'inputs': attempt to access non-existing object member 'inputs'")
    inputs: dict[str, Input] = {}
    for tensor in tensors:
        key = _name(tensor, "inputs")
        if key in inputs:
            raise Malformed(f"input '{key}' already exists in request")
        inputs[key] = _input(key, tensor)
    parameters = _parameters(document, "the request")
    outputs, binary, classes = _outputs(_member_list(document, "outputs") or ())
    return Layout(
        inputs=tuple(inputs.values()),
        request_id=request_id,
        outputs=outputs,
        fields=request_fields(parameters),
        is_binary=flag("binary_data_output", parameters.get("binary_data_output", False)),
        binary=binary,
        classes=classes,
    )


def read_id(document: dict[str, Any]) -> str:
    """The caller's own name for its request; empty for none. Raises Malformed."""
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise Malformed("Unable to parse 'id': must be a string")
    if len(request_id) > MAX_NAME:
        raise Malformed(f"Unable to parse 'id': it has more than {MAX_NAME} characters")
    return request_id


def _input(name: str, tensor: dict[str, Any]) -> Input:
    datatype, shape = tensor.get("datatype"), tensor.get("shape")
    if not isinstance(datatype, str):
        raise Malformed(f"Unable to parse 'datatype' of input '{name}': must be a string")
    if not isinstance(shape, list) or not set(map(type, shape)) <= _INTEGERS:
        raise Malformed(f"Unable to parse 'shape' of input '{name}': must be an array of integers")
    parameters = _parameters(tensor, f"input '{name}'")
    if parameters:
        _refuse_shared_memory(name, parameters)
        size = parameters.get("binary_data_size")
        if size is not None:
            if "data" in tensor:
                raise Malformed(f"input '{name}' has both 'data' and 'binary_data_size'")
            return Input(name, datatype, shape, size, None)
    if "data" not in tensor:
        raise Malformed(
            f"Unable to parse 'data': attempt to access non-existing object member 'data' of input '{name}'"
        )
    return Input(name, datatype, shape, None, tensor["data"])


def _outputs(tensors: Sequence[Any]) -> tuple[tuple[str, ...], Mapping[str, bool], Mapping[str, int]]:
    """Names, which of them are wanted as bytes, and of which the best classes."""
    if not tensors:
        return (), _NO_BINARY, _NO_CLASSES
    names: list[str] = []
    binary: dict[str, bool] = {}
    classes: dict[str, int] = {}
    for tensor in tensors:
        name = _name(tensor, "outputs")
        names.append(name)
        parameters = _parameters(tensor, f"output '{name}'")
        if not parameters:
            continue
        _refuse_shared_memory(name, parameters)
        if "binary_data" in parameters:
            binary[name] = flag("binary_data", parameters["binary_data"])
        count = parameters.get("classification", 0)
        if type(count) is not int or not 0 <= count <= MAX_CLASSES:
            raise Malformed(f"parameter 'classification' of output '{name}' must be a whole number above 0")
        if count:
            classes[name] = count
    return tuple(names), binary, classes


def _member_list(document: dict[str, Any], member: str) -> list[Any] | None:
    value = document.get(member)
    if value is None and member not in document:
        return None
    if not isinstance(value, list):
        raise Malformed(f"Unable to parse '{member}': must be an array")
    if len(value) > MAX_TENSORS:
        raise Malformed(f"Unable to parse '{member}': it has more than {MAX_TENSORS} elements")
    return value


def _name(tensor: Any, member: str) -> str:
    name = tensor.get("name") if isinstance(tensor, dict) else None
    if not isinstance(name, str):
        raise Malformed(f"Unable to parse '{member}': every element must be an object with a string 'name'")
    if len(name) > MAX_NAME:
        raise Malformed(f"Unable to parse '{member}': a name has more than {MAX_NAME} characters")
    return name


def _parameters(holder: dict[str, Any], whose: str) -> dict[str, Any]:
    parameters = holder.get("parameters")
    if parameters is None and "parameters" not in holder:
        return {}
    if not isinstance(parameters, dict):
        raise Malformed(f"Unable to parse 'parameters' of {whose}: must be an object")
    return parameters


def _refuse_shared_memory(name: str, parameters: dict[str, Any]) -> None:
    if "shared_memory_region" in parameters:
        raise InferenceError(
            ErrorCode.UNSUPPORTED, f"tensor '{name}' is in shared memory, which this server does not offer"
        )
