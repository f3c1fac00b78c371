"""Tensors between the core's wire form and the bodies of the Open Inference Protocol. Pure.

The protocol itself is the local runtime's code (`local_runtime.protocol`): one reading of a body, whoever answers it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np

from gateway.core.models import ModelFacts
from gateway.core.tensors import BF16, BYTES, element_spans, to_numpy
from gateway.core.types import SequenceStep, Tensor, TensorPayload
from local_runtime.messages import ModelMetadata, TensorMetadata
from local_runtime.protocol.oip_json import Asked, Output
from local_runtime.protocol.oip_tensors import MAX_TEXTS, Malformed, check_count, check_size, check_tensor
from local_runtime.protocol.oip_values import bytes_from_json, no_json_form, to_json

MAX_NAME_BYTES: Final = 255  # a model is a folder, and no file system takes longer names
_UNSAFE: Final = re.compile(r"[/\\\x00-\x1f\x7f]")
# What JSON has no number for, in the words of protobuf's JSON form (protobuf.dev/programming-guides/json).
_WORDS: Final = {np.inf: "Infinity", -np.inf: "-Infinity"}


class Wire:
    """Requests' tensors in the core's form, their bytes where they were: see `oip_json.TensorForm`."""

    @staticmethod
    def from_json(name: str, datatype: str, shape: Sequence[int], data: Any) -> Tensor:
        """A tensor from JSON values, flat or nested as its shape says. Raises `Malformed` naming the input."""
        raw = bytes_from_json(name, datatype, shape, data)
        return Tensor(name=name, datatype=datatype, shape=tuple(shape), data=raw)

    @staticmethod
    def from_bytes(name: str, datatype: str, shape: Sequence[int], *, raw: bytes | memoryview, model: str) -> Tensor:
        """A tensor from its binary form, whose bytes are kept and not copied. Raises `Malformed`."""
        if datatype == BYTES:
            check_tensor(name, datatype, shape)
            check_count(name, _elements(name, raw, most=MAX_TEXTS), shape, is_text=True)
        else:
            check_size(name, datatype, shape, len(raw), model=model)
        return Tensor(name=name, datatype=datatype, shape=tuple(shape), data=raw)


def is_name(model: str) -> bool:
    """Whether `model` can be the name of a folder of a repository, and of nothing outside it."""
    return (
        0 < len(model.encode(errors="replace")) <= MAX_NAME_BYTES
        and model not in (".", "..")
        and _UNSAFE.search(model) is None
    )


def described(facts: ModelFacts) -> ModelMetadata:
    """What the reading of raw and generate bodies has to know of a model."""
    inputs = tuple(
        TensorMetadata(name=name, datatype=one.datatype, shape=one.shape) for name, one in facts.inputs.items()
    )
    return ModelMetadata(name=facts.name, versions=facts.versions, platform="", inputs=inputs, outputs=())


def payload(asked: Asked[Tensor], *, stream: bool = False) -> TensorPayload:
    """What a backend is asked. A stream wants its last answer, too: without any, there would be no answer at all."""
    fields = asked.fields
    return TensorPayload(
        inputs=tuple(asked.inputs.values()),
        outputs=asked.outputs,
        classes=asked.classes,
        stream=stream,
        wants_empty_final=stream,
        parameters=fields.get("parameters", {}),
        priority=fields.get("priority", 0),
        queue_timeout_us=fields.get("queue_timeout_us", 0),
    )


def sequence(asked: Asked[Tensor]) -> SequenceStep | None:
    """The request's place in a sequence, None where it names none (0 and "" are none, as in Triton)."""
    number = asked.fields.get("sequence_id", 0)
    if not number:
        return None
    return SequenceStep(
        id=number,
        is_start=asked.fields.get("sequence_start", False),
        is_end=asked.fields.get("sequence_end", False),
    )


def outputs(tensors: Iterable[Tensor], asked: Asked[Tensor]) -> list[Output]:
    """A model's outputs as their caller wants them. Raises `InferenceError` where JSON cannot hold one."""
    return [
        Output(name=one.name, datatype=one.datatype, shape=one.shape, blob=one.data)
        if asked.wants_bytes(one.name)
        else Output(name=one.name, datatype=one.datatype, shape=one.shape, values=values(one))
        for one in tensors
    ]


def values(tensor: Tensor) -> Any:
    """A tensor's values in row order as what every JSON parser reads; a float that is no number is a word.

    Raises `InferenceError` for 16-bit floats, and for BYTES that are not UTF-8.
    """
    if tensor.datatype == BF16:
        raise no_json_form(tensor.name, BF16)
    flat = to_json(tensor.name, to_numpy(tensor))
    if isinstance(flat, np.ndarray) and flat.dtype.kind == "f" and np.count_nonzero(np.isfinite(flat)) < flat.size:
        found = flat.tolist()
        for at in np.flatnonzero(~np.isfinite(flat)).tolist():
            found[at] = _WORDS.get(found[at], "NaN")
        return found
    return flat


def documents(tensors: Iterable[Tensor]) -> list[Mapping[str, Any]]:
    """A model's outputs as JSON objects alone. Raises `InferenceError`."""
    return [{"name": one.name, "datatype": one.datatype, "shape": one.shape, "data": values(one)} for one in tensors]


def _elements(name: str, raw: bytes | memoryview, *, most: int) -> int:
    """How many elements of BYTES there are; of more than `most` those beyond are not counted."""
    try:
        return sum(1 for _ in islice(element_spans(name, raw), most + 1))
    except ValueError as error:  # in Triton's words
        raise Malformed(f"unexpected end of string elements for inference input '{name}'") from error
