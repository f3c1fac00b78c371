"""The Open Inference Protocol on both sides: bodies of HTTP, messages of gRPC, answers that our own client reads."""

import contextlib
import json
import math
from typing import Any

import numpy as np
import orjson
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from gateway.backends.grpc import http2
from gateway.backends.triton import codec
from gateway.core.errors import BackendError
from gateway.core.tensors import BF16, from_numpy, to_numpy
from gateway.core.types import Tensor
from gateway.tasks.oip import Wire, is_name, values
from local_runtime.errors import InferenceError
from local_runtime.messages import ModelMetadata, TensorMetadata
from local_runtime.protocol.http_routes import known_route
from local_runtime.protocol.json_text import parse
from local_runtime.protocol.oip_codec import decode_load, decode_request, decode_unload
from local_runtime.protocol.oip_generate import read_generate
from local_runtime.protocol.oip_json import Arrays, read_infer, read_raw
from local_runtime.protocol.oip_repository import read_index, read_load, read_unload
from local_runtime.protocol.oip_tensors import Malformed, from_bytes, to_bytes
from local_runtime.repository.model_config import NUMPY_TYPES
from tests.fuzz.making import DRAWN, JSON, NASTY, NUMBERS, changed_somewhere, cut, documents, mutated
from tests.fuzz.target import Target

TYPES = (*NUMPY_TYPES, "BYTES", "FP128", "")
NAMES = st.sampled_from(["A", "B", "INPUT", "OUTPUT"]) | DRAWN
DIMENSIONS = st.lists(st.sampled_from([0, 1, 2, 3]) | NUMBERS, max_size=4)


# --- HTTP -----------------------------------------------------------------------------------------


@st.composite
def _infer_bodies(draw: st.DrawFn) -> tuple[bytes, int | None]:
    """A body and where its JSON ends: nearly right, its bytes cut, lengthened or wrongly told."""
    inputs, blobs = [], b""
    for _ in range(draw(st.integers(0, 3))):
        datatype = draw(st.sampled_from(TYPES))
        one: dict[str, Any] = {"name": draw(NAMES), "datatype": datatype, "shape": draw(DIMENSIONS)}
        if draw(st.booleans()):
            blob = draw(st.binary(max_size=24) | st.sampled_from([b"\x01\0\0\0a", b"\xff\xff\xff\xff", b"\0" * 4]))
            one["parameters"] = {"binary_data_size": draw(st.just(len(blob)) | NUMBERS | JSON)}
            blobs += blob
        else:
            one["data"] = draw(st.lists(NUMBERS | DRAWN | st.booleans(), max_size=6) | JSON)
        inputs.append(one)
    document: Any = {"id": draw(DRAWN), "inputs": inputs}
    if draw(st.booleans()):
        document["outputs"] = [
            {"name": draw(NAMES), "parameters": {"classification": draw(NUMBERS), "binary_data": draw(JSON)}}
        ]
    if draw(st.booleans()):
        names = ("sequence_id", "sequence_start", "priority", "timeout", "binary_data_output", "headers")
        document["parameters"] = {draw(st.sampled_from(names) | DRAWN): draw(JSON)}
    for _ in range(draw(st.integers(0, 2))):
        if isinstance(document, dict | list):
            document = changed_somewhere(draw, document)
    text = draw(
        st.just(_json(document)) | mutated([_json(document)], [b"NaN", b"Infinity", b"-", b"[", b"{", b"\\ud83d"])
    )
    length = draw(st.sampled_from([len(text), None, 0, len(text) - 1, len(text) + 1, 2**40, -1]))
    return text + blobs, length


def _json(document: Any) -> bytes:
    return json.dumps(document, allow_nan=True).encode("utf-8", "surrogatepass")


METADATA = ModelMetadata(
    name="m",
    versions=("1",),
    platform="",
    inputs=(TensorMetadata(name="A", datatype="INT32", shape=(-1, 2)),),
    outputs=(),
)
TEXT = ModelMetadata(
    name="m", versions=("1",), platform="", inputs=(TensorMetadata(name="T", datatype="BYTES", shape=(1,)),), outputs=()
)


def _both_sides_read_alike(body: tuple[bytes, int | None]) -> None:
    text, length = body
    found: list[Any] = []
    for form in (Wire, Arrays):
        try:
            found.append(read_infer("m", text, form, json_length=length))
        except InferenceError as error:
            found.append(error.code)
    wire, arrays = found
    if not hasattr(wire, "inputs") or not hasattr(arrays, "inputs"):
        assert wire == arrays, (wire, arrays)
        return
    assert wire.inputs.keys() == arrays.inputs.keys()
    for name, array in arrays.inputs.items():
        assert _same_as(wire.inputs[name], array), name
    for metadata in (METADATA, TEXT):
        with contextlib.suppress(InferenceError):
            read_raw(metadata, text, Wire, is_batched=True)
        with contextlib.suppress(InferenceError):
            read_generate(metadata, text, Arrays)


def _same_as(tensor: Tensor, array: Any) -> bool:
    """Whether a tensor of the gateway holds what an array of the local runtime does."""
    if tensor.datatype == BF16:  # has no numpy form in the gateway
        return bytes(tensor.data) == array.tobytes() and tensor.shape == array.shape
    return _same(to_numpy(tensor), array)


def _same(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind == "O" or other.dtype.kind == "O":
        return [_raw(a) for a in one.reshape(-1)] == [_raw(b) for b in other.reshape(-1)]
    return one.tobytes() == other.tobytes()


def _raw(element: Any) -> bytes:
    return element.encode() if isinstance(element, str) else bytes(element)


@st.composite
def _arrays(draw: st.DrawFn) -> tuple[str, Any]:
    datatype = draw(st.sampled_from([*NUMPY_TYPES, "BYTES"]))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    count = math.prod(shape)
    if datatype == "BYTES":
        flat = np.empty(count, object)
        flat[:] = draw(st.lists(st.binary(max_size=9), min_size=count, max_size=count))
        return datatype, flat.reshape(shape)
    dtype = np.dtype(NUMPY_TYPES[datatype])
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if datatype == "BOOL":
        raw = bytes(byte & 1 for byte in raw)
    return datatype, np.frombuffer(raw, dtype).reshape(shape)


def _arrays_come_back(given: tuple[str, Any]) -> None:
    datatype, array = given
    raw = to_bytes(array)
    back = from_bytes("A", datatype, array.shape, raw=raw, model="m")
    assert _same(back, array)
    tensor = Tensor(name="A", datatype=datatype, shape=tuple(array.shape), data=raw)
    assert _same_as(tensor, array)
    assert datatype == BF16 or bytes(from_numpy("A", array).data) == raw
    head = orjson.dumps(
        {
            "inputs": [
                {
                    "name": "A",
                    "datatype": datatype,
                    "shape": list(array.shape),
                    "parameters": {"binary_data_size": len(raw)},
                }
            ]
        }
    )
    for form in (Wire, Arrays):
        read = read_infer("m", head + raw, form, json_length=len(head)).inputs["A"]
        assert _same_as(read, array) if form is Wire else _same(read, array)
    try:
        orjson.dumps(values(tensor), option=orjson.OPT_SERIALIZE_NUMPY)
    except InferenceError:
        assert datatype in ("BF16", "FP16", "BYTES")


def _framing_alike(given: tuple[bytes, int]) -> None:
    raw, count = given
    answers: list[Any] = []
    for reading in (
        lambda: [_raw(one) for one in from_bytes("A", "BYTES", [count], raw=raw, model="m").reshape(-1)],
        lambda: [_raw(one) for one in to_numpy(Wire.from_bytes("A", "BYTES", [count], raw=raw, model="m")).reshape(-1)],
    ):
        try:
            answers.append(reading())
        except Malformed as error:
            answers.append(str(error))
    assert answers[0] == answers[1], answers


FRAMED = st.lists(st.binary(max_size=6), max_size=4).map(
    lambda items: b"".join(len(i).to_bytes(4, "little") + i for i in items)
)


def _routes(path: bytes) -> None:
    found = known_route(path)
    if found is not None and found.model:
        is_name(found.model)


# --- gRPC -----------------------------------------------------------------------------------------


@st.composite
def _infer_messages(draw: st.DrawFn) -> bytes:
    message = pb.ModelInferRequest(model_name=_text(draw), model_version=_text(draw), id=_text(draw))
    for _ in range(draw(st.integers(0, 3))):
        one = message.inputs.add(name=_text(draw), datatype=draw(st.sampled_from(TYPES)))
        one.shape.extend(draw(st.lists(st.sampled_from([0, 1, 2, -1, 2**40, 2**63 - 1, -(2**63)]), max_size=4)))
        contents = one.contents
        if draw(st.booleans()):
            getattr(contents, draw(st.sampled_from(["int_contents", "int64_contents", "bool_contents"]))).extend([0, 1])
        if draw(st.booleans()):
            contents.bytes_contents.append(draw(st.binary(max_size=8)))
        _parameters(draw, one.parameters)
    for _ in range(draw(st.integers(0, 2))):
        _parameters(draw, message.outputs.add(name=_text(draw)).parameters)
    _parameters(draw, message.parameters)
    message.raw_input_contents.extend(draw(st.lists(st.binary(max_size=16), max_size=4)))
    return message.SerializeToString()


def _text(draw: st.DrawFn) -> str:
    return draw(st.sampled_from(["A", "B", "m", "", *(t for t in NASTY if t.isascii())]))


def _parameters(draw: st.DrawFn, parameters: Any) -> None:
    names = (
        "sequence_id",
        "sequence_start",
        "classification",
        "priority",
        "timeout",
        "binary_data_size",
        "headers",
        "",
    )
    for name in draw(st.lists(st.sampled_from(names), max_size=2)):
        match draw(st.integers(0, 4)):
            case 0:
                parameters[name].int64_param = draw(st.sampled_from([0, -1, 2**63 - 1]))
            case 1:
                parameters[name].string_param = _text(draw)
            case 2:
                parameters[name].bool_param = draw(st.booleans())
            case 3:
                parameters[name].double_param = draw(st.floats())
            case _:
                parameters[name].uint64_param = 2**64 - 1


def _requests_of_grpc(text: bytes) -> None:
    for kind, reading in (
        (pb.ModelInferRequest, lambda message: decode_request(message, timeout_us=None)),
        (pb.RepositoryModelLoadRequest, decode_load),
        (pb.RepositoryModelUnloadRequest, decode_unload),
    ):
        try:
            message = kind.FromString(text)
        except Exception:  # noqa: BLE001, S112 - grpc itself refuses what is no message; we see none of it
            continue
        _only(InferenceError, lambda: reading(message))  # noqa: B023 - called at once


@st.composite
def _infer_answers(draw: st.DrawFn) -> bytes:
    answer = pb.ModelInferResponse(model_name="m", model_version=_text(draw), id=_text(draw))
    for name in draw(st.lists(st.sampled_from(["A", "B", "C"]), max_size=3)):
        one = answer.outputs.add(name=name, datatype=draw(st.sampled_from(TYPES)))
        one.shape.extend(draw(st.lists(st.sampled_from([0, 1, 2, -1, 2**40, 2**63 - 1]), max_size=4)))
        answer.raw_output_contents.append(draw(st.binary(max_size=16) | FRAMED))
    _parameters(draw, answer.parameters)
    if draw(st.booleans()):
        return pb.ModelStreamInferResponse(
            infer_response=answer, error_message=draw(st.sampled_from(["", "x"]))
        ).SerializeToString()
    return answer.SerializeToString()


def _answers_of_grpc(text: bytes) -> None:
    for wanted in ((), ("A",), ("A", "B")):
        found = _only(BackendError, lambda: codec.decode(text, wanted))  # noqa: B023 - called at once
        if found is not None:
            for tensor in found.outputs:
                if tensor.datatype != BF16:
                    to_numpy(tensor)
        _only(BackendError, lambda: codec.decode_streamed(text, wanted))  # noqa: B023 - called at once


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    """Frames with right heads around anything, and some with wrong ones."""
    parts = []
    for _ in range(draw(st.integers(0, 8))):
        payload = draw(st.binary(max_size=40) | st.sampled_from([b"\0" * 4, b"\0" * 8, b"\x82", b"\xff" * 6]))
        kind, flags = draw(st.integers(0, 12)), draw(st.sampled_from([0, 1, 4, 5, 8, 0x20, 0x2D, 255]))
        stream = draw(st.sampled_from([0, 1, 3, 2**31 - 1]))
        size = draw(st.just(len(payload)) | st.sampled_from([0, 1, 2**14, 2**14 + 1, 2**24 - 1]))
        parts.append(size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload)
    return b"".join(parts)


def _frames_read_alike(reads: list[bytes]) -> None:
    assert _frames_of([b"".join(reads)]) == _frames_of(reads)


def _frames_of(reads: list[bytes]) -> list[Any]:
    """Frames, of DATA as one text, and the code of what ended them."""
    reader, found = http2.FrameReader(2**14), []
    decoder = http2.HeaderDecoder()
    try:
        for read in reads:
            for frame in reader.feed(read):
                told = [bytes(part) if isinstance(part, memoryview) else part for part in frame]
                if told[0] == 1:  # HEADERS
                    decoder.decode(told[-1])
                is_more = found and told[0] == found[-1][0] == 0 and told[2] == found[-1][2]
                if is_more and not _ends(found[-1]):
                    found[-1] = [*told[:-1], found[-1][-1] + told[-1]]
                else:
                    found.append(told)
    except http2.Http2Error as error:
        found.append(["error", error.code])
    return found


def _ends(frame: list[Any]) -> bool:
    return bool(frame[1] & 1)


def _only(error: type[Exception], reading: Any) -> Any:
    """What is read; None for the error that is declared. Any other goes up."""
    try:
        return reading()
    except error:
        return None


LOADS = [
    {"parameters": {"config": '{"max_batch_size": 4}', "file:1/model.py": "YQ=="}},
    {"parameters": {"unload_dependents": True}},
    {"ready": True},
]


def _repository_bodies(body: bytes) -> None:
    for reading in (read_index, read_load, read_unload, parse):
        _only(InferenceError, lambda: reading(body))  # noqa: B023 - called at once


ROUTES = [
    b"/v2/models/m/infer",
    b"/v2/models/m/versions/1/config",
    b"/v2/repository/models/m/load",
    b"/v2/health/ready",
]
BITS = [b"/", b"//", b"%2f", b"%00", b"..", b"%2e%2e", b"%", b"%ff", b"?", b"\\", b"%0d%0a", b"versions", b"models"]

TARGETS = (
    Target(
        name="oip-bodies",
        about="gateway and local runtime take the same bodies for the same tensors, and refuse the same",
        inputs=_infer_bodies(),
        check=_both_sides_read_alike,
    ),
    Target(name="oip-tensors", about="arrays come back from every form", inputs=_arrays(), check=_arrays_come_back),
    Target(
        name="oip-bytes",
        about="BYTES are cut alike on both sides",
        inputs=st.tuples(FRAMED | mutated([b"\x01\0\0\0a\x02\0\0\0bc", b"\0" * 8]), st.integers(0, 5)),
        check=_framing_alike,
    ),
    Target(
        name="oip-repository",
        about="calls of the repository extension: the declared error only",
        inputs=documents(LOADS).map(_json) | mutated([_json(one) for one in LOADS], [b"NaN", b"[" * 500]),
        check=_repository_bodies,
    ),
    Target(name="oip-paths", about="any path is a call or none", inputs=mutated(ROUTES, BITS), check=_routes),
    Target(
        name="grpc-requests",
        about="messages of the local runtime's gRPC: the declared error only",
        inputs=_infer_messages().flatmap(lambda text: st.just(text) | mutated([text])),
        check=_requests_of_grpc,
    ),
    Target(
        name="grpc-answers",
        about="answers that our client reads: the declared error only",
        inputs=_infer_answers().flatmap(lambda text: st.just(text) | mutated([text])),
        check=_answers_of_grpc,
    ),
    Target(
        name="http2-frames",
        about="frames are the same however they are cut, or the declared error",
        inputs=cut(_frames()),
        check=_frames_read_alike,
    ),
)
