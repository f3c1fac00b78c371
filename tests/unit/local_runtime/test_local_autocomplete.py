import shutil

import pytest

from local_runtime.errors import ModelLoadError
from local_runtime.repository.model_config import Backend, DynamicBatching
from local_runtime.repository.reader import read_model

EMBEDDED = """
name: "another name" max_batch_size: 3
input [ { name: "A" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def linear():
    import torch  # noqa: PLC0415 - only the tests that need it pay for it

    return torch.nn.Linear(3, 2).eval()


@pytest.fixture
def version(repository):
    folder = repository / "m" / "1"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def save_script(version):
    import torch  # noqa: PLC0415 - as above

    def save(embedded=None):
        module = type("Same", (torch.jit.ScriptModule,), {})()
        module.define("def forward(self, input): return input\n")
        module.save(str(version / "model.pt"), _extra_files={"config.pbtxt": embedded} if embedded else {})

    return save


@pytest.fixture
def save_export(version):
    import torch  # noqa: PLC0415 - as above

    def save(*, free):
        shapes = ({0: torch.export.Dim("batch")},) if free else None
        program = torch.export.export(linear(), (torch.zeros(4, 3),), dynamic_shapes=shapes)
        torch.export.save(program, version / "model.pt2")

    return save


def tensors(specs):
    return [(spec.name, spec.datatype, spec.dims, spec.reshape) for spec in specs]


def test_torchscript_is_completed_from_the_config_inside_the_file(repository, save_script):
    save_script(EMBEDDED)
    config = read_model(repository, "m").config
    assert (config.name, config.backend, config.max_batch_size) == ("m", Backend.PYTORCH, 3)
    assert tensors(config.inputs) == [("A", "FP32", (3,), None)]
    assert tensors(config.outputs) == [("B", "FP32", (2,), None)]


def test_torchscript_with_half_a_config_gets_the_other_half(repository, version, save_script):
    save_script(EMBEDDED)
    own = 'max_batch_size: 8 input [ { name: "OWN" data_type: TYPE_FP32 dims: [ 3 ] } ]'
    (version.parent / "config.pbtxt").write_text(own)
    config = read_model(repository, "m").config
    assert (config.max_batch_size, config.inputs[0].name, config.outputs[0].name) == (8, "OWN", "B")


def test_what_the_config_says_wins_over_the_file(repository, version, save_script):
    save_script(EMBEDDED + "instance_group [ { count: 2 } ]")
    (version.parent / "config.pbtxt").write_text("max_batch_size: 8 instance_group [ { count: 5 } ]")
    config = read_model(repository, "m").config
    assert (config.max_batch_size, [group.count for group in config.instance_groups]) == (8, [5])


def test_torchscript_without_a_config_inside_is_refused_by_what_it_lacks(repository, save_script):
    save_script()
    with pytest.raises(ModelLoadError) as refused:
        read_model(repository, "m")
    assert str(refused.value) == (
        "m/1/model.pt takes 1 inputs (input), but TorchScript does not keep their datatypes and shapes: write a "
        "config.pbtxt, or save one inside the file (_extra_files of torch.jit.save)"
    )


def test_exported_program_with_a_free_first_dimension_batches(repository, save_export):
    save_export(free=True)
    source = read_model(repository, "m")
    config = source.config
    assert (source.file("1").name, config.backend, config.max_batch_size) == ("model.pt2", Backend.PYTORCH, 4)
    assert config.dynamic_batching == DynamicBatching()
    assert tensors(config.inputs) == [("input", "FP32", (3,), None)]
    assert tensors(config.outputs) == [("OUTPUT__0", "FP32", (2,), None)]


def test_exported_program_with_fixed_shapes_does_not_batch(repository, save_export):
    save_export(free=False)
    config = read_model(repository, "m").config
    assert (config.max_batch_size, config.dynamic_batching) == (0, None)
    assert tensors(config.inputs) == [("input", "FP32", (4, 3), None)]


def test_batching_that_the_file_cannot_do_is_refused(repository, version, save_export):
    save_export(free=False)
    (version.parent / "config.pbtxt").write_text("max_batch_size: 2")
    with pytest.raises(ModelLoadError, match="does not support batching while non-zero max_batch_size is specified"):
        read_model(repository, "m")


def test_script_wins_over_export_and_the_config_over_both(repository, version, save_script, save_export):
    save_script(EMBEDDED)
    save_export(free=True)
    assert read_model(repository, "m").file("1").name == "model.pt"
    (version.parent / "config.pbtxt").write_text('default_model_filename: "model.pt2" backend: "pytorch"')
    assert read_model(repository, "m").file("1").name == "model.pt2"


@pytest.mark.parametrize("name", ["model.pt", "model.pt2", "model.onnx"])
def test_file_that_cannot_be_read_is_the_reason(repository, version, name):
    (version / name).write_bytes(b"nonsense")
    if name == "model.onnx":
        pytest.importorskip("onnxruntime")
    with pytest.raises(ModelLoadError, match=f"failed to read m/1/{name}: "):
        read_model(repository, "m")


class Session:
    """As onnxruntime describes a model."""

    class Tensor:
        def __init__(self, name, kind, shape):
            self.name, self.type, self.shape = name, kind, shape

    def __init__(self, inputs, outputs):
        self.inputs, self.outputs = inputs, outputs

    def get_inputs(self):
        return self.inputs

    def get_outputs(self):
        return self.outputs


@pytest.fixture
def onnx(version, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    (version / "model.onnx").write_bytes(b"")

    def describe(inputs, outputs):
        session = Session([Session.Tensor(*entry) for entry in inputs], [Session.Tensor(*entry) for entry in outputs])
        monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: session)

    return describe


def test_a_real_onnx_file(repository, version):
    datasets = pytest.importorskip("onnxruntime.datasets")
    shutil.copy(datasets.get_example("sigmoid.onnx"), version / "model.onnx")
    config = read_model(repository, "m").config
    assert (config.backend, config.max_batch_size) == (Backend.ONNXRUNTIME, 0)
    assert tensors(config.inputs) == [("x", "FP32", (3, 4, 5), None)]
    assert tensors(config.outputs) == [("y", "FP32", (3, 4, 5), None)]


def test_onnx_names_types_and_shapes(repository, onnx):
    onnx(
        [("ids", "tensor(int64)", ["batch", "length"]), ("scale", "tensor(float16)", ["batch"])],
        [("text", "tensor(string)", [None, 3])],
    )
    config = read_model(repository, "m").config
    assert (config.backend, config.max_batch_size, config.dynamic_batching) == (
        Backend.ONNXRUNTIME,
        4,
        DynamicBatching(),
    )
    assert tensors(config.inputs) == [("ids", "INT64", (-1,), None), ("scale", "FP16", (1,), ())]
    assert tensors(config.outputs) == [("text", "BYTES", (3,), None)]


def test_onnx_where_one_first_dimension_is_fixed_does_not_batch(repository, onnx):
    onnx([("a", "tensor(float)", ["batch", 2])], [("b", "tensor(double)", [1, 2])])
    config = read_model(repository, "m").config
    assert (config.max_batch_size, config.dynamic_batching) == (0, None)
    assert (config.inputs[0].dims, config.outputs[0].dims) == ((-1, 2), (1, 2))


def test_onnx_type_that_no_config_knows_is_refused(repository, onnx):
    onnx([("a", "seq(tensor(float))", [])], [("b", "tensor(float)", [1])])
    with pytest.raises(ModelLoadError, match=r"m/1/model.onnx: 'a' is a seq\(tensor\(float\)\)"):
        read_model(repository, "m")
