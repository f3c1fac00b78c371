"""Core values to and from Triton's protobuf messages of inference. Pure: no channel, no clock.

Tensors' bytes do not go through protobuf, which would copy each of them twice: a message is its head, made by protobuf,
and its raw contents, which are fields like any other, after one another (protobuf.dev/programming-guides/encoding).
Heads are the same over and over, but for the request's id, which is a field by itself: what they say is remembered.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from gateway.backends.triton.faults import wrong_names
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFacts
from gateway.core.tensors import BYTES, byte_size, check
from gateway.core.types import BackendCall, Parameter, SequenceStep, Tensor, TensorPayload, Tensors
from local_runtime.protocol.oip_parameters import FINAL_RESPONSE, WANTS_EMPTY_FINAL, put_parameters

_LENGTH_DELIMITED: Final = 2
_ID_TAG: Final = bytes([3 << 3 | _LENGTH_DELIMITED])  # ModelInferRequest.id, and ModelInferResponse.id
_ID_TAG_NUMBER: Final = _ID_TAG[0]
_RAW_INPUT_TAG: Final = bytes([7 << 3 | _LENGTH_DELIMITED])  # ModelInferRequest.raw_input_contents
_RAW_OUTPUT_TAG: Final = 6 << 3 | _LENGTH_DELIMITED  # ModelInferResponse.raw_output_contents
_MORE: Final = 0x80
_MAX_INT64: Final = 2**63 - 1
REMEMBERED: Final = 256  # heads of requests, and of answers: models times the shapes that are usual
MAX_REMEMBERED: Final = 4096  # bytes of such an answer's head
MAX_TENSORS: Final = 16  # of such a request, inputs and outputs together
MAX_VERSION: Final = 20  # digits


class Aside(Protocol):
    """A way for tensors beside the message (`shared_memory.Slot`)."""

    def put(self, tensor: Any, content: bytes | memoryview) -> bool:
        """Whether an input goes that way."""
        ...

    def ask(self, output: Any, size: int) -> bool:
        """Whether an output of at most `size` bytes comes that way."""
        ...

    def contents(self, outputs: Sequence[Any], raw: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """The raw contents with those that came that way."""
        ...


def encode(
    call: BackendCall,
    payload: TensorPayload,
    facts: ModelFacts | None,
    *,
    aside: Aside | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> list[bytes | memoryview]:
    """The request as it goes out, in parts: all inputs in raw form, or by way of `aside`, as outputs of known `sizes`.

    Triton's `priority` and `timeout` are left out for models that are not known to declare them.
    """
    raw = [tensor.data for tensor in payload.inputs]
    if aside is None and _is_plain(call, payload):
        inputs = tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in payload.inputs])
        head = _plain_head(call.model, call.version, inputs, payload.outputs)
    else:
        request = _request(call, payload, facts)
        if aside is not None:
            pairs = zip(request.inputs, raw, strict=True)
            raw = [content for tensor, content in pairs if not aside.put(tensor, content)]
            _ask_aside(request, payload, facts, aside, sizes)
        head = request.SerializeToString()
    request_id = call.request_id.encode()
    parts: list[bytes | memoryview] = [head + _ID_TAG + _varint(len(request_id)) + request_id]
    for content in raw:
        parts += (_RAW_INPUT_TAG + _varint(len(content)), content)
    return parts


def decode(message: bytes | memoryview, wanted: Sequence[str], *, aside: Aside | None = None) -> Tensors:
    """The answer to a unary call: the outputs in `wanted` (all where nothing is named), in the server's order.

    Triton checks none of its models' outputs, so this does: raises `BackendError` BROKEN for missing or double names,
    and for sizes that do not fit shape and datatype.
    """
    try:
        head, raw = _split(message)
        outline = (_known_outline if len(head) <= MAX_REMEMBERED else _outline)(head, tuple(wanted))
    except (DecodeError, IndexError, ValueError) as error:
        raise _broken("not an answer in protobuf's form") from error
    return _tensors(outline, raw if aside is None else aside.contents(outline.outputs, raw))


def decode_streamed(message: bytes | memoryview, wanted: Sequence[str]) -> Tensors | str:
    """One answer of a stream, as `decode`, or the text of the error that came in its place."""
    try:
        response = pb.ModelStreamInferResponse.FromString(message)
    except DecodeError as error:
        raise _broken("not an answer in protobuf's form") from error
    if response.error_message:
        return str(response.error_message)
    answer = response.infer_response
    return _tensors(_outlined(answer, wanted if answer.outputs else ()), answer.raw_output_contents)


# --- requests -------------------------------------------------------------------------------------


def _is_plain(call: BackendCall, payload: TensorPayload) -> bool:
    """Whether all that is said of it is what it is made of, and that is little: such requests look alike."""
    return not (
        call.sequence is not None
        or payload.parameters
        or payload.classes
        or payload.priority
        or payload.queue_timeout_us
        or payload.wants_empty_final
        or len(payload.inputs) + len(payload.outputs) > MAX_TENSORS
        or len(call.version) > MAX_VERSION
    )


@lru_cache(REMEMBERED)
def _plain_head(
    model: str, version: str, inputs: tuple[tuple[str, str, tuple[int, ...]], ...], outputs: tuple[str, ...]
) -> bytes:
    request = pb.ModelInferRequest(model_name=model, model_version=version)
    for name, datatype, shape in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
    for name in outputs:
        request.outputs.add(name=name)
    head: bytes = request.SerializeToString()
    return head


def _request(call: BackendCall, payload: TensorPayload, facts: ModelFacts | None) -> pb.ModelInferRequest:
    """All but its id and its contents."""
    request = pb.ModelInferRequest(model_name=call.model, model_version=call.version)
    for tensor in payload.inputs:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    for name in payload.outputs:
        request.outputs.add(name=name)
    put_parameters(request.parameters, payload.parameters)
    for output in request.outputs:
        if output.name in payload.classes:
            output.parameters["classification"].int64_param = payload.classes[output.name]
    if facts is not None:
        _put_queueing(request, payload, facts)
    if call.sequence is not None:
        _put_sequence(request, call.sequence)
    if payload.wants_empty_final:
        request.parameters[WANTS_EMPTY_FINAL].bool_param = True
    return request


def _ask_aside(
    request: pb.ModelInferRequest,
    payload: TensorPayload,
    facts: ModelFacts | None,
    aside: Aside,
    sizes: Mapping[str, int],
) -> None:
    """Outputs of known sizes come by way of `aside`; of all outputs, where none is named, that takes naming them."""
    if not request.outputs and facts is not None and sizes:
        for name in facts.outputs:
            request.outputs.add(name=name)
    for output in request.outputs:
        if output.name in sizes and output.name not in payload.classes:
            aside.ask(output, sizes[output.name])


def _put_queueing(request: pb.ModelInferRequest, payload: TensorPayload, facts: ModelFacts) -> None:
    if payload.priority and facts.has_priority_levels:
        request.parameters["priority"].uint64_param = payload.priority
    if payload.queue_timeout_us and facts.allows_timeout:
        request.parameters["timeout"].int64_param = payload.queue_timeout_us


def _put_sequence(request: pb.ModelInferRequest, step: SequenceStep) -> None:
    """Triton reads ids as int64 and takes them for uint64: the large ones go in two's complement."""
    number = int(step.id)
    request.parameters["sequence_id"].int64_param = number if number <= _MAX_INT64 else number - 2**64
    request.parameters["sequence_start"].bool_param = step.is_start
    request.parameters["sequence_end"].bool_param = step.is_end


# --- answers --------------------------------------------------------------------------------------


class _Output(NamedTuple):
    """An output as an answer's head describes it; `size` is -1 for BYTES, whose shape does not tell it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int
    is_wanted: bool


class _Outline(NamedTuple):
    """An answer but for the contents of its outputs."""

    outputs: tuple[_Output, ...]
    version: str
    parameters: Mapping[str, Parameter]
    is_final: bool


def _outline(head: bytes, wanted: tuple[str, ...]) -> _Outline:
    return _outlined(pb.ModelInferResponse.FromString(head), wanted)


_known_outline: Final = lru_cache(REMEMBERED)(_outline)  # a model's answers are alike but for their contents


def _outlined(response: pb.ModelInferResponse, wanted: Sequence[str]) -> _Outline:
    """Raises `BackendError` BROKEN for outputs that no tensors can be, or others than are `wanted`."""
    wrong = wrong_names([output.name for output in response.outputs], wanted)
    if wrong:
        raise _broken(wrong)
    outputs = []
    for output in response.outputs:
        shape, datatype = tuple(output.shape), output.datatype
        try:
            size = -1 if datatype == BYTES else byte_size(datatype, shape)
        except ValueError as error:
            raise _broken(f"output '{output.name}': {error}") from error
        outputs.append(_Output(output.name, datatype, shape, size, not wanted or output.name in wanted))
    parameters = {name: _parameter(value) for name, value in response.parameters.items()}
    is_final = bool(parameters.pop(FINAL_RESPONSE, True))
    return _Outline(tuple(outputs), response.model_version, MappingProxyType(parameters), is_final)


def _tensors(outline: _Outline, raw: Sequence[bytes | memoryview]) -> Tensors:
    if len(raw) != len(outline.outputs):
        raise _broken(f"{len(outline.outputs)} outputs with {len(raw)} raw contents")
    picked = []
    for output, contents in zip(outline.outputs, raw, strict=True):
        tensor = Tensor(name=output.name, datatype=output.datatype, shape=output.shape, data=contents)
        if len(contents) != output.size:
            try:
                check(tensor)
            except ValueError as error:
                raise _broken(str(error)) from error
        if output.is_wanted:
            picked.append(tensor)
    return Tensors(
        outputs=tuple(picked), version=outline.version, parameters=outline.parameters, is_final=outline.is_final
    )


def _parameter(value: pb.InferParameter) -> Parameter:
    chosen = value.WhichOneof("parameter_choice")
    found: Parameter = getattr(value, chosen) if chosen else ""
    return found


def _split(message: bytes | memoryview) -> tuple[bytes, list[memoryview]]:
    """A ModelInferResponse without its id and its raw contents, and those. Raises IndexError, ValueError for no such.

    The id is that of the request, and the rest the same for many answers.
    """
    view = memoryview(message)
    heads: list[bytes | memoryview] = []
    raw: list[memoryview] = []
    at, end = 0, len(message)
    while at < end:
        tag, size, begin = message[at], message[at + 1], at + 2
        if (tag | size) >= _MORE:  # in more bytes than one each
            tag, begin = _read_varint(message, at)
            size, begin = _read_varint(message, begin)
        if tag & 7 != _LENGTH_DELIMITED:
            raise ValueError("a field of another kind than Triton's answers have")
        past = begin + size
        if past > end:
            raise ValueError("a field is longer than the message")
        if tag == _RAW_OUTPUT_TAG:
            raw.append(view[begin:past])
        elif tag != _ID_TAG_NUMBER:
            heads.append(message[at:past])
        at = past
    return b"".join(heads), raw


def _read_varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    """A number, and where it ends: seven bits a byte, the lowest first, all but the last byte with the highest bit."""
    byte = message[at]
    if byte < _MORE:
        return byte, at + 1
    number, shift = byte & ~_MORE, 7
    while shift < 64:  # noqa: PLR2004 - no number has more bits
        at += 1
        byte = message[at]
        number |= (byte & ~_MORE) << shift
        if byte < _MORE:
            return number, at + 1
        shift += 7
    raise ValueError("a number of more than 64 bits")


def _varint(number: int) -> bytes:
    if number < _MORE:
        return bytes((number,))
    found = bytearray()
    while number >= _MORE:
        found.append(number & ~_MORE & 0xFF | _MORE)
        number >>= 7
    found.append(number)
    return bytes(found)


def _broken(text: str) -> BackendError:
    return BackendError(Fault(kind=FaultKind.BROKEN, message=text))
