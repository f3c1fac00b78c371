import json
import math

import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import InferAnswer, ModelMetadata, TensorMetadata
from local_runtime.protocol import http_routes
from local_runtime.protocol.http_routes import Route, known_route, route
from local_runtime.protocol.json_text import MAX_CONTAINERS, MAX_NAMES, MAX_VALUES, parse
from local_runtime.protocol.oip_generate import decode_generate, encode_generate
from local_runtime.protocol.oip_json import decode_infer, decode_raw, encode_infer
from local_runtime.protocol.oip_tensors import from_bytes, to_bytes
from local_runtime.protocol.oip_values import bytes_from_json, from_json, to_json

TYPES = {
    "BOOL": [True, False],
    "INT8": [-128, 127],
    "INT16": [-(2**15), 2**15 - 1],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "UINT8": [0, 255],
    "UINT16": [0, 2**16 - 1],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "FP32": [0.5, -0.0],
    "FP64": [0.1, 1e300],
    "BYTES": ["", "日本🙂 a\u0000b"],
}


def body(data=(1.0, 2.0), shape=(2,), datatype="FP32", **document):
    return json.dumps(
        {"inputs": [{"name": "X", "shape": list(shape), "datatype": datatype, "data": data}], **document}
    ).encode()


def tensor(content, json_length=None):
    return decode_infer("m", "", content, json_length=json_length).request.inputs["X"]


def refusal(content, json_length=None):
    with pytest.raises(InferenceError) as refused:
        decode_infer("m", "", content, json_length=json_length)
    assert refused.value.code is ErrorCode.INVALID_ARG
    return refused.value.message


def answer(outputs, **fields):
    return InferAnswer(model="m", version="1", outputs=outputs, queue_us=0, compute_us=0, batch_size=1, **fields)


def encoded(outputs, request=None, **fields):
    return encode_infer(answer(outputs, **fields), decode_infer("m", "", request or body()))


@pytest.mark.parametrize("datatype", TYPES)
def test_values_of_every_type_go_there_and_back(datatype):
    array = tensor(body(TYPES[datatype], datatype=datatype))
    told = json.loads(encoded({"Y": array}).content)["outputs"][0]
    assert told == {"name": "Y", "datatype": datatype, "shape": [2], "data": TYPES[datatype]}


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1, 1)])
@pytest.mark.parametrize("datatype", TYPES)
def test_values_are_read_into_the_binary_form_at_once(datatype, shape):
    array = from_json("X", datatype, shape, TYPES[datatype])
    raw = bytes_from_json("X", datatype, shape, TYPES[datatype])
    assert (array.shape, raw) == (shape, to_bytes(array))
    assert from_bytes("X", datatype, shape, raw=raw, model="m").tolist() == array.tolist()


@pytest.mark.parametrize(
    "other",
    [
        b'"\\ud800"',
        b'{"\\udfff": 1}',
        b'"\xed\xa0\x80"',
        b'"\xff"',
        b"1e999",
        b"1" + b"0" * 400,
        b"1" + b"0" * 5000,
        b"[" * 5000,
        b"'x'",
        b'"\n"',
        b"01",
    ],
)
def test_a_bare_nan_makes_nothing_else_acceptable(other):
    plain, with_nan = b'{"id": %b}' % other, b'{"inputs": [NaN], "id": %b}' % other
    for text in (plain, with_nan):
        with pytest.raises(InferenceError, match="failed to parse the request JSON buffer"):
            parse(text)


@pytest.mark.parametrize("number", [b"18446744073709551616", b"-9223372036854775809", b"18446744073709551615", b"-0"])
def test_numbers_beside_a_bare_nan_are_read_as_without(number):
    plain, with_nan = parse(b'{"id": %b}' % number)["id"], parse(b'{"x": NaN, "id": %b}' % number)["id"]
    assert (plain, type(plain)) == (with_nan, type(with_nan))


@pytest.mark.parametrize("data", [[[1, 2, 3], [4, 5, 6]], [1, 2, 3, 4, 5, 6]], ids=["nested", "flat"])
def test_nested_and_flat_data_are_the_same(data):
    np.testing.assert_array_equal(tensor(body(data, (2, 3))), np.array([[1, 2, 3], [4, 5, 6]], np.float32))


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        ([1, 2, 3, 4, 5], [2, 3]),
        ([1, 2, 3, 4, 5, 6, 7], [2, 3]),
        ([[1, 2, 3], [4, 5]], [2, 3]),
        ([[1, 2], [3, 4], [5, 6]], [2, 3]),
        ([[[1, 2, 3], [4, 5, 6]]], [2, 3]),
        ([[1, 2, 3], 4, 5, 6], [2, 3]),
        ([[1, 2, 3, 4, 5, 6]], [2, 3]),
        ([], [2, 3]),
        ([[1]], []),
    ],
)
def test_data_that_contradicts_the_shape_names_the_input(data, shape):
    text = refusal(body(data, shape))
    assert "Shape does not match true shape of 'data' field of input 'X'" in text


@pytest.mark.parametrize(
    "shape",
    [[0, 2**62, 2**62], [0] * 100, [2**62, 2**62], [2**62], [2**64 - 1], [0, 2**63], [2**63 - 1] * 100_000, [1] * 65],
    ids=lambda shape: f"{len(shape)} x {shape[-1]}",
)
def test_shapes_beyond_what_can_be_addressed(shape):
    binary = json.loads(body(shape=shape))
    del binary["inputs"][0]["data"]
    binary["inputs"][0]["parameters"] = {"binary_data_size": 0}
    head = json.dumps(binary).encode()
    for text in (refusal(body([], shape)), refusal(head, len(head))):
        assert "invalid shape for input 'X'" in text
        assert len(text) < 200


def test_a_tensor_of_64_dimensions_is_one():
    assert tensor(body([1], [1] * 64)).shape == (1,) * 64


@pytest.mark.parametrize("part", [b"[],", b"{},", b"[[[]]],", b'"[[",'])
def test_more_lists_and_objects_than_can_be_read_at_once_are_refused(part):
    text = refusal(b'{"inputs":[' + part * MAX_CONTAINERS + b"0]}")
    assert f"more than {MAX_CONTAINERS} " in text


@pytest.mark.parametrize(("part", "most"), [(b'"a":1,', MAX_NAMES), (b"1,", MAX_VALUES)])
def test_more_names_and_values_than_can_be_read_at_once_are_refused(part, most):
    assert f"more than {most} " in refusal(b'{"inputs":' + part * (most + 1) + b"0}")


def test_as_many_lists_as_are_allowed_and_any_number_of_values_are_read():
    rows = MAX_CONTAINERS - 4  # beside the document, its inputs, the shape and the data
    nested = b"[0]," * (rows - 1) + b"[0]"
    content = b'{"inputs":[{"name":"X","datatype":"INT8","shape":[%d,1],"data":[%b]}]}'
    assert tensor(content % (rows - 1, nested[4:])).shape == (rows - 1, 1)
    flat = b"1," * 999_999 + b"1"
    assert tensor(content.replace(b",1]", b"]") % (1_000_000, flat)).sum(dtype=np.int64) == 1_000_000


def nested(depth):
    return [] if depth == 0 else [nested(depth - 1)]


def test_generate_refuses_more_dimensions_than_a_tensor_has():
    with pytest.raises(InferenceError, match="it has 101 dimensions"):
        decode_generate(metadata(("X", "FP32", [-1])), "", json.dumps({"X": nested(100)}).encode())


@pytest.mark.parametrize("shape", [[0], [2, 0], [0, 3]])
def test_empty_tensors_keep_their_shape(shape):
    array = tensor(body([], shape))
    assert array.shape == tuple(shape)
    told = json.loads(encoded({"Y": array}).content)["outputs"][0]
    assert (told["shape"], told["data"]) == (shape, [])


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT32", 1.5),
        ("INT32", 1.0),
        ("INT32", "1"),
        ("INT32", True),
        ("INT32", None),
        ("FP32", True),
        ("FP32", "1"),
        ("FP32", None),
        ("FP32", {}),
        ("BOOL", 1),
        ("BYTES", 1),
        ("UINT64", 2**64),
    ],
)
def test_values_of_another_kind_are_refused_with_the_input(datatype, value):
    assert f"'data' of input 'X': {datatype} values must be" in refusal(body([value], [1], datatype))


@pytest.mark.parametrize(
    ("datatype", "value"),
    [("INT8", 128), ("UINT8", -1), ("INT32", 2**31), ("INT64", 2**63), ("UINT32", 2**32), ("FP32", 1e39)],
)
def test_values_beyond_the_type_are_refused_with_the_input(datatype, value):
    assert refusal(body([value], [1], datatype)).endswith(
        f"Unable to parse 'data' of input 'X': a value is out of range of {datatype}"
    )


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_have_no_json_form(datatype):
    assert (
        f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input X"
        in refusal(body([1.0], [1], datatype))
    )
    with pytest.raises(InferenceError, match="sending FP16 data via JSON is not supported"):
        encoded({"Y": np.zeros(1, np.float16)})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "failed to parse the request JSON buffer: "),
        (b"", "failed to parse the request JSON buffer: "),
        (b"[]", "failed to parse the request JSON buffer: the document is not an object"),
        (b'{"inputs": [NaN', "failed to parse the request JSON buffer: "),
        (b"{}", "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (b'{"inputs": {}}', "Unable to parse 'inputs': must be an array"),
        (b'{"inputs": null}', "Unable to parse 'inputs': must be an array"),
        (b'{"inputs": [1]}', "Unable to parse 'inputs': every element must be an object with a string 'name'"),
        (b'{"inputs": [], "id": 5}', "Unable to parse 'id': must be a string"),
        (b'{"inputs": [], "outputs": "Y"}', "Unable to parse 'outputs': must be an array"),
        (b'{"inputs": [], "parameters": []}', "Unable to parse 'parameters' of the request: must be an object"),
        (body(shape="-1"), "Unable to parse 'shape' of input 'X'"),
        (body(shape=[1.5]), "Unable to parse 'shape' of input 'X'"),
        (body(shape=[True]), "Unable to parse 'shape' of input 'X'"),
        (body(shape=[-2]), "invalid shape for input 'X': [-2]"),
        (body(shape=[1, -1]), "invalid shape for input 'X': [1, -1]"),
        (body(datatype="fp32"), "invalid datatype for input 'X': 'fp32'"),
        (body(datatype="STRING"), "invalid datatype for input 'X': 'STRING'"),
        (body(datatype=None), "Unable to parse 'datatype' of input 'X': must be a string"),
        (body(data={}), "Unable to parse 'data' of input 'X': must be an array"),
        (body(data="12"), "Unable to parse 'data' of input 'X': must be an array"),
        (body(data=None), "Unable to parse 'data' of input 'X': must be an array"),
        (
            b'{"inputs": [{"name": "X", "shape": [1], "datatype": "FP32"}]}',
            "Unable to parse 'data': attempt to access non-existing object member 'data' of input 'X'",
        ),
        (body(parameters={"own": {}}), "parameter 'own' must be a string, a number or a boolean"),
        (body(parameters={"priority": -1}), "parameter 'priority' must be an unsigned 64-bit integer"),
        (body(parameters={"sequence_start": 1}), "parameter 'sequence_start' must be true or false"),
        (body(parameters={"binary_data_output": "yes"}), "parameter 'binary_data_output' must be true or false"),
    ],
)
def test_what_is_wrong_is_named(content, text):
    assert text in refusal(content)


def test_one_input_given_twice():
    one = json.loads(body())["inputs"][0]
    assert "input 'X' already exists in request" in refusal(json.dumps({"inputs": [one, one]}).encode())


def test_refusals_name_the_request():
    assert refusal(body(shape=[3], id="r7")).startswith("[request id: r7] ")


def test_bare_nan_and_infinity_are_numbers_both_ways():
    array = tensor(b'{"inputs":[{"name":"X","shape":[3],"datatype":"FP32","data":[NaN,Infinity,-Infinity]}]}')
    assert math.isnan(array[0])
    assert array[1:].tolist() == [math.inf, -math.inf]
    assert b'"data":[NaN,Infinity,-Infinity]' in encoded({"Y": array}).content


def test_the_word_null_in_a_string_stays_what_it_is():
    content = encoded({"Y": np.array([b"null"], object), "Z": np.array([0.5], np.float32)}).content
    assert [output["data"] for output in json.loads(content)["outputs"]] == [["null"], [0.5]]


def test_bytes_that_are_not_text_are_refused_not_replaced():
    with pytest.raises(InferenceError, match="output 'Y' holds bytes that are not UTF-8") as refused:
        encoded({"Y": np.array([b"\xff\x00\xfe"], object)})
    assert refused.value.code is ErrorCode.INVALID_ARG


def test_answers_echo_the_id_and_carry_parameters():
    told = json.loads(encoded({"Y": np.zeros(1)}, body(id="r7"), parameters={"p": 1}).content)
    assert (told["id"], told["model_name"], told["model_version"], told["parameters"]) == ("r7", "m", "1", {"p": 1})
    assert "id" not in json.loads(encoded({}).content)
    assert list(told) == ["id", "model_name", "model_version", "parameters", "outputs"]


def test_single_floats_are_written_with_the_digits_that_triton_writes():
    content = encoded({"Y": np.array([0.1, -0.0, 123456789], np.float32)}).content
    assert b'"data":[0.10000000149011612,-0.0,123456792.0]' in content


def test_parameters_reach_their_fields():
    asked = decode_infer(
        "m",
        "3",
        body(
            parameters={"sequence_id": "s", "sequence_end": True, "priority": 2, "timeout": 9, "own": 1.5},
            outputs=[{"name": "Y"}, {"name": "Z", "parameters": {"classification": 3}}],
        ),
    )
    request = asked.request
    assert (request.version, request.sequence_id, request.sequence_end) == ("3", "s", True)
    assert (request.priority, request.queue_timeout_us, request.parameters) == (2, 9, {"own": 1.5})
    assert (request.outputs, asked.classes) == (("Y", "Z"), {"Z": 3})


# --- the binary tensor extension ------------------------------------------------------------------


def binary(*tensors, **document):
    """Inputs as (name, datatype, shape, raw)."""
    head = json.dumps(
        {
            "inputs": [
                {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(raw)}}
                for name, datatype, shape, raw in tensors
            ],
            **document,
        }
    ).encode()
    return head + b"".join(raw for *_, raw in tensors), len(head)


def test_bytes_of_tensors_follow_in_order():
    content, length = binary(
        ("A", "FP16", [2], b"\x01\x02\x03\x04"), ("B", "FP32", [2, 0], b""), ("X", "BYTES", [1], b"\x02\0\0\0\xff\xfe")
    )
    inputs = decode_infer("m", "", content, json_length=length).request.inputs
    assert inputs["A"].tobytes() == b"\x01\x02\x03\x04"
    assert inputs["B"].shape == (2, 0)
    assert inputs["X"].tolist() == [b"\xff\xfe"]


@pytest.mark.parametrize(
    ("raw", "extra", "text"),
    [
        (b"1234", b"", "Expected 8, got 4"),
        (b"12345678", b"9", "unexpected additional input data of 1 bytes"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(raw, extra, text):
    content, length = binary(("X", "INT32", [2], raw))
    assert text in refusal(content + extra, length)


def test_a_body_that_is_too_short_is_refused():
    content, length = binary(("X", "INT32", [2], b"12345678"))
    assert "unexpected end of binary data for input 'X'" in refusal(content[:-1], length)
    assert "exceeds the body" in refusal(content, len(content) + 1)


@pytest.mark.parametrize("size", [-1, 1.5, "4", True])
def test_a_size_that_is_none_is_refused(size):
    head = {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": size}}]}
    content = json.dumps(head).encode()
    assert "parameter 'binary_data_size' of input 'X'" in refusal(content + b"1234", len(content))


def test_requests_with_the_same_json_have_their_own_tensors_and_parameters():
    x = {"name": "X", "shape": [2], "datatype": "INT8", "parameters": {"binary_data_size": 2}}
    head = json.dumps({"id": "r", "inputs": [x], "parameters": {"own": "a"}}).encode()
    for raw in (b"\x01\x02", b"\x03\x04"):
        request = decode_infer("m", "", head + raw, json_length=len(head)).request
        assert (request.request_id, request.inputs["X"].tolist()) == ("r", list(raw))
        assert request.parameters == {"own": "a"}
        request.parameters["own"] = "b"  # as a model may
    for raw in (b"\x01", b"\x01\x02\x03"):
        assert refusal(head + raw, len(head)).startswith("[request id: r] unexpected ")


def test_outputs_come_as_bytes_where_that_is_asked_for():
    outputs = {"A": np.array([1], np.float16), "B": np.array([2], np.int32), "C": np.array([b"\xff"], object)}
    asked = body(
        parameters={"binary_data_output": True},
        outputs=[{"name": "A"}, {"name": "B", "parameters": {"binary_data": False}}, {"name": "C"}],
    )
    told = encoded(outputs, asked)
    head = json.loads(told.content[: told.json_length])
    assert [output.get("parameters") for output in head["outputs"]] == [
        {"binary_data_size": 2},
        None,
        {"binary_data_size": 5},
    ]
    assert head["outputs"][1]["data"] == [2]
    assert told.content[told.json_length :] == np.float16(1).tobytes() + b"\x01\0\0\0\xff"


def test_an_answer_of_empty_tensors_is_json_alone():
    told = encoded({"A": np.empty((0, 2), np.int32)}, body(parameters={"binary_data_output": True}))
    assert told.json_length is None
    assert json.loads(told.content)["outputs"][0]["parameters"] == {"binary_data_size": 0}


def metadata(*inputs):
    tensors = tuple(TensorMetadata(name=name, datatype=datatype, shape=shape) for name, datatype, shape in inputs)
    return ModelMetadata(name="m", versions=("1",), platform="", inputs=tensors, outputs=())


@pytest.mark.parametrize(
    ("datatype", "shape", "content", "expected"),
    [
        ("FP32", (-1, 2), b"12345678", (1, 2)),
        ("FP32", (-1, -1), b"12345678", (1, 2)),
        ("BYTES", (-1, 1), b"abc", (1, 1)),
    ],
)
def test_a_raw_body_is_the_only_input(datatype, shape, content, expected):
    asked = decode_raw(metadata(("X", datatype, shape)), "", content, is_batched=True)
    array = asked.request.inputs["X"]
    assert (array.shape, asked.is_binary) == (expected, True)
    assert (array.item() if datatype == "BYTES" else array.tobytes()) == content


@pytest.mark.parametrize(
    ("inputs", "content", "text"),
    [
        ([("A", "FP32", (1,)), ("B", "FP32", (1,))], b"", "must only have 1 input .* got 2 inputs"),
        ([("A", "FP32", (-1, -1, -1))], b"", "at most 1 variable dimension"),
        ([("A", "FP32", (-1, 2))], b"1234", "Expected 8, got 4"),
    ],
)
def test_raw_bodies_that_cannot_be_an_input(inputs, content, text):
    with pytest.raises(InferenceError, match=text):
        decode_raw(metadata(*inputs), "", content, is_batched=True)


# --- generate -------------------------------------------------------------------------------------


def test_generate_takes_fields_as_inputs_and_the_rest_as_parameters():
    model = metadata(("TEXT", "BYTES", (-1, 1)), ("N", "INT32", (-1, -1)))
    content = {"TEXT": "hi", "N": [1, 2], "temperature": 0.5, "id": "r", "parameters": {"priority": 1}}
    request = decode_generate(model, "", json.dumps(content).encode())
    assert request.inputs["TEXT"].tolist() == [[b"hi"]]
    assert request.inputs["N"].tolist() == [[1, 2]]
    assert (request.parameters, request.priority, request.request_id) == ({"temperature": 0.5}, 1, "r")


@pytest.mark.parametrize(
    ("content", "text"),
    [(b'{"N": "x"}', "input 'N'"), (b'{"parameters": 1}', "'parameters'"), (b'{"id": 1}', "'id'"), (b"[", "JSON")],
)
def test_generate_names_what_is_wrong(content, text):
    with pytest.raises(InferenceError, match=text):
        decode_generate(metadata(("N", "INT32", (-1,))), "", content)


def test_generate_answers_sorted_with_a_value_where_there_is_one():
    told = encode_generate(
        answer({"T": np.array([[b"hi"]], object), "N": np.array([[1, 2]]), "F": np.array([math.nan])}), request_id="r"
    )
    assert told == b'{"F":NaN,"N":[1,2],"T":"hi","id":"r","model_name":"m","model_version":"1"}'


# --- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (b"/v2", Route(call="server")),
        (b"/v2/", Route(call="server")),
        (b"/v2/health/ready", Route(call="ready")),
        (b"/v2/models/stats", Route(call="stats")),
        (b"/v2/models/m", Route(call="metadata", model="m")),
        (b"/v2/models/m/versions/3", Route(call="metadata", model="m", version="3")),
        (b"/v2/models/m/versions/3/infer", Route(call="infer", model="m", version="3")),
        (b"/v2/models/a%2Fb/infer", Route(call="infer", model="a/b")),
        (b"/v2/models/%E6%97%A5/ready", Route(call="model_ready", model="日")),
        (b"/v2/models/versions/infer", Route(call="infer", model="versions")),
        (b"/v2/repository/models/m/load", Route(call="load", model="m")),
        (b"/v2/repository/models/..%2F..%2Fetc/load", Route(call="load", model="../../etc")),
        (b"/v2/cudasharedmemory/region/r/register", Route(call="not_offered")),
        (b"/v2/cudasharedmemory/status", Route(call="shared_memory_status")),
        (b"/metrics", Route(call="metrics")),
    ],
)
def test_paths_name_calls(path, expected):
    assert route(path) == expected


@pytest.mark.parametrize(
    "path",
    [
        b"/",
        b"",
        b"/v1/models/m",
        b"/v2/models",
        b"/v2//models/m",
        b"/v2/models/m/infer/more",
        b"/v2/models/m/versions/abc/infer",
        b"/v2/models/m/versions",
        b"/v2/models/%ff/infer",
        b"/v2/repository/models/m",
        b"*",
    ],
)
def test_other_paths_name_none(path):
    assert route(path) is None


def test_a_long_path_is_read_and_not_remembered():
    http_routes._known.cache_clear()
    long = b"/v2/models/" + b"m" * http_routes.MAX_REMEMBERED
    assert known_route(long) == known_route(long) == Route(call="metadata", model="m" * http_routes.MAX_REMEMBERED)
    assert known_route(b"/v2") == Route(call="server")
    assert http_routes._known.cache_info().currsize == 1


def test_a_signalling_nan_is_written_as_any_other():
    """Without a warning, which is an error here."""
    array = np.frombuffer(b"\x01\x00\x80\x7f", np.float32)
    assert math.isnan(to_json("A", array)[0])
