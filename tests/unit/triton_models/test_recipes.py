"""The recipes' configs, and what the exporter refuses (tests/parity/test_recipes.py runs what it makes)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from gateway.cli.check_models import examined, findings
from tests.kit import tiny_networks
from triton_models import export, exportable

RECIPES = export.RECIPES
NAMES = sorted(folder.name for folder in RECIPES.iterdir())


def read(path: Path) -> ModelConfig:
    return text_format.Parse(path.read_text(), ModelConfig())


# --- the recipes ---------------------------------------------------------------------------------


def test_every_recipe_has_a_config_and_says_how():
    assert NAMES == ["bert_base", "clip_image", "llm_vllm", "resnet50", "whisper", "whisper_decoder", "whisper_encoder"]
    for name in NAMES:
        assert read(RECIPES / name / "config.pbtxt").name == name
        text = (RECIPES / name / "README.md").read_text()
        if name not in ("llm_vllm", "whisper_decoder", "whisper_encoder"):
            assert "python -m triton_models.export" in text
    assert {finding.severity for finding in findings(examined(RECIPES))} == {"warning", "note"}


@pytest.mark.parametrize(("file", "kind"), [("config.pbtxt", "KIND_CPU"), ("configs/gpu.pbtxt", "KIND_GPU")])
def test_bert_base(file: str, kind: str):
    config = read(RECIPES / "bert_base" / file)
    assert config.platform == "onnxruntime_onnx"
    [group] = config.instance_group
    assert (group.count, ModelInstanceGroup.Kind.Name(group.kind)) == (2, kind)
    assert list(config.dynamic_batching.preferred_batch_size) == [8, 16, 32]
    assert config.dynamic_batching.max_queue_delay_microseconds == 1000


def test_the_two_configs_of_bert_base_differ_in_the_instances_alone():
    cpu, gpu = (read(RECIPES / "bert_base" / file) for file in ("config.pbtxt", "configs/gpu.pbtxt"))
    for config in (cpu, gpu):
        config.ClearField("instance_group")
    assert cpu == gpu


def test_clip_image():
    config = read(RECIPES / "clip_image" / "config.pbtxt")
    assert list(config.input[0].dims) == [3, 224, 224]
    assert list(config.output[0].dims) == [512]
    assert config.dynamic_batching.max_queue_delay_microseconds == 5000


def test_llm_vllm():
    config = read(RECIPES / "llm_vllm" / "config.pbtxt")
    assert config.backend == "vllm"
    assert config.model_transaction_policy.decoupled
    assert config.WhichOneof("scheduling_choice") is None
    assert config.max_batch_size == 0
    assert json.loads((RECIPES / "llm_vllm" / "1" / "model.json").read_text())["gpu_memory_utilization"] == 0.85


# --- the exporter --------------------------------------------------------------------------------


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert export.main(arguments) == 1
    return " ".join(capsys.readouterr().err.split())


def test_the_exporter_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, repository = tmp_path / "model", tmp_path / "repository"
    target = ["--to", str(repository / "m")]
    assert "make the model repository first" in refused(["bert", "--from", str(model), *target], capsys)
    repository.mkdir()
    assert "model does not exist" in refused(["bert", "--from", str(model), *target], capsys)
    model.mkdir()
    assert "config.json cannot be read" in refused(["bert", "--from", str(model), *target], capsys)
    (model / "config.json").write_text('{"model_type": "roberta"}')
    assert "of the type 'roberta', this recipe takes 'bert'" in refused(["bert", "--from", str(model), *target], capsys)
    weights = tmp_path / "weights.pth"
    torch.save({"fc.weight": torch.zeros(10, 2048)}, weights)
    assert "does not fit ResNet-50" in refused(["resnet50", "--from", str(weights), *target], capsys)
    torch.save({"classifier": torch.zeros(1)}, weights)
    assert "no 'fc.weight'" in refused(["resnet50", "--from", str(weights), *target], capsys)
    weights.write_text("no weights")
    assert "cannot be read as a state dict" in refused(["resnet50", "--from", str(weights), *target], capsys)
    assert "a state dict ends in" in refused(["resnet50", "--from", str(model / "config.json"), *target], capsys)
    assert list(repository.iterdir()) == []


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tiny_networks.save(tmp_path / "bert", "bert")
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - after HF_HUB_OFFLINE is set

    file = tmp_path / "bert" / "model.safetensors"
    state = {name: tensor for name, tensor in load_file(file).items() if "pooler" not in name}
    save_file(state, file, metadata={"format": "pt"})
    words = refused(["bert", "--from", str(tmp_path / "bert"), "--to", str(tmp_path / "m")], capsys)
    assert "lacks weights of BertModel: pooler.dense.bias, pooler.dense.weight" in words


def test_a_version_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "repository" / "m" / "1").mkdir(parents=True)
    tiny_networks.save(tmp_path / "clip", "clip")
    target = str(tmp_path / "repository" / "m")
    words = refused(["clip", "--from", str(tmp_path / "clip"), "--to", target], capsys)
    assert words.endswith("m/1 exists: remove it, or give another --version")
    assert list(tmp_path.glob("**/*.onnx")) == []


def test_a_second_version_leaves_the_config_and_the_first(tmp_path: Path):
    tiny_networks.save(tmp_path / "resnet", "resnet50")
    (tmp_path / "repository").mkdir()
    folder = tmp_path / "repository" / "mine"
    command = ["resnet50", "--from", str(tmp_path / "resnet"), "--to", str(folder)]
    assert export.main(command) == 0
    config = read(folder / "config.pbtxt")
    assert (config.name, list(config.output[0].dims)) == ("mine", [10])
    (folder / "config.pbtxt").write_text("# tuned by hand\n" + (folder / "config.pbtxt").read_text())
    assert export.main([*command, "--version", "2"]) == 0
    assert (folder / "config.pbtxt").read_text().startswith("# tuned by hand")
    assert sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*")) == [
        "1/model.onnx",
        "2/model.onnx",
    ]
    assert list(tmp_path.glob(".export-*")) == []


def test_an_export_that_answers_otherwise_is_refused(tmp_path: Path):
    class Random(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values * (2.0 if torch.onnx.is_in_onnx_export() else 1.0)

    item = exportable.Exportable(
        recipe="resnet50", module=Random(), inputs=("values",), outputs=("logits",), examples=[(torch.ones(2, 3),)]
    )
    with pytest.raises(exportable.ExportError, match="answers 'logits' otherwise than the torch model"):
        export.exported(item, tmp_path)


@pytest.mark.parametrize("gpu", [True, False])
def test_a_recipe_gets_the_name_and_the_dims_of_the_model(gpu: bool):
    tensors = [
        export.Tensor(name="input_ids", data_type="TYPE_INT64", dims=(-1,)),
        export.Tensor(name="last_hidden_state", data_type="TYPE_FP32", dims=(-1, 32)),
    ]
    text = export.configured(
        export._recipe_text("bert_base", gpu=gpu), name="b", tensors=tensors, parameters={"K": "v"}
    )
    config = text_format.Parse(text, ModelConfig())
    assert config.name == "b"
    assert {output.name: list(output.dims) for output in config.output}["last_hidden_state"] == [-1, 32]
    assert config.parameters["K"].string_value == "v"
    with pytest.raises(ValueError, match="no TYPE_FP32 tensor 'input_ids'"):
        export.configured(
            text, name="b", tensors=[export.Tensor(name="input_ids", data_type="TYPE_FP32", dims=())], parameters={}
        )


def test_resnet50_is_the_one_of_transformers_under_the_names_of_torchvision():
    import transformers  # noqa: PLC0415 - takes seconds

    config = transformers.ResNetConfig(num_labels=7)
    theirs = transformers.ResNetForImageClassification(config).eval()
    ours = exportable.ResNet50(classes=7).eval()
    shapes = [tuple(tensor.shape) for tensor in ours.state_dict().values()]
    assert sum(np.prod(shape) for shape in shapes) == sum(tensor.numel() for tensor in theirs.state_dict().values())
    ours.load_state_dict({name: theirs.state_dict()[their_name(name)] for name in ours.state_dict()})
    pixels = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(ours(pixels), theirs(pixels).logits)


def their_name(name: str) -> str:
    """What transformers calls a parameter of torchvision's ResNet-50."""
    parts = name.split(".")
    kinds = {"conv": "convolution", "bn": "normalization"}
    if parts[0] == "fc":
        return f"classifier.1.{parts[1]}"
    if not parts[0].startswith("layer"):
        return f"resnet.embedder.embedder.{kinds[parts[0].rstrip('1')]}.{parts[1]}"
    layer = f"resnet.encoder.stages.{int(parts[0][5:]) - 1}.layers.{parts[1]}"
    if parts[2] == "downsample":
        return f"{layer}.shortcut.{('convolution', 'normalization')[int(parts[3])]}.{parts[4]}"
    return f"{layer}.layer.{int(parts[2][-1]) - 1}.{kinds[parts[2][:-1]]}.{parts[3]}"
