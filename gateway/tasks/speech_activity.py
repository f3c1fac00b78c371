"""`speech-activity`: a stream of audio, chunk by chunk -> how likely it is that someone speaks in each."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gateway.core.errors import InvalidInput
from gateway.core.tensors import from_numpy, to_numpy
from gateway.core.types import Answer, Delta, Message, Speech, TensorPayload, Tensors
from gateway.tasks.contract import Form, broken, known_fields, output, tensors_of
from gateway.tasks.files import file_of

SAMPLES = 512  # 32 ms at 16 kHz: the only size that the network was trained for
SAMPLE = np.dtype("<i2")
FULL_SCALE = 2**15


class SpeechActivity:
    """AUDIO (FP32 [1, 512], full scale at -1 and 1) -> SPEECH_PROBABILITY (FP32 [1, 1])."""

    name: ClassVar[str] = "speech-activity"
    is_sequence: ClassVar[bool] = True
    tensor_fields: ClassVar[Mapping[str, str]] = {"AUDIO": "input.audio"}
    speaks: ClassVar[frozenset[Speech]] = frozenset({"tensors"})

    input_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "audio": {
                "type": "string",
                "description": f"the next {SAMPLES} samples of a stream, 16 kHz, mono, 16 bits, little-endian "
                f"({SAMPLES * SAMPLE.itemsize} bytes), in base64; uploads and frames of a WebSocket hold the bytes",
            }
        },
        "required": ["audio"],
        "additionalProperties": False,
    }
    output_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"speech_probability": {"type": "number", "minimum": 0, "maximum": 1}},
        "required": ["speech_probability"],
    }

    @property
    def forms(self) -> Mapping[Speech, Form]:
        """Tensors alone."""
        return {"tensors": self}

    def parse(self, given: object, parameters: Mapping[str, Any]) -> npt.NDArray[Any]:
        """Read `{"audio": base64 | bytes}`: FP32 [1, 512]."""
        fields = known_fields(given, ("audio",), at="input")
        known_fields(parameters, (), at="parameters")
        audio = file_of(fields.get("audio"), field="input.audio")
        if len(audio) != SAMPLES * SAMPLE.itemsize:
            raise InvalidInput(
                f"has {len(audio)} bytes, must be {SAMPLES * SAMPLE.itemsize}: {SAMPLES} samples of 16 bits at 16 kHz",
                field="input.audio",
            )
        return (np.frombuffer(audio, SAMPLE).astype(np.float32) / FULL_SCALE)[None]

    def payload(self, parsed: npt.NDArray[Any]) -> TensorPayload:
        """AUDIO as FP32 [1, 512]."""
        return TensorPayload(inputs=(from_numpy("AUDIO", parsed),), outputs=("SPEECH_PROBABILITY",))

    def answer(self, event: Tensors | Message | Delta, parsed: npt.NDArray[Any]) -> Answer:  # noqa: ARG002 - the contract's form
        """The probability for this chunk."""
        found = to_numpy(output(tensors_of(event), "SPEECH_PROBABILITY", datatype="FP32", shape=(1, 1)))
        probability = float(found[0, 0])
        if not 0 <= probability <= 1:  # also for NaN
            raise broken("the speech probability is none")
        return Answer(output={"speech_probability": probability})
