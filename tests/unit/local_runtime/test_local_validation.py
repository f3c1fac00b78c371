import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import InferRequest
from local_runtime.repository.model_config import parse
from local_runtime.scheduling.validation import check, check_outputs

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
