"""`image-embedding`: one image -> a vector of unit length; pictures that look alike have vectors that are near."""

from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.core.types import Answer, Delta, Message, Speech, TensorPayload, Tensors
from gateway.tasks.contract import Form, known_fields
from gateway.tasks.embeddings import unit_vectors
from gateway.tasks.files import IMAGE_INPUT_SCHEMA, image_of, image_tensor


class ImageEmbedding:
    """IMAGE (BYTES [1, 1], the file's bytes) -> EMBEDDING (FP32 [1, dimensions], unit length)."""

    name: ClassVar[str] = "image-embedding"
    is_sequence: ClassVar[bool] = False
    tensor_fields: ClassVar[Mapping[str, str]] = {"IMAGE": "input.image"}
    speaks: ClassVar[frozenset[Speech]] = frozenset({"tensors"})

    input_schema: Mapping[str, Any] = IMAGE_INPUT_SCHEMA

    def __init__(self, *, dimensions: int = 1280, max_image_bytes: int = 20 * 2**20) -> None:
        self.dimensions = dimensions
        self.max_image_bytes = max_image_bytes
        self.output_schema: Mapping[str, Any] = {
            "type": "object",
            "properties": {
                "embedding": {
                    "type": "array",
                    "items": {"type": "number"},
                    "minItems": dimensions,
                    "maxItems": dimensions,
                },
                "dimensions": {"const": dimensions},
            },
            "required": ["embedding", "dimensions"],
        }

    @property
    def forms(self) -> Mapping[Speech, Form]:
        """Tensors alone."""
        return {"tensors": self}

    def parse(self, given: object, parameters: Mapping[str, Any]) -> bytes:
        """Read `{"image": base64 | data URL | bytes}`: the file, undecoded."""
        known_fields(parameters, (), at="parameters")
        return image_of(known_fields(given, ("image",), at="input"), max_bytes=self.max_image_bytes)

    def payload(self, parsed: bytes) -> TensorPayload:
        """IMAGE as BYTES [1, 1]."""
        return TensorPayload(inputs=(image_tensor(parsed),), outputs=("EMBEDDING",))

    def answer(self, event: Tensors | Message | Delta, parsed: bytes) -> Answer:  # noqa: ARG002 - the contract's form
        """The vector, checked: finite and of unit length."""
        [vector] = unit_vectors(event, rows=1, dimensions=self.dimensions)
        return Answer(output={"embedding": vector, "dimensions": self.dimensions})
