"""`text-embedding`: one text or a list of texts -> unit-length vectors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gateway.core.errors import InvalidInput
from gateway.core.types import Answer, Delta, Message, Speech, TensorPayload, Tensors, Usage
from gateway.tasks.contract import Form, known_fields
from gateway.tasks.embeddings import check_text, refuse_truncated, texts_payload, tokens_of, unit_vectors
from gateway.tasks.llm_embedding import EmbeddingsApi


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInput:
    """`texts` in the caller's order; `is_list` remembers how they were given, for error fields."""

    texts: tuple[str, ...]
    is_list: bool
    truncate: bool = False

    def field(self, index: int) -> str:
        """The dotted name of one text, as the caller wrote it."""
        return f"input.text[{index}]" if self.is_list else "input.text"


class TextEmbedding:
    """TEXT (BYTES [n, 1]) -> EMBEDDING (FP32 [n, dimensions], unit length), TOKENS (INT32 [n, 1]).

    TOKENS is the count before any truncation: a text longer than `max_tokens` is refused unless the caller
    sets `parameters.truncate`, because a vector of half a text looks just like a right one.
    """

    name: ClassVar[str] = "text-embedding"
    is_sequence: ClassVar[bool] = False
    tensor_fields: ClassVar[Mapping[str, str]] = {"TEXT": "input.text"}
    speaks: ClassVar[frozenset[Speech]] = frozenset({"tensors", "openai"})

    def __init__(
        self,
        *,
        dimensions: int = 384,
        max_texts: int = 64,
        max_characters: int = 32_768,
        max_tokens: int = 256,
    ) -> None:
        self.dimensions = dimensions
        self.max_texts = max_texts
        self.max_characters = max_characters
        self.max_tokens = max_tokens
        self._by_api = EmbeddingsApi(dimensions=dimensions)
        text = {"type": "string", "minLength": 1, "maxLength": max_characters}
        self.input_schema: Mapping[str, Any] = {
            "type": "object",
            "properties": {
                "text": {"oneOf": [text, {"type": "array", "items": text, "minItems": 1, "maxItems": max_texts}]}
            },
            "required": ["text"],
            "additionalProperties": False,
        }
        self.output_schema: Mapping[str, Any] = {
            "type": "object",
            "properties": {
                "embeddings": {
                    "type": "array",
                    "items": {
                        "type": "array",
                        "items": {"type": "number"},
                        "minItems": dimensions,
                        "maxItems": dimensions,
                    },
                },
                "dimensions": {"const": dimensions},
            },
            "required": ["embeddings", "dimensions"],
        }

    @property
    def forms(self) -> Mapping[Speech, Form]:
        """Also as a request to an embeddings API."""
        return {"tensors": self, "openai": self._by_api}

    def parse(self, given: object, parameters: Mapping[str, Any]) -> TextInput:
        """Read `{"text": str | [str]}` and `{"truncate": bool}`."""
        fields = known_fields(given, ("text",), at="input")
        truncate = known_fields(parameters, ("truncate",), at="parameters").get("truncate", False)
        if not isinstance(truncate, bool):
            raise InvalidInput("must be true or false", field="parameters.truncate")
        text = fields.get("text")
        is_list = isinstance(text, list)
        texts: list[Any] = text if isinstance(text, list) else [text]
        if not 1 <= len(texts) <= self.max_texts:
            raise InvalidInput(f"takes 1 to {self.max_texts} texts, got {len(texts)}", field="input.text")
        parsed = TextInput(texts=tuple(texts), is_list=is_list, truncate=truncate)
        for i, item in enumerate(texts):
            check_text(item, parsed.field(i), max_characters=self.max_characters)
        return parsed

    def payload(self, parsed: TextInput) -> TensorPayload:
        """TEXT as BYTES [n, 1] in UTF-8."""
        return texts_payload(parsed.texts)

    def answer(self, event: Tensors | Message | Delta, parsed: TextInput) -> Answer:
        """The vectors, checked: finite and of unit length."""
        rows = len(parsed.texts)
        tokens = tokens_of(event, rows=rows)
        if not parsed.truncate:
            remedy = "shorten the text, or set parameters.truncate to embed only its beginning"
            refuse_truncated(tokens, max_tokens=self.max_tokens, field=parsed.field, remedy=remedy)
        return Answer(
            output={
                "embeddings": unit_vectors(event, rows=rows, dimensions=self.dimensions),
                "dimensions": self.dimensions,
            },
            usage=Usage(input_tokens=int(np.minimum(tokens, self.max_tokens).sum())),
        )
