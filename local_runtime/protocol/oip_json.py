"""Inference over HTTP: JSON bodies with Triton's binary tensor extension to requests, answers to bodies. Pure.

Sources: `inference_rest.md` of the Open Inference Protocol, Triton's `protocol/extension_binary_data.md`. Like Triton's
server, requests may hold the bare words NaN and Infinity, and answers hold them where a tensor does.
"""

import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
import orjson

from local_runtime.errors import ErrorCode, InferenceError, invalid, with_request_id
from local_runtime.messages import Array, InferAnswer, InferRequest, ModelMetadata
from local_runtime.protocol.error_texts import safe_text
from local_runtime.protocol.oip_parameters import flag, request_fields
from local_runtime.protocol.oip_tensors import Malformed, from_bytes, refusing, to_bytes
from local_runtime.protocol.oip_values import from_json, to_json
from local_runtime.scheduling.validation import datatype_of

# Lists and objects, and what looks like them within strings. So many pairs of numbers are read in 0.25 s (0.4 s with a
# NaN among them) on one core of 2.5 GHz, during which nothing else is answered. Flat lists of numbers cost a tenth.
MAX_CONTAINERS: Final = 500_000
_MIN_INT64 = -(2**63)
_MAX_UINT64 = 2**64 - 1
_INTEGERS = frozenset({int})  # and not bool, which is one of their subclasses
_NO_BINARY: Mapping[str, bool] = MappingProxyType({})
_NO_CLASSES: Mapping[str, int] = MappingProxyType({})


class JsonInfer(msgspec.Struct, frozen=True, kw_only=True):
    """A request and how its caller wants the answer.

    Args:
        request: for the runtime.
        is_binary: outputs are wanted as bytes, where `binary` does not say otherwise.
        binary: the same, by output.
        classes: how many best classes are wanted in place of an output's values, by output.
    """

    request: InferRequest
    is_binary: bool
    binary: Mapping[str, bool]
    classes: Mapping[str, int]


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """An answer's body; `json_length` is that of its JSON part where bytes of tensors follow it."""

    content: bytes
    json_length: int | None = None


def decode_infer(model: str, version: str, body: bytes, *, json_length: int | None = None) -> JsonInfer:
    """The body of an infer call; INVALID_ARG naming what is wrong with it.

    `json_length` is the `Inference-Header-Content-Length`: where the JSON ends and the bytes of tensors begin.
    """
    if json_length is not None and not 0 <= json_length <= len(body):
        raise invalid(f"Inference-Header-Content-Length {json_length} exceeds the body of {len(body)} bytes")
    document = parse(body if json_length is None else body[:json_length])
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise invalid("Unable to parse 'id': must be a string")
    try:
        return _decode(document, _Blobs(body, json_length), (model, version, request_id))
    except Malformed as error:
        raise invalid(with_request_id(request_id, str(error))) from error


def decode_raw(metadata: ModelMetadata, version: str, body: bytes, *, is_batched: bool) -> JsonInfer:
    """A body that is the model's only input and nothing else (header length 0); outputs come back as bytes."""
    with refusing():
        if len(metadata.inputs) != 1:
            raise Malformed(
                f"raw request needs a model with exactly 1 input, '{metadata.name}' has {len(metadata.inputs)}"
            )
        spec = metadata.inputs[0]
        shape = [1 if is_batched and at == 0 else dim for at, dim in enumerate(spec.shape)]
        if spec.datatype == "BYTES":
            array = from_bytes(spec.name, "BYTES", _filled(shape, 1), raw=_framed(body), model=metadata.name)
        else:
            one = from_bytes(spec.name, spec.datatype, [0], raw=b"", model=metadata.name).dtype.itemsize
            array = from_bytes(
                spec.name, spec.datatype, _filled(shape, len(body) // one), raw=body, model=metadata.name
            )
    request = InferRequest(model=metadata.name, version=version, inputs={spec.name: array})
    return JsonInfer(request=request, is_binary=True, binary=_NO_BINARY, classes=_NO_CLASSES)


def encode_infer(answer: InferAnswer, asked: JsonInfer) -> Body:
    """The body of an infer answer; INVALID_ARG where JSON cannot hold an output's values."""
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for name, array in answer.outputs.items():
        output: dict[str, Any] = {"name": name, "datatype": datatype_of(array), "shape": array.shape}
        if asked.binary.get(name, asked.is_binary):
            blob = to_bytes(array)
            output["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
        else:
            output["data"] = to_json(name, array)
        outputs.append(output)
    document: dict[str, Any] = {"model_name": answer.model, "model_version": answer.version}
    if asked.request.request_id:
        document["id"] = asked.request.request_id
    if answer.parameters:
        document["parameters"] = dict(answer.parameters)
    document["outputs"] = outputs
    head = dump(document)
    if not blobs:
        return Body(content=head)
    return Body(content=b"".join((head, *blobs)), json_length=len(head))


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object; INVALID_ARG for anything else, or too many parts. Bare NaN and Infinity are numbers."""
    if len(body) > MAX_CONTAINERS and body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise invalid(
            f"failed to parse the request JSON buffer: it has more than {MAX_CONTAINERS} of the characters [ and {{"
        )
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        document = _parse_non_finite(body, error)
    if not isinstance(document, dict):
        raise invalid("failed to parse the request JSON buffer: the document is not an object")
    return document


def dump(document: Any) -> bytes:
    """A document as JSON, arrays (one-dimensional) and NaN and Infinity included."""
    text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    # orjson writes null for what JSON has no word for; nothing else in an answer is null.
    if b"null" in text:
        return json.dumps(document, default=_plain, separators=(",", ":"), ensure_ascii=False).encode()
    return text


def error_body(text: object) -> bytes:
    """The body of every answer that is an error."""
    return orjson.dumps({"error": safe_text(text)})


def _parse_non_finite(body: bytes, error: orjson.JSONDecodeError) -> Any:
    """What the first parser refused, in case it was for bare NaN or Infinity: just as strict about everything else."""
    if b"NaN" in body or b"Infinity" in body:
        try:
            document = json.loads(body.decode(), parse_int=_integer, parse_float=_finite)
            orjson.dumps(document)  # raises for half a surrogate pair, which is no text
        except (ValueError, RecursionError, orjson.JSONEncodeError):
            pass  # it is malformed in another way: the first parser's words are better
        else:
            return document
    raise invalid(f"failed to parse the request JSON buffer: {error}") from error


def _integer(text: str) -> int | float:
    number = int(text)
    return number if _MIN_INT64 <= number <= _MAX_UINT64 else _finite(text)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("number is infinity when parsed as double")
    return number


def _plain(value: Any) -> Any:
    return value.tolist()


class _Blobs:
    """The bytes behind the JSON, handed out in order."""

    def __init__(self, body: bytes, start: int | None) -> None:
        self._body = body
        self._at = len(body) if start is None else start

    def take(self, name: str, size: Any) -> memoryview:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise Malformed(f"parameter 'binary_data_size' of input '{name}' must be a number of bytes")
        if size > self.left:
            raise Malformed(f"unexpected end of binary data for input '{name}': {size} bytes wanted, {self.left} left")
        self._at += size
        return memoryview(self._body)[self._at - size : self._at]

    @property
    def left(self) -> int:
        return len(self._body) - self._at


def _decode(document: dict[str, Any], blobs: _Blobs, name: tuple[str, str, str]) -> JsonInfer:
    model, version, request_id = name
    tensors = _member_list(document, "inputs")
    if tensors is None:
        raise Malformed("Unable to parse 'inputs': attempt to access non-existing object member 'inputs'")
    inputs: dict[str, Array] = {}
    for tensor in tensors:
        key = _name(tensor, "inputs")
        if key in inputs:
            raise Malformed(f"input '{key}' is given more than once")
        inputs[key] = _input(key, tensor, blobs, model)
    if blobs.left:
        raise Malformed(f"unexpected additional input data of {blobs.left} bytes")
    parameters = _parameters(document, "the request")
    outputs, binary, classes = _outputs(_member_list(document, "outputs") or ())
    return JsonInfer(
        request=InferRequest(
            model=model,
            version=version,
            inputs=inputs,
            request_id=request_id,
            outputs=outputs,
            **request_fields(parameters),
        ),
        is_binary=flag("binary_data_output", parameters.get("binary_data_output", False)),
        binary=binary,
        classes=classes,
    )


def _input(name: str, tensor: dict[str, Any], blobs: _Blobs, model: str) -> Array:
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
            return from_bytes(name, datatype, shape, raw=blobs.take(name, size), model=model)
    if "data" not in tensor:
        raise Malformed(
            f"Unable to parse 'data': attempt to access non-existing object member 'data' of input '{name}'"
        )
    return from_json(name, datatype, shape, tensor["data"])


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
        if type(count) is not int or count < 0:
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
    return value


def _name(tensor: Any, member: str) -> str:
    name = tensor.get("name") if isinstance(tensor, dict) else None
    if not isinstance(name, str):
        raise Malformed(f"Unable to parse '{member}': every element must be an object with a string 'name'")
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
