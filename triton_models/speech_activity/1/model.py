"""`speech_activity`: how likely it is that someone speaks, chunk by chunk, for many audio streams at once."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils

CHUNK = 512  # samples at 16 kHz, 32 ms: the only size that the network was trained for
CONTEXT = 64  # samples of the chunk before, which the network sees again
WIDTH = 128  # of the recurrent state
WINDOW, HOP = 256, 128  # of the spectrum, in samples


class Stream(NamedTuple):
    """What one stream has left behind: FP32 context [64], hidden [128] and cell [128]."""

    context: np.ndarray
    hidden: np.ndarray
    cell: np.ndarray


SILENCE = Stream(np.zeros(CONTEXT, np.float32), np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32))


class TritonPythonModel:
    """Silero VAD in numpy, which every server's Python backend has; the network is too small to need more.

    A stream is a sequence (its correlation id): START begins it with a silent past, END makes the model forget it.
    Its state lives here, by correlation id. Of streams that end without END the model keeps at most MAX_STREAMS; those
    longest without a chunk go first. Chunks of a batch go through the network together.

    Input: AUDIO FP32 [1, 512], the next 32 ms at 16 kHz, full scale at -1 and 1. Controls: START, END INT32 [1, 1].
    Output: SPEECH_PROBABILITY FP32 [1, 1], of this chunk.
    A chunk that is not finite is refused with INVALID_ARG and leaves its stream as it was, unless it carries END.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the weights; `args` is what Triton gives every Python model."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._max_streams = int(parameters["MAX_STREAMS"]["string_value"])
        with np.load(Path(args["model_repository"]) / args["model_version"] / "weights.npz") as weights:
            self._network = Network(dict(weights))
        self._streams: dict[int | str, Stream] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request, in order; the scheduler never puts two chunks of one stream into a batch."""
        answers: list[Any] = [None] * len(requests)
        chunks: dict[int, np.ndarray] = {}
        befores: list[Stream] = []
        for index, request in enumerate(requests):
            try:
                before = self._before(request)
                chunks[index] = _chunk(request)
                befores.append(before)
            except ValueError as error:
                answers[index] = _refusal(str(error))
        if chunks:
            probabilities, afters = self._network(np.stack(list(chunks.values())), befores)
            for index, probability, after in zip(chunks, probabilities, afters, strict=True):
                self._keep(requests[index].correlation_id(), after)
                output = pb_utils.Tensor("SPEECH_PROBABILITY", probability.reshape(1, 1))
                answers[index] = pb_utils.InferenceResponse(output_tensors=[output])
        for request in requests:
            if _flag(request, "END"):
                self._streams.pop(request.correlation_id(), None)
        return answers

    def _before(self, request: Any) -> Stream:
        """The state that this chunk continues; raises `ValueError` when it is gone."""
        stream = request.correlation_id()
        if _flag(request, "START"):
            self._keep(stream, SILENCE)
        if stream not in self._streams:
            raise ValueError("the stream's past is not known any more: begin a new one")
        return self._streams[stream]

    def _keep(self, stream: int | str, state: Stream) -> None:
        """Remember `state` as the newest; forget the oldest when there are too many."""
        self._streams.pop(stream, None)
        self._streams[stream] = state
        if len(self._streams) > self._max_streams:
            del self._streams[next(iter(self._streams))]


class Network:
    """Spectrum, four convolutions over time, an LSTM step and a sigmoid; the build lays out the weights."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self._weights = weights

    def __call__(self, chunks: np.ndarray, befores: list[Stream]) -> tuple[np.ndarray, list[Stream]]:
        """Chunks FP32 [rows, 512] and the state before each -> probabilities FP32 [rows] and the state after each."""
        audio = np.concatenate([np.stack([stream.context for stream in befores]), chunks], axis=1)
        states = self._spectrum(audio)
        for name, stride in (("conv1", 1), ("conv2", 2), ("conv3", 2), ("conv4", 1)):
            states = self._convolved(states, name, stride)
        hidden, cell = self._step(states[:, 0], befores)
        logits = np.maximum(hidden, 0) @ self._weights["output"] + self._weights["output_bias"]
        # Copies: a view would keep the whole batch in memory as long as one of its streams lives.
        afters = [
            Stream(*(part.copy() for part in row)) for row in zip(chunks[:, -CONTEXT:], hidden, cell, strict=True)
        ]
        return _sigmoid(logits)[:, 0], afters

    def _spectrum(self, audio: np.ndarray) -> np.ndarray:
        """Magnitudes FP32 [rows, 4 frames, 129]; the end of the audio is mirrored to fill the last frame."""
        mirrored = np.concatenate([audio, audio[:, -2 : -CONTEXT - 2 : -1]], axis=1)
        frames = np.lib.stride_tricks.sliding_window_view(mirrored, WINDOW, axis=1)[:, ::HOP]
        parts = frames @ self._weights["spectrum"]
        real, imaginary = np.split(parts, 2, axis=2)
        return np.sqrt(real**2 + imaginary**2)

    def _convolved(self, states: np.ndarray, name: str, stride: int) -> np.ndarray:
        """Convolution of width 3 over time, zeros at both ends, then ReLU: FP32 [rows, frames, channels]."""
        padded = np.pad(states, ((0, 0), (1, 1), (0, 0)))
        frames = range(0, states.shape[1], stride)
        windows = np.stack([padded[:, frame : frame + 3].reshape(len(states), -1) for frame in frames], axis=1)
        return np.maximum(windows @ self._weights[name] + self._weights[f"{name}_bias"], 0)

    def _step(self, inputs: np.ndarray, befores: list[Stream]) -> tuple[np.ndarray, np.ndarray]:
        """One LSTM step, gates in PyTorch's order (input, forget, cell, output): hidden and cell FP32 [rows, 128]."""
        hidden = np.stack([stream.hidden for stream in befores])
        gates = np.concatenate([inputs, hidden], axis=1) @ self._weights["lstm"] + self._weights["lstm_bias"]
        enter, keep, candidate, show = np.split(gates, 4, axis=1)
        cell = np.stack([stream.cell for stream in befores])
        cell = _sigmoid(keep) * cell + _sigmoid(enter) * np.tanh(candidate)
        return _sigmoid(show) * np.tanh(cell), cell


def _chunk(request: Any) -> np.ndarray:
    """The audio of one request, FP32 [512]; raises `ValueError`."""
    # A copy: the array may be a view of memory that is gone after the batch.
    audio = pb_utils.get_input_tensor_by_name(request, "AUDIO").as_numpy().reshape(CHUNK).astype(np.float32)
    if not np.isfinite(audio).all():
        raise ValueError("AUDIO: not finite")
    return audio


def _flag(request: Any, name: str) -> bool:
    return bool(pb_utils.get_input_tensor_by_name(request, name).as_numpy().any())


def _sigmoid(values: np.ndarray) -> np.ndarray:
    """By tanh, which does not overflow."""
    return 0.5 * np.tanh(0.5 * values) + 0.5


def _refusal(message: str) -> Any:
    error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse(output_tensors=[], error=error)
