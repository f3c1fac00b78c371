"""The PyTorch networks of this repository as TorchScript, made from the weights of the installed packages."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

# Where the checkpoint keeps the parameters of each submodule of an `EncoderLayer`.
LAYER_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "mix": "attention.output.dense",
    "mix_norm": "attention.output.LayerNorm",
    "widen": "intermediate.dense",
    "narrow": "output.dense",
    "narrow_norm": "output.LayerNorm",
}


class EncoderLayer(nn.Module):
    """One BERT layer: self-attention and feed-forward, each with a residual and a norm after it (post-norm)."""

    def __init__(self, width: int, inner_width: int, heads: int, epsilon: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.mix = nn.Linear(width, width)
        self.mix_norm = nn.LayerNorm(width, epsilon)
        self.widen = nn.Linear(width, inner_width)
        self.narrow = nn.Linear(inner_width, width)
        self.narrow_norm = nn.LayerNorm(width, epsilon)

    def forward(self, states: Tensor, visible: Tensor) -> Tensor:
        """States FP32 [rows, length, width], visible BOOL [rows, 1, 1, length] -> FP32 [rows, length, width]."""
        query, key, value = (
            projection(states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        states = self.mix_norm(states + self.mix(mixed.transpose(1, 2).flatten(2)))
        return self.narrow_norm(states + self.narrow(functional.gelu(self.widen(states))))


class SentenceEncoder(nn.Module):
    """BERT encoder, mean over the tokens, unit length (all-MiniLM-L6-v2).

    Written so that a trace holds no shape and no device of its example: lengths come from slicing, masks from the
    input.
    """

    def __init__(self, config: Mapping[str, int | float], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        width, epsilon = int(config["hidden_size"]), float(config["layer_norm_eps"])
        self.words = nn.Embedding(int(config["vocab_size"]), width)
        self.positions = nn.Parameter(torch.empty(int(config["max_position_embeddings"]), width))
        self.norm = nn.LayerNorm(width, epsilon)
        inner_width, heads = int(config["intermediate_size"]), int(config["num_attention_heads"])
        self.layers = nn.ModuleList(
            EncoderLayer(width, inner_width, heads, epsilon) for _ in range(int(config["num_hidden_layers"]))
        )
        self.load_state_dict(_renamed(weights, len(self.layers)))
        self.eval().requires_grad_(requires_grad=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """INT64 [rows, length] twice (mask: 1 token, 0 padding) -> FP32 [rows, 384] of unit length."""
        states = self.norm(self.words(input_ids) + self.positions[: input_ids.shape[1]])
        visible = attention_mask.ne(0)[:, None, None, :]
        for layer in self.layers:
            states = layer(states, visible)
        weight = attention_mask.unsqueeze(-1).to(states.dtype)
        # The floor is sentence-transformers' own; it matters only for a row without any token.
        mean = (states * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return functional.normalize(mean, dim=1)


class ImageNetwork(nn.Module):
    """EfficientNet-Lite0 with its batch norms folded into the convolutions."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = _folded(network.eval()).requires_grad_(requires_grad=False)
        # Channels last: 15 to 40 % faster on the CPUs tried, at every batch size.
        self.network.to(memory_format=torch.channels_last)


class ImageClassifier(ImageNetwork):
    """The whole network, and softmax."""

    def forward(self, pixels: Tensor) -> Tensor:
        """FP32 [rows, 3, 224, 224] -> FP32 [rows, 1000], probabilities."""
        return torch.softmax(self.network(pixels.contiguous(memory_format=torch.channels_last)), dim=1)


class ImageFeatures(ImageNetwork):
    """What the network's last layer, the one that knows the classes, would see: good for telling pictures alike."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.network.set_submodule("_fc", nn.Identity())  # not a part of it

    def forward(self, pixels: Tensor) -> Tensor:
        """FP32 [rows, 3, 224, 224] -> FP32 [rows, 1280] of unit length."""
        maps = self.network.extract_features(pixels.contiguous(memory_format=torch.channels_last))
        return functional.normalize(maps.mean(dim=(2, 3)), dim=1)


def sentence_encoder(folder: Path) -> SentenceEncoder:
    """The encoder from a Hugging Face model folder (config.json, model.safetensors)."""
    from safetensors.torch import load_file  # noqa: PLC0415 - a build-only package; tests import this module without it

    config = json.loads((folder / "config.json").read_text())
    return SentenceEncoder(config, load_file(folder / "model.safetensors"))


def efficientnet(checkpoint: Path) -> nn.Module:
    """EfficientNet-Lite0 from a state dict of `efficientnet_lite_pytorch`, for one of the classes above to take."""
    from efficientnet_lite_pytorch import EfficientNet  # noqa: PLC0415 - a build-only package, as above

    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True))
    return network


def token_example(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Random ids and masks, INT64 [rows, length], each row with a padded tail of another size."""
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    input_ids = torch.randint(1000, 30000, (rows, length), generator=generator)
    tokens = torch.randint(2, length + 1, (rows, 1), generator=generator)
    return input_ids, (torch.arange(length) < tokens).long()


def pixel_example(rows: int) -> tuple[Tensor]:
    """Random pixels, FP32 [rows, 3, 224, 224]."""
    generator = torch.Generator().manual_seed(rows)
    return (torch.rand((rows, 3, 224, 224), generator=generator) * 2 - 1,)


def traced(module: nn.Module, examples: Sequence[tuple[Tensor, ...]]) -> torch.jit.ScriptModule:
    """Trace `module` on the first example and prove the trace on the others.

    Raises `RuntimeError` when a trace gives another answer than the module, as one does that has frozen a shape.
    """
    with warnings.catch_warnings(), torch.inference_mode(mode=False):
        # PyTorch advises torch.export, which the official Triton's LibTorch loader does not read.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        script = torch.jit.trace(module, examples[0], check_trace=False)
    with torch.inference_mode(), torch.jit.optimized_execution(False):  # noqa: FBT003 - torch takes it by position only
        for example in examples:
            difference = float((script(*example) - module(*example)).abs().max())
            if difference > 1e-5:  # noqa: PLR2004 - float32 rounding of unit-sized values
                raise RuntimeError(f"the trace differs from the module by {difference} on {example[0].shape}")
    return script


def _renamed(weights: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The checkpoint's tensors under the names of `SentenceEncoder`."""
    renamed = {
        "words.weight": weights["embeddings.word_embeddings.weight"],
        # Every token here is of type 0: its embedding is added to all positions once instead of in every call.
        "positions": weights["embeddings.position_embeddings.weight"]
        + weights["embeddings.token_type_embeddings.weight"][0],
    }
    sources = {"norm": "embeddings.LayerNorm"}
    for index in range(layers):
        for name, source in LAYER_NAMES.items():
            sources[f"layers.{index}.{name}"] = f"encoder.layer.{index}.{source}"
    for name, source in sources.items():
        for part in ("weight", "bias"):
            renamed[f"{name}.{part}"] = weights[f"{source}.{part}"]
    return renamed


def _folded(network: nn.Module) -> nn.Module:
    """Fold each batch norm of an EfficientNet into the convolution before it."""
    pairs = [(network, "_conv_stem", "_bn0"), (network, "_conv_head", "_bn1")]
    for block in network.get_submodule("_blocks").children():
        if hasattr(block, "_expand_conv"):
            pairs.append((block, "_expand_conv", "_bn0"))
        pairs += [(block, "_depthwise_conv", "_bn1"), (block, "_project_conv", "_bn2")]
    for owner, convolution, norm in pairs:
        setattr(owner, convolution, fuse_conv_bn_eval(getattr(owner, convolution), getattr(owner, norm)))
        setattr(owner, norm, nn.Identity())
    return network
