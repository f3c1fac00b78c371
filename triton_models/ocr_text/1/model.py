"""`ocr_text`: the recogniser's characters as text, in reading order."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from reading_order import rows_of

NOTHING = 0  # the class of places between characters


class TritonPythonModel:
    """Reads each line by the rule of CTC: a character that lasts over several places is one.

    Inputs: CHARACTERS INT64 [lines, places], CONFIDENCES FP32 [lines, places], TURNED BOOL [lines], BOXES FP32
    [lines, 4, 2].
    Outputs, for lines of a score of at least MIN_SCORE, in reading order: TEXT BYTES [kept], UTF-8; SCORE FP32 [kept],
    the mean confidence of a line's characters; BOX FP32 [kept, 4, 2], clockwise from the text's own top left; ROW INT32
    [kept], from 0 on: lines with one row stand side by side.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the characters; `args` is what Triton gives every Python model."""
        self._min_score = float(json.loads(args["model_config"])["parameters"]["MIN_SCORE"]["string_value"])
        file = Path(args["model_repository"]) / args["model_version"] / "characters.txt"
        self._characters = np.array(["", *file.read_text(encoding="utf-8").removesuffix("\n").split("\n")], object)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        characters, confidences, turned, boxes = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in ("CHARACTERS", "CONFIDENCES", "TURNED", "BOXES")
        )
        texts, scores = self._read(characters, confidences)
        kept = np.flatnonzero(scores >= self._min_score)
        # What stood on its head begins at the corner across.
        begun = np.where(turned[:, None, None], np.roll(boxes, -2, axis=1), boxes)
        rows = rows_of(begun[kept])
        order = kept[[index for row in rows for index in row]] if rows else kept
        outputs = {
            "TEXT": np.array([texts[index].encode() for index in order], object),
            "SCORE": scores[order],
            "BOX": begun[order].astype(np.float32),
            "ROW": np.repeat(np.arange(len(rows), dtype=np.int32), [len(row) for row in rows]),
        }
        return pb_utils.InferenceResponse(
            output_tensors=[pb_utils.Tensor(name, array) for name, array in outputs.items()]
        )

    def _read(self, characters: np.ndarray, confidences: np.ndarray) -> tuple[list[str], np.ndarray]:
        """Texts and scores FP32 of all lines; a line without text has a score of 0."""
        texts = []
        scores = np.zeros(len(characters), np.float32)
        begins = (np.diff(characters, axis=1, prepend=NOTHING) != 0) & (characters != NOTHING)
        for index, begin in enumerate(begins):
            texts.append("".join(self._characters[characters[index, begin]]).strip())
            if texts[index]:
                scores[index] = confidences[index, begin].mean()
        return texts, scores
