from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from .conftest import Logger, Request

SOURCE = Path(__file__).resolve().parents[3] / "deploy/triton/backends/onnxruntime/model.py"
CONFIG = """
name: "table"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "SCALE" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "IDS" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "ROW" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table of ten rows [i, -i], looked up by IDS and multiplied by SCALE; another index fails."""
    folder = tmp_path / "table"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    table = helper.make_tensor("table", TensorProto.FLOAT, [10, 2], [v for i in range(10) for v in (i, -i)])
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    nodes = [
        helper.make_node("Squeeze", ["IDS", "axis"], ["flat"]),
        helper.make_node("Gather", ["table", "flat"], ["rows"], axis=0),
        helper.make_node("Mul", ["rows", "SCALE"], ["ROW"]),
    ]
    inputs = [
        helper.make_tensor_value_info("IDS", TensorProto.INT64, ["N", 1]),
        helper.make_tensor_value_info("SCALE", TensorProto.FLOAT, ["N", 1]),
    ]
    outputs = [helper.make_tensor_value_info("ROW", TensorProto.FLOAT, ["N", 2])]
    graph = helper.make_graph(nodes, "table", inputs, outputs, [table, axis])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "1/model.onnx"
    )
    return folder


def request(*ids: int, scale: float = 1.0) -> Request:
    return Request({"IDS": np.array(ids, np.int64)[:, None], "SCALE": np.full((len(ids), 1), scale, np.float32)})


def rows(response) -> list[list[float]]:
    return response.array("ROW").tolist()


def test_the_requests_of_a_batch_each_get_their_rows(load, folder: Path):
    first, second = load(SOURCE, folder).execute([request(1, 2), request(3, scale=2)])
    assert rows(first) == [[1, -1], [2, -2]]
    assert rows(second) == [[6, -6]]


def test_a_request_that_breaks_the_model_fails_alone(load, folder: Path):
    first, bad, last = load(SOURCE, folder).execute([request(1), request(99), request(3)])
    assert (str(bad.error), bad.error.code) == ("table: the model failed on this request", "INTERNAL")
    assert (rows(first), rows(last)) == ([[1, -1]], [[3, -3]])
    assert "99" in Logger.errors[-1] or "out of" in Logger.errors[-1]


def test_a_model_without_batching_gets_each_request_alone(load, folder: Path):
    (folder / "config.pbtxt").write_text(CONFIG.replace("max_batch_size: 8", "max_batch_size: 0"))
    first, second = load(SOURCE, folder).execute([request(1, 2), request(4)])
    assert (rows(first), rows(second)) == ([[1, -1], [2, -2]], [[4, -4]])


@pytest.mark.parametrize("name", ["SCALE", "ROW"])
def test_a_name_that_the_file_lacks_is_refused_at_load(load, folder: Path, name: str):
    (folder / "config.pbtxt").write_text(CONFIG.replace(f'"{name}"', '"OTHER"'))
    with pytest.raises(ValueError, match="the file has no tensor 'OTHER', but "):
        load(SOURCE, folder)


def test_texts_go_in_and_come_out(load, folder: Path):
    text = helper.make_tensor_value_info("TEXT", TensorProto.STRING, ["N"])
    same = helper.make_tensor_value_info("SAME", TensorProto.STRING, ["N"])
    graph = helper.make_graph([helper.make_node("Identity", ["TEXT"], ["SAME"])], "echo", [text], [same])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "1/model.onnx"
    )
    tensors = 'name: "{}" data_type: TYPE_STRING dims: [ -1 ]'
    (folder / "config.pbtxt").write_text(
        f'name: "echo" input [ {{ {tensors.format("TEXT")} }} ] output [ {{ {tensors.format("SAME")} }} ]'
    )
    [response] = load(SOURCE, folder).execute([Request({"TEXT": np.array(["é€".encode(), b""], object)})])
    assert response.array("SAME").tolist() == ["é€", ""]


def test_threads_are_the_models_own(load, folder: Path):
    model = load(SOURCE, folder, intra_op_thread_count="3", inter_op_thread_count="2")
    options = model._session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
