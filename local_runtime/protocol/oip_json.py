"""Inference over HTTP: JSON bodies with Triton's binary tensor extension to requests, answers to bodies. Pure.

Sources: `inference_rest.md` of the Open Inference Protocol, Triton's `protocol/extension_binary_data.md`. Like Triton's
server, requests may hold the bare words NaN and Infinity, and answers hold them where a tensor does.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from local_runtime.errors import InferenceError, invalid, with_request_id
from local_runtime.messages import Array, InferAnswer, InferRequest, ModelMetadata
from local_runtime.protocol.json_text import dump, parse
from local_runtime.protocol.oip_layout import MAX_REMEMBERED, Layout, Wishes, known_layout, layout_of, read_id
from local_runtime.protocol.oip_tensors import Malformed, from_bytes, item_size, refusing, to_bytes
from local_runtime.protocol.oip_values import from_json, to_json
from local_runtime.scheduling.validation import datatype_of

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
    if json_length is not None and json_length <= MAX_REMEMBERED:
        try:
            return _with_tensors(known_layout(body[:json_length]), Blobs(body, json_length), form, model)
        except (Malformed, InferenceError):
            pass  # what is wrong is told below, in the words and the order of every other body
    document = parse(body if json_length is None else body[:json_length])
    return read_document(model, document, form, blobs=Blobs(body, json_length))


def read_document(
    model: str, document: dict[str, Any], form: TensorForm[_Tensor], *, blobs: "Blobs | None" = None
) -> Asked[_Tensor]:
    """The same for JSON that is parsed already; `blobs` are the bytes behind it."""
    try:
        request_id = read_id(document)
    except Malformed as error:
        raise invalid(str(error)) from error
    try:
        return _read(document, blobs or Blobs(b"", None), form, (model, request_id))
    except Malformed as error:
        raise invalid(with_request_id(request_id, str(error))) from error


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
    return _with_tensors(layout_of(document, request_id), blobs, form, model)


def _with_tensors(layout: Layout, blobs: Blobs, form: TensorForm[_Tensor], model: str) -> Asked[_Tensor]:
    """The request, its tensors made of what its JSON says and the bytes behind it."""
    inputs = {
        one.name: form.from_json(one.name, one.datatype, one.shape, one.values)
        if one.size is None
        else form.from_bytes(one.name, one.datatype, one.shape, raw=blobs.take(one.name, one.size), model=model)
        for one in layout.inputs
    }
    if blobs.left:
        raise Malformed(f"unexpected additional input data of {blobs.left} bytes")
    fields = layout.fields
    if "parameters" in fields:  # which a model is given, and may change
        fields = fields | {"parameters": dict(fields["parameters"])}
    return Asked(
        inputs=inputs,
        request_id=layout.request_id,
        outputs=layout.outputs,
        fields=fields,
        is_binary=layout.is_binary,
        binary=layout.binary,
        classes=layout.classes,
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
