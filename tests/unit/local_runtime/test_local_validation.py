import ml_dtypes
import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import InferRequest
from local_runtime.repository.parsing import parse
from local_runtime.scheduling.validation import RequestChecker, bytes_array, check_outputs

STD = parse(
    """backend: "python" max_batch_size: 4
    input [ { name: "X" data_type: TYPE_INT32 dims: [ 2 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "S" data_type: TYPE_STRING dims: [ 1 ] } ]""",
    folder_name="std",
)
TWO = parse(
    """backend: "python" max_batch_size: 4
    input [ { name: "X" data_type: TYPE_STRING dims: [ 1 ] }, { name: "Z" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]""",
    folder_name="two",
)
UNBATCHED = parse(
    """backend: "python"
    input [ { name: "X" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]""",
    folder_name="flat",
)
NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to "
    "each input shape. If you want to specify the full shape including the batch dim in your input dims config, "
    "try setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def ints(*shape):
    return np.zeros(shape, np.int32)


def floats(*shape):
    return np.zeros(shape, np.float32)


def strings(*shape):
    return np.full(shape, b"a", dtype=object)


def request(inputs, **fields):
    return InferRequest(model="any", inputs=inputs, **fields)


def check(one, config):
    return RequestChecker(config).check(one)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            pytest.param(field, value, id=f"{field}-{name}")
            for field in ("sequence_id", "priority", "queue_timeout_us")
            for name, value in {
                "negative": -1,
                "too large": 2**64,
                "too large to be written": 10**5000,
                "none": None,
                "float": 1.5,
                "bytes": b"a",
            }.items()
        ),
        pytest.param("sequence_id", "a\ud800", id="sequence_id-half a pair"),
        ("priority", "1"),
        ("queue_timeout_us", np.int64(-1)),
    ],
)
def test_numbers_and_names_that_no_protocol_could_carry_are_refused(field, value):
    with pytest.raises(InferenceError) as refused:
        check(request({"X": ints(1, 2)}, request_id="abc", **{field: value}), STD)
    assert refused.value.code is ErrorCode.INVALID_ARG
    assert refused.value.message.startswith(f"[request id: abc] {field} must be an unsigned 64-bit integer")


@pytest.mark.parametrize(
    "sequence_id", [0, "", 1, 2**64 - 1, np.uint64(2**64 - 1), np.int32(7), "a\0", "straße", "😀" * 9]
)
def test_numbers_and_names_that_a_protocol_could_carry_are_taken(sequence_id):
    one = request({"X": ints(1, 2)}, sequence_id=sequence_id, priority=2**64 - 1, queue_timeout_us=2**64 - 1)
    assert check(one, STD).source is one


@pytest.mark.parametrize(
    ("config", "inputs", "text"),
    [
        (STD, {"X": ints(5, 2)}, "inference request batch-size must be <= 4 for 'std'"),
        (STD, {"X": ints(0, 2)}, "input byte size mismatch for input 'X' for model 'std'. Expected 8, got 0"),
        (STD, {"X": floats(1, 2)}, "inference input 'X' data-type is 'FP32', but model 'std' expects 'INT32'"),
        (STD, {"X": ints(1, 3)}, "unexpected shape for input 'X' for model 'std'. Expected [-1,2], got [1,3]." + NOTE),
        (STD, {"X": ints(2)}, "unexpected shape for input 'X' for model 'std'. Expected [-1,2], got [2]." + NOTE),
        (STD, {"X": ints()}, "unexpected shape for input 'X' for model 'std'. Expected [-1,2], got []." + NOTE),
        (
            STD,
            {},
            (
                "expected 1 inputs but got 0 inputs for model 'std'. Got input(s) [], but missing required input(s) "
                "['X']. Please provide all required input(s)."
            ),
        ),
        (
            TWO,
            {"X": strings(1, 1)},
            (
                "expected 2 inputs but got 1 inputs for model 'two'. Got input(s) ['X'], but missing required input(s) "
                "['Z']. Please provide all required input(s)."
            ),
        ),
        (
            STD,
            {"X": ints(1, 2), "Q": ints(1, 2)},
            (
                "expected 1 inputs but got 2 inputs for model 'std'. Got input(s) ['Q','X'], but missing required "
                "input(s) ]. Please provide all required input(s)."
            ),
        ),
        (
            TWO,
            {"X": strings(1, 1), "Z": floats(2, 1)},
            "input 'Z' batch size does not match other inputs for 'two'",
        ),
        (
            TWO,
            {"X": np.array([[3]], dtype=object), "Z": floats(1, 1)},
            "input 'X': an element of a BYTES tensor is int, not bytes or str",
        ),
        (UNBATCHED, {"X": floats(2)}, "unexpected shape for input 'X' for model 'flat'. Expected [-1,2], got [2]."),
    ],
)
@pytest.mark.parametrize(("request_id", "shown"), [("", "<id_unknown>"), ("abc", "abc")])
def test_wrong_request_gets_tritons_text(config, inputs, text, request_id, shown):
    with pytest.raises(InferenceError) as refused:
        check(request(inputs, request_id=request_id), config)
    assert refused.value.code is ErrorCode.INVALID_ARG
    assert refused.value.message == f"[request id: {shown}] {text}"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"inputs": {"Q": ints(1, 2)}}, "unexpected inference input 'Q' for model 'std'"),
        (
            {"inputs": {"X": ints(1, 2)}, "outputs": ("NOPE",)},
            "unexpected inference output 'NOPE' for model 'std'",
        ),
    ],
)
def test_wrong_name_gets_tritons_text(fields, text):
    with pytest.raises(InferenceError) as refused:
        check(InferRequest(model="std", **fields), STD)
    assert refused.value.message == text


def test_good_request():
    checked = check(request({"Z": floats(2, 5), "X": strings(2, 1)}, outputs=("Y",)), TWO)
    assert list(checked.inputs) == ["X", "Z"]
    assert (checked.rows, checked.outputs) == (2, ("Y",))


def test_batch_key_is_the_inner_shapes():
    def key(width, rows):
        return check(request({"X": strings(rows, 1), "Z": floats(rows, width)}), TWO).batch_key

    assert key(3, 1) == key(3, 2)
    assert key(3, 1) != key(4, 1)


@pytest.mark.parametrize("values", [np.array([["é"]]), np.array([["é".encode()]]), np.array([["é"]], dtype=object)])
def test_strings_become_bytes_and_the_callers_array_is_left_alone(values):
    before = values.copy()
    checked = check(request({"X": values, "Z": floats(1, 1)}), TWO)
    assert checked.inputs["X"].dtype == object
    assert checked.inputs["X"][0, 0] == "é".encode()
    np.testing.assert_array_equal(values, before)


def test_model_without_batch_dimension_has_one_row():
    assert check(request({"X": floats(7, 2)}), UNBATCHED).rows == 1


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"Y": floats(1, 2)}, "model 'std' did not return output 'S'"),
        (
            {"Y": ints(1, 2), "S": strings(1, 1)},
            "model 'std' returned output 'Y' as 'INT32', but its config says 'FP32'",
        ),
        (
            {"Y": floats(1, 2), "S": strings(1, 2)},
            "model 'std' returned output 'S' of shape [1,2], but its config says [-1,1]",
        ),
    ],
)
def test_output_that_breaks_the_config_is_the_models_fault(outputs, text):
    with pytest.raises(InferenceError) as fault:
        check_outputs(outputs, STD, wanted=("Y", "S"))
    assert (fault.value.code, fault.value.message) == (ErrorCode.INTERNAL, text)


def test_outputs_in_config_order_without_surplus():
    outputs = {"EXTRA": ints(1), "S": strings(1, 1), "Y": floats(1, 9)}
    assert list(check_outputs(outputs, STD, wanted=("S", "Y"))) == ["Y", "S"]
    assert list(check_outputs(outputs, STD, wanted=("S",))) == ["S"]


OPTIONAL = parse(
    """backend: "python" max_batch_size: 4
    input [ { name: "X" data_type: TYPE_INT32 dims: [ 2 ] },
            { name: "O" data_type: TYPE_INT32 dims: [ -1 ] optional: true },
            { name: "F" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]""",
    folder_name="opt",
)
RESHAPED = parse(
    """backend: "python" max_batch_size: 4
    input [ { name: "X" data_type: TYPE_BF16 dims: [ 1 ] reshape { shape: [ ] } },
            { name: "Z" data_type: TYPE_FP32 dims: [ -1, 6, -1 ] reshape { shape: [ 1, -1, 2, 3, -1 ] } } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1, 4 ] reshape { shape: [ -1, 2, 2 ] } },
             { name: "S" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } } ]""",
    folder_name="re",
)
SEQUENCE = parse(
    """backend: "python" max_batch_size: 4
    input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
    sequence_batching { state [
        { input_name: "IN" output_name: "OUT" data_type: TYPE_INT64 dims: [ -1 ] },
        { input_name: "Y_IN" output_name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ] }""",
    folder_name="seq",
)


@pytest.mark.parametrize("present", [("X",), ("X", "O"), ("X", "F"), ("X", "O", "F")])
def test_optional_inputs_may_lack(present):
    widths = {"X": 2, "O": 3, "F": 1}
    checked = check(request({name: ints(2, widths[name]) for name in present}), OPTIONAL)
    assert (tuple(checked.inputs), checked.rows) == (present, 2)


def test_batch_key_tells_which_optional_inputs_are_there_and_their_shapes():
    def key(**widths):
        return check(request({"X": ints(1, 2)} | {name: ints(1, width) for name, width in widths.items()}), OPTIONAL)

    keys = [key().batch_key, key(O=2).batch_key, key(O=3).batch_key, key(F=1).batch_key, key(O=2, F=1).batch_key]
    assert len(set(keys)) == len(keys)
    assert key(O=2).batch_key == keys[1]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            (),
            (
                "expected number of inputs between 1 and 3 but got 0 inputs for model 'opt'. Got input(s) [], but "
                "missing required input(s) ['X']. Please provide all required input(s)."
            ),
        ),
        (
            ("O", "F"),
            (
                "expected number of inputs between 1 and 3 but got 2 inputs for model 'opt'. Got input(s) ['F','O'], "
                "but missing required input(s) ['X']. Please provide all required input(s)."
            ),
        ),
    ],
)
def test_required_input_of_a_model_with_optional_ones(names, text):
    with pytest.raises(InferenceError) as refused:
        check(request({name: ints(1, 1) for name in names}), OPTIONAL)
    assert refused.value.message == f"[request id: <id_unknown>] {text}"


def test_unknown_input_beside_optional_ones():
    with pytest.raises(InferenceError) as refused:
        check(request({"X": ints(1, 2), "Q": ints(1, 2)}), OPTIONAL)
    assert refused.value.message == "unexpected inference input 'Q' for model 'opt'"


def test_ragged_inputs_have_no_part_in_the_batch_key():
    config = parse(
        """backend: "python" max_batch_size: 4
        input [ { name: "R" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true },
                { name: "X" data_type: TYPE_INT32 dims: [ -1 ] } ]
        output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]""",
        folder_name="m",
    )

    def key(ragged, other):
        return check(request({"R": ints(1, ragged), "X": ints(1, other)}), config).batch_key

    assert key(1, 5) == key(2, 5)
    assert key(1, 5) != key(1, 6)


def test_model_sees_reshaped_inputs_with_free_dimensions_in_order():
    x = np.ones((2, 1), ml_dtypes.bfloat16)
    z = np.arange(2 * 5 * 6 * 7, dtype=np.float32).reshape(2, 5, 6, 7)
    inputs = check(request({"X": x, "Z": z}), RESHAPED).inputs
    assert (inputs["X"].shape, inputs["X"].dtype) == ((2,), ml_dtypes.bfloat16)
    assert inputs["Z"].shape == (2, 1, 5, 2, 3, 7)
    np.testing.assert_array_equal(inputs["Z"].ravel(), z.ravel())


def test_clients_see_outputs_in_the_shape_of_the_config():
    model = {"Y": floats(3, 5, 2, 2), "S": floats(3)}
    checked = check_outputs(model, RESHAPED, wanted=("Y", "S"))
    assert {name: array.shape for name, array in checked.items()} == {"Y": (3, 5, 4), "S": (3, 1)}


def test_output_must_have_the_shape_that_the_model_sees():
    with pytest.raises(InferenceError, match=r"of shape \[3,5,4\], but its config says \[-1,-1,2,2\]"):
        check_outputs({"Y": floats(3, 5, 4)}, RESHAPED, wanted=("Y",))


def test_sequence_model_takes_one_row():
    assert check(request({"X": floats(1, 1)}), SEQUENCE).rows == 1
    with pytest.raises(InferenceError) as refused:
        check(request({"X": floats(2, 1)}), SEQUENCE)
    assert refused.value.code is ErrorCode.INVALID_ARG
    assert refused.value.message == (
        "inference request to model 'seq' must specify batch-size 1 due to requirements of sequence batcher"
    )


def test_states_are_outputs_of_the_model_but_not_of_the_client():
    assert check(request({"X": floats(1, 1)}), SEQUENCE).outputs == ("Y",)
    with pytest.raises(InferenceError, match="unexpected inference output 'OUT'"):
        check(request({"X": floats(1, 1)}, outputs=("OUT",)), SEQUENCE)
    model = {"OUT": np.zeros((1, 5), np.int64), "Y": floats(1, 1)}
    assert list(check_outputs(model, SEQUENCE, wanted=("Y", "OUT"))) == ["Y", "OUT"]
    with pytest.raises(InferenceError, match="model 'seq' returned output 'OUT' as 'FP32'"):
        check_outputs({"OUT": floats(1, 5)}, SEQUENCE, wanted=("OUT",))


def test_one_checker_serves_many_requests_and_passes_on_how_to_respond():
    checker = RequestChecker(STD)

    def respond(_outcome, _is_last):
        return None

    first, second = (checker.check(request({"X": ints(rows, 2)}), respond=respond) for rows in (1, 3))
    assert (first.rows, second.rows, first.respond) == (1, 3, respond)
    assert first.cancellation is not second.cancellation


@pytest.mark.parametrize("array", [np.array([b"a", "b"], dtype=object), np.array(["a", "b"]), np.array([b"a", b"b"])])
def test_strings_in_all_of_numpys_forms_become_bytes(array):
    assert bytes_array(array).tolist() == [b"a", b"b"]


def test_object_array_of_anything_else_is_no_bytes_tensor():
    with pytest.raises(TypeError, match="int, not bytes or str"):
        bytes_array(np.array([b"a", 1], dtype=object))
    with pytest.raises(InferenceError, match="input 'X': an element of a BYTES tensor is int"):
        check(request({"X": np.array([[1]], dtype=object), "Z": floats(1, 1)}), TWO)
