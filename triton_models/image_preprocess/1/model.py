"""`image_preprocess`: image files to the pixels that EfficientNet-Lite0 expects."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from image_files import InvalidImageError, picture
from PIL import Image

# The evaluation transform of the published EfficientNet-Lite models: the centre square that is 7/8 of the short side,
# resized by bicubic interpolation, then scaled by (x - 127) / 128.
SIDE = 224
CROP_FRACTION = 0.875
MEAN = 127.0
DEVIATION = 128.0

# What a large JPEG is at least decoded to: twice the final resize is kept in hand.
DRAFT_SIDE = 2 * int(SIDE / CROP_FRACTION)


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
    """Turn one image file into FP32 [3, 224, 224]; raises `InvalidImageError`."""
    image = picture(content, max_pixels=max_pixels, side=DRAFT_SIDE, of=min).image
    side = max(1, int(CROP_FRACTION * min(image.size)))
    left = (image.width - side + 1) // 2
    top = (image.height - side + 1) // 2
    square = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    scaled = (np.asarray(square, np.float32) - MEAN) / DEVIATION
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))
