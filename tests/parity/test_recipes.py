"""The recipes for models that people bring: exported from tiny networks, they answer on both servers as torch does."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tritonclient import grpc as client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from gateway.cli.check_models import check_repository, examined, findings
from tests.kit import tiny_networks
from tests.kit.servers import TARGETS, Server, copy_model
from triton_models import export

RECIPES = export.RECIPES
KINDS = {"bert": "tiny_bert", "resnet50": "tiny_resnet", "clip": "tiny_clip", "whisper": "tiny_whisper"}
IO = """
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
IDENTITY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]) for array in arrays]
"""
# What `gateway check` says of a config, and real Triton has to agree: None where it loads.
JUDGED = {
    "judged_plain": (IO + "dynamic_batching { }", None),
    "judged_typo": (IO + "max_batch_sizes: 4", "failed to read text proto"),
    "judged_both": (IO + "sequence_batching { direct { } }\ndynamic_batching { }", "failed to read text proto"),
    "judged_preferred": (IO + "dynamic_batching { preferred_batch_size: [ 8 ] }", "preferred size must be <= max"),
    "judged_cache": (
        IO + "model_transaction_policy { decoupled: true }\nresponse_cache { enable: true }",
        "Response Cache does not currently support",
    ),
    "judged_priority": (IO + "dynamic_batching { priority_levels: 2 default_priority_level: 1 }", None),
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    networks: Mapping[str, Any]
    repository: Path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A tiny network of each kind, and the repository that the exporter made of them."""
    folder = tmp_path_factory.mktemp("recipes")
    repository = folder / "repository"
    repository.mkdir()
    networks = {kind: tiny_networks.save(folder / kind, kind) for kind in KINDS}
    for kind, name in KINDS.items():
        assert export.main([kind, "--from", str(folder / kind), "--to", str(repository / name)]) == 0
    return Exported(networks=networks, repository=repository)


@pytest.fixture(scope="module", params=TARGETS)
def server(
    request: pytest.FixtureRequest, serving: Callable[[str], Server], exported: Exported
) -> Iterator[client.InferenceServerClient]:
    """A client of a server that has loaded all of them."""
    running = serving(request.param)
    names = [*KINDS.values(), "tiny_whisper_encoder", "tiny_whisper_decoder"]
    for name in names:
        copy_model(running, exported.repository / name)
    with client.InferenceServerClient(running.grpc) as asked:
        for name in names:
            asked.load_model(name)
        yield asked
        for name in names:
            asked.unload_model(name)


def infer(asked: client.InferenceServerClient, model: str, output: str, **inputs: np.ndarray) -> np.ndarray:
    tensors = []
    for name, array in inputs.items():
        tensors.append(client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    return asked.infer(model, tensors, client_timeout=30).as_numpy(output)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("rows", "length"), [(1, 5), (3, 9), (32, 4)])
def test_bert_answers_as_torch_does(server: client.InferenceServerClient, exported: Exported, rows: int, length: int):
    ids = np.random.default_rng(rows).integers(0, tiny_networks.VOCABULARY, (rows, length))
    mask = np.ones_like(ids)
    mask[0, length // 2 :] = 0
    tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    with torch.inference_mode():
        want = exported.networks["bert"](**{name: torch.from_numpy(array) for name, array in tensors.items()})
    for output in ("last_hidden_state", "pooler_output"):
        got = infer(server, "tiny_bert", output, **tensors)
        np.testing.assert_allclose(got, getattr(want, output).numpy(), atol=1e-5)


def test_image_networks_answer_as_torch_does(server: client.InferenceServerClient, exported: Exported):
    large, small = noise(2, 3, 224, 224), noise(3, 3, 64, 64)
    with torch.inference_mode():
        logits = exported.networks["resnet50"](torch.from_numpy(large)).logits.numpy()
        vision = exported.networks["clip"].get_image_features(torch.from_numpy(small))
    embeds = getattr(vision, "pooler_output", vision).numpy()
    np.testing.assert_allclose(infer(server, "tiny_resnet", "logits", pixel_values=large), logits, atol=1e-5)
    np.testing.assert_allclose(infer(server, "tiny_clip", "image_embeds", pixel_values=small), embeds, atol=1e-5)


def test_whisper_says_what_transformers_generates(server: client.InferenceServerClient, exported: Exported):
    features = noise(8, 100)
    prompt = torch.tensor([tiny_networks.WHISPER_PROMPT])
    generated = exported.networks["whisper"].generate(
        torch.from_numpy(features[None]), decoder_input_ids=prompt, max_new_tokens=20, do_sample=False, num_beams=1
    )
    tokens = infer(server, "tiny_whisper", "tokens", input_features=features).tolist()
    assert tokens == generated[0].tolist()
    assert len(set(tokens)) > 5, "a network that says one thing all the time proves nothing"


def test_the_exported_repository_passes_the_check(exported: Exported, capsys: pytest.CaptureFixture[str]):
    assert check_repository(exported.repository, strict=True) == 0
    assert "6 of 6 models valid" in capsys.readouterr().out


def test_the_configs_of_the_recipes_load_in_real_triton(serving: Callable[[str], Server]):
    """Their weights are absent, and that alone is what Triton finds wrong."""
    running = serving("triton")
    found = {}
    with client.InferenceServerClient(running.grpc) as asked:
        for recipe in sorted(folder.name for folder in RECIPES.iterdir()):
            copy_model(running, RECIPES / recipe)
            (running.repository / recipe / "1").mkdir(exist_ok=True)
            found[recipe] = load(asked, recipe)
            shutil.rmtree(running.repository / recipe)
    absent = dict.fromkeys(("bert_base", "clip_image", "resnet50", "whisper_decoder", "whisper_encoder"), "NO_SUCHFILE")
    expected = {**absent, "llm_vllm": "unable to find backend library for backend 'vllm'", "whisper": "loaded"}
    assert found.keys() == expected.keys()
    assert {name: text for name, text in expected.items() if text not in found[name]} == {}


def load(asked: client.InferenceServerClient, name: str) -> str:
    try:
        asked.load_model(name)
    except InferenceServerException as error:
        return str(error)
    asked.unload_model(name)
    return "loaded"


def test_check_and_real_triton_judge_alike(serving: Callable[[str], Server], tmp_path: Path):
    running = serving("triton")
    for name, (config, _) in JUDGED.items():
        for repository in (running.repository, tmp_path):
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "config.pbtxt").write_text(f'backend: "python"\n{config}\n')
            (repository / name / "1" / "model.py").write_text(IDENTITY)
    refused = {finding.model for finding in findings(examined(tmp_path)) if finding.severity == "fault"}
    assert refused == {name for name, (_, reason) in JUDGED.items() if reason}
    with client.InferenceServerClient(running.grpc) as asked:
        for name, (_, reason) in JUDGED.items():
            written = len(running.log)
            answer = load(asked, name)
            assert (answer == "loaded") == (reason is None), answer
            assert reason is None or reason in running.log[written:]
