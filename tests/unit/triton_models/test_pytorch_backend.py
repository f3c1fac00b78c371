import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from .conftest import Logger, Request

SOURCE = Path(__file__).resolve().parents[3] / "deploy/triton/backends/pytorch/model.py"


class Mixer(torch.nn.Module):
    """Counts its calls through the second output; an index of 99 is out of the table's range."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 4).requires_grad_(requires_grad=False)

    def forward(self, ids, scale):
        rows = torch.full_like(scale, 1.0) * scale.shape[0]
        return self.table(ids).sum(1) * scale, rows


CONFIG = """
name: "mixer"
platform: "pytorch_libtorch"
max_batch_size: 8
input [ { name: "SCALE__1" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "IDS__0" data_type: TYPE_INT64 dims: [ 2 ] } ]
output [ { name: "ROWS__1" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "SUM__0" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mixer"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    example = (torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch advises torch.export
        torch.jit.trace(Mixer(), example).save(str(folder / "1/model.pt"))
    return folder


def request(*ids: tuple[int, int], scale: float = 1.0) -> Request:
    return Request({"IDS__0": np.array(ids, np.int64), "SCALE__1": np.full((len(ids), 1), scale, np.float32)})


def test_the_requests_of_a_batch_are_one_forward_pass(load, folder: Path):
    model = load(SOURCE, folder)
    batch = [request((1, 2)), request((3, 4), (5, 6), scale=2.0), request((7, 8))]
    responses = model.execute(batch)
    assert [response.array("ROWS__1").ravel().tolist() for response in responses] == [[4], [4, 4], [4]]
    for response, part in zip(responses, batch, strict=True):
        [alone] = model.execute([part])
        assert np.allclose(response.array("SUM__0"), alone.array("SUM__0"))


def test_a_request_that_breaks_the_model_fails_alone(load, folder: Path):
    model = load(SOURCE, folder)
    first, bad, last = model.execute([request((1, 2)), request((99, 0)), request((3, 4))])
    assert (str(bad.error), bad.error.code) == ("mixer: the model failed on this request", "INTERNAL")
    assert first.array("SUM__0").shape == last.array("SUM__0").shape == (1, 4)
    assert "index out of range" in Logger.errors[-1]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (('"SUM__0" data_type: TYPE_FP32', '"SUM__0" data_type: TYPE_INT32'), "gave float32 for 'SUM__0'"),
        (("ROWS__1", "ROWS__2"), "gave 2 outputs, none for 'ROWS__2'"),
    ],
    ids=["type", "count"],
)
def test_an_answer_that_breaks_the_configuration_is_an_error(load, folder: Path, change, fault: str):
    (folder / "config.pbtxt").write_text(CONFIG.replace(*change))
    [response] = load(SOURCE, folder).execute([request((1, 2))])
    assert response.error.code == "INTERNAL"
    assert str(response.error).startswith(f"mixer: {fault}")


def test_a_model_without_batching_gets_each_request_alone(load, folder: Path):
    (folder / "config.pbtxt").write_text(CONFIG.replace("max_batch_size: 8", "max_batch_size: 0"))
    responses = load(SOURCE, folder).execute([request((1, 2)), request((3, 4), (5, 6))])
    assert [response.array("ROWS__1").ravel().tolist() for response in responses] == [[1], [2, 2]]


def test_inputs_may_bear_the_names_of_the_arguments(load, folder: Path):
    (folder / "config.pbtxt").write_text(CONFIG.replace("SCALE__1", "scale").replace("IDS__0", "ids"))
    named = Request({"ids": np.array([[1, 2]], np.int64), "scale": np.ones((1, 1), np.float32)})
    [response] = load(SOURCE, folder).execute([named])
    assert response.array("SUM__0").shape == (1, 4)


def test_a_name_without_a_position_is_refused_at_load(load, folder: Path):
    (folder / "config.pbtxt").write_text(CONFIG.replace("SUM__0", "SUM"))
    with pytest.raises(ValueError, match="naming convention <name>__<index>"):
        load(SOURCE, folder)


@pytest.mark.parametrize(("parameter", "variable", "threads"), [("3", "5", 3), ("", "2", 2)])
def test_threads_come_from_the_model_before_the_environment(load, folder, monkeypatch, parameter, variable, threads):
    monkeypatch.setenv("PYTORCH_INTRA_OP_THREAD_COUNT", variable)
    before = torch.get_num_threads()
    try:
        load(SOURCE, folder, **({"INTRA_OP_THREAD_COUNT": parameter} if parameter else {}))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
