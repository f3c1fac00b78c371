"""A whole answer, or a definite refusal, as bytes that can be kept and given again.

A version byte, the length of a JSON header (uint32, little-endian), the header, and behind it what JSON has no form
for: the bytes of tensors, arrays and upstream bodies, in the order in which the header counts them.
"""

import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import orjson

from gateway.core.errors import (
    BodyTooLarge,
    GatewayError,
    InvalidInput,
    MalformedRequest,
    Reply,
    UnknownModel,
    UnsupportedMediaType,
)
from gateway.core.types import (
    Answer,
    Delta,
    Deltas,
    Finished,
    Message,
    Part,
    Route,
    Tensor,
    Tensors,
    Timing,
    Usage,
    singly,
)

VERSION: Final = 1
_HEAD: Final = struct.Struct("<BI")
_DEFINITE: Final = {
    error.code: error for error in (MalformedRequest, UnknownModel, BodyTooLarge, UnsupportedMediaType, InvalidInput)
}
_UPSTREAM: Final = (0, 400, 404, 413, 415, 422)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a request was answered.

    Attributes:
        id: the request's.
        route / finished: of an answer.
        error: of a refusal, which has neither these nor parts.
    """

    id: str
    route: Route | None = None
    parts: Sequence[Part] = ()
    finished: Finished | None = None
    error: GatewayError | None = None


def is_definite(error: GatewayError) -> bool:
    """Whether the same request would be refused again: 400, 404, 413, 415 and 422, for what it says itself."""
    return _DEFINITE.get(error.code) is type(error) and error.upstream_status in _UPSTREAM


def weight(part: Part) -> int:
    """About how many bytes it will take, without looking into it: what is not known counts nothing."""
    if isinstance(part, Delta):
        return len(part.data) + len(part.event)
    if isinstance(part, Deltas):
        return len(part.wire)
    if isinstance(part, Message):
        return len(part.body)
    return sum([memoryview(one.data).nbytes for one in part.outputs]) if isinstance(part, Tensors) else 0


def written(recording: Recording) -> bytes | None:
    """`recording` as bytes; None where an output holds what has no form here, or an error is not definite."""
    blobs: list[bytes | memoryview] = []
    header: dict[str, Any] = {"id": recording.id}
    if recording.error is not None:
        if not is_definite(recording.error):
            return None
        header["error"] = _error_words(recording.error)
    elif recording.route is None or recording.finished is None:
        return None
    else:
        header["route"] = _words(recording.route)
        header["parts"] = [_part_words(one, blobs) for part in recording.parts for one in singly(part)]
        header["usage"] = _words(recording.finished.usage)
        header["timing"] = _words(recording.finished.timing)
    header["blobs"] = [memoryview(blob).nbytes for blob in blobs]
    try:
        words = orjson.dumps(header, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        return None
    return b"".join((_HEAD.pack(VERSION, len(words)), words, *blobs))


def read(data: bytes) -> Recording | None:
    """The inverse of `written`; None for another version, and for what is no recording."""
    try:
        version, length = _HEAD.unpack_from(data)
        if version != VERSION:
            return None
        header = orjson.loads(memoryview(data)[_HEAD.size : _HEAD.size + length])
        return _recording(header, _blobs(data, _HEAD.size + length, header["blobs"]))
    except (struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError, StopIteration):
        return None


def _recording(header: Mapping[str, Any], blobs: Iterator[memoryview]) -> Recording:
    if "error" in header:
        return Recording(id=header["id"], error=_error(header["error"]))
    return Recording(
        id=header["id"],
        route=Route(**header["route"]),
        parts=tuple([_PARTS[words[0]](words, blobs) for words in header["parts"]]),
        finished=Finished(usage=Usage(**header["usage"]), timing=Timing(**header["timing"])),
    )


def _blobs(data: bytes, at: int, lengths: Sequence[int]) -> Iterator[memoryview]:
    if at + sum(lengths) != len(data) or any(length < 0 for length in lengths):
        raise ValueError("cut off")
    view = memoryview(data)
    ends = itertools.accumulate(lengths, initial=at)
    return iter([view[start:end] for start, end in itertools.pairwise(ends)])


def _words(value: Route | Usage | Timing) -> dict[str, Any]:
    """A flat dataclass, without what is as usual."""
    named = ((field, getattr(value, field.name)) for field in fields(value))
    return {field.name: told for field, told in named if told != field.default}


def _part_words(part: Part, blobs: list[bytes | memoryview]) -> list[Any]:
    """A part as its kind's letter and what belongs to it; its bytes go to `blobs`."""
    if isinstance(part, Delta):
        blobs.append(part.data)
        return ["d", part.event.decode("latin-1"), None if part.usage is None else _words(part.usage)]
    if isinstance(part, Message):
        blobs.append(part.body)
        return ["m", _words(part.usage)]
    if isinstance(part, Answer):
        arrays: list[list[Any]] = []
        output = _without_arrays(part.output, [], arrays, blobs)
        return ["a", output, arrays, _words(part.usage)]
    assert isinstance(part, Tensors)  # noqa: S101 - for the type checker: `Deltas` come one by one
    blobs += [tensor.data for tensor in part.outputs]
    tensors = [[tensor.name, tensor.datatype, tensor.shape] for tensor in part.outputs]
    return ["t", tensors, part.version, part.queue_us, dict(part.parameters), part.is_final]


def _without_arrays(value: Any, path: list[str | int], arrays: list[list[Any]], blobs: list[bytes | memoryview]) -> Any:
    """`value` with null in the place of each numpy array, which `arrays` names by its path."""
    if isinstance(value, np.ndarray):
        arrays.append([path, value.dtype.str, value.shape])
        blobs.append(value.tobytes())
        return None
    if isinstance(value, Mapping):
        return {name: _without_arrays(one, [*path, name], arrays, blobs) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(one, [*path, i], arrays, blobs) for i, one in enumerate(value)]
    return value


def _delta(words: Sequence[Any], blobs: Iterator[memoryview]) -> Part:
    _, event, usage = words
    told = None if usage is None else Usage(**usage)
    return Delta(data=bytes(next(blobs)), event=event.encode("latin-1"), usage=told)


def _message(words: Sequence[Any], blobs: Iterator[memoryview]) -> Part:
    return Message(body=bytes(next(blobs)), usage=Usage(**words[1]))


def _answer(words: Sequence[Any], blobs: Iterator[memoryview]) -> Part:
    _, output, arrays, usage = words
    for path, dtype, shape in arrays:
        array = np.frombuffer(next(blobs), np.dtype(dtype)).reshape(shape)
        holder = output
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = array
    return Answer(output=output, usage=Usage(**usage))


def _tensors(words: Sequence[Any], blobs: Iterator[memoryview]) -> Part:
    _, tensors, version, queue_us, parameters, is_final = words
    return Tensors(
        outputs=tuple(
            [Tensor(name=name, datatype=kind, shape=tuple(shape), data=next(blobs)) for name, kind, shape in tensors]
        ),
        version=version,
        queue_us=queue_us,
        parameters=parameters,
        is_final=is_final,
    )


_PARTS: Final[Mapping[str, Callable[[Sequence[Any], Iterator[memoryview]], Part]]] = {
    "d": _delta,
    "m": _message,
    "a": _answer,
    "t": _tensors,
}


def _error_words(error: GatewayError) -> dict[str, Any]:
    return {
        "code": error.code,
        "detail": error.detail,
        "field": error.field,
        "upstream_code": error.upstream_code,
        "upstream_status": error.upstream_status,
        "should_retry": error.should_retry,
        "reply": None if error.reply is None else [error.reply.code, error.reply.text],
    }


def _error(words: Mapping[str, Any]) -> GatewayError:
    error = _DEFINITE[words["code"]](words["detail"], field=words["field"], upstream_code=words["upstream_code"])
    error.upstream_status = words["upstream_status"]
    error.should_retry = words["should_retry"]
    if words["reply"] is not None:
        code, text = words["reply"]
        error.reply = Reply(code=code, text=text)
    return error
