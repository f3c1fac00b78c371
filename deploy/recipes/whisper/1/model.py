"""The greedy loop of Whisper: one call of the encoder, then one call of the decoder for each token."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers each request with the tokens of its recording; the two networks are models of their own."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Leave the configuration as it is: it is complete."""
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters. Raises `KeyError` or `ValueError` for one that is absent or no number."""
        entries = json.loads(args["model_config"])["parameters"]
        parameters = {name: entry["string_value"] for name, entry in entries.items()}
        self._encoder = parameters["ENCODER"]
        self._decoder = parameters["DECODER"]
        self._prompt = [int(token) for token in parameters["PROMPT_TOKENS"].split()]
        self._end = int(parameters["END_TOKEN"])
        self._not_first = [int(token) for token in parameters.get("NOT_FIRST_TOKENS", "").split()]
        self._most = int(parameters["MAX_TOKENS"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request: INT64 [tokens], or the error of the model that failed."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        features = pb_utils.get_input_tensor_by_name(request, "input_features").as_numpy()
        try:
            tokens = self._transcribed(request, features)
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([pb_utils.Tensor("tokens", np.array(tokens, np.int64))])

    def _transcribed(self, request: Any, features: np.ndarray) -> list[int]:
        states = _asked(self._encoder, "encoder_hidden_states", input_features=features[None])
        tokens = list(self._prompt)
        for step in range(self._most):
            if request.is_cancelled():  # nobody reads the rest
                break
            ids = np.array([tokens], np.int64)
            logits = _asked(self._decoder, "logits", input_ids=ids, encoder_hidden_states=states)[0]
            if step == 0:
                logits[self._not_first] = -np.inf
            token = int(logits.argmax())
            if token == self._end:
                break
            tokens.append(token)
        return tokens[len(self._prompt) :]


def _asked(model: str, output: str, **inputs: np.ndarray) -> np.ndarray:
    """One output of another model, a copy. Raises `TritonModelException` when it fails."""
    call = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=[output],
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
    )
    response = call.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return np.array(pb_utils.get_output_tensor_by_name(response, output).as_numpy())
