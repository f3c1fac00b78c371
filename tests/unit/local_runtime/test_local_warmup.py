import dataclasses
import os

import numpy as np
import pytest

from local_runtime.errors import ModelLoadError
from local_runtime.executors.warmup import warmup_batches
from local_runtime.repository.model_config import Warmup, WarmupData, WarmupInput
from local_runtime.repository.parsing import parse

CONFIG = """backend: "python" max_batch_size: 8
    input [ { name: "X" data_type: TYPE_INT32 dims: [ -1 ] } ]
    output [ { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] } ]
    instance_group [ { kind: KIND_CPU } ]"""
SEQUENCE = """sequence_batching {
    control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
                    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] } ]
    state [ { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 2 ] } ]
}"""


def entry(data=WarmupData.ZERO, *, name="X", datatype="INT32", dims=(2,), file=""):
    return WarmupInput(name=name, datatype=datatype, dims=dims, data=data, file=file)


def batches(tmp_path, *inputs, text=CONFIG, batch_size=2, count=1):
    config = dataclasses.replace(
        parse(text, folder_name="m"),
        warmups=(Warmup(name="w", batch_size=batch_size, inputs=inputs, count=count),),
    )
    return warmup_batches(config, tmp_path)


def values(tmp_path, one, text=CONFIG):
    ((members, _),) = batches(tmp_path, one, text=text)
    return members[0].inputs["X"]


def test_a_batch_of_equal_requests_of_one_row_to_be_run_so_often(tmp_path):
    ((members, count),) = batches(tmp_path, entry(), batch_size=4, count=3)
    assert (count, len(members)) == (3, 4)
    for request in members:
        assert (request.rows, request.outputs, request.respond, request.source.model) == (1, ("Y",), None, "m")
        assert request.inputs["X"].tolist() == [[0, 0]]


def test_no_warmup_no_batches(tmp_path):
    assert list(warmup_batches(parse(CONFIG, folder_name="m"), tmp_path)) == []


@pytest.mark.parametrize("datatype", ["INT32", "FP32", "BOOL", "FP16", "BF16", "UINT8"])
def test_random_values_are_the_same_every_time(tmp_path, datatype):
    text = CONFIG.replace("TYPE_INT32", f"TYPE_{datatype}")
    first, second = (
        values(tmp_path, entry(WarmupData.RANDOM, datatype=datatype, dims=(64,)), text=text) for _ in range(2)
    )
    assert first.tolist() == second.tolist()
    assert len(set(first[0].tolist())) > 1


@pytest.mark.parametrize("data", [WarmupData.ZERO, WarmupData.RANDOM])
def test_strings(tmp_path, data):
    text = CONFIG.replace("TYPE_INT32", "TYPE_STRING")
    array = values(tmp_path, entry(data, datatype="BYTES"), text=text)
    assert array.shape == (1, 2)
    assert {type(item) for item in array.reshape(-1)} == {bytes}


def test_values_of_a_file(tmp_path):
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "raw").write_bytes(np.array([7, 8], "<i4").tobytes())
    assert values(tmp_path, entry(WarmupData.FILE, file="raw")).tolist() == [[7, 8]]


def test_strings_of_a_file_are_serialized(tmp_path):
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "raw").write_bytes(b"\x02\0\0\0ab\0\0\0\0")
    text = CONFIG.replace("TYPE_INT32", "TYPE_STRING")
    array = values(tmp_path, entry(WarmupData.FILE, datatype="BYTES", file="raw"), text=text)
    assert array.tolist() == [[b"ab", b""]]


@pytest.mark.parametrize(
    ("datatype", "content", "reason"),
    [
        ("INT32", None, "warm-up 'w' of model 'm' cannot read warmup/raw: No such file or directory"),
        ("INT32", b"1234", "warmup/raw does not hold 2 elements of INT32"),
        ("INT32", b"123", "warmup/raw does not hold 2 elements of INT32"),
        ("BYTES", b"\x02\0\0\0ab", "warmup/raw does not hold 2 elements of BYTES"),
        ("BYTES", b"\x02\0\0\0ab\x09\0\0\0", "warmup/raw does not hold 2 elements of BYTES"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, datatype, content, reason):
    (tmp_path / "warmup").mkdir()
    if content is not None:
        (tmp_path / "warmup" / "raw").write_bytes(content)
    text = CONFIG.replace("TYPE_INT32", "TYPE_STRING" if datatype == "BYTES" else "TYPE_INT32")
    with pytest.raises(ModelLoadError, match=reason):
        batches(tmp_path, entry(WarmupData.FILE, datatype=datatype, file="raw"), text=text)


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (entry(datatype="FP32"), "warm-up 'w' of model 'm'.* data-type is 'FP32'"),
        (entry(name="Z"), "missing required input"),
    ],
)
def test_inputs_that_the_model_does_not_take(tmp_path, one, reason):
    with pytest.raises(ModelLoadError, match=reason):
        batches(tmp_path, one)


def test_the_model_sees_its_own_shape(tmp_path):
    text = CONFIG.replace(
        '"X" data_type: TYPE_INT32 dims: [ -1 ]', '"X" data_type: TYPE_INT32 dims: [ 4 ] reshape { shape: [ 2, 2 ] }'
    )
    assert values(tmp_path, entry(dims=(4,)), text=text).shape == (1, 2, 2)


def test_a_sequence_model_gets_the_controls_of_a_whole_sequence_unless_they_are_given(tmp_path):
    given = entry(WarmupData.ZERO, name="READY", dims=(1,))
    (((request, *others), _),) = batches(tmp_path, entry(), given, text=CONFIG + SEQUENCE, batch_size=3)
    assert {name: array.tolist() for name, array in request.inputs.items()} == {
        "X": [[0, 0]],
        "START": [[1]],
        "READY": [[0]],
        "S": [[0, 0]],
    }
    assert (len(others), request.rows, request.outputs) == (2, 1, ("Y", "T"))


def test_a_decoupled_model_answers_into_nothing(tmp_path):
    (((request, *_), _),) = batches(tmp_path, entry(), text=CONFIG + "model_transaction_policy { decoupled: true }")
    assert request.respond(None, True) is None


def test_without_batch_dimension(tmp_path):
    text = CONFIG.replace("max_batch_size: 8", "max_batch_size: 0")
    (((request,), _),) = batches(tmp_path, entry(), text=text, batch_size=1)
    assert (request.rows, request.inputs["X"].tolist()) == (1, [0, 0])


@pytest.mark.parametrize("dims", [(10**14,), (2**40, 2**40), (2**62, 2**62)])
@pytest.mark.parametrize("data", [WarmupData.ZERO, WarmupData.RANDOM])
def test_values_that_do_not_fit_into_memory_are_a_failed_load(tmp_path, dims, data):
    text = CONFIG.replace("dims: [ -1 ]", "dims: [ -1, -1 ]" if len(dims) > 1 else "dims: [ -1 ]")
    with pytest.raises(ModelLoadError, match="warm-up 'w' of model 'm' cannot be made: "):
        batches(tmp_path, entry(data, dims=dims), text=text)


@pytest.mark.parametrize("file", ["../secret", "{}/warmup/raw"])
def test_files_outside_of_the_models_folder_are_not_read(tmp_path, file):
    (tmp_path / "warmup").mkdir()
    for path in ("warmup/raw", "secret"):
        (tmp_path / path).write_bytes(np.array([7, 8], "<i4").tobytes())
    with pytest.raises(
        ModelLoadError, match=r"warm-up 'w' of model 'm': the file .* lies outside of the model's folder"
    ):
        values(tmp_path, entry(WarmupData.FILE, file=file.format(tmp_path)))


def test_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "warmup").mkdir()
    os.mkfifo(tmp_path / "warmup" / "raw")
    with pytest.raises(ModelLoadError, match="cannot read warmup/raw: not a file"):
        values(tmp_path, entry(WarmupData.FILE, file="raw"))
