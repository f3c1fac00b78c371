"""The networks that people bring, as `python -m triton_models.export` exports them: from their files to a module.

Every module takes and gives exactly the tensors of its recipe (deploy/recipes), by position.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STATE_DICT_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")


class ExportError(Exception):
    """A model cannot be exported; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exportable:
    """One network and what its ONNX file shall be called with.

    Args:
        recipe: the folder in `recipes/` whose config.pbtxt describes it.
        module: in evaluation mode.
        inputs: the names of the arguments of `forward`, in order.
        outputs: the names of what it returns, in order.
        lengths: by input, the axes after the batch that may have any size, with a name for each.
        examples: arguments of several shapes; the export is made on the first and proven on all.
    """

    recipe: str
    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    examples: Sequence[tuple[Tensor, ...]]
    lengths: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


class Bert(nn.Module):
    """A BERT encoder by the tensors of a tokenizer."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        """INT64 [rows, length] three times -> FP32 [rows, length, width], FP32 [rows, width]."""
        answer = self.network(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        return answer.last_hidden_state, answer.pooler_output


class Attribute(nn.Module):
    """A network that takes pixels or a spectrogram, and the one attribute of its answer that is wanted."""

    def __init__(self, network: nn.Module, name: str) -> None:
        super().__init__()
        self.network = network
        self.name = name

    def forward(self, values: Tensor) -> Tensor:
        """FP32 [rows, ...] -> FP32 [rows, ...]."""
        answer: Tensor = getattr(self.network(values), self.name)
        return answer


class WhisperStep(nn.Module):
    """One step of Whisper's decoder: the logits of the token after the last one, minus infinity for banned tokens."""

    def __init__(self, decoder: nn.Module, projection: nn.Module, banned: Sequence[int]) -> None:
        super().__init__()
        self.decoder = decoder
        self.projection = projection
        bias = torch.zeros(projection.weight.shape[0])
        bias[list(banned)] = -torch.inf
        self.register_buffer("bias", bias)

    def forward(self, input_ids: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        """INT64 [rows, tokens], FP32 [rows, positions, width] -> FP32 [rows, vocabulary]."""
        answer = self.decoder(input_ids=input_ids, encoder_hidden_states=encoder_hidden_states, use_cache=False)
        logits: Tensor = self.projection(answer.last_hidden_state[:, -1]) + self.bias
        return logits


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: 1x1, 3x3, 1x1 (He et al. 2015; the stride in the 3x3, as torchvision has it)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, states: Tensor) -> Tensor:
        """FP32 [rows, inputs, height, width] -> FP32 [rows, 4 * width, ...]."""
        inner = torch.relu(self.bn1(self.conv1(states)))
        inner = torch.relu(self.bn2(self.conv2(inner)))
        return torch.relu(self.bn3(self.conv3(inner)) + self.downsample(states))


class ResNet50(nn.Module):
    """ResNet-50 with the parameter names of torchvision's state dicts (torchvision itself is not needed)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = 64
        for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
            strides = [1 if stage == 1 else 2, *[1] * (blocks - 1)]
            layers = [Bottleneck(inputs if block == 0 else 4 * width, width, s) for block, s in enumerate(strides)]
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
            inputs = 4 * width
        self.fc = nn.Linear(inputs, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """FP32 [rows, 3, height, width] -> FP32 [rows, classes], logits."""
        states = self.pool(torch.relu(self.bn1(self.conv1(pixel_values))))
        for stage in range(1, 5):
            states = getattr(self, f"layer{stage}")(states)
        return self.fc(states.mean((2, 3)))


def bert(source: Path) -> list[Exportable]:
    """The encoder of a Hugging Face folder of a BERT model. Raises ExportError."""
    network = _pretrained(source, "BertModel", "bert")
    most = int(network.config.max_position_embeddings)
    shapes = [(2, min(16, most)), (1, min(16, most)), (3, min(24, most)), (1, most)]
    examples = [_tokens(rows, length, int(network.config.vocab_size)) for rows, length in shapes]
    return [
        Exportable(
            recipe="bert_base",
            module=Bert(network),
            inputs=("input_ids", "attention_mask", "token_type_ids"),
            outputs=("last_hidden_state", "pooler_output"),
            lengths={name: {1: "length"} for name in ("input_ids", "attention_mask", "token_type_ids")},
            examples=[(ids, mask, torch.zeros_like(ids)) for ids, mask in examples],
        )
    ]


def resnet50(source: Path) -> list[Exportable]:
    """ResNet-50 from a Hugging Face folder, or from a state dict file with torchvision's names. Raises ExportError."""
    if source.is_dir():
        module: nn.Module = Attribute(_pretrained(source, "ResNetForImageClassification", "resnet"), "logits")
    else:
        module = _from_state_dict(source)
    return [
        Exportable(
            recipe="resnet50",
            module=module.eval(),
            inputs=("pixel_values",),
            outputs=("logits",),
            examples=[_noise(rows, 3, 224, 224) for rows in (2, 1, 5)],
        )
    ]


def clip(source: Path) -> list[Exportable]:
    """The image encoder of a Hugging Face folder of a CLIP model. Raises ExportError."""
    network = _pretrained(source, "CLIPVisionModelWithProjection", "clip")
    size = int(network.config.image_size)
    return [
        Exportable(
            recipe="clip_image",
            module=Attribute(network, "image_embeds"),
            inputs=("pixel_values",),
            outputs=("image_embeds",),
            examples=[_noise(rows, 3, size, size) for rows in (2, 1, 5)],
        )
    ]


def whisper(source: Path) -> list[Exportable]:
    """The encoder and the decoder of a Hugging Face folder of a Whisper model. Raises ExportError."""
    network = _pretrained(source, "WhisperForConditionalGeneration", "whisper")
    config = network.config
    banned = network.generation_config.suppress_tokens or []
    positions, width = int(config.max_source_positions), int(config.d_model)
    steps = [(2, 4), (1, 4), (3, 7), (1, 1)]
    return [
        Exportable(
            recipe="whisper_encoder",
            module=Attribute(network.model.encoder, "last_hidden_state"),
            inputs=("input_features",),
            outputs=("encoder_hidden_states",),
            examples=[_noise(rows, int(config.num_mel_bins), 2 * positions) for rows in (2, 1)],
        ),
        Exportable(
            recipe="whisper_decoder",
            module=WhisperStep(network.model.decoder, network.proj_out, banned),
            inputs=("input_ids", "encoder_hidden_states"),
            outputs=("logits",),
            lengths={"input_ids": {1: "tokens"}},
            examples=[
                (_tokens(rows, length, int(config.vocab_size))[0], *_noise(rows, positions, width))
                for rows, length in steps
            ],
        ),
    ]


def whisper_parameters(source: Path) -> dict[str, str]:
    """What the loop (recipes/whisper) has to know of that model, as parameters of its config. Raises ExportError."""
    generation = _json(source / "generation_config.json")
    if "decoder_start_token_id" not in generation or "eos_token_id" not in generation:
        raise ExportError(f"{source}/generation_config.json lacks decoder_start_token_id or eos_token_id")
    positions = _json(source / "config.json").get("max_target_positions", 448)
    languages, tasks = generation.get("lang_to_id") or {}, generation.get("task_to_id") or {}
    entries = [
        generation["decoder_start_token_id"],
        languages.get("<|en|>"),
        tasks.get("transcribe"),
        generation.get("no_timestamps_token_id"),
    ]
    prompt = [str(token) for token in entries if token is not None]
    return {
        "PROMPT_TOKENS": " ".join(prompt),
        "END_TOKEN": str(generation["eos_token_id"]),
        "NOT_FIRST_TOKENS": " ".join(map(str, generation.get("begin_suppress_tokens") or [])),
        # Half of the positions is what Whisper was trained to say about 30 s; the other half is for a longer prompt.
        "MAX_TOKENS": str(positions // 2),
    }


KINDS: Mapping[str, Callable[[Path], list[Exportable]]] = {
    "bert": bert,
    "resnet50": resnet50,
    "clip": clip,
    "whisper": whisper,
}


def _json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{file} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ExportError(f"{file} is not a JSON object")
    return document


def _pretrained(folder: Path, class_name: str, model_type: str) -> Any:
    """The network of a Hugging Face folder, all of whose weights came from there. Raises ExportError."""
    if not folder.is_dir():
        raise ExportError(
            f"{folder} is not a folder: give a Hugging Face model folder (config.json, model.safetensors)"
        )
    found = str(_json(folder / "config.json").get("model_type"))
    if found.removesuffix("_vision_model") != model_type:
        raise ExportError(f"{folder} holds a model of the type '{found}', this recipe takes '{model_type}'")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import: nothing here fetches, and this makes sure of it
    try:
        import transformers  # noqa: PLC0415 - a build-only package; without it the message says how to get it
    except ImportError as error:
        raise ExportError("transformers is not installed: python -m pip install '.[build]'") from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # whole CLIP files have weights of the text encoder, too
    network_class = getattr(transformers, class_name)
    try:
        network, loading = network_class.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, dtype=torch.float32
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ExportError(f"{folder} cannot be loaded as {class_name}: {error}") from error
    if loading["missing_keys"]:  # transformers fills them with random numbers and goes on
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise ExportError(f"{folder} lacks weights of {class_name}: {missing}")
    return network.eval().requires_grad_(requires_grad=False)


def _from_state_dict(file: Path) -> ResNet50:
    if file.suffix not in STATE_DICT_SUFFIXES:
        raise ExportError(f"{file}: a state dict ends in {', '.join(STATE_DICT_SUFFIXES)}")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file  # noqa: PLC0415 - a build-only package, as above

            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is wrong in a foreign file
        raise ExportError(f"{file} cannot be read as a state dict: {error}") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not isinstance(state.get("fc.weight"), Tensor):
        raise ExportError(f"{file} is not a state dict of ResNet-50 with torchvision's names: it has no 'fc.weight'")
    module = ResNet50(classes=len(state["fc.weight"]))
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ExportError(f"{file} does not fit ResNet-50: {error}") from error
    return module.requires_grad_(requires_grad=False)


def _tokens(rows: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Random ids and masks, INT64 [rows, length]; all rows but the first have a padded tail."""
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    tokens = torch.randint(1, length + 1, (rows, 1), generator=generator)
    tokens[0] = length
    return ids, (torch.arange(length) < tokens).long()


def _noise(*shape: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator),)
