"""Core values to and from Triton's protobuf messages of inference. Pure: no channel, no clock.

Tensors' bytes do not go through protobuf, which would copy each of them twice: a message is its head, made by protobuf,
and its raw contents, which are fields like any other, after one another (protobuf.dev/programming-guides/encoding).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from gateway.backends.triton.faults import wrong_names
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFacts
from gateway.core.tensors import check
from gateway.core.types import BackendCall, Parameter, SequenceStep, Tensor, TensorPayload, Tensors
from local_runtime.protocol.oip_parameters import FINAL_RESPONSE, WANTS_EMPTY_FINAL, put_parameters

_LENGTH_DELIMITED: Final = 2
_RAW_INPUT_TAG: Final = bytes([7 << 3 | _LENGTH_DELIMITED])  # ModelInferRequest.raw_input_contents
_RAW_OUTPUT_TAG: Final = 6 << 3 | _LENGTH_DELIMITED  # ModelInferResponse.raw_output_contents
_MORE: Final = 0x80
_MAX_INT64: Final = 2**63 - 1


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
) -> bytes:
    """The request as it goes out, all inputs in raw form, or by way of `aside`, as outputs of known `sizes`.

    Triton's `priority` and `timeout` are left out for models that are not known to declare them.
    """
    request = pb.ModelInferRequest(model_name=call.model, model_version=call.version, id=call.request_id)
    raw: list[bytes | memoryview] = []
    for tensor in payload.inputs:
        added = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if aside is None or not aside.put(added, tensor.data):
            raw.append(tensor.data)
    for name in payload.outputs or (facts.outputs if facts is not None and sizes else ()):
        output = request.outputs.add(name=name)
        if name in payload.classes:
            output.parameters["classification"].int64_param = payload.classes[name]
        elif aside is not None and name in sizes:
            aside.ask(output, sizes[name])
    put_parameters(request.parameters, payload.parameters)
    if facts is not None:
        _put_queueing(request, payload, facts)
    if call.sequence is not None:
        _put_sequence(request, call.sequence)
    if payload.wants_empty_final:
        request.parameters[WANTS_EMPTY_FINAL].bool_param = True
    parts: list[bytes | memoryview] = [request.SerializeToString()]
    for content in raw:
        parts += (_RAW_INPUT_TAG, _varint(len(content)), content)
    return b"".join(parts)


def decode(message: bytes, wanted: Sequence[str], *, aside: Aside | None = None) -> Tensors:
    """The answer to a unary call: the outputs in `wanted` (all where nothing is named), in the server's order.

    Triton checks none of its models' outputs, so this does: raises `BackendError` BROKEN for missing or double names,
    and for sizes that do not fit shape and datatype.
    """
    try:
        head, raw = _split(memoryview(message))
        response = pb.ModelInferResponse.FromString(head)
    except (DecodeError, IndexError, ValueError) as error:
        raise _broken("not an answer in protobuf's form") from error
    return _tensors(response, raw if aside is None else aside.contents(response.outputs, raw), wanted)


def decode_streamed(message: bytes, wanted: Sequence[str]) -> Tensors | str:
    """One answer of a stream, as `decode`, or the text of the error that came in its place."""
    try:
        response = pb.ModelStreamInferResponse.FromString(message)
    except DecodeError as error:
        raise _broken("not an answer in protobuf's form") from error
    if response.error_message:
        return str(response.error_message)
    answer = response.infer_response
    return _tensors(answer, answer.raw_output_contents, wanted if answer.outputs else ())


def _tensors(response: pb.ModelInferResponse, raw: Sequence[bytes | memoryview], wanted: Sequence[str]) -> Tensors:
    if len(raw) != len(response.outputs):
        raise _broken(f"{len(response.outputs)} outputs with {len(raw)} raw contents")
    outputs = {}
    for output, contents in zip(response.outputs, raw, strict=True):
        tensor = Tensor(name=output.name, datatype=output.datatype, shape=tuple(output.shape), data=contents)
        try:
            check(tensor)
        except ValueError as error:
            raise _broken(str(error)) from error
        outputs[tensor.name] = tensor
    wrong = wrong_names([output.name for output in response.outputs], wanted)
    if wrong:
        raise _broken(wrong)
    picked = tuple(tensor for name, tensor in outputs.items() if not wanted or name in wanted)
    if not response.parameters:
        return Tensors(outputs=picked, version=response.model_version)
    parameters = {name: _parameter(value) for name, value in response.parameters.items()}
    is_final = bool(parameters.pop(FINAL_RESPONSE, True))
    return Tensors(outputs=picked, version=response.model_version, parameters=parameters, is_final=is_final)


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


def _parameter(value: pb.InferParameter) -> Parameter:
    chosen = value.WhichOneof("parameter_choice")
    found: Parameter = getattr(value, chosen) if chosen else ""
    return found


def _split(message: memoryview) -> tuple[bytes, list[memoryview]]:
    """A ModelInferResponse without its raw contents, and those. Raises IndexError, ValueError for what is none."""
    heads: list[memoryview] = []
    raw: list[memoryview] = []
    at, head_at, end = 0, 0, len(message)
    while at < end:
        tag, begin = _read_varint(message, at)
        if tag & 7 != _LENGTH_DELIMITED:
            raise ValueError("a field of another kind than Triton's answers have")
        size, begin = _read_varint(message, begin)
        past = begin + size
        if past > end:
            raise ValueError("a field is longer than the message")
        if tag == _RAW_OUTPUT_TAG:
            heads.append(message[head_at:at])
            raw.append(message[begin:past])
            head_at = past
        at = past
    heads.append(message[head_at:])
    return b"".join(heads), raw


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
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
    found = bytearray()
    while number >= _MORE:
        found.append(number & ~_MORE & 0xFF | _MORE)
        number >>= 7
    found.append(number)
    return bytes(found)


def _broken(text: str) -> BackendError:
    return BackendError(Fault(kind=FaultKind.BROKEN, message=text))
