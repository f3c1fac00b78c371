"""`config.pbtxt` into a checked, typed value. What is not honoured here is refused by name, never ignored.

The text is parsed into Triton's own `ModelConfig` message, so syntax and unknown fields are judged as
Triton judges them. Field meanings: triton-inference-server/common `protobuf/model_config.proto`; the texts
of refusals that Triton shares: core `src/model_config_utils.cc`.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from local_runtime.errors import ModelLoadError

# The protocol's name of each datatype. TYPE_BF16 is absent: numpy has no such type.
NUMPY_TYPES: Mapping[str, Any] = MappingProxyType(
    {
        "BOOL": np.bool_,
        "UINT8": np.uint8,
        "UINT16": np.uint16,
        "UINT32": np.uint32,
        "UINT64": np.uint64,
        "INT8": np.int8,
        "INT16": np.int16,
        "INT32": np.int32,
        "INT64": np.int64,
        "FP16": np.float16,
        "FP32": np.float32,
        "FP64": np.float64,
        "BYTES": np.object_,
    }
)


class Backend(enum.StrEnum):
    """Which executor runs a model (Triton's word is backend)."""

    PYTHON = "python"
    PYTORCH = "pytorch"
    ENSEMBLE = "ensemble"


class InstanceKind(enum.StrEnum):
    """Where the instances of a group run."""

    AUTO = "KIND_AUTO"
    CPU = "KIND_CPU"
    GPU = "KIND_GPU"


_PLATFORMS = MappingProxyType(
    {"pytorch_libtorch": Backend.PYTORCH, "python": Backend.PYTHON, "ensemble": Backend.ENSEMBLE}
)
_BACKENDS = MappingProxyType({"pytorch": Backend.PYTORCH, "python": Backend.PYTHON})

# Fields that are honoured, by message. A set field that is not here makes the model fail to load.
_HONOURED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "ModelConfig": frozenset(
            {
                "name",
                "platform",
                "backend",
                "max_batch_size",
                "input",
                "output",
                "instance_group",
                "dynamic_batching",
                "ensemble_scheduling",
                "parameters",
                "default_model_filename",
            }
        ),
        "ModelInput": frozenset({"name", "data_type", "dims"}),
        "ModelOutput": frozenset({"name", "data_type", "dims", "label_filename"}),
        "ModelInstanceGroup": frozenset({"name", "kind", "count", "gpus"}),
        "ModelDynamicBatching": frozenset({"preferred_batch_size", "max_queue_delay_microseconds"}),
        "ModelEnsembling": frozenset({"step"}),
        "Step": frozenset({"model_name", "model_version", "input_map", "output_map"}),
        "ModelParameter": frozenset({"string_value"}),
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output. `dims` excludes the batch dimension, -1 is free; `datatype` is FP32, BYTES, ..."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    label_filename: str = ""

    @property
    def numpy_type(self) -> "np.dtype[Any]":
        """The numpy type of its arrays; object (holding bytes) for BYTES."""
        numpy_type: np.dtype[Any] = np.dtype(NUMPY_TYPES[self.datatype])
        return numpy_type


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """So many instances (per GPU for KIND_GPU); no `gpus` means all there are."""

    name: str
    kind: InstanceKind
    count: int
    gpus: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicBatching:
    """The `dynamic_batching` block."""

    preferred_batch_size: tuple[int, ...]
    max_queue_delay_microseconds: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleStep:
    """One step. `input_map` leads from model input, `output_map` from model output to ensemble tensor."""

    model_name: str
    model_version: str
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's configuration, checked. `message` is the protobuf it came from; treat it as read-only."""

    name: str
    backend: Backend
    platform: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    instance_groups: tuple[InstanceGroup, ...]
    dynamic_batching: DynamicBatching | None
    ensemble_steps: tuple[EnsembleStep, ...]
    parameters: Mapping[str, str]
    default_model_filename: str
    message: Any = dataclasses.field(repr=False, compare=False)

    def full_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Dims as clients see them: with -1 for the batch dimension if the model has one."""
        return (-1, *spec.dims) if self.max_batch_size > 0 else spec.dims


def parse(text: str, *, folder_name: str) -> ModelConfig:
    """The checked configuration of the model in that folder; ModelLoadError names what is wrong."""
    try:
        message = text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ModelLoadError(f"failed to read text proto from {folder_name}/config.pbtxt: {error}") from error
    message.name = message.name or folder_name
    if message.name != folder_name:
        raise ModelLoadError(
            f"unexpected directory name '{folder_name}' for model '{message.name}', "
            "directory name must equal model name"
        )
    _refuse_unhonoured(message, path="")
    config = _typed(message)
    _check_tensors(config, "input", config.inputs)
    _check_tensors(config, "output", config.outputs)
    _check_batching(config)
    _check_ensemble(config)
    return config


def _refuse_unhonoured(message: Any, *, path: str) -> None:
    honoured = _HONOURED[message.DESCRIPTOR.name]
    for field, value in message.ListFields():
        where = f"{path}{field.name}"
        if field.name not in honoured:
            raise ModelLoadError(f"'{where}' is not supported by the local runtime")
        for child in _children(field, value):
            _refuse_unhonoured(child, path=f"{where}.")


def _children(field: Any, value: Any) -> Iterable[Any]:
    """The messages inside a field's value: itself, the items of a list, or the values of a map."""
    if field.message_type is None:
        return ()
    if field.message_type.GetOptions().map_entry:
        is_plain = field.message_type.fields_by_name["value"].message_type is None
        return () if is_plain else value.values()
    return (value,) if hasattr(value, "ListFields") else value


def _typed(message: Any) -> ModelConfig:
    batching = message.dynamic_batching
    return ModelConfig(
        name=message.name,
        backend=_backend(message),
        platform=message.platform,
        max_batch_size=message.max_batch_size,
        inputs=_tensor_specs(message.input),
        outputs=_tensor_specs(message.output),
        instance_groups=_instance_groups(message),
        dynamic_batching=DynamicBatching(
            preferred_batch_size=tuple(batching.preferred_batch_size),
            max_queue_delay_microseconds=batching.max_queue_delay_microseconds,
        )
        if message.HasField("dynamic_batching")
        else None,
        ensemble_steps=tuple(_step(step) for step in message.ensemble_scheduling.step),
        parameters=MappingProxyType({key: value.string_value for key, value in message.parameters.items()}),
        default_model_filename=message.default_model_filename,
        message=message,
    )


def _backend(message: Any) -> Backend:
    named = {table[key] for table, key in _engine_names(message) if key in table}
    unknown = [key for table, key in _engine_names(message) if key and key not in table]
    if unknown:
        raise ModelLoadError(f"backend or platform '{unknown[0]}' is not supported by the local runtime")
    if len(named) != 1:
        raise ModelLoadError(f"must specify one matching 'platform' or 'backend' for {message.name}")
    return named.pop()


def _engine_names(message: Any) -> Sequence[tuple[Mapping[str, Backend], str]]:
    return (_PLATFORMS, message.platform), (_BACKENDS, message.backend)


def _tensor_specs(tensors: Iterable[Any]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=tensor.name,
            datatype=_datatype(tensor.data_type),
            dims=tuple(tensor.dims),
            label_filename=getattr(tensor, "label_filename", ""),
        )
        for tensor in tensors
    )


def _datatype(number: int) -> str:
    """The protocol's name of a DataType: TYPE_FP32 -> FP32, TYPE_STRING -> BYTES."""
    name: str = model_config_pb2.DataType.Name(number).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _instance_groups(message: Any) -> tuple[InstanceGroup, ...]:
    """The groups, completed as Triton completes them: at least one, with a count and a name."""
    groups = message.instance_group or [model_config_pb2.ModelInstanceGroup()]
    return tuple(
        InstanceGroup(
            name=group.name or f"{message.name}_{position}",
            kind=_kind(model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind), message.name),
            count=_count(group, message.name),
            gpus=tuple(group.gpus),
        )
        for position, group in enumerate(groups)
    )


def _kind(name: str, model: str) -> InstanceKind:
    try:
        return InstanceKind(name)
    except ValueError as error:
        raise ModelLoadError(f"instance group kind {name} of {model} is not supported") from error


def _count(group: Any, model: str) -> int:
    if group.count < 0:
        raise ModelLoadError(f"instance group count must be positive for {model}")
    return group.count or 1


def _step(step: Any) -> EnsembleStep:
    return EnsembleStep(
        model_name=step.model_name,
        model_version="" if step.model_version in (-1, 0) else str(step.model_version),
        input_map=MappingProxyType(dict(step.input_map)),
        output_map=MappingProxyType(dict(step.output_map)),
    )


def _check_tensors(config: ModelConfig, what: str, specs: Sequence[TensorSpec]) -> None:
    if not specs:
        raise ModelLoadError(f"model must specify at least one {what} for {config.name}")
    names = [spec.name for spec in specs]
    if "" in names:
        raise ModelLoadError(f"model {what} must specify 'name' for {config.name}")
    if len(set(names)) != len(names):
        raise ModelLoadError(f"model {what} names must be unique for {config.name}")
    for spec in specs:
        where = f"'{spec.name}' of {config.name}"
        if spec.datatype == "INVALID":
            raise ModelLoadError(f"model {what} must specify 'data_type': {where}")
        if spec.datatype not in NUMPY_TYPES:
            raise ModelLoadError(f"data_type TYPE_{spec.datatype} is not supported: {where}")
        if not spec.dims:
            raise ModelLoadError(f"model {what} must specify 'dims': {where}")
        if any(dim < 1 and dim != -1 for dim in spec.dims):
            raise ModelLoadError(
                f"model {what} dimension must be integer >= 1, or -1 to indicate a variable-size dimension: {where}"
            )


def _check_batching(config: ModelConfig) -> None:
    if config.max_batch_size < 0:
        raise ModelLoadError(f"'max_batch_size' must be non-negative value for {config.name}")
    if config.dynamic_batching is None:
        return
    for size in config.dynamic_batching.preferred_batch_size:
        if size <= 0:
            raise ModelLoadError(f"dynamic batching preferred size must be positive for {config.name}")
        if size > config.max_batch_size:
            raise ModelLoadError(f"dynamic batching preferred size must be <= max batch size for {config.name}")


def _check_ensemble(config: ModelConfig) -> None:
    is_ensemble = config.backend is Backend.ENSEMBLE
    if not is_ensemble and config.ensemble_steps:
        raise ModelLoadError(
            f"ensemble scheduling cannot be set for model '{config.name}' whose platform is not ensemble"
        )
    if is_ensemble and not config.ensemble_steps:
        raise ModelLoadError(f"ensemble scheduling must be set for ensemble {config.name}")
    if is_ensemble and config.message.instance_group:
        raise ModelLoadError(f"instance group should not be specified for ensemble '{config.name}'")
