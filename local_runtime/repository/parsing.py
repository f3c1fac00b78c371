"""`config.pbtxt` into a checked, typed value. What is not honoured here is refused by name, never ignored. Pure.

The text is parsed into Triton's own `ModelConfig` message, so syntax, unknown fields and two schedulers at once are
judged as Triton judges them. `schedulers` and `config_checks` hold the rules.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from local_runtime.errors import ModelLoadError
from local_runtime.repository import config_checks, schedulers
from local_runtime.repository.config_words import PLATFORMS, datatype, word
from local_runtime.repository.model_config import (
    Backend,
    EnsembleStep,
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    TensorSpec,
    VersionPolicy,
    Warmup,
    WarmupData,
    WarmupInput,
)

_BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {backend.value: backend for backend in (Backend.PYTORCH, Backend.ONNXRUNTIME, Backend.PYTHON)}
)

_MAX_ERROR = 1000  # characters of a parser's own text in an error

# Fields that are honoured, by message. A set field that is not here makes the model fail to load.
_HONOURED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        name: frozenset(fields.split())
        for name, fields in {
            "ModelConfig": "name platform backend version_policy max_batch_size input output optimization "
            "dynamic_batching sequence_batching ensemble_scheduling instance_group default_model_filename parameters "
            "model_warmup model_transaction_policy response_cache",
            "ModelInput": "name data_type format dims reshape allow_ragged_batch optional",
            "ModelOutput": "name data_type dims reshape label_filename",
            "ModelTensorReshape": "shape",
            "ModelVersionPolicy": "latest all specific",
            "Latest": "num_versions",
            "All": "",
            "Specific": "versions",
            # Hints about host memory: they change nothing on the CPU.
            "ModelOptimizationPolicy": "input_pinned_memory output_pinned_memory",
            "PinnedMemoryBuffer": "enable",
            "ModelInstanceGroup": "name kind count gpus",
            "ModelDynamicBatching": "preferred_batch_size max_queue_delay_microseconds preserve_ordering "
            "priority_levels default_priority_level default_queue_policy priority_queue_policy",
            "ModelQueuePolicy": "timeout_action default_timeout_microseconds allow_timeout_override max_queue_size",
            "ModelSequenceBatching": "direct oldest max_sequence_idle_microseconds control_input state",
            "StrategyDirect": "max_queue_delay_microseconds minimum_slot_utilization",
            "StrategyOldest": "max_candidate_sequences preferred_batch_size max_queue_delay_microseconds "
            "preserve_ordering",
            "ControlInput": "name control",
            "Control": "kind int32_false_true fp32_false_true bool_false_true data_type",
            "State": "input_name output_name data_type dims initial_state",
            "InitialState": "data_type dims zero_data data_file name",
            "ModelEnsembling": "step",
            "Step": "model_name model_version input_map output_map",
            "ModelParameter": "string_value",
            "ModelWarmup": "name batch_size inputs count",
            "Input": "data_type dims zero_data random_data input_data_file",
            "ModelTransactionPolicy": "decoupled",
            "ModelResponseCache": "enable",
        }.items()
    }
)


def parse(text: str, *, folder_name: str) -> ModelConfig:
    """The checked configuration in a `config.pbtxt` of that folder; ModelLoadError names what is wrong."""
    return parse_message(read_text(text, folder_name=folder_name), folder_name=folder_name)


def read_text(text: str, *, folder_name: str) -> Any:
    """The `ModelConfig` message of a `config.pbtxt`, not yet checked. Raises ModelLoadError."""
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ModelLoadError(f"failed to read text proto from {folder_name}/config.pbtxt: {_short(error)}") from error


def read_json(text: str, *, folder_name: str) -> Any:
    """The `ModelConfig` message of a configuration in JSON, not yet checked. Raises ModelLoadError."""
    try:
        return json_format.Parse(text, model_config_pb2.ModelConfig())
    except (json_format.ParseError, RecursionError) as error:
        raise ModelLoadError(f"failed to read the config override of {folder_name}: {_short(error)}") from error


def _short(error: Exception) -> str:
    """The parser repeats the whole line in which it found the error, however long and whatever is in it."""
    text = str(error).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


def parse_message(message: Any, *, folder_name: str) -> ModelConfig:
    """The checked configuration in a `ModelConfig` message, which is copied. Raises ModelLoadError."""
    own = model_config_pb2.ModelConfig()
    own.CopyFrom(message)
    own.name = own.name or folder_name
    if own.name != folder_name:
        raise ModelLoadError(
            f"unexpected directory name '{folder_name}' for model '{own.name}', directory name must equal model name"
        )
    _refuse_unhonoured(own, path="")
    config = _typed(own)
    config_checks.check(config)
    return config


def version_policy(message: Any) -> VersionPolicy:
    """Which versions a configuration wants served: the latest one unless it says otherwise."""
    if not message.HasField("version_policy"):
        return VersionPolicy()
    policy = message.version_policy
    if policy.HasField("latest"):
        return VersionPolicy(latest=policy.latest.num_versions)
    if policy.HasField("specific"):
        return VersionPolicy(latest=None, specific=tuple(policy.specific.versions))
    return VersionPolicy(latest=None)


def backend_of(message: Any) -> Backend | None:
    """The backend that `platform` and `backend` name together, None if neither is set. Raises ModelLoadError."""
    named = ((PLATFORMS, message.platform), (_BACKENDS, message.backend))
    for table, key in named:
        if key and key not in table:
            raise ModelLoadError(
                f"backend or platform '{key}' is not supported by the local runtime, supported are: "
                + ", ".join(sorted(table))
            )
    found = {table[key] for table, key in named if key}
    if len(found) > 1:
        raise ModelLoadError(f"unexpected 'platform' and 'backend' pair, got:{message.platform}, {message.backend}")
    return found.pop() if found else None


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
    backend = backend_of(message)
    if backend is None:
        raise ModelLoadError(f"must specify 'platform' or 'backend' for '{message.name}'")
    return ModelConfig(
        name=message.name,
        backend=backend,
        platform=message.platform,
        max_batch_size=message.max_batch_size,
        inputs=tuple(
            _tensor_spec(tensor, is_optional=tensor.optional, allow_ragged_batch=tensor.allow_ragged_batch)
            for tensor in message.input
        ),
        outputs=tuple(_tensor_spec(tensor, label_filename=tensor.label_filename) for tensor in message.output),
        instance_groups=_instance_groups(message),
        dynamic_batching=schedulers.dynamic_batching(message),
        sequence_batching=schedulers.sequence_batching(message),
        ensemble_steps=tuple(_step(step) for step in message.ensemble_scheduling.step),
        version_policy=version_policy(message),
        warmups=tuple(_warmup(warmup) for warmup in message.model_warmup if warmup.batch_size > 0),
        is_decoupled=message.model_transaction_policy.decoupled,
        has_response_cache=message.response_cache.enable,
        parameters=MappingProxyType({key: value.string_value for key, value in message.parameters.items()}),
        default_model_filename=message.default_model_filename,
        message=message,
    )


def _tensor_spec(
    tensor: Any, *, label_filename: str = "", is_optional: bool = False, allow_ragged_batch: bool = False
) -> TensorSpec:
    return TensorSpec(
        name=tensor.name,
        datatype=datatype(tensor.data_type),
        dims=tuple(tensor.dims),
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        label_filename=label_filename,
        is_optional=is_optional,
        allow_ragged_batch=allow_ragged_batch,
    )


def _instance_groups(message: Any) -> tuple[InstanceGroup, ...]:
    """The groups, completed as Triton completes them: at least one, with a count and a name."""
    groups = message.instance_group or [model_config_pb2.ModelInstanceGroup(name=message.name)]
    return tuple(
        InstanceGroup(
            name=group.name or f"{message.name}_{position}",
            kind=InstanceKind(word(model_config_pb2.ModelInstanceGroup.Kind, group.kind)),
            count=group.count or 1,
            gpus=tuple(group.gpus),
        )
        for position, group in enumerate(groups)
    )


def _step(step: Any) -> EnsembleStep:
    return EnsembleStep(
        model_name=step.model_name,
        model_version="" if step.model_version in (-1, 0) else str(step.model_version),
        input_map=MappingProxyType(dict(step.input_map)),
        output_map=MappingProxyType(dict(step.output_map)),
    )


def _warmup(warmup: Any) -> Warmup:
    """A sample is run once where no `count` is given (proto, `ModelWarmup.count`); those of batch size 0 never are."""
    return Warmup(
        name=warmup.name,
        batch_size=warmup.batch_size,
        inputs=tuple(_warmup_input(name, entry) for name, entry in warmup.inputs.items()),
        count=warmup.count or 1,
    )


def _warmup_input(name: str, entry: Any) -> WarmupInput:
    source = entry.WhichOneof("input_data_type")
    if source is None:
        raise ModelLoadError(f"warmup setting expects input '{name}' to have input_data_type set")
    return WarmupInput(
        name=name,
        datatype=datatype(entry.data_type),
        dims=tuple(entry.dims),
        data=WarmupData(source),
        file=entry.input_data_file,
    )
