"""`ocr_lines`: the lines of text that the detector found, cut out of the picture and laid flat."""

import json
import math
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image
from text_boxes import sides, text_boxes

HEIGHT = 48  # what the recogniser and the classifier read
CROP_WIDTH = 192  # what the classifier reads
LEAST_WIDTH = 320  # what the recogniser was trained on; shorter lines are padded
PADDING = 2  # with it, all lines may be so many times the columns that they may have themselves
GREY = 127  # the middle of what the networks take: nothing
VERTICAL = 1.5  # a box so many times higher than wide holds a line that runs down


class InvalidImageError(ValueError):
    """The image cannot be served; the message is meant for the caller."""


class TritonPythonModel:
    """Finds the boxes of lines in the detector's map and cuts them out.

    Inputs: MAP FP32 [1, 1, height, width]; UPRIGHT UINT8 [height, width, 3]; SCALE FP32 [2] (see `ocr_preprocess`).
    Outputs, one line at least (blank where there is none):
    LINES UINT8 [lines, 48, width, 3], padded to the longest, and WIDTHS INT64 [lines], without the padding;
    CROPS UINT8 [lines, 48, 192, 3], the same lines squeezed for the classifier;
    BOXES FP32 [lines, 4, 2], the corners of each in pixels of the file, clockwise from the top left of the line as it
    was cut out.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read the bounds; `args` is what Triton gives every Python model."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._max_lines, self._max_columns = (
            int(parameters[name]["string_value"]) for name in ("MAX_LINES", "MAX_COLUMNS")
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        likely, upright, scale = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("MAP", "UPRIGHT", "SCALE")
        )
        image = Image.fromarray(upright)
        boxes = _boxes(likely[0, 0], image.size)
        try:
            lines, widths = self._lines(image, boxes)
        except InvalidImageError as error:
            refusal = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(output_tensors=[], error=refusal)
        crops = np.stack([_squeezed(line[:, :width]) for line, width in zip(lines, widths, strict=True)])
        outputs = {
            "LINES": lines,
            "WIDTHS": np.array(widths, np.int64),
            "CROPS": crops,
            "BOXES": (np.stack(boxes) * scale).astype(np.float32) if boxes else np.zeros((1, 4, 2), np.float32),
        }
        return pb_utils.InferenceResponse(
            output_tensors=[pb_utils.Tensor(name, array) for name, array in outputs.items()]
        )

    def _lines(self, image: Image.Image, boxes: list[np.ndarray]) -> tuple[np.ndarray, list[int]]:
        """All lines in one array, and the width of each; raises `InvalidImageError`."""
        if len(boxes) > self._max_lines:
            raise InvalidImageError(f"IMAGE: more than {self._max_lines} lines of text")
        widths = [_width(box) for box in boxes] or [1]
        longest = max(LEAST_WIDTH, *widths)
        if sum(widths) > self._max_columns or longest * len(widths) > PADDING * self._max_columns:
            raise InvalidImageError(
                f"IMAGE: too much text, {len(boxes)} lines of up to {longest} pixels at a height of 48"
            )
        lines = np.full((len(widths), HEIGHT, longest, 3), GREY, np.uint8)
        for line, box, width in zip(lines, boxes, widths, strict=False):
            # Sharp: of small letters scaled up by softer filters the recogniser does not see the spaces between words.
            line[:, :width] = np.asarray(flat(image, box).resize((width, HEIGHT), Image.Resampling.LANCZOS))
        return lines, widths


def _boxes(likely: np.ndarray, size: tuple[int, int]) -> list[np.ndarray]:
    """The boxes in pixels of a picture of that size, none beyond its edges, each from its line's top left corner on."""
    height, width = likely.shape
    scale = np.array([size[0] / width, size[1] / height])
    boxes = [np.clip(box * scale, 0, size) for box in text_boxes(likely)]
    return [_begun(box) for box in boxes if min(sides(box)) >= 1]


def _begun(box: np.ndarray) -> np.ndarray:
    """The corners of a line that runs down begin at the upper right, where its own top left is."""
    across, down = sides(box)
    return np.roll(box, -1, axis=0) if down >= VERTICAL * across else box


def _width(box: np.ndarray) -> int:
    """Of the line at a height of 48 pixels."""
    across, down = sides(box)
    return max(1, math.ceil(HEIGHT * across / down))


def flat(image: Image.Image, box: np.ndarray) -> Image.Image:
    """What is in a box [4, 2], as an upright rectangle whose top left is the first corner."""
    width, height = (max(1, round(side)) for side in sides(box))
    across, down = (box[1] - box[0]) / width, (box[3] - box[0]) / height
    coefficients = (across[0], down[0], box[0, 0], across[1], down[1], box[0, 1])
    values = [float(value) for value in coefficients]
    return image.transform((width, height), Image.Transform.AFFINE, values, Image.Resampling.BICUBIC)


def _squeezed(line: np.ndarray) -> np.ndarray:
    """A line UINT8 [48, width, 3] as the classifier reads it: squeezed where it is too long, else padded."""
    crop = np.full((HEIGHT, CROP_WIDTH, 3), GREY, np.uint8)
    if line.shape[1] > CROP_WIDTH:
        return np.asarray(Image.fromarray(line).resize((CROP_WIDTH, HEIGHT), Image.Resampling.BILINEAR))
    crop[:, : line.shape[1]] = line
    return crop
