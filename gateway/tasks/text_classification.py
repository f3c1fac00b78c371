"""`text-classification`: one text and labels of the caller's choosing -> how well each label fits (zero-shot).

The model `text_embedding` gives a vector for the text and for each label; a label fits as well as its vector is near.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gateway.core.errors import InvalidInput
from gateway.core.types import Answer, Delta, Message, Speech, TensorPayload, Tensors, Usage
from gateway.tasks.contract import Form, known_fields
from gateway.tasks.embeddings import check_text, refuse_truncated, texts_payload, tokens_of, unit_vectors
from gateway.tasks.llm_classification import ChosenLabel

LEAST_LABELS = 2
# Scores are the softmax of cosine similarities divided by it. Of 0.02 to 0.3 it is 0.03 that gave the least log loss
# with all-MiniLM-L6-v2 on 38 texts of topics, intents, sentiment and urgency (0.34; 33 of them got their label).
TEMPERATURE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledText:
    """A text and the labels that it may have, as the caller gave them."""

    text: str
    labels: tuple[str, ...]

    def field(self, index: int) -> str:
        """The dotted name of the text (0) or of one label (1 and on)."""
        return "input.text" if index == 0 else f"input.labels[{index - 1}]"


class TextClassification:
    """TEXT (BYTES [1 + labels, 1]: the text, then each label) -> EMBEDDING, TOKENS as of `text-embedding`.

    A sentence around each label ("This text is about ...") changed one text in the 38 of `TEMPERATURE`: so there is
    none; callers may write their labels as sentences.

    Args:
        max_labels: the model takes 64 rows a request, and the text is one of them.
    """

    name: ClassVar[str] = "text-classification"
    is_sequence: ClassVar[bool] = False
    tensor_fields: ClassVar[Mapping[str, str]] = {"TEXT": "input.text"}
    speaks: ClassVar[frozenset[Speech]] = frozenset({"tensors", "openai"})

    def __init__(
        self,
        *,
        dimensions: int = 384,
        max_labels: int = 63,
        max_characters: int = 32_768,
        max_label_characters: int = 512,
        max_tokens: int = 256,
    ) -> None:
        self.dimensions = dimensions
        self.max_labels = max_labels
        self.max_characters = max_characters
        self.max_label_characters = max_label_characters
        self.max_tokens = max_tokens
        self._chosen = ChosenLabel()
        self.input_schema: Mapping[str, Any] = {
            "type": "object",
            "properties": {
                "text": {"type": "string", "minLength": 1, "maxLength": max_characters},
                "labels": {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": max_label_characters},
                    "minItems": LEAST_LABELS,
                    "maxItems": max_labels,
                    "uniqueItems": True,
                },
            },
            "required": ["text", "labels"],
            "additionalProperties": False,
        }
        self.output_schema: Mapping[str, Any] = {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "scores": {
                    "type": "array",
                    "description": "probabilities in the order of the labels; their sum is 1",
                    "items": {"type": "number", "minimum": 0, "maximum": 1},
                    "minItems": LEAST_LABELS,
                    "maxItems": max_labels,
                },
            },
            "required": ["label", "scores"],
        }

    @property
    def forms(self) -> Mapping[Speech, Form]:
        """Also as a question to a chat model."""
        return {"tensors": self, "openai": self._chosen}

    def parse(self, given: object, parameters: Mapping[str, Any]) -> LabelledText:
        """Read `{"text": str, "labels": [str]}`."""
        fields = known_fields(given, ("text", "labels"), at="input")
        known_fields(parameters, (), at="parameters")
        text = check_text(fields.get("text"), "input.text", max_characters=self.max_characters)
        labels = fields.get("labels")
        if not isinstance(labels, list):
            raise InvalidInput("must be a list of labels", field="input.labels")
        if not LEAST_LABELS <= len(labels) <= self.max_labels:
            raise InvalidInput(
                f"takes {LEAST_LABELS} to {self.max_labels} labels, got {len(labels)}", field="input.labels"
            )
        seen: set[str] = set()
        for index, label in enumerate(labels):
            field = f"input.labels[{index}]"
            if check_text(label, field, max_characters=self.max_label_characters) in seen:
                raise InvalidInput("is there twice", field=field)
            seen.add(label)
        return LabelledText(text=text, labels=tuple(labels))

    def payload(self, parsed: LabelledText) -> TensorPayload:
        """TEXT as BYTES [1 + labels, 1] in UTF-8."""
        return texts_payload((parsed.text, *parsed.labels))

    def answer(self, event: Tensors | Message | Delta, parsed: LabelledText) -> Answer:
        """The best label (the first of equals), and all scores."""
        rows = 1 + len(parsed.labels)
        tokens = tokens_of(event, rows=rows)
        refuse_truncated(tokens, max_tokens=self.max_tokens, field=parsed.field)
        vectors = unit_vectors(event, rows=rows, dimensions=self.dimensions).astype(np.float64)
        logits = vectors[1:] @ vectors[0] / TEMPERATURE
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        return Answer(
            output={"label": parsed.labels[int(np.argmax(scores))], "scores": scores.tolist()},
            usage=Usage(input_tokens=int(tokens.sum())),
        )
