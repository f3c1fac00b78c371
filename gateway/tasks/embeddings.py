"""What tasks share whose models give vectors of unit length: `text_embedding` for texts, `image_embedding`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.core.errors import InvalidInput
from gateway.core.tensors import from_numpy, to_numpy
from gateway.core.types import Delta, Message, TensorPayload, Tensors
from gateway.tasks.contract import broken, output, tensors_of

UNIT_TOLERANCE = 1e-3  # float16 weights and a sum over some hundred dimensions stay well inside
TENSOR = "TEXT"


def check_text(text: object, field: str, *, max_characters: int) -> str:
    """`text` as a text that is worth a vector. Raises `InvalidInput`."""
    if not isinstance(text, str):
        raise InvalidInput("must be a string", field=field)
    if not text.strip():
        raise InvalidInput("must not be empty", field=field)
    if len(text) > max_characters:
        raise InvalidInput(f"has {len(text)} characters, at most {max_characters} are taken", field=field)
    return text


def texts_payload(texts: Sequence[str]) -> TensorPayload:
    """TEXT as BYTES [n, 1] in UTF-8."""
    rows = np.array([[text.encode()] for text in texts], dtype=np.object_)
    return TensorPayload(inputs=(from_numpy(TENSOR, rows),), outputs=("EMBEDDING", "TOKENS"))


def tokens_of(event: Tensors | Message | Delta, *, rows: int) -> npt.NDArray[Any]:
    """TOKENS INT32 [rows]: the length of each text before any truncation."""
    return to_numpy(output(tensors_of(event), "TOKENS", datatype="INT32", shape=(rows, 1)))[:, 0]


def unit_vectors(event: Tensors | Message | Delta, *, rows: int, dimensions: int) -> npt.NDArray[Any]:
    """EMBEDDING FP32 [rows, dimensions], checked: finite and of unit length."""
    vectors = to_numpy(output(tensors_of(event), "EMBEDDING", datatype="FP32", shape=(rows, dimensions)))
    lengths = np.linalg.norm(vectors, axis=1)
    if not np.all(np.abs(lengths - 1.0) < UNIT_TOLERANCE):  # also false for NaN
        raise broken("an embedding is not of unit length")
    return vectors


def refuse_truncated(
    tokens: npt.NDArray[Any], *, max_tokens: int, field: Callable[[int], str], remedy: str = "shorten the text"
) -> None:
    """Raise `InvalidInput` for the longest text where the model did not read all of it."""
    longest = int(np.argmax(tokens))
    if tokens[longest] > max_tokens:
        raise InvalidInput(
            f"has {tokens[longest]} tokens and the model reads {max_tokens}: {remedy}", field=field(longest)
        )
