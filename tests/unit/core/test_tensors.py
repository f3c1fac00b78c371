"""Wire form <-> numpy: exact both ways, and nothing wrong gets through."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gateway.core.tensors import BYTES, DTYPES, ITEM_SIZES, byte_size, check, from_numpy, to_numpy
from gateway.core.types import Tensor


def tensor(datatype, shape, data):
    return Tensor(name="X", datatype=datatype, shape=tuple(shape), data=data)


def framed(*elements):
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


@pytest.mark.parametrize("datatype", sorted(DTYPES))
@given(data=st.data())
def test_every_fixed_type_survives_the_round_trip_bit_for_bit(datatype, data):
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    count = int(np.prod(shape))
    size = count * ITEM_SIZES[datatype]
    raw = data.draw(st.binary(min_size=size, max_size=size))
    array = np.frombuffer(raw, dtype=DTYPES[datatype]).reshape(shape)
    wire = from_numpy("X", array)
    assert (wire.datatype, wire.shape, bytes(wire.data)) == (datatype, shape, raw)
    back = to_numpy(wire)
    assert back.dtype == array.dtype
    assert back.shape == shape
    assert back.tobytes() == raw


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_bytes_survive_the_round_trip(elements):
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    wire = from_numpy("X", array)
    check(wire)
    assert bytes(wire.data) == framed(*elements)
    assert to_numpy(wire).tolist() == elements


def test_bytes_hold_anything():
    elements = [b"", b"a\x00b", "日本🙂".encode(), b"x" * 100_000, b"\xff\x00\xfe"]
    back = to_numpy(tensor(BYTES, [5], framed(*elements)))
    assert back.tolist() == elements


def test_str_elements_are_utf8():
    array = np.array([["é"], ["ab"]], dtype=np.object_)
    assert bytes(from_numpy("X", array).data) == framed("é".encode(), b"ab")
    assert bytes(from_numpy("X", np.array(["é"])).data) == framed("é".encode())


def test_a_fixed_type_is_a_view_without_a_copy():
    raw = bytearray(8)
    array = to_numpy(tensor("FP32", [2], memoryview(raw)))
    raw[3] = 0x40
    assert array[0] == 2.0
    source = np.zeros(2, dtype="<f4")
    wire = from_numpy("X", source)
    source[0] = 2.0
    assert bytes(wire.data[:4]) == b"\x00\x00\x00\x40"


def test_big_endian_and_strided_arrays_are_put_in_order():
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    wire = from_numpy("X", array)
    assert wire.shape == (3, 2)
    assert bytes(wire.data) == struct.pack("<6i", 0, 3, 1, 4, 2, 5)


def test_bf16_is_raw_only():
    check(tensor("BF16", [3], bytes(6)))
    with pytest.raises(ValueError, match="BF16"):
        to_numpy(tensor("BF16", [3], bytes(6)))


@pytest.mark.parametrize("array", [np.array([1j]), np.array(["2020-01-01"], dtype="M8[D]")])
def test_types_that_the_protocol_lacks(array):
    with pytest.raises(ValueError, match="not in the protocol"):
        from_numpy("X", array)


def test_objects_that_are_no_text():
    with pytest.raises(ValueError, match="bytes and str only"):
        from_numpy("X", np.array([1, b"a"], dtype=np.object_))


@pytest.mark.parametrize(
    ("datatype", "shape", "size"),
    [("FP32", [2, 3], 24), ("BOOL", [], 1), ("BF16", [5], 10), ("INT64", [0, 7], 0), ("FP64", [2**59], 2**62)],
)
def test_byte_size(datatype, shape, size):
    assert byte_size(datatype, shape) == size


@pytest.mark.parametrize(
    ("datatype", "shape", "words"),
    [
        ("fp32", [1], "datatype 'fp32' is not one of"),
        ("STRING", [1], "is not one of"),
        (BYTES, [1], "no size of its own"),
        ("FP32", [-1, 4], "outside"),
        ("FP32", [2**63], "outside"),
        ("FP32", [2**62], "too large"),
        ("FP32", [0, 2**40, 2**40], "too large"),
        ("FP32", [1] * 65, "over 64"),
    ],
)
def test_byte_size_refuses(datatype, shape, words):
    with pytest.raises(ValueError, match=words):
        byte_size(datatype, shape)


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("FP32", [2, 3], bytes(20)),
        ("FP32", [2, 3], bytes(28)),
        ("FP32", [-1], bytes(4)),
        ("FP32", [2**40, 2**40], b""),  # the product is 2**80: must not wrap around to 0
        ("FP32", [1] * 70, bytes(4)),
        (BYTES, [2], framed(b"a")),
        (BYTES, [1], framed(b"a", b"b")),
        (BYTES, [1], framed(b"a") + b"\x00\x00"),  # trailing bytes
        (BYTES, [1], b"\xff\xff\xff\xffab"),  # a length past the end
        (BYTES, [1], b"\x05\x00\x00\x00ab"),
        (BYTES, [1], b""),
        (BYTES, [2**60], framed(b"a")),
        (BYTES, [0], framed(b"")),
        ("NOPE", [1], b"a"),
    ],
)
def test_wrong_tensors_are_refused_by_all(datatype, shape, data):
    wrong = tensor(datatype, shape, data)
    with pytest.raises(ValueError, match=r"."):
        check(wrong)
    with pytest.raises(ValueError, match=r"."):
        to_numpy(wrong)


@given(
    st.sampled_from([*sorted(ITEM_SIZES), BYTES, "x"]),
    st.lists(st.integers(-2, 2**64) | st.integers(0, 3), max_size=5),
    st.binary(max_size=24),
)
def test_check_raises_nothing_but_value_error_and_agrees_with_to_numpy(datatype, shape, data):
    candidate = tensor(datatype, shape, data)
    try:
        check(candidate)
    except ValueError:
        good = False
    else:
        good = datatype != "BF16"
    try:
        to_numpy(candidate)
    except ValueError:
        assert not good
    else:
        assert good


def test_empty_tensors_keep_their_shape():
    for shape in ([0], [2, 0], [0, 3]):
        wire = from_numpy("X", np.zeros(shape, dtype=np.float32))
        assert (wire.shape, bytes(wire.data)) == (tuple(shape), b"")
        assert to_numpy(wire).shape == tuple(shape)
        text = from_numpy("X", np.empty(shape, dtype=np.object_))
        assert to_numpy(text).shape == tuple(shape)
