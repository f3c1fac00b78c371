"""Files in requests: base64 text, a `data:` URL or an upload's own bytes."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from gateway.core.errors import InvalidInput
from gateway.core.tensors import BYTES
from gateway.core.types import Tensor

_MAGIC: Mapping[bytes, str] = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}

IMAGE_SCHEMA: Mapping[str, Any] = {
    "type": "string",
    "description": "the image file in base64, or a data: URL; multipart and raw bodies also work",
}
IMAGE_INPUT_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"image": IMAGE_SCHEMA},
    "required": ["image"],
    "additionalProperties": False,
}
"""The input of a task that takes an image and nothing else."""


def image_of(fields: Mapping[str, Any], *, max_bytes: int) -> bytes:
    """The file in `input.image`, undecoded. Raises `InvalidInput`."""
    image = file_of(fields.get("image"), field="input.image")
    if not image:
        raise InvalidInput("is empty", field="input.image")
    if len(image) > max_bytes:
        raise InvalidInput(f"has {len(image)} bytes, at most {max_bytes} are taken", field="input.image")
    return image


def image_tensor(image: bytes, *, shape: tuple[int, ...] = (1, 1)) -> Tensor:
    """IMAGE as BYTES of one element."""
    return Tensor(name="IMAGE", datatype=BYTES, shape=shape, data=len(image).to_bytes(4, "little") + image)


def media_type(image: bytes) -> str | None:
    """The media type of an image file of the kinds that browsers and vision models share; None for any other."""
    if image.startswith(b"RIFF") and image[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _MAGIC.items() if image.startswith(magic)), None)


def file_of(given: object, *, field: str) -> bytes:
    """A file's bytes, as `field` of the input gave them. Raises `InvalidInput`."""
    found = _decoded(given, field) if isinstance(given, str) else given
    if not isinstance(found, bytes):
        raise InvalidInput("must be base64 text, a data: URL or an upload", field=field)
    return found


def _decoded(text: str, field: str) -> bytes:
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidInput("a data: URL must be base64 encoded", field=field)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        is_address = text.startswith(("http://", "https://"))
        raise InvalidInput(
            "is an address, which is not fetched: send the file itself" if is_address else "is not valid base64",
            field=field,
        ) from None
