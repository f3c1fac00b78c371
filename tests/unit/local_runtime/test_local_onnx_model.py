"""ONNX models, written here byte by byte (protobuf wire format, onnx/onnx.proto) since nothing else needs `onnx`."""

import sys
import types
import warnings

import numpy as np
import pytest

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.executors.onnx_model import OnnxModel
from local_runtime.messages import InferRequest
from local_runtime.repository.completion import Placement, place
from local_runtime.repository.model_config import NUMPY_TYPES, InstanceKind
from local_runtime.repository.parsing import parse
from local_runtime.scheduling.validation import CheckedRequest, RequestChecker

onnxruntime = pytest.importorskip("onnxruntime")

# TensorProto.DataType
NUMBERS = {
    "FP32": 1, "UINT8": 2, "INT8": 3, "UINT16": 4, "INT16": 5, "INT32": 6, "INT64": 7, "BYTES": 8, "BOOL": 9,
    "FP16": 10, "FP64": 11, "UINT32": 12, "UINT64": 13, "BF16": 16,
}  # fmt: skip


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(name, datatype, dims=2):
    shape = field(1, field(2, "batch")) + field(1, field(1, dims))
    return field(1, name) + field(2, field(1, field(1, NUMBERS[datatype]) + field(2, shape)))


def node(operation, inputs, output):
    return b"".join(field(1, name) for name in inputs) + field(2, output) + field(4, operation)


def model_of(nodes, inputs, outputs):
    graph = b"".join(field(1, one) for one in nodes) + field(2, "graph")
    graph += b"".join(field(11, one) for one in inputs) + b"".join(field(12, one) for one in outputs)
    return field(1, 8) + field(8, field(2, 17)) + field(7, graph)


def add(datatype="FP32"):
    return model_of(
        [node("Add", ["A", "B"], "SUM"), node("Sub", ["A", "B"], "DIFFERENCE")],
        [tensor("A", datatype), tensor("B", datatype)],
        [tensor("DIFFERENCE", datatype), tensor("SUM", datatype)],
    )


def identity(datatype):
    return model_of([node("Identity", ["X"], "Y")], [tensor("X", datatype)], [tensor("Y", datatype)])


def config(inputs="A B", outputs="SUM DIFFERENCE", *, datatype="FP32", max_batch=8):
    word = "STRING" if datatype == "BYTES" else datatype
    tensors = " ".join(
        f'{kind} [ {{ name: "{name}" data_type: TYPE_{word} dims: [ 2 ] }} ]'
        for kind, names in (("input", inputs), ("output", outputs))
        for name in names.split()
    )
    return parse(
        f'platform: "onnxruntime_onnx" max_batch_size: {max_batch} {tensors} instance_group [ {{ kind: KIND_CPU }} ]',
        folder_name="add",
    )


@pytest.fixture
def load(tmp_path):
    def load_model(model_config, content):
        file = tmp_path / "model.onnx"
        file.write_bytes(content)
        return OnnxModel(config=model_config, file=file, placement=place(model_config, cuda_devices=0)[0], threads=1)

    return load_model


def request_of(model_config, outputs=(), **arrays):
    return RequestChecker(model_config).check(InferRequest(model="add", inputs=arrays, outputs=outputs))


def rows_of(value, rows=1):
    return np.full((rows, 2), value, np.float32)


def test_members_run_as_one_batch_and_get_their_own_rows(load):
    model_config = config()
    model = load(model_config, add())
    executed = model.execute(
        [
            request_of(model_config, A=rows_of(5, 2), B=rows_of(3, 2)),
            request_of(model_config, ("SUM",), A=rows_of(1), B=rows_of(1)),
        ]
    )
    first, second = executed.outcomes
    assert {name: array.tolist() for name, array in first.items()} == {
        "SUM": [[8, 8]] * 2,
        "DIFFERENCE": [[2, 2]] * 2,
    }
    assert {name: array.tolist() for name, array in second.items()} == {"SUM": [[2, 2]]}
    assert executed.compute.total_us > 0
    model.close()


@pytest.mark.parametrize("datatype", [name for name in NUMPY_TYPES if name not in {"BYTES", "BF16"}])
def test_every_datatype_goes_in_and_out_unchanged(load, datatype):
    model_config = config("X", "Y", datatype=datatype)
    array = np.array([[0, 1]]).astype(NUMPY_TYPES[datatype])
    (outcome,) = load(model_config, identity(datatype)).execute([request_of(model_config, X=array)]).outcomes
    assert (outcome["Y"].dtype, outcome["Y"].tolist()) == (array.dtype, array.tolist())


def test_strings_are_text_and_one_that_is_not_fails_alone(load):
    model_config = config("X", "Y", datatype="BYTES")
    members = [
        request_of(model_config, X=np.array([list(texts)], dtype=object))
        for texts in ([b"a", "ü".encode()], [b"\xff", b""])
    ]
    good, bad = load(model_config, identity("BYTES")).execute(members).outcomes
    assert good["Y"].tolist() == [[b"a", "ü".encode()]]
    assert isinstance(bad, InferenceError)
    assert bad.code is ErrorCode.INVALID_ARG
    assert "UTF-8" in bad.message


def test_without_batch_dimension_members_run_one_at_a_time(load):
    model_config = parse(
        """platform: "onnxruntime_onnx"
        input [ { name: "X" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
        output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
        instance_group [ { kind: KIND_CPU } ]""",
        folder_name="add",
    )
    members = [request_of(model_config, X=rows_of(value, value)) for value in (1, 2)]
    outcomes = load(model_config, identity("FP32")).execute(members).outcomes
    assert [outcome["Y"].shape for outcome in outcomes] == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("model_config", "content", "reason"),
    [
        (config("A Z"), add(), "unexpected inference input 'Z', allowed inputs are: A, B"),
        (config(outputs="SUM Q"), add(), "unexpected inference output 'Q', allowed outputs are: DIFFERENCE, SUM"),
        (
            config(datatype="INT32"),
            add(),
            "configuration expects datatype TYPE_INT32 for input 'A', model provides TYPE_FP32",
        ),
        (config("X", "Y"), identity("BF16"), r"tensor\(bfloat16\) of input 'X' .* is not supported"),
        (config(), b"junk", "failed to load model 'add': "),
    ],
)
def test_refused_at_load(load, model_config, content, reason):
    with pytest.raises(ModelLoadError, match=reason):
        load(model_config, content)


def test_without_the_package_the_reason_is_told(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelLoadError, match="model 'add' needs the package onnxruntime, which is absent"):
        load(config(), add())


def test_an_answer_is_memory_of_its_own(load):
    model_config = config("X", "X Y")
    content = model_of(
        [node("Identity", ["X"], "Y")], [tensor("X", "FP32")], [tensor("X", "FP32"), tensor("Y", "FP32")]
    )
    (outcome,) = load(model_config, content).execute([request_of(model_config, X=rows_of(1))]).outcomes
    # A view of the batch's own copy: onnxruntime's memory would be held by an object that is no array.
    assert [array.base.flags.owndata for array in outcome.values()] == [True, True]


SEQUENCE = """sequence_batching {
    state [ { input_name: "B" output_name: "SUM" data_type: TYPE_FP32 dims: [ -1 ] } ]
}"""


def sequence_member(state):
    inputs = {"A": np.ones((1, len(state)), np.float32), "B": np.array([state], np.float32)}
    source = InferRequest(model="add", inputs={})
    return CheckedRequest(source=source, inputs=inputs, rows=1, batch_key=(), outputs=("DIFFERENCE", "SUM"))


@pytest.mark.parametrize(
    ("states", "text", "batches"),
    [
        (([1, 2], [3, 4]), "onnx runtime error: broken", [2]),
        (
            ([1, 2], [3]),
            (
                "model 'add' cannot run sequences together whose state 'B' has the shapes [1, 1] and [1, 2]: a state "
                "that grows needs max_batch_size 1"
            ),
            [],
        ),
    ],
)
def test_sequences_fail_together_since_their_row_is_their_place(load, states, text, batches):
    model_config = parse(str(config("A", "DIFFERENCE").message) + SEQUENCE, folder_name="add")
    model = load(model_config, add())
    ran = []

    def run(names, inputs):
        ran.append(len(inputs["A"]))
        raise RuntimeError("broken")

    model._session = types.SimpleNamespace(run=run)
    outcomes = model.execute([sequence_member(state) for state in states]).outcomes
    assert ([outcome.message for outcome in outcomes], ran) == ([text] * 2, batches)


@pytest.mark.parametrize("available", [["CPUExecutionProvider"], ["CUDAExecutionProvider", "CPUExecutionProvider"]])
def test_a_gpu_that_onnxruntime_cannot_use_is_never_replaced_by_the_cpu(tmp_path, monkeypatch, available):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    (tmp_path / "model.onnx").write_bytes(add())
    placement = Placement(name="add_0", kind=InstanceKind.GPU, device_id=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnxruntime's own, of a provider that it does not have
        with pytest.raises(
            ModelLoadError, match="model 'add' is to run on a GPU, but onnxruntime cannot use CUDA here"
        ):
            OnnxModel(config=config(), file=tmp_path / "model.onnx", placement=placement, threads=1)


def test_warnings_of_onnxruntime_are_not_printed(load, tmp_path, capfd):
    # An initializer that no node uses: onnxruntime warns that it removes it.
    unused = field(1, 2) + field(2, 1) + field(8, "unused") + field(9, np.zeros(2, np.float32).tobytes())
    graph = field(1, node("Identity", ["X"], "Y")) + field(2, "graph") + field(5, unused)
    graph += field(11, tensor("X", "FP32")) + field(12, tensor("Y", "FP32"))
    content = field(1, 8) + field(8, field(2, 17)) + field(7, graph)
    (tmp_path / "model.onnx").write_bytes(content)
    onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert "unused" in capfd.readouterr().err
    load(config("X", "Y"), content)
    assert capfd.readouterr().err == ""
