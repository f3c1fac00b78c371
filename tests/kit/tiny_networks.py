"""Networks of the kinds that `triton_models.export` takes, small and with random weights, as Hugging Face folders."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

WIDTH, LAYERS, HEADS, INNER = 32, 1, 2, 64
VOCABULARY = 120
ENCODER: Mapping[str, int] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
}
WHISPER_PROMPT, WHISPER_END = [3, 9], 2


def save(folder: Path, kind: str) -> Any:
    """Save a network of that kind (`bert`, `resnet50`, `clip`, `whisper`) in `folder`; gives back what was saved."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers  # noqa: PLC0415 - takes seconds, and HF_HUB_OFFLINE is read at the import

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(4)  # of some tried, the one with which Whisper says the most different tokens
    network = {"bert": _bert, "resnet50": _resnet, "clip": _clip, "whisper": _whisper}[kind](transformers)
    network.save_pretrained(folder)
    return type(network).from_pretrained(folder).eval()


def _bert(hub: Any) -> Any:
    return hub.BertModel(hub.BertConfig(**ENCODER, vocab_size=VOCABULARY, max_position_embeddings=64))


def _resnet(hub: Any) -> Any:
    config = hub.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_labels=10)
    return hub.ResNetForImageClassification(config)


def _clip(hub: Any) -> Any:
    vision = {**ENCODER, "image_size": 64, "patch_size": 16, "projection_dim": 24}
    text = {**ENCODER, "vocab_size": VOCABULARY, "projection_dim": 24}
    return hub.CLIPModel(hub.CLIPConfig(vision_config=vision, text_config=text, projection_dim=24))


def _whisper(hub: Any) -> Any:
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _SIZES.items()}
    positions = {"max_source_positions": 50, "max_target_positions": 40, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": WHISPER_END, "decoder_start_token_id": 3}
    # Great weights: with small ones the network says the same token all the time.
    config = hub.WhisperConfig(vocab_size=VOCABULARY, d_model=WIDTH, init_std=0.6, **sizes, **positions, **tokens)
    network = hub.WhisperForConditionalGeneration(config)
    # Tokens that it would say otherwise: 79 first, 74 later.
    settings = {"suppress_tokens": [5, 74], "begin_suppress_tokens": [79], "no_timestamps_token_id": WHISPER_PROMPT[1]}
    for name, value in settings.items():
        setattr(network.generation_config, name, value)
    return network


_SIZES: Mapping[str, int] = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": INNER}
