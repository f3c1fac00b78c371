"""Recordings: whatever was answered comes back out of its bytes as it was, and nothing else comes out of any bytes."""

import json
import struct
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import (
    DATA_PLANE,
    BodyTooLarge,
    GatewayError,
    InvalidInput,
    MalformedRequest,
    Reply,
    UnknownModel,
    UnsupportedMediaType,
)
from gateway.core.recording import Recording, is_definite, read, weight, written
from gateway.core.types import Answer, Delta, Finished, Message, Part, Route, Tensor, Tensors, Timing, Usage

NUMBERS = st.one_of(st.none(), st.integers(0, 2**53))
USAGES = st.builds(
    Usage,
    input_tokens=NUMBERS,
    output_tokens=NUMBERS,
    cached_tokens=NUMBERS,
    reasoning_tokens=NUMBERS,
    is_estimated=st.booleans(),
    cost_nano_usd=NUMBERS,
    estimated_scores=st.booleans(),
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**53), 2**53),
        st.floats(allow_nan=False, allow_infinity=False, width=64),
        TEXTS,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)
TENSORS = st.builds(
    Tensor,
    name=TEXTS,
    datatype=st.sampled_from(["FP32", "BYTES", "INT64"]),
    shape=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    data=st.binary(max_size=50),
)
PARTS: st.SearchStrategy[Part] = st.one_of(
    st.builds(
        Delta,
        data=st.binary(max_size=50),
        event=st.binary(max_size=9),
        usage=st.one_of(st.none(), USAGES),
    ),
    st.builds(Message, body=st.binary(max_size=50), usage=USAGES),
    st.builds(Answer, output=st.dictionaries(TEXTS, JSON, max_size=4), usage=USAGES),
    st.builds(
        Tensors,
        outputs=st.lists(TENSORS, max_size=3).map(tuple),
        version=TEXTS,
        queue_us=NUMBERS,
        parameters=st.dictionaries(TEXTS, st.one_of(TEXTS, st.booleans(), st.integers(0, 9)), max_size=2),
        is_final=st.booleans(),
    ),
)
ROUTE = Route(backend="b", model="m", version="3", rule="r", attempts=2, replica="x")
FINISHED = Finished(usage=Usage(input_tokens=3), timing=Timing(total_us=9, admit_us=1, backend_us=7, queue_us=None))


def answered(*parts: Part) -> Recording:
    return Recording(id="one", route=ROUTE, parts=parts, finished=FINISHED)


def again(recording: Recording) -> Recording:
    data = written(recording)
    assert data is not None
    found = read(data)
    assert found is not None
    return found


@given(st.lists(PARTS, max_size=5), USAGES)
def test_an_answer_comes_back_as_it_was(parts: list[Part], usage: Usage) -> None:
    timing = Timing(total_us=5, admit_us=4, backend_us=3, queue_us=2)
    given_ = Recording(id="a b", route=ROUTE, parts=tuple(parts), finished=Finished(usage=usage, timing=timing))

    assert again(given_) == given_


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2", "<i8", "|u1", "|b1"])
def test_arrays_are_written_to_json_with_the_same_digits(dtype: str) -> None:
    rows = np.random.default_rng(1).normal(size=(3, 4)).astype(dtype)
    output = {"embeddings": [rows[0], {"deep": rows}], "none": None, "scalar": np.float32(0.1)}
    found = again(answered(Answer(output=output))).parts[0]

    assert isinstance(found, Answer)
    write = orjson.OPT_SERIALIZE_NUMPY
    assert orjson.dumps(found.output, option=write) == orjson.dumps(output, option=write)
    assert found.output["embeddings"][1]["deep"].dtype == rows.dtype


def test_a_view_of_wider_items_keeps_all_its_bytes() -> None:
    view = memoryview(np.arange(3, dtype=np.int64))
    found = again(answered(Tensors(outputs=(Tensor(name="x", datatype="INT64", shape=(3,), data=view),), version="1")))

    assert isinstance(found.parts[0], Tensors)
    assert bytes(found.parts[0].outputs[0].data) == view.tobytes()
    assert weight(found.parts[0]) == 24


@pytest.mark.parametrize("kind", [MalformedRequest, UnknownModel, BodyTooLarge, UnsupportedMediaType, InvalidInput])
def test_a_definite_refusal_comes_back_as_it_was(kind: type[GatewayError]) -> None:
    error = kind("no such thing", field="input.text", upstream_code="too_long")
    error.upstream_status, error.reply, error.should_retry = 413, Reply(code="INVALID_ARGUMENT", text="words"), False
    found = again(Recording(id="one", error=error)).error

    assert type(found) is kind
    assert vars(found) == vars(error)


def test_no_other_refusal_is_definite() -> None:
    assert [kind.code for kind in DATA_PLANE if is_definite(kind("no"))] == [
        "malformed_request",
        "model_not_found",
        "body_too_large",
        "unsupported_media_type",
        "invalid_input",
    ]
    conflict = InvalidInput("busy")
    conflict.upstream_status = 409
    assert not is_definite(conflict)
    assert written(Recording(id="one", error=conflict)) is None


def test_what_has_no_form_is_not_written() -> None:
    assert written(answered(Answer(output={"x": object()}))) is None
    assert written(answered(Answer(output={"x": 2**70}))) is None
    assert written(Recording(id="one", route=ROUTE)) is None


def test_another_version_is_no_recording() -> None:
    data = written(answered(Delta(data=b"x")))
    assert data is not None
    assert read(bytes([data[0] + 1]) + data[1:]) is None


@given(st.binary(max_size=200))
def test_bytes_of_others_are_no_recording(data: bytes) -> None:
    assert read(data) is None


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_what_is_cut_off_is_no_recording(cut: int) -> None:
    data = written(answered(Delta(data=b"x" * 40), Message(body=b"y" * 40)))
    assert data is not None
    assert read(data[:-cut]) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": [["z"]]},
        {"parts": [["d", 3, None]]},
        {"parts": [["a", {}, [[["x"], "|O", [1]]], {}]], "blobs": [8]},
        {"route": {"backend": "b"}},
        {"usage": {"unknown": 1}},
        {"parts": [["d", "", None]], "blobs": [5, -1]},
        {"error": {"code": "internal"}},
    ],
)
def test_a_header_that_does_not_fit_is_no_recording(changes: dict[str, Any]) -> None:
    data = written(answered())
    assert data is not None
    header = json.dumps(json.loads(data[5:]) | changes).encode()
    assert read(struct.pack("<BI", 1, len(header)) + header + bytes(sum(changes.get("blobs", [])))) is None
