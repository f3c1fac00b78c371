"""`text-embedding` answered by an endpoint of OpenAI's embeddings API."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gateway.core.types import Answer, Delta, Message, OpenAIPayload, Tensors
from gateway.tasks.contract import broken
from gateway.tasks.llm import message_of, object_of

if TYPE_CHECKING:  # the contract imports this file
    from gateway.tasks.text_embedding import TextInput


class EmbeddingsApi:
    """Texts -> vectors, checked and brought to unit length.

    Vectors of different models cannot be compared, and nothing in them tells: a rule may name an endpoint as another
    candidate only where it serves the same model. Whether an endpoint cuts a long text cannot be seen either; those
    that refuse it (OpenAI, vLLM and llama.cpp do) are safe.
    """

    def __init__(self, *, dimensions: int) -> None:
        self._dimensions = dimensions

    def payload(self, parsed: "TextInput") -> OpenAIPayload:
        """All texts in one request; a rule's target may set `dimensions` for models that can shorten their vectors."""
        return OpenAIPayload(api="embeddings", body={"input": list(parsed.texts), "encoding_format": "float"})

    def answer(self, event: Tensors | Message | Delta, parsed: "TextInput") -> Answer:
        """The vectors (FP32 [n, dimensions]) in the order of the texts."""
        message = message_of(event)
        given = object_of(message.body).get("data")
        rows = len(parsed.texts)
        if not isinstance(given, list) or len(given) != rows:
            raise broken(f"the answer is no list of {rows} embeddings")
        vectors: dict[int, npt.NDArray[Any]] = {}
        for entry in given:
            index = entry.get("index") if isinstance(entry, dict) else None
            if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < rows:
                raise broken("an embedding has no index")
            vectors[index] = self._unit(entry.get("embedding"))
        if len(vectors) != rows:
            raise broken("an embedding is missing")
        return Answer(
            output={
                "embeddings": np.stack([vectors[i] for i in range(rows)]),
                "dimensions": self._dimensions,
            },
            usage=message.usage,
        )

    def _unit(self, given: object) -> npt.NDArray[Any]:
        if not isinstance(given, list) or len(given) != self._dimensions:
            raise broken(f"an embedding is no list of {self._dimensions} numbers")
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in given):
            raise broken("an embedding is no list of numbers")
        vector = np.array(given, dtype=np.float64)
        largest = np.abs(vector).max()
        if not 0 < largest < np.inf:  # also for NaN
            raise broken("an embedding has no direction")
        vector /= largest  # so that squares neither overflow nor vanish
        return (vector / np.linalg.norm(vector)).astype(np.float32)
