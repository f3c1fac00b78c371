from urllib.parse import quote

import ml_dtypes
import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import InferAnswer
from local_runtime.protocol.error_texts import MAX_TEXT_BYTES, safe_text
from local_runtime.protocol.oip_classes import top_classes
from local_runtime.protocol.oip_codec import (
    decode_load,
    decode_request,
    decode_unload,
    encode_answer,
    encode_statistics,
    encode_stream_error,
)
from local_runtime.protocol.oip_tensors import Malformed, to_bytes
from local_runtime.scheduling.validation import datatype_of
from tests.kit.local_fake import statistics


def message(datatype, shape, *, raw=(), **contents):
    request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=raw)
    request.inputs.add(
        name="X",
        datatype=datatype,
        shape=shape,
        contents=service_pb2.InferTensorContents(**contents) if contents else None,
    )
    return request


def decoded(request):
    return decode_request(request, timeout_us=None).request.inputs["X"]


def parameterised(**parameters):
    request = message("FP32", [1], raw=[b"1234"])
    for name, (choice, value) in parameters.items():
        setattr(request.parameters[name], choice, value)
    return request


def refusal(request):
    with pytest.raises(InferenceError) as refused:
        decode_request(request, timeout_us=None)
    assert refused.value.code is ErrorCode.INVALID_ARG
    return refused.value.message.removeprefix("[request id: <id_unknown>] ")


@pytest.mark.parametrize(
    "numpy_type",
    [bool, *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)), "float16", "float32", "float64"],
)
def test_raw_contents_are_the_values(numpy_type):
    array = np.array([[0, 1], [1, 0]], numpy_type)
    np.testing.assert_array_equal(decoded(message(datatype_of(array), [2, 2], raw=[array.tobytes()])), array)


def answer(array, **fields):
    return InferAnswer(model="m", version="1", outputs={"Y": array}, queue_us=0, compute_us=0, batch_size=1, **fields)


@pytest.mark.parametrize("pattern", [0x7FC1, 0xFF80, 0x0001, 0x8000], ids=["nan", "-inf", "subnormal", "-0"])
def test_bf16_is_bit_exact(pattern):
    raw = pattern.to_bytes(2, "little")
    array = decoded(message("BF16", [1], raw=[raw]))
    assert array.dtype == ml_dtypes.bfloat16
    assert encode_answer(answer(array), request_id="").raw_output_contents[0] == raw


def test_nan_payloads_are_bit_exact():
    raw = (0x7FC12345).to_bytes(4, "little")
    assert to_bytes(decoded(message("FP32", [1], raw=[raw]))) == raw


def test_strings_as_tritons_client_reads_them():
    array = np.array([b"", b"a\x00b", b"x" * 300], dtype=object)
    np.testing.assert_array_equal(deserialize_bytes_tensor(to_bytes(array)), array)
    np.testing.assert_array_equal(decoded(message("BYTES", [3], raw=[to_bytes(array)])), array)


@pytest.mark.parametrize("shape", [[1, 0], [0], [2, 0, 3]])
def test_empty_tensors_keep_their_shape(shape):
    assert decoded(message("FP32", shape, raw=[b""])).shape == tuple(shape)
    assert decoded(message("FP32", shape)).shape == tuple(shape)


@pytest.mark.parametrize(
    ("datatype", "contents", "values"),
    [
        ("BOOL", {"bool_contents": [True, False]}, [True, False]),
        ("INT8", {"int_contents": [-128, 127]}, [-128, 127]),
        ("UINT64", {"uint64_contents": [0, 2**64 - 1]}, [0, 2**64 - 1]),
        ("FP32", {"fp32_contents": [float("inf"), -0.5]}, [float("inf"), -0.5]),
        ("BYTES", {"bytes_contents": [b"\xff\x00", b""]}, [b"\xff\x00", b""]),
    ],
)
def test_typed_contents_are_the_values(datatype, contents, values):
    assert decoded(message(datatype, [2], **contents)).tolist() == values


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
        (message("BF16", [1]), "datatype BF16 of input 'X' needs raw contents"),
        (message("WHAT", [1]), "invalid datatype for input 'X': 'WHAT'"),
        (message("INT32", [-1]), "invalid shape for input 'X': [-1]"),
        (
            message("INT32", [2**62, 2**62], raw=[b"1234"]),
            f"invalid shape for input 'X': [{2**62}, {2**62}]",
        ),
        (message("INT32", [0, 2**62, 2**62], raw=[b""]), f"invalid shape for input 'X': [0, {2**62}, {2**62}]"),
        (
            message("INT32", [1], raw=[b"", b""]),
            "expected tensor data for 1 inputs but got 2 sets of data for model 'm'",
        ),
        (
            message("INT32", [1], raw=[b"1234"], int_contents=[1]),
            "input 'X' has contents although the request uses raw_input_contents",
        ),
        (
            message("INT32", [1], fp32_contents=[1]),
            "input 'X' of datatype INT32 must use contents field int_contents",
        ),
    ],
)
def test_contents_that_do_not_hold_what_they_say(request_message, text):
    assert refusal(request_message) == text


def test_parameters_reach_their_fields():
    request = decode_request(
        parameterised(
            sequence_id=("int64_param", 7),
            sequence_start=("bool_param", True),
            sequence_end=("bool_param", True),
            priority=("uint64_param", 2),
            timeout=("int64_param", 900),
            own=("double_param", 0.5),
            triton_enable_empty_final_response=("bool_param", True),
            headers=("string_param", "x"),
        ),
        timeout_us=5,
    )
    asked = request.request
    assert (asked.sequence_id, asked.sequence_start, asked.sequence_end) == (7, True, True)
    assert (asked.priority, asked.queue_timeout_us, asked.timeout_us) == (2, 900, 5)
    assert asked.parameters == {"own": 0.5}
    assert request.wants_empty_final


@pytest.mark.parametrize("choice", ["uint64_param", "string_param"])
def test_sequence_ids_are_numbers_or_strings(choice):
    value = 2**64 - 1 if choice == "uint64_param" else "user-x"
    assert decode_request(parameterised(sequence_id=(choice, value)), timeout_us=None).request.sequence_id == value


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("priority", ("string_param", "1")),
        ("priority", ("int64_param", -1)),
        ("timeout", ("bool_param", True)),
        ("sequence_id", ("int64_param", -1)),
        ("sequence_start", ("int64_param", 1)),
        ("triton_enable_empty_final_response", ("string_param", "yes")),
    ],
)
def test_parameters_of_the_wrong_kind_are_named(name, parameter):
    assert f"'{name}'" in refusal(parameterised(**{name: parameter}))


def test_shared_memory_is_refused_clearly():
    request = message("FP32", [1])
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(InferenceError, match="shared memory") as refused:
        decode_request(request, timeout_us=None)
    assert refused.value.code is ErrorCode.UNSUPPORTED


def test_answers_carry_parameters_of_every_kind():
    parameters = {"b": True, "i": -3, "u": 2**63, "f": 0.5, "s": "x"}
    written = encode_answer(answer(np.zeros(1), parameters=parameters), request_id="9", is_final=True).parameters
    assert {name: getattr(p, p.WhichOneof("parameter_choice")) for name, p in written.items()} == {
        **parameters,
        "triton_final_response": True,
    }
    assert written["u"].WhichOneof("parameter_choice") == "uint64_param"


def load(**parameters):
    request = service_pb2.RepositoryModelLoadRequest(model_name="m")
    for name, (choice, value) in parameters.items():
        setattr(request.parameters[name], choice, value)
    return request


def test_load_brings_config_and_files():
    wanted = decode_load(load(**{"config": ("string_param", "{}"), "file:1/model.py": ("bytes_param", b"x")}))
    assert (wanted.model, wanted.config, wanted.files) == ("m", "{}", {"1/model.py": b"x"})


def test_load_parameters_that_do_not_exist_are_refused():
    with pytest.raises(InferenceError, match="unrecognized load parameter 'what'"):
        decode_load(load(what=("string_param", "")))


def test_unload_may_take_dependents_along():
    request = service_pb2.RepositoryModelUnloadRequest(model_name="m")
    assert decode_unload(request) is False
    request.parameters["unload_dependents"].bool_param = True
    assert decode_unload(request) is True


def test_statistics_have_tritons_fields():
    told = encode_statistics([statistics("m")]).model_stats[0]
    assert (told.name, told.version, told.last_inference) == ("m", "1", 6)
    assert (told.inference_count, told.execution_count) == (3, 1)
    assert (told.inference_stats.success.count, told.inference_stats.success.ns) == (2, 348_000)
    assert (told.inference_stats.queue.ns, told.inference_stats.compute_infer.ns) == (300_000, 40_000)
    assert (told.inference_stats.fail.count, told.inference_stats.fail.ns) == (1, 9_000)
    assert (told.batch_stats[0].batch_size, told.batch_stats[0].compute_infer.count) == (3, 1)


def test_classes_of_each_row():
    rows = np.array([[0.1, 0.7, 0.2], [0.5, 0.25, 0.25]], np.float32)
    best = top_classes("Y", rows, count=2, is_batched=True, labels=["cat", "dog"])
    assert best.tolist() == [[b"0.700000:1:dog", b"0.200000:2"], [b"0.500000:0:cat", b"0.250000:1:dog"]]


def test_classes_without_a_batch_are_at_most_all_there_are():
    best = top_classes("Y", np.array([3, 9], np.int64), count=5, is_batched=False, labels=())
    assert best.tolist() == [b"9:1", b"3:0"]


def test_strings_have_no_best_class():
    with pytest.raises(Malformed, match="unsupported type"):
        top_classes("Y", np.array([b"x"], object), count=1, is_batched=False, labels=())


@pytest.mark.parametrize("shape", [[2**63 - 1] * 100_000, [2**63 - 1] * 64, [1] * 65, [2**62]])
@pytest.mark.parametrize("form", [{"raw": [b"12345678"]}, {"fp32_contents": [1.0]}], ids=["raw", "typed"])
def test_shapes_that_no_array_can_have_are_refused_before_anything_is_computed(shape, form):
    text = refusal(message("FP32", shape, **form))
    assert text.startswith("invalid shape for input 'X'")
    assert len(text) < 2000


class Unprintable:
    def __str__(self):
        raise Unicode("no")


class Unicode(Exception):
    pass


@pytest.mark.parametrize(
    "text", [None, 7, Unprintable(), "half \udcff", "x" * 20_000, "日" * 20_000, "\n" * 20_000, b"\xff"]
)
def test_any_error_text_can_be_sent(text):
    safe = safe_text(text)
    assert 0 < len(safe.encode()) <= MAX_TEXT_BYTES
    # The trailers of gRPC, whose clients take 8 KiB.
    assert len(quote(safe)) < 8 * 1024
    assert (
        encode_stream_error(InferenceError(ErrorCode.INTERNAL, text), request_id="", is_final=True).error_message
        == safe
    )


def test_a_long_error_text_keeps_its_start_and_its_end():
    safe = safe_text("start" + "x" * 10_000 + "end")
    assert (safe[:5], safe[-3:]) == ("start", "end")
    assert safe_text("Ordnung: ä" * 100) == "Ordnung: ä" * 100
