"""A model's settings as the runtime's scheduler takes them, out of Triton's own words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from gateway.tuning.curves import LatencyCurve
from local_runtime.errors import ModelLoadError
from local_runtime.repository import parsing
from local_runtime.repository.model_config import ModelConfig

# Of a config.pbtxt what queues and batches; what is computed how is in the curve.
_KEPT: Final = ("max_batch_size", "dynamic_batching", "sequence_batching")
_BLOCKS: Final[Mapping[str, Any]] = {
    "dynamic_batching": model_config_pb2.ModelDynamicBatching,
    "sequence_batching": model_config_pb2.ModelSequenceBatching,
}
_ADAPTIVE: Final = "ADAPTIVE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """A model on every replica: how it batches, and how long its batches take.

    Attributes:
        instances: on each replica.
    """

    name: str
    curve: LatencyCurve
    config: ModelConfig
    instances: int


def configured(
    name: str,
    text: str,
    *,
    max_batch_size: int | None = None,
    blocks: Mapping[str, Mapping[str, Any]] | None = None,
    parameters: Mapping[str, str] | None = None,
) -> ModelConfig:
    """The settings in a `config.pbtxt`, or none, with those that are given in their stead; as the runtime checks them.

    `blocks`: `dynamic_batching` or `sequence_batching`, of which a model has one. Raises ModelLoadError.
    """
    written = parsing.read_text(text, folder_name=name)
    if written.HasField("ensemble_scheduling"):
        raise ModelLoadError(f"model '{name}' is an ensemble: only models that compute by themselves are simulated")
    message = model_config_pb2.ModelConfig(name=name, backend="python")
    for field in _KEPT:
        _take(message, field, written)
    for group in written.instance_group:
        message.instance_group.add(count=(group.count or 1) * max(1, len(group.gpus)))
    for key, value in written.parameters.items():
        if key.startswith(_ADAPTIVE):
            message.parameters[key].string_value = value.string_value
    is_fixed = bool(written.input) and all(-1 not in one.dims or one.allow_ragged_batch for one in written.input)
    for spec in (message.input.add(), message.output.add()):  # what the checks want; of shapes Triton's batcher asks
        spec.name, spec.data_type = "ANY", model_config_pb2.TYPE_FP32
        spec.dims.append(1 if is_fixed else -1)
    if max_batch_size is not None:
        message.max_batch_size = max_batch_size
    _put(message, blocks or {})
    if message.HasField("sequence_batching"):
        del message.sequence_batching.state[:]  # what is kept from one request to the next takes no time of its own
    for key, text_value in (parameters or {}).items():
        message.parameters[key].string_value = text_value
    return parsing.parse_message(message, folder_name=name)


def _take(message: Any, field: str, written: Any) -> None:
    value = getattr(written, field)
    if hasattr(value, "CopyFrom"):
        if written.HasField(field):
            getattr(message, field).CopyFrom(value)
    else:
        setattr(message, field, value)


def _put(message: Any, blocks: Mapping[str, Mapping[str, Any]]) -> None:
    """A scheduler of a file in place of the one that is there (of the two a message has one). Raises ModelLoadError."""
    for field, given in blocks.items():
        try:
            block = json_format.Parse(orjson.dumps(given), _BLOCKS[field]())
        except (json_format.ParseError, TypeError) as error:
            raise ModelLoadError(f"failed to read '{field}' of {message.name}: {error}") from error
        getattr(message, field).CopyFrom(block)
