"""Open Inference Protocol messages of gRPC to requests, answers to messages. No network."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from local_runtime.errors import ErrorCode, InferenceError, invalid, with_request_id
from local_runtime.messages import Array, InferAnswer, InferRequest, ModelMetadata
from local_runtime.protocol import oip_describe
from local_runtime.protocol.error_texts import safe_text
from local_runtime.protocol.oip_parameters import (
    FINAL_RESPONSE,
    WANTS_EMPTY_FINAL,
    flag,
    put_parameters,
    request_fields,
)
from local_runtime.protocol.oip_tensors import Malformed, check_tensor, from_bytes, refusing, shaped, to_bytes
from local_runtime.repository.model_config import NUMPY_TYPES
from local_runtime.scheduling.stats import ModelStatistics
from local_runtime.scheduling.validation import datatype_of

# Which field of InferTensorContents holds which datatype; FP16 and BF16 have none and must come raw.
_TYPED_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "bool_contents",
        "INT8": "int_contents",
        "INT16": "int_contents",
        "INT32": "int_contents",
        "INT64": "int64_contents",
        "UINT8": "uint_contents",
        "UINT16": "uint_contents",
        "UINT32": "uint_contents",
        "UINT64": "uint64_contents",
        "FP32": "fp32_contents",
        "FP64": "fp64_contents",
        "BYTES": "bytes_contents",
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A request and what the protocol's side of it asks of the answer.

    Args:
        request: for the runtime.
        classes: how many best classes are wanted in place of an output's values, by output.
        wants_empty_final: streams: a last message even where the model ends with none.
    """

    request: InferRequest
    classes: Mapping[str, int]
    wants_empty_final: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A `RepositoryModelLoadRequest`: the model, and the config and files that replace those of the repository."""

    model: str
    config: str | None
    files: Mapping[str, bytes]


def decode_request(message: Any, *, timeout_us: int | None) -> Decoded:
    """A `ModelInferRequest` as a request; INVALID_ARG if its tensors do not hold what they say.

    Arrays over raw contents are read-only views of the message.
    """
    try:
        parameters = _values(message.parameters)
        return Decoded(
            request=InferRequest(
                model=message.model_name,
                version=message.model_version,
                inputs=_inputs(message),
                request_id=message.id,
                timeout_us=timeout_us,
                outputs=tuple(output.name for output in message.outputs),
                **request_fields(parameters),
            ),
            classes=_classes(message),
            wants_empty_final=flag(WANTS_EMPTY_FINAL, parameters.get(WANTS_EMPTY_FINAL, False)),
        )
    except Malformed as error:
        raise invalid(with_request_id(message.id, str(error))) from error


def decode_load(message: Any) -> LoadRequest:
    """A `RepositoryModelLoadRequest`; INVALID_ARG for parameters that are not Triton's."""
    config: str | None = None
    files: dict[str, bytes] = {}
    with refusing():
        for name, parameter in message.parameters.items():
            if name == "config":
                config = _chosen(name, parameter, "string_param")
            elif name.startswith("file:"):
                files[name.removeprefix("file:")] = _chosen(name, parameter, "bytes_param")
            else:
                raise Malformed(f"unrecognized load parameter '{name:.100}'")
    return LoadRequest(model=message.model_name, config=config, files=files)


def decode_unload(message: Any) -> bool:
    """Whether a `RepositoryModelUnloadRequest` takes the composing models along; INVALID_ARG if it is unclear."""
    with refusing():
        for name, parameter in message.parameters.items():
            if name == "unload_dependents":
                return bool(_chosen(name, parameter, "bool_param"))
    return False


def encode_answer(answer: InferAnswer, *, request_id: str, is_final: bool | None = None) -> Any:
    """An answer as a `ModelInferResponse` with raw contents; in streams it says whether it is the last."""
    message = service_pb2.ModelInferResponse(
        model_name=answer.model,
        model_version=answer.version,
        id=request_id,
        outputs=[
            service_pb2.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype_of(array), shape=array.shape)
            for name, array in answer.outputs.items()
        ],
        raw_output_contents=[to_bytes(array) for array in answer.outputs.values()],
    )
    put_parameters(message.parameters, answer.parameters)
    if is_final is not None:
        message.parameters[FINAL_RESPONSE].bool_param = is_final
    return message


def encode_stream_error(error: InferenceError, *, request_id: str, is_final: bool) -> Any:
    """An error as a `ModelStreamInferResponse`, which says whose it is and whether it is the last answer."""
    message = service_pb2.ModelStreamInferResponse(
        error_message=safe_text(error.message), infer_response=service_pb2.ModelInferResponse(id=request_id)
    )
    message.infer_response.parameters[FINAL_RESPONSE].bool_param = is_final
    return message


def encode_metadata(metadata: ModelMetadata) -> Any:
    """Metadata as a `ModelMetadataResponse`."""
    return service_pb2.ModelMetadataResponse(**oip_describe.metadata(metadata))


def encode_statistics(statistics: Sequence[ModelStatistics]) -> Any:
    """Counters as a `ModelStatisticsResponse`."""
    return service_pb2.ModelStatisticsResponse(**oip_describe.statistics(statistics))


def _inputs(message: Any) -> dict[str, Array]:
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise Malformed(
            f"expected tensor data for {len(message.inputs)} inputs but got {len(raw)} sets of data for model "
            f"'{message.model_name}'"
        )
    inputs: dict[str, Array] = {}
    for position, tensor in enumerate(message.inputs):
        if tensor.name in inputs:
            raise Malformed(f"input '{tensor.name}' already exists in request")
        if tensor.parameters:
            _refuse_shared_memory(tensor)
        if raw:
            if tensor.HasField("contents") and tensor.contents.ListFields():
                raise Malformed(f"input '{tensor.name}' has contents although the request uses raw_input_contents")
            inputs[tensor.name] = from_bytes(
                tensor.name, tensor.datatype, tensor.shape, raw=raw[position], model=message.model_name
            )
        else:
            inputs[tensor.name] = _typed(tensor)
    return inputs


def _typed(tensor: Any) -> Array:
    check_tensor(tensor.name, tensor.datatype, tensor.shape)
    field = _TYPED_FIELDS.get(tensor.datatype)
    if field is None:
        raise Malformed(f"datatype {tensor.datatype} of input '{tensor.name}' needs raw contents")
    if any(used.name != field for used, _ in tensor.contents.ListFields()):
        raise Malformed(f"input '{tensor.name}' of datatype {tensor.datatype} must use contents field {field}")
    try:
        array = np.array(list(getattr(tensor.contents, field)), dtype=NUMPY_TYPES[tensor.datatype])
    except OverflowError as error:
        raise Malformed(f"value out of range of {tensor.datatype} for input '{tensor.name}'") from error
    return shaped(tensor.name, array, tensor.shape)


def _classes(message: Any) -> dict[str, int]:
    classes: dict[str, int] = {}
    for output in message.outputs:
        if not output.parameters:
            continue
        _refuse_shared_memory(output)
        wanted = _values(output.parameters).get("classification", 0)
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0:
            raise Malformed(f"parameter 'classification' of output '{output.name}' must be a whole number above 0")
        if wanted:
            classes[output.name] = wanted
    return classes


def _refuse_shared_memory(tensor: Any) -> None:
    if "shared_memory_region" in tensor.parameters:
        raise InferenceError(
            ErrorCode.UNSUPPORTED, f"tensor '{tensor.name}' is in shared memory, which this server does not offer"
        )


def _values(parameters: Any) -> dict[str, Any]:
    """`InferParameter`s as plain values."""
    values: dict[str, Any] = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise Malformed(f"parameter '{name}' has no value")
        values[name] = getattr(parameter, choice)
    return values


def _chosen(name: str, parameter: Any, choice: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != choice:
        raise Malformed(f"parameter '{name:.100}' must be given as {choice}")
    return getattr(parameter, choice)
