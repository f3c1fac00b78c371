"""The three models that are measured and simulated, each under three settings, and as batches of one size alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from google.protobuf import text_format

from local_runtime.repository import parsing
from tests.kit.servers import ROOT

MAX_BATCH_SIZE: Final = 8
DELAY_US: Final = 5_000
TOKENS: Final = 8  # a query; of long texts one alone keeps a core busy, and batches gain nothing
SIZES: Final = (1, 2, 4, 8)
SETTINGS: Final[Mapping[str, tuple[str, int]]] = {
    "unbatched": ("", 0),
    "no delay": ("dynamic_batching { }", 0),
    "delay 5 ms": (f"dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }}", DELAY_US),
}
"""The block of the configuration, and how long a lone request waits."""
UNBATCHED: Final = "unbatched"

# A batch of one size leaves when it is full and not before: its callers are always enough.
_FULL = "dynamic_batching { max_queue_delay_microseconds: 2000000 }"
_FIXED = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
_FIXED_CODE = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(one, "X").as_numpy() for one in requests]
        time.sleep(0.004 + 0.001 * sum(len(one) for one in arrays))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", one)]) for one in arrays]
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model: its folder in `triton_models`, or none for the artificial one, and one row of its inputs."""

    name: str
    title: str
    folder: str
    inputs: Mapping[str, Any]

    def served(self, setting: str) -> str:
        """The name of the model under a setting."""
        return f"{self.name}_{list(SETTINGS).index(setting)}"

    def full(self, rows: int) -> str:
        """The name of the model that runs batches of so many rows alone."""
        return f"{self.name}_full{rows}"

    def write(self, repository: Path) -> list[str]:
        """Put all of them there, and tell their names. The weights are not copied."""
        blocks = {self.served(name): (block, MAX_BATCH_SIZE) for name, (block, _) in SETTINGS.items()}
        blocks |= {self.full(rows): (_FULL if rows > 1 else "", rows) for rows in SIZES}
        for name, (block, max_batch_size) in blocks.items():
            folder = repository / name
            folder.mkdir(parents=True)
            (folder / "config.pbtxt").write_text(self._config(name, block, max_batch_size))
            if self.folder:
                (folder / "1").symlink_to(ROOT / "triton_models" / self.folder / "1")
            else:
                (folder / "1").mkdir()
                (folder / "1" / "model.py").write_text(_FIXED_CODE)
        return list(blocks)

    def _config(self, name: str, block: str, max_batch_size: int) -> str:
        text = (ROOT / "triton_models" / self.folder / "config.pbtxt").read_text() if self.folder else _FIXED
        message = parsing.read_text(text, folder_name=name)
        message.name, message.max_batch_size = name, max_batch_size
        message.ClearField("dynamic_batching")
        # One core computes, and one is left to who asks: else each request slows the batch that runs meanwhile.
        message.parameters["INTRA_OP_THREAD_COUNT"].string_value = "1"
        return text_format.MessageToString(message) + block


SUBJECTS: Final = {
    one.name: one
    for one in (
        Subject(
            name="fixed",
            title="fixed cost: 4 ms a batch and 1 ms a row",
            folder="",
            inputs={"X": np.ones((1, 1), np.float32)},
        ),
        Subject(
            name="minilm",
            title=f"MiniLM, {TOKENS} tokens",
            folder="text_encoder",
            inputs={name: np.ones((1, TOKENS), np.int64) for name in ("INPUT__0", "INPUT__1")},
        ),
        Subject(
            name="efficientnet",
            title="EfficientNet-Lite0",
            folder="image_classifier",
            inputs={"INPUT__0": np.random.default_rng(0).random((1, 3, 224, 224), np.float32)},
        ),
    )
}
