"""`image_preprocess`: image files to the pixels that EfficientNet-Lite0 expects."""

import io
import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image, ImageOps

# The evaluation transform of the published EfficientNet-Lite models: the centre square that is 7/8 of the short side,
# resized by bicubic interpolation, then scaled by (x - 127) / 128.
SIDE = 224
CROP_FRACTION = 0.875
MEAN = 127.0
DEVIATION = 128.0
WHITE_16 = 65535

# A JPEG decodes 2, 4 or 8 times smaller at a fraction of the cost; twice the final resize is kept in hand.
DRAFT_SIDE = 2 * int(SIDE / CROP_FRACTION)

# Only formats whose decoders run inside Pillow; others, such as EPS, start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


class InvalidImageError(ValueError):
    """The bytes are not an image that can be served; the message is meant for the caller."""


class TritonPythonModel:
    """Decodes IMAGE and crops, resizes and normalises it.

    Input: IMAGE BYTES [rows, 1], the files as they are. Output: PIXELS FP32 [rows, 3, 224, 224], RGB, about -1 to 1.
    Bytes that are no image, or an image with too many pixels, fail their own request with INVALID_ARG.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read the bounds; `args` is what Triton gives every Python model."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._max_pixels = int(parameters["MAX_PIXELS"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        rows = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().reshape(-1)
        try:
            pixels = np.stack([pixels_of(bytes(row), self._max_pixels) for row in rows])
        except InvalidImageError as error:
            refusal = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(output_tensors=[], error=refusal)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("PIXELS", pixels)])


def pixels_of(content: bytes, max_pixels: int) -> np.ndarray:
    """Turn one image file into FP32 [3, 224, 224].

    Raises `InvalidImageError` for anything that is not an image of at most `max_pixels` pixels.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_size(image, max_pixels)
            square = _centre_square(image)
    except InvalidImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidImageError(f"IMAGE: more than {max_pixels} pixels") from error
    # Decoders raise nearly anything for foreign bytes, and only this request may fail.
    except Exception as error:
        raise InvalidImageError("IMAGE: not a decodable image") from error
    scaled = (np.asarray(square, np.float32) - MEAN) / DEVIATION
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))


def _check_size(image: Image.Image, max_pixels: int) -> None:
    """Refuse by the size in the file's header, before anything is decoded."""
    if image.width * image.height > max_pixels:
        raise InvalidImageError(f"IMAGE: more than {max_pixels} pixels")


def _centre_square(image: Image.Image) -> Image.Image:
    """Decode, turn upright and cut to an RGB image of 224 x 224."""
    image.draft("RGB", (DRAFT_SIDE, DRAFT_SIDE))
    upright = ImageOps.exif_transpose(image)
    opaque = _on_white(upright)
    side = max(1, int(CROP_FRACTION * min(opaque.size)))
    left = (opaque.width - side + 1) // 2
    top = (opaque.height - side + 1) // 2
    box = (left, top, left + side, top + side)
    return opaque.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)


def _on_white(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB, transparent parts shown on white."""
    if image.mode == "F" or image.mode.startswith("I"):
        grey = np.asarray(image)
        # 16 bits of grey come as integers of 16 or 32 bits; what is beyond them, or broken, has no agreed white.
        if image.mode == "F" or grey.min() < 0 or grey.max() > WHITE_16:
            raise InvalidImageError("IMAGE: more than 16 bits a pixel are not supported")
        return Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")  # convert() would clip instead of scaling
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer).convert("RGB")
