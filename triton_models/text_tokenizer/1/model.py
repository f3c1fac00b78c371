"""`text_tokenizer`: texts to padded token ids for `text_encoder`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class InvalidTextError(ValueError):
    """The text cannot be tokenised; the message is meant for the caller."""


class TritonPythonModel:
    """Tokenises TEXT and pads it to one of a few bucket lengths.

    A request alone gets the shortest bucket that holds its longest row. Requests that arrive together share a longer
    one where that is cheap, because `text_encoder` can only batch what has the same length.

    Input: TEXT BYTES [rows, 1], UTF-8.
    Outputs: INPUT_IDS and ATTENTION_MASK INT64 [rows, bucket]; TOKENS INT32 [rows, 1], the length before truncation.
    A text that is not UTF-8 or too long fails its own request with INVALID_ARG.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokeniser; `args` is what Triton gives every Python model."""
        parameters = json.loads(args["model_config"])["parameters"]
        lengths = parameters["BUCKET_LENGTHS"]["string_value"].split(",")
        self._bucket_lengths = sorted(int(length) for length in lengths)
        self._max_text_bytes = int(parameters["MAX_TEXT_BYTES"]["string_value"])
        self._max_widening = float(parameters["MAX_WIDENING"]["string_value"])
        folder = Path(args["model_repository"]) / args["model_version"]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The file asks for fixed padding and truncation at 128; both are done here, by bucket.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._pad_id = self._tokenizer.token_to_id("[PAD]")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request; all texts of the batch are tokenised in one call."""
        answers: list[Any] = [None] * len(requests)
        texts: list[str] = []
        spans: dict[int, slice] = {}
        for index, request in enumerate(requests):
            try:
                rows = self._texts(request)
            except InvalidTextError as error:
                answers[index] = _refusal(str(error))
                continue
            spans[index] = slice(len(texts), len(texts) + len(rows))
            texts += rows
        # The fast variant leaves out character offsets, which nobody reads here.
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        groups = [ids[span] for span in spans.values()]
        for index, rows, length in zip(spans, groups, self._lengths(groups), strict=True):
            answers[index] = self._answer(rows, length)
        return answers

    def _texts(self, request: Any) -> list[str]:
        """The texts of one request; raises `InvalidTextError`."""
        rows = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1)
        if any(len(row) > self._max_text_bytes for row in rows):
            raise InvalidTextError(f"TEXT: longer than {self._max_text_bytes} bytes")
        try:
            return [bytes(row).decode() for row in rows]
        except UnicodeDecodeError as error:
            raise InvalidTextError("TEXT: not valid UTF-8") from error

    def _lengths(self, groups: list[list[list[int]]]) -> list[int]:
        """The padded length of each request, given the token ids of its rows.

        The shared length is the longest to which all shorter requests can be padded without making their work, in
        tokens, more than `MAX_WIDENING` times what it is. Requests above it keep their own.
        """
        own = [self._bucket(max(len(ids) for ids in rows)) for rows in groups]
        for shared in sorted(set(own), reverse=True):
            rows = [(length, len(group)) for length, group in zip(own, groups, strict=True) if length <= shared]
            work = sum(length * count for length, count in rows)
            if shared * sum(count for _, count in rows) <= self._max_widening * work:
                return [max(length, shared) for length in own]
        return own

    def _bucket(self, tokens: int) -> int:
        limit = self._bucket_lengths[-1]
        return next(length for length in self._bucket_lengths if length >= min(tokens, limit))

    def _answer(self, rows: list[list[int]], length: int) -> Any:
        """Pad the rows of one request to `length`, and cut them where the model's limit is."""
        limit = self._bucket_lengths[-1]
        # The last token is [SEP]: it stays, as the reference tokeniser keeps it when it truncates.
        kept = [ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in rows]
        input_ids = np.full((len(kept), length), self._pad_id, np.int64)
        attention_mask = np.zeros((len(kept), length), np.int64)
        for row, ids in enumerate(kept):
            input_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
        tokens = np.array([[len(ids)] for ids in rows], np.int32)
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("INPUT_IDS", input_ids),
                pb_utils.Tensor("ATTENTION_MASK", attention_mask),
                pb_utils.Tensor("TOKENS", tokens),
            ]
        )


def _refusal(message: str) -> Any:
    error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse(output_tensors=[], error=error)
