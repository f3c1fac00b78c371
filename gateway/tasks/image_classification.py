"""`image-classification`: one image -> the best labels with their scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gateway.core.errors import InvalidInput
from gateway.core.tensors import to_numpy
from gateway.core.types import Answer, Delta, Message, Speech, TensorPayload, Tensors
from gateway.tasks.contract import Form, broken, known_fields, output, tensors_of
from gateway.tasks.files import IMAGE_SCHEMA, image_of, image_tensor
from gateway.tasks.llm_images import NamedLabels

SUM_TOLERANCE = 1e-2  # softmax in float32 over a thousand classes is within 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """`image` holds the file's own bytes, undecoded."""

    image: bytes
    top_k: int


class ImageClassification:
    """IMAGE (BYTES [1, 1], the file's bytes) -> SCORES (FP32 [1, classes], probabilities)."""

    name: ClassVar[str] = "image-classification"
    is_sequence: ClassVar[bool] = False
    tensor_fields: ClassVar[Mapping[str, str]] = {"IMAGE": "input.image"}
    speaks: ClassVar[frozenset[Speech]] = frozenset({"tensors", "openai"})

    def __init__(self, *, labels: Sequence[str], max_image_bytes: int = 20 * 2**20) -> None:
        self.labels = tuple(labels)
        self.max_image_bytes = max_image_bytes
        self._named = NamedLabels(labels=self.labels)
        self.input_schema: Mapping[str, Any] = {
            "type": "object",
            "properties": {
                "image": IMAGE_SCHEMA,
                "top_k": {"type": "integer", "minimum": 1, "maximum": len(self.labels), "default": 5},
            },
            "required": ["image"],
            "additionalProperties": False,
        }
        self.output_schema: Mapping[str, Any] = {
            "type": "object",
            "properties": {
                "labels": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string"},
                            "index": {"type": "integer"},
                            "score": {"type": "number"},
                        },
                        "required": ["name", "index", "score"],
                    },
                }
            },
            "required": ["labels"],
        }

    @property
    def forms(self) -> Mapping[Speech, Form]:
        """Also as a question to a vision chat model."""
        return {"tensors": self, "openai": self._named}

    def parse(self, given: object, parameters: Mapping[str, Any]) -> ImageInput:
        """Read `{"image": base64 | data URL | bytes, "top_k": int}`; bytes come from uploads."""
        fields = known_fields(given, ("image", "top_k"), at="input")
        known_fields(parameters, (), at="parameters")
        top_k = fields.get("top_k", min(5, len(self.labels)))
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= len(self.labels):
            raise InvalidInput(f"must be a whole number from 1 to {len(self.labels)}", field="input.top_k")
        image = image_of(fields, max_bytes=self.max_image_bytes)
        return ImageInput(image=image, top_k=top_k)

    def payload(self, parsed: ImageInput) -> TensorPayload:
        """IMAGE as BYTES [1, 1]."""
        return TensorPayload(inputs=(image_tensor(parsed.image),), outputs=("SCORES",))

    def answer(self, event: Tensors | Message | Delta, parsed: ImageInput) -> Answer:
        """The `top_k` labels, best first."""
        scores = to_numpy(output(tensors_of(event), "SCORES", datatype="FP32", shape=(1, len(self.labels))))[0]
        if not (scores.min() >= 0 and abs(float(scores.sum()) - 1.0) < SUM_TOLERANCE):
            raise broken("the scores are not probabilities")
        best = _best(scores, parsed.top_k).tolist()
        labels = [{"name": self.labels[i], "index": i, "score": float(scores[i])} for i in best]
        return Answer(output={"labels": labels})


def _best(scores: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """The indexes of the highest scores, best first, and of equal ones the first first; only these are sorted."""
    among = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return among[np.argsort(-scores[among], kind="stable")][:count]
