"""`ocr`: one image -> the text in it, line by line."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from gateway.core.tensors import to_numpy
from gateway.core.types import Answer, Delta, Message, Speech, TensorPayload, Tensors
from gateway.tasks.contract import Form, broken, known_fields, output, tensors_of
from gateway.tasks.files import IMAGE_INPUT_SCHEMA, image_of, image_tensor

CORNERS = 4


class Ocr:
    """IMAGE (BYTES [1], the file's bytes) -> lines in reading order, none where there is no text.

    TEXT (BYTES [lines], UTF-8), SCORE (FP32 [lines], 0 to 1), BOX (FP32 [lines, 4, 2], corners as x, y in pixels of the
    upright image, clockwise from the text's own top left), ROW (INT32 [lines], from 0 on; the same for lines side by
    side).
    """

    name: ClassVar[str] = "ocr"
    is_sequence: ClassVar[bool] = False
    tensor_fields: ClassVar[Mapping[str, str]] = {"IMAGE": "input.image"}
    speaks: ClassVar[frozenset[Speech]] = frozenset({"tensors"})

    input_schema: Mapping[str, Any] = IMAGE_INPUT_SCHEMA
    output_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "all lines; those side by side with a space between"},
            "lines": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string"},
                        "score": {"type": "number", "minimum": 0, "maximum": 1},
                        "box": {
                            "type": "array",
                            "description": "corners x, y in pixels of the upright image, from the text's top left on",
                            "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
                            "minItems": CORNERS,
                            "maxItems": CORNERS,
                        },
                    },
                    "required": ["text", "score", "box"],
                },
            },
        },
        "required": ["text", "lines"],
    }

    def __init__(self, *, max_image_bytes: int = 20 * 2**20) -> None:
        self.max_image_bytes = max_image_bytes

    @property
    def forms(self) -> Mapping[Speech, Form]:
        """Tensors alone."""
        return {"tensors": self}

    def parse(self, given: object, parameters: Mapping[str, Any]) -> bytes:
        """Read `{"image": base64 | data URL | bytes}`: the file, undecoded."""
        known_fields(parameters, (), at="parameters")
        return image_of(known_fields(given, ("image",), at="input"), max_bytes=self.max_image_bytes)

    def payload(self, parsed: bytes) -> TensorPayload:
        """IMAGE as BYTES [1]."""
        inputs = (image_tensor(parsed, shape=(1,)),)
        return TensorPayload(inputs=inputs, outputs=("TEXT", "SCORE", "BOX", "ROW"))

    def answer(self, event: Tensors | Message | Delta, parsed: bytes) -> Answer:  # noqa: ARG002 - the contract's form
        """The lines, checked, and their text as one."""
        tensors = tensors_of(event)
        raw = to_numpy(output(tensors, "TEXT", datatype="BYTES", shape=(None,)))
        count = len(raw)
        scores = to_numpy(output(tensors, "SCORE", datatype="FP32", shape=(count,)))
        boxes = to_numpy(output(tensors, "BOX", datatype="FP32", shape=(count, CORNERS, 2)))
        rows = to_numpy(output(tensors, "ROW", datatype="INT32", shape=(count,)))
        if not (np.all((scores >= 0) & (scores <= 1)) and np.isfinite(boxes).all() and np.all(np.diff(rows) >= 0)):
            raise broken("the lines are not in order, or have no scores and boxes")
        try:
            texts = [text.decode() for text in raw]
        except UnicodeDecodeError:
            raise broken("a line is not UTF-8") from None
        starts = np.diff(rows, prepend=rows[:1])  # 0 where a line is beside the one before it
        joined = "".join(
            f"{chr(10) if start else ' '}{text}" if index else text
            for index, (text, start) in enumerate(zip(texts, starts, strict=True))
        )
        lines = [
            {"text": text, "score": float(score), "box": box.tolist()}
            for text, score, box in zip(texts, scores, boxes, strict=True)
        ]
        return Answer(output={"text": joined, "lines": lines})
