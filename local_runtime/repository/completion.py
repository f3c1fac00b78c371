"""The configuration as Triton completes it: instances placed, defaults filled in, its JSON form."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2

from local_runtime.errors import ModelLoadError
from local_runtime.repository.model_config import Backend, InstanceGroup, InstanceKind, ModelConfig

# The file that each backend loads unless `default_model_filename` says otherwise (Triton's defaults).
_MODEL_FILES = {Backend.PYTORCH: "model.pt", Backend.PYTHON: "model.py", Backend.ENSEMBLE: ""}
_WIDE_INTEGERS = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One instance and the device it runs on; `name` is Triton's `<group>_<index>`."""

    name: str
    kind: InstanceKind
    device_id: int


def model_filename(config: ModelConfig) -> str:
    """The file inside the version folder that holds the model; "" for an ensemble."""
    return config.default_model_filename or _MODEL_FILES[config.backend]


def place(config: ModelConfig, *, cuda_devices: int) -> tuple[Placement, ...]:
    """One placement per instance, given how many CUDA devices there are.

    KIND_AUTO means every GPU there is, or the CPU without one. Raises ModelLoadError for a GPU that is
    not there.
    """
    if config.backend is Backend.ENSEMBLE:
        return ()
    return tuple(
        placement for group in config.instance_groups for placement in _place_group(group, config.name, cuda_devices)
    )


def _place_group(group: InstanceGroup, model: str, cuda_devices: int) -> Sequence[Placement]:
    gpus = group.gpus or tuple(range(cuda_devices))
    if group.kind is InstanceKind.CPU and group.gpus:
        raise ModelLoadError(f"instance group {group.name} of model {model} has kind KIND_CPU but lists gpus")
    if group.kind is InstanceKind.CPU or (group.kind is InstanceKind.AUTO and not gpus):
        devices: Sequence[tuple[InstanceKind, int]] = [(InstanceKind.CPU, 0)]
    else:
        devices = [(InstanceKind.GPU, gpu) for gpu in gpus]
    absent = [device for kind, device in devices if kind is InstanceKind.GPU and device >= cuda_devices]
    if absent or not devices:
        wanted = ", ".join(str(device) for device in absent) or "any"
        raise ModelLoadError(
            f"instance group {group.name} of model {model} has kind KIND_GPU but no GPU is available "
            f"(GPU {wanted} of {cuda_devices})"
        )
    places = [device for device in devices for _ in range(group.count)]
    return [
        Placement(name=f"{group.name}_{index}", kind=kind, device_id=device)
        for index, (kind, device) in enumerate(places)
    ]


def completed(config: ModelConfig, placements: Sequence[Placement]) -> Any:
    """The `ModelConfig` message with the defaults that Triton fills in when it loads a model."""
    message = model_config_pb2.ModelConfig()
    message.CopyFrom(config.message)
    message.version_policy.latest.num_versions = 1
    message.default_model_filename = model_filename(config)
    if config.dynamic_batching is not None and not config.dynamic_batching.preferred_batch_size:
        message.dynamic_batching.preferred_batch_size.append(config.max_batch_size)
    if placements:
        del message.instance_group[:]
        message.instance_group.extend(_completed_group(group, placements) for group in config.instance_groups)
    return message


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
