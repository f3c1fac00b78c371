"""The configuration as Triton completes it: instances placed, defaults filled in, its JSON form."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2

from local_runtime.errors import ModelLoadError
from local_runtime.repository.config_words import PLATFORMS, default_file
from local_runtime.repository.model_config import Backend, InstanceGroup, InstanceKind, ModelConfig

# The backends beside which Triton writes a platform (core `src/model_config_utils.cc`, AutoCompleteBackendFields).
_PLATFORMS: Mapping[Backend, str] = MappingProxyType(
    {backend: platform for platform, backend in PLATFORMS.items() if platform != backend}
)
_WIDE_INTEGERS = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One instance and the device it runs on; `name` is Triton's `<group>_<index>`."""

    name: str
    kind: InstanceKind
    device_id: int


def model_filename(config: ModelConfig) -> str:
    """The file inside the version folder that holds the model; "" for an ensemble."""
    return config.default_model_filename or default_file(config.backend)


def place(config: ModelConfig, *, cuda_devices: int) -> tuple[Placement, ...]:
    """One placement per instance, given how many CUDA devices there are.

    KIND_AUTO means the GPUs that are named, or every GPU there is, or the CPU without one. A KIND_MODEL instance
    places itself and is told device 0. Raises ModelLoadError for a GPU that is not there.
    """
    if config.backend is Backend.ENSEMBLE:
        return ()
    return tuple(
        placement for group in config.instance_groups for placement in _place_group(group, config.name, cuda_devices)
    )


def _place_group(group: InstanceGroup, model: str, cuda_devices: int) -> Sequence[Placement]:
    places = [device for device in _devices(group, model, cuda_devices) for _ in range(group.count)]
    return [
        Placement(name=f"{group.name}_{index}", kind=kind, device_id=device)
        for index, (kind, device) in enumerate(places)
    ]


def _devices(group: InstanceGroup, model: str, cuda_devices: int) -> Sequence[tuple[InstanceKind, int]]:
    gpus = group.gpus or tuple(range(cuda_devices))
    if group.kind in (InstanceKind.CPU, InstanceKind.MODEL):
        return [(group.kind, 0)]
    if group.kind is InstanceKind.AUTO and not gpus:
        return [(InstanceKind.CPU, 0)]
    where = f"instance group {group.name} of model {model}"
    if not gpus:
        raise ModelLoadError(f"{where} has kind KIND_GPU but no GPUs are available")
    absent = [gpu for gpu in gpus if not 0 <= gpu < cuda_devices]
    if absent:
        known = ", ".join(str(gpu) for gpu in range(cuda_devices)) or "none"
        raise ModelLoadError(f"{where} specifies invalid or unsupported gpu id {absent[0]}. GPUs are: {known}")
    return [(InstanceKind.GPU, gpu) for gpu in gpus]


def completed(config: ModelConfig, placements: Sequence[Placement]) -> Any:
    """The `ModelConfig` message with the defaults that Triton fills in when it loads a model.

    Which ones: core `src/model_config_utils.cc`, AutoCompleteBackendFields and NormalizeModelConfig.
    """
    message = model_config_pb2.ModelConfig()
    message.CopyFrom(config.message)
    if not message.HasField("version_policy"):
        message.version_policy.latest.num_versions = 1
    message.default_model_filename = model_filename(config)
    if config.backend is not Backend.ENSEMBLE:
        message.backend = config.backend
        message.platform = message.platform or _PLATFORMS.get(config.backend, "")
        for buffer in ("input_pinned_memory", "output_pinned_memory"):
            if not message.optimization.HasField(buffer):
                getattr(message.optimization, buffer).enable = True
    _complete_schedulers(message, config)
    if placements:
        del message.instance_group[:]
        message.instance_group.extend(_completed_group(group, placements) for group in config.instance_groups)
    return message


def _complete_schedulers(message: Any, config: ModelConfig) -> None:
    if message.HasField("dynamic_batching"):
        _complete_preferred(message.dynamic_batching, config)
    if config.sequence_batching is not None:
        block = message.sequence_batching
        block.max_sequence_idle_microseconds = config.sequence_batching.max_sequence_idle_microseconds
        if block.HasField("oldest"):
            _complete_preferred(block.oldest, config)


def _complete_preferred(block: Any, config: ModelConfig) -> None:
    if not block.preferred_batch_size and config.max_batch_size > 0:
        block.preferred_batch_size.append(config.max_batch_size)


def _completed_group(group: InstanceGroup, placements: Sequence[Placement]) -> Any:
    own = [placement for placement in placements if placement.name.rpartition("_")[0] == group.name]
    gpus = sorted({placement.device_id for placement in own if placement.kind is InstanceKind.GPU})
    return model_config_pb2.ModelInstanceGroup(name=group.name, kind=own[0].kind.value, count=group.count, gpus=gpus)


def triton_json(message: Any) -> str:
    """The message in Triton's JSON: proto names, default values present, 64-bit integers as numbers."""
    tree = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(_numbers(message.DESCRIPTOR, tree))


def _numbers(descriptor: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with the strings that protobuf writes for 64-bit integers turned into numbers."""
    return {name: _number(descriptor.fields_by_name[name], value) for name, value in tree.items()}


def _number(field: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [_number(field, item) for item in value]
    if field.cpp_type in _WIDE_INTEGERS:
        return int(value)
    if field.message_type is None:
        return value
    if field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {key: _number(inner, item) for key, item in value.items()}
    return _numbers(field.message_type, value)
