"""`text-classification` with the model's own vectors: how often the label is right that a reader would choose."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gateway.core.tensors import from_numpy
from gateway.core.types import Tensors
from gateway.tasks.text_classification import TextClassification

from .conftest import Request, rows_of, torchscript

TASK = TextClassification()
SANITY = {
    ("sports", "politics", "technology", "business", "health", "travel"): [
        ("The striker scored twice in the second half", "sports"),
        ("Parliament voted on the new budget law", "politics"),
        ("The new phone has a faster chip and a better camera", "technology"),
        ("Shares of the carmaker fell after weak quarterly earnings", "business"),
        ("Doctors recommend a flu shot before winter", "health"),
        ("Our flight to Lisbon leaves early and the hotel is by the beach", "travel"),
    ],
    ("cancel my order", "track my parcel", "request a refund", "change my password", "talk to a person"): [
        ("I don't want the shoes any more, please stop the shipment", "cancel my order"),
        ("Where is my package? It should have come yesterday", "track my parcel"),
        ("The item arrived broken and I want my money back", "request a refund"),
        ("I forgot how to log in and need to reset my credentials", "change my password"),
        ("Can I speak with someone from support?", "talk to a person"),
    ],
    ("positive", "negative"): [
        ("I love this product, it works perfectly", "positive"),
        ("Terrible quality, broke after one day", "negative"),
        ("The best meal I have had in years", "positive"),
        ("The staff was rude and the room was dirty", "negative"),
    ],
}


@pytest.fixture
def classify(load, repository: Path):
    tokenizer = load(repository / "text_tokenizer/1/model.py", repository / "text_tokenizer")
    encoder = torchscript(repository / "text_encoder/1/model.pt")

    def classify(text: str, labels: tuple[str, ...]):
        parsed = TASK.parse({"text": text, "labels": list(labels)}, {})
        [response] = tokenizer.execute([Request({"TEXT": rows_of(*[t.encode() for t in (text, *labels)])})])
        tensors = [torch.from_numpy(response.array(name)) for name in ("INPUT_IDS", "ATTENTION_MASK")]
        with torch.inference_mode(), torch.jit.optimized_execution(False):
            vectors = encoder(*tensors).numpy()
        outputs = (from_numpy("EMBEDDING", vectors), from_numpy("TOKENS", response.array("TOKENS")))
        return TASK.answer(Tensors(outputs=outputs, version="1"), parsed).output

    return classify


def test_plain_texts_get_their_label(classify):
    found = [(classify(text, labels)["label"], label) for labels, texts in SANITY.items() for text, label in texts]
    assert sum(label == expected for label, expected in found) >= len(found) - 1


def test_scores_follow_their_labels_in_any_order(classify):
    labels = ("sports", "politics", "health")
    text = "The goalkeeper saved a penalty"
    scores = dict(zip(labels, classify(text, labels)["scores"], strict=True))
    turned = dict(zip(labels[::-1], classify(text, labels[::-1])["scores"], strict=True))
    assert max(scores, key=scores.get) == "sports"
    assert scores["sports"] > 0.8
    assert np.isclose(sum(scores.values()), 1)
    assert scores == pytest.approx(turned, abs=1e-4)
