"""`ocr_preprocess`: an image file to the pixels that text is found in and those that it is read from."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from image_files import InvalidImageError, picture
from PIL import Image

STRIDE = 32  # the detector halves the picture five times
WHITE = (255, 255, 255)
# A strip of text has no surroundings for the detector to see it against: it gets some. (RapidOCR's measures.)
LONGEST_SHAPE = 8
LEAST_SIDE = 30


class TritonPythonModel:
    """Decodes IMAGE and scales it for `ocr_detector`.

    Input: IMAGE BYTES [1], the file as it is.
    Outputs: PIXELS UINT8 [1, height, width, 3], sides that are multiples of 32; UPRIGHT UINT8 [height, width, 3], the
    picture in RGB with sides of at most MAX_SIDE; SCALE FP32 [2], how many pixels of the file, turned upright, one of
    UPRIGHT is wide and high.
    Where a strip is too narrow to be served as it is, white is added below it or to its right, in PIXELS and UPRIGHT.
    Bytes that are no image, or an image with too many pixels, fail their own request with INVALID_ARG.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read the bounds; `args` is what Triton gives every Python model."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._max_pixels, self._max_side, self._min_side = (
            int(parameters[name]["string_value"]) for name in ("MAX_PIXELS", "MAX_SIDE", "MIN_SIDE")
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        [content] = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().reshape(-1)
        try:
            image, size = picture(bytes(content), max_pixels=self._max_pixels, side=self._max_side, of=max)
        except InvalidImageError as error:
            refusal = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(output_tensors=[], error=refusal)
        image = self._bounded(image)
        scale = np.array([size[0] / image.width, size[1] / image.height], np.float32)
        upright = _with_surroundings(image)
        pixels = self._for_detector(upright)
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("PIXELS", np.asarray(pixels)[None]),
                pb_utils.Tensor("UPRIGHT", np.asarray(upright)),
                pb_utils.Tensor("SCALE", scale),
            ]
        )

    def _bounded(self, image: Image.Image) -> Image.Image:
        """Scaled down to MAX_SIDE where it is larger, and up to LEAST_SIDE where that keeps it within."""
        longest, shortest = max(image.size), min(image.size)
        factor = min(self._max_side / longest, max(1, LEAST_SIDE / shortest))
        return image if factor == 1 else image.resize(_scaled(image.size, factor), Image.Resampling.BICUBIC)

    def _for_detector(self, image: Image.Image) -> Image.Image:
        """Scaled up to MIN_SIDE where that keeps it within MAX_SIDE, to whole strides."""
        factor = min(self._max_side / max(image.size), max(1, self._min_side / min(image.size)))
        width, height = (max(STRIDE, round(side * factor / STRIDE) * STRIDE) for side in image.size)
        return image.resize((width, height), Image.Resampling.BILINEAR)


def _scaled(size: tuple[int, int], factor: float) -> tuple[int, int]:
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def _with_surroundings(image: Image.Image) -> Image.Image:
    """As it is, or with white added where one side is far longer than the other or both are tiny."""
    least = max(LEAST_SIDE, -(-max(image.size) // LONGEST_SHAPE))
    if min(image.size) > least:
        return image
    canvas = Image.new("RGB", (max(image.width, 2 * least), max(image.height, 2 * least)), WHITE)
    canvas.paste(image, (0, 0))
    return canvas
