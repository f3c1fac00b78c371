"""Inference over HTTP: JSON bodies with Triton's binary tensor extension to requests, answers to bodies. Pure.

Sources: `inference_rest.md` of the Open Inference Protocol, Triton's `protocol/extension_binary_data.md`. Like Triton's
server, requests may hold the bare words NaN and Infinity, and answers hold them where a tensor does.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from local_runtime.errors import ErrorCode, InferenceError, invalid, with_request_id
from local_runtime.messages import Array, InferAnswer, InferRequest, ModelMetadata
from local_runtime.protocol.json_text import dump, parse
from local_runtime.protocol.oip_parameters import flag, request_fields
from local_runtime.protocol.oip_tensors import Malformed, from_bytes, item_size, refusing, to_bytes
from local_runtime.protocol.oip_values import from_json, to_json
from local_runtime.scheduling.validation import datatype_of

MAX_NAME = 1024  # characters of an id or a tensor's name: they come back in errors, which are sent as headers
MAX_CLASSES = 2**31 - 1  # no model has as many
MAX_TENSORS = 4096  # inputs or outputs of a request: the widest tables of features have some hundreds

_INTEGERS = frozenset({int})  # and not bool, which is one of their subclasses
_NO_BINARY: Mapping[str, bool] = MappingProxyType({})
_NO_CLASSES: Mapping[str, int] = MappingProxyType({})
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


_Tensor_co = TypeVar("_Tensor_co", covariant=True)
_Tensor = TypeVar("_Tensor")


class TensorForm(Protocol[_Tensor_co]):
    """What the tensors of a request become. Both calls raise Malformed naming the input."""

    def from_json(self, name: str, datatype: str, shape: Sequence[int], data: Any, /) -> _Tensor_co:
        """A tensor from JSON values, flat or nested as its shape says."""
        ...

    def from_bytes(
        self, name: str, datatype: str, shape: Sequence[int], /, *, raw: bytes | memoryview, model: str
    ) -> _Tensor_co:
        """A tensor from its binary form."""
        ...


class Arrays:
    """Requests' tensors as numpy arrays: the runtime's own form."""

    from_json = staticmethod(from_json)
    from_bytes = staticmethod(from_bytes)


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


class JsonInfer(Wishes, frozen=True, kw_only=True):
    """A request for the runtime, and how its caller wants the answer."""

    request: InferRequest


class Asked(Wishes, Generic[_Tensor], frozen=True, kw_only=True):
    """A request as its body says it, in any form of tensors, and how its caller wants the answer.

    Args:
        inputs: by name.
        request_id: the caller's; empty where it gave none.
        outputs: names of those that are wanted; empty for all.
        fields: what the parameters mean (see `oip_parameters.request_fields`).
    """

    inputs: Mapping[str, _Tensor]
    request_id: str = ""
    outputs: tuple[str, ...] = ()
    fields: Mapping[str, Any] = _NO_FIELDS


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """An answer's body; `json_length` is that of its JSON part where bytes of tensors follow it."""

    content: bytes
    json_length: int | None = None


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """An output as it is written: `blob` is its binary form; `values` (what JSON takes) count where there is none."""

    name: str
    datatype: str
    shape: Sequence[int]
    values: Any = None
    blob: "bytes | memoryview | None" = None


def decode_infer(model: str, version: str, body: bytes, *, json_length: int | None = None) -> JsonInfer:
    """The body of an infer call as a request for the runtime; see `read_infer`."""
    return _for_runtime(read_infer(model, body, Arrays, json_length=json_length), model, version)


def decode_raw(metadata: ModelMetadata, version: str, body: bytes, *, is_batched: bool) -> JsonInfer:
    """A raw body as a request for the runtime; see `read_raw`."""
    return _for_runtime(read_raw(metadata, body, Arrays, is_batched=is_batched), metadata.name, version)


def read_infer(model: str, body: bytes, form: TensorForm[_Tensor], *, json_length: int | None = None) -> Asked[_Tensor]:
    """The body of an infer call; INVALID_ARG naming what is wrong with it.

    `json_length` is the `Inference-Header-Content-Length`: where the JSON ends and the bytes of tensors begin.
    """
    if json_length is not None and not 0 <= json_length <= len(body):
        raise invalid(f"Inference-Header-Content-Length {json_length} exceeds the body of {len(body)} bytes")
    document = parse(body if json_length is None else body[:json_length])
    return read_document(model, document, form, blobs=Blobs(body, json_length))


def read_document(
    model: str, document: dict[str, Any], form: TensorForm[_Tensor], *, blobs: "Blobs | None" = None
) -> Asked[_Tensor]:
    """The same for JSON that is parsed already; `blobs` are the bytes behind it."""
    with refusing():
        request_id = read_id(document)
    try:
        return _read(document, blobs or Blobs(b"", None), form, (model, request_id))
    except Malformed as error:
        raise invalid(with_request_id(request_id, str(error))) from error


def read_id(document: dict[str, Any]) -> str:
    """The caller's own name for its request; empty for none. Raises Malformed."""
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise Malformed("Unable to parse 'id': must be a string")
    if len(request_id) > MAX_NAME:
        raise Malformed(f"Unable to parse 'id': it has more than {MAX_NAME} characters")
    return request_id


def read_raw(metadata: ModelMetadata, body: bytes, form: TensorForm[_Tensor], *, is_batched: bool) -> Asked[_Tensor]:
    """A body that is the model's only input and nothing else (header length 0); outputs come back as bytes."""
    with refusing():
        if len(metadata.inputs) != 1:
            raise Malformed(
                with_request_id(
                    "",
                    f"Raw request must only have 1 input (found 1) to be deduced but got {len(metadata.inputs)} inputs "
                    f"in '{metadata.name}' model configuration",
                )
            )
        spec = metadata.inputs[0]
        shape = [1 if is_batched and at == 0 else dim for at, dim in enumerate(spec.shape)]
        if spec.datatype == "BYTES":
            raw, elements = _framed(body), 1
        else:
            raw, elements = body, len(body) // item_size(spec.datatype)
        tensor = form.from_bytes(spec.name, spec.datatype, _filled(shape, elements), raw=raw, model=metadata.name)
    return Asked(inputs={spec.name: tensor}, is_binary=True)


def encode_infer(answer: InferAnswer, asked: JsonInfer) -> Body:
    """The body of an infer answer; INVALID_ARG where JSON cannot hold an output's values."""
    outputs = [
        Output(name=name, datatype=datatype_of(array), shape=array.shape, blob=to_bytes(array))
        if asked.wants_bytes(name)
        else Output(name=name, datatype=datatype_of(array), shape=array.shape, values=to_json(name, array))
        for name, array in answer.outputs.items()
    ]
    return answer_body(
        (answer.model, answer.version), outputs, request_id=asked.request.request_id, parameters=answer.parameters
    )


def answer_body(
    model: tuple[str, str], outputs: Iterable[Output], *, request_id: str, parameters: Mapping[str, Any]
) -> Body:
    """The body of an infer answer of `model` (name and version), its members in Triton's order."""
    told: list[dict[str, Any]] = []
    blobs: list[bytes | memoryview] = []
    for output in outputs:
        one: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if output.blob is None:
            one["data"] = output.values
        else:
            one["parameters"] = {"binary_data_size": len(output.blob)}
            blobs.append(output.blob)
        told.append(one)
    document: dict[str, Any] = {"id": request_id} if request_id else {}
    document |= {"model_name": model[0], "model_version": model[1]}
    if parameters:
        document["parameters"] = dict(parameters)
    document["outputs"] = told
    head = dump(document)
    if not any(map(len, blobs)):
        return Body(content=head)  # empty tensors have no bytes: the answer is JSON alone, as in Triton
    return Body(content=b"".join((head, *blobs)), json_length=len(head))


class Blobs:
    """The bytes behind the JSON, handed out in order; none without a `start`."""

    def __init__(self, body: bytes, start: int | None) -> None:
        self._body = body
        self._at = len(body) if start is None else start

    def take(self, name: str, size: Any) -> memoryview:
        """So many of them, for the input `name`; Malformed where they are not there."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise Malformed(f"parameter 'binary_data_size' of input '{name}' must be a number of bytes")
        if size > self.left:
            raise Malformed(f"unexpected end of binary data for input '{name}': {size} bytes wanted, {self.left} left")
        self._at += size
        return memoryview(self._body)[self._at - size : self._at]

    @property
    def left(self) -> int:
        """How many nobody has taken."""
        return len(self._body) - self._at


def _for_runtime(asked: Asked[Array], model: str, version: str) -> JsonInfer:
    request = InferRequest(
        model=model,
        version=version,
        inputs=asked.inputs,
        request_id=asked.request_id,
        outputs=asked.outputs,
        **asked.fields,
    )
    return JsonInfer(request=request, is_binary=asked.is_binary, binary=asked.binary, classes=asked.classes)


def _read(document: dict[str, Any], blobs: Blobs, form: TensorForm[_Tensor], named: tuple[str, str]) -> Asked[_Tensor]:
    model, request_id = named
    tensors = _member_list(document, "inputs")
    if tensors is None:
        raise Malformed("Unable to parse 'inputs': attempt to access non-existing object member 'inputs'")
    inputs: dict[str, _Tensor] = {}
    for tensor in tensors:
        key = _name(tensor, "inputs")
        if key in inputs:
            raise Malformed(f"input '{key}' already exists in request")
        inputs[key] = _input(key, tensor, blobs, form, model)
    if blobs.left:
        raise Malformed(f"unexpected additional input data of {blobs.left} bytes")
    parameters = _parameters(document, "the request")
    outputs, binary, classes = _outputs(_member_list(document, "outputs") or ())
    return Asked(
        inputs=inputs,
        request_id=request_id,
        outputs=outputs,
        fields=request_fields(parameters),
        is_binary=flag("binary_data_output", parameters.get("binary_data_output", False)),
        binary=binary,
        classes=classes,
    )


def _input(name: str, tensor: dict[str, Any], blobs: Blobs, form: TensorForm[_Tensor], model: str) -> _Tensor:
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
            return form.from_bytes(name, datatype, shape, raw=blobs.take(name, size), model=model)
    if "data" not in tensor:
        raise Malformed(
            f"Unable to parse 'data': attempt to access non-existing object member 'data' of input '{name}'"
        )
    return form.from_json(name, datatype, shape, tensor["data"])


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


def _filled(shape: list[int], elements: int) -> list[int]:
    """The shape with its one free dimension set so that it holds so many elements."""
    free = [at for at, dim in enumerate(shape) if dim < 0]
    if len(free) > 1:
        raise Malformed("raw request needs an input of at most 1 variable dimension")
    fixed = 1
    for dim in shape:
        fixed *= max(dim, 1)
    return [elements // fixed if at in free else dim for at, dim in enumerate(shape)]


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body
