import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.protocol.oip_codec import decode_request, to_bytes


def message(datatype, shape, *, raw=(), **contents):
    request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=raw)
    request.inputs.add(name="X", datatype=datatype, shape=shape, contents=service_pb2.InferTensorContents(**contents))
    return request


def decoded(request):
    return decode_request(request, timeout_us=None).inputs["X"]


@pytest.mark.parametrize(
    ("datatype", "numpy_type"),
    [("BOOL", bool), ("UINT8", np.uint8), ("INT16", np.int16), ("FP16", np.float16), ("FP64", np.float64)],
)
def test_raw_contents(datatype, numpy_type):
    array = np.array([[0, 1], [1, 0]], numpy_type)
    np.testing.assert_array_equal(decoded(message(datatype, [2, 2], raw=[array.tobytes()])), array)


def test_strings_as_tritons_client_reads_them():
    array = np.array([b"", b"a\x00b", b"x" * 300], dtype=object)
    np.testing.assert_array_equal(deserialize_bytes_tensor(to_bytes(array)), array)
    np.testing.assert_array_equal(decoded(message("BYTES", [3], raw=[to_bytes(array)])), array)


def test_empty_tensor():
    assert decoded(message("FP32", [1, 0], raw=[b""])).shape == (1, 0)


@pytest.mark.parametrize(
    ("request_message", "text"),
    [
        (
            message("INT32", [1, 2], raw=[b"1234"]),
            "input byte size mismatch for input 'X' for model 'm'. Expected 8, got 4",
        ),
        (
            message("BYTES", [1], raw=[b"\x05\x00\x00\x00ab"]),
            "unexpected end of string elements for inference input 'X'",
        ),
        (message("BYTES", [1], raw=[b"\x05\x00"]), "unexpected end of string elements for inference input 'X'"),
        (
            message("BYTES", [2], raw=[b"\x00\x00\x00\x00"]),
            "unexpected number of string elements 1 for inference input 'X', expecting 2",
        ),
        (
            message("INT32", [2], int_contents=[1]),
            "unexpected number of elements 1 for inference input 'X', expecting 2",
        ),
        (message("INT8", [1], int_contents=[300]), "value out of range of INT8 for input 'X'"),
        (message("FP16", [1]), "datatype FP16 of input 'X' needs raw contents"),
        (message("WHAT", [1]), "invalid datatype for input 'X': 'WHAT'"),
        (message("INT32", [-1]), "invalid shape for input 'X': [-1]"),
        (
            message("INT32", [1], raw=[b"", b""]),
            "expected tensor data for 1 inputs but got 2 sets of data for model 'm'",
        ),
    ],
)
def test_contents_that_do_not_hold_what_they_say(request_message, text):
    with pytest.raises(InferenceError) as refused:
        decode_request(request_message, timeout_us=None)
    assert refused.value.code is ErrorCode.INVALID_ARG
    assert refused.value.message == f"[request id: <id_unknown>] {text}"
