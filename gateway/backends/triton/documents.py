"""What Triton tells about itself and its models: protobuf messages as the documents of its HTTP answers. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from gateway.core.models import DEFAULT_SEQUENCE_IDLE_US, ModelFacts, ModelFigures, TensorFacts

_WIDE_INTEGERS: Final = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
# Fields that servers know only since lately: left out where they are not set, as all the others do.
_NEW_FIELDS: Final = frozenset({"max_inflight_requests"})
_NARROW_IDS: Final = (model_config_pb2.TYPE_UINT32, model_config_pb2.TYPE_INT32)


def document(message: Any) -> dict[str, Any]:
    """A message in Triton's JSON: proto names, default values present, 64-bit integers as numbers."""
    tree = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _numbers(message.DESCRIPTOR, tree)


def index(response: pb.RepositoryIndexResponse) -> list[dict[str, Any]]:
    """The repository: what is known of each version, a name alone for a model that was never loaded."""
    return [{name: value for name, value in document(one).items() if value} for one in response.models]


def facts(metadata: Any, config: Any) -> ModelFacts:
    """What the gateway has to know of a model, out of its `ModelConfig` message and its metadata.

    The metadata are Triton's message, or the local runtime's value with the same names.
    """
    batching = config.dynamic_batching
    policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
    return ModelFacts(
        name=metadata.name,
        versions=tuple(metadata.versions),
        inputs=_tensors(metadata.inputs),
        outputs=_tensors(metadata.outputs),
        max_batch_size=config.max_batch_size,
        is_decoupled=config.model_transaction_policy.decoupled,
        has_priority_levels=batching.priority_levels > 0,
        allows_timeout=any(policy.allow_timeout_override for policy in policies),
        is_sequence=config.HasField("sequence_batching"),
        sequence_idle_us=config.sequence_batching.max_sequence_idle_microseconds or DEFAULT_SEQUENCE_IDLE_US,
        correlation_bits=_correlation_bits(config.sequence_batching),
    )


def figures(response: pb.ModelStatisticsResponse, *, replica: str) -> list[ModelFigures]:
    """The counters of every version of every model, nanoseconds as microseconds."""
    return [
        ModelFigures(
            replica=replica,
            model=stats.name,
            version=stats.version,
            requests=stats.inference_stats.success.count,
            failures=stats.inference_stats.fail.count,
            inferences=stats.inference_count,
            executions=stats.execution_count,
            queue_us=stats.inference_stats.queue.ns // 1000,
            compute_input_us=stats.inference_stats.compute_input.ns // 1000,
            compute_infer_us=stats.inference_stats.compute_infer.ns // 1000,
            compute_output_us=stats.inference_stats.compute_output.ns // 1000,
            batch_sizes={batch.batch_size: batch.compute_infer.count for batch in stats.batch_stats},
        )
        for stats in response.model_stats
    ]


def load_request(model: str, *, config: str | None, files: Mapping[str, bytes] | None) -> pb.RepositoryModelLoadRequest:
    """A load; `files` by `<version>/<name>`, which Triton calls `file:<version>/<name>`."""
    request = pb.RepositoryModelLoadRequest(model_name=model)
    if config is not None:
        request.parameters["config"].string_param = config
    for name, content in (files or {}).items():
        request.parameters[f"file:{name.removeprefix('file:')}"].bytes_param = content
    return request


def _tensors(described: Iterable[Any]) -> dict[str, TensorFacts]:
    return {one.name: TensorFacts(datatype=one.datatype, shape=tuple(one.shape)) for one in described}


def _correlation_bits(batching: Any) -> int:
    for control_input in batching.control_input:
        for control in control_input.control:
            is_id = control.kind == model_config_pb2.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID
            if is_id and control.data_type in _NARROW_IDS:
                return 32
    return 64


def _numbers(descriptor: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with the strings that protobuf writes for 64-bit integers turned into numbers."""
    return {
        field.name: _number(field, tree[field.name])
        for field in descriptor.fields  # in their declared order, which is that of Triton's JSON
        if field.name in tree and (tree[field.name] or field.name not in _NEW_FIELDS)
    }


def _number(field: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [_number(field, item) for item in value]
    if field.cpp_type in _WIDE_INTEGERS:
        return int(value)
    if field.message_type is None:  # a float without a fraction is written without one
        return int(value) if isinstance(value, float) and value.is_integer() else value
    if field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {key: _number(inner, item) for key, item in value.items()}
    return _numbers(field.message_type, value)
