"""Open Inference Protocol messages to requests, answers to messages. No network.

Binary form of tensors: little-endian values in row order; BYTES elements as a 4-byte little-endian length and the
bytes (Triton's binary tensor data extension, `protocol/extension_binary_data.md`).
"""

import math
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from local_runtime.errors import InferenceError, invalid, with_request_id
from local_runtime.messages import Array, InferAnswer, InferRequest, ModelMetadata
from local_runtime.repository.model_config import NUMPY_TYPES
from local_runtime.scheduling.stats import ModelStatistics
from local_runtime.scheduling.validation import datatype_of

# Which field of InferTensorContents holds which datatype; FP16 has none and must come raw.
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


def decode_request(message: Any, *, timeout_us: int | None) -> InferRequest:
    """A `ModelInferRequest` as a request; INVALID_ARG if its tensors do not hold what they say.

    Arrays over raw contents are read-only views of the message.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise _refused(
            message,
            f"expected tensor data for {len(message.inputs)} inputs but got {len(raw)} sets of data for model "
            f"'{message.model_name}'",
        )
    inputs: dict[str, Array] = {}
    for position, tensor in enumerate(message.inputs):
        if tensor.datatype not in NUMPY_TYPES:
            raise _refused(message, f"invalid datatype for input '{tensor.name}': '{tensor.datatype}'")
        if any(dim < 0 for dim in tensor.shape):
            raise _refused(message, f"invalid shape for input '{tensor.name}': {list(tensor.shape)}")
        if tensor.name in inputs:
            raise _refused(message, f"input '{tensor.name}' is given more than once")
        values = _raw_values(message, tensor, raw[position]) if raw else _typed_values(message, tensor)
        try:
            inputs[tensor.name] = values.reshape(tuple(tensor.shape))
        except (ValueError, OverflowError) as error:  # dimensions beyond what numpy can address, or too many of them
            raise _refused(message, f"invalid shape for input '{tensor.name}': {list(tensor.shape)}") from error
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        inputs=inputs,
        request_id=message.id,
        timeout_us=timeout_us,
        outputs=tuple(output.name for output in message.outputs),
    )


def encode_answer(answer: InferAnswer, *, request_id: str) -> Any:
    """An answer as a `ModelInferResponse` with raw contents."""
    return service_pb2.ModelInferResponse(
        model_name=answer.model,
        model_version=answer.version,
        id=request_id,
        outputs=[
            service_pb2.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype_of(array), shape=array.shape)
            for name, array in answer.outputs.items()
        ],
        raw_output_contents=[to_bytes(array) for array in answer.outputs.values()],
    )


def encode_metadata(metadata: ModelMetadata) -> Any:
    """Metadata as a `ModelMetadataResponse`."""
    response = service_pb2.ModelMetadataResponse(
        name=metadata.name, versions=metadata.versions, platform=metadata.platform
    )
    for field, tensors in ((response.inputs, metadata.inputs), (response.outputs, metadata.outputs)):
        for tensor in tensors:
            field.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return response


def encode_statistics(statistics: ModelStatistics) -> Any:
    """Counters as a `ModelStatistics` message. Compute time counts as infer; nothing is split off for in/output."""
    message = service_pb2.ModelStatistics(
        name=statistics.name,
        version=statistics.version,
        inference_count=statistics.inference_count,
        execution_count=statistics.execution_count,
    )
    total = message.inference_stats
    total.success.count = total.queue.count = statistics.success_count
    total.success.ns = 1000 * (statistics.queue_us + statistics.compute_us)
    total.fail.count = statistics.fail_count
    total.queue.ns = 1000 * statistics.queue_us
    total.compute_infer.count = statistics.success_count
    total.compute_infer.ns = 1000 * statistics.compute_us
    for rows, executions in statistics.batch_sizes.items():
        message.batch_stats.add(batch_size=rows).compute_infer.count = executions
    return message


def to_bytes(array: Array) -> bytes:
    """The binary form of a tensor."""
    if array.dtype.kind == "O":
        return b"".join(struct.pack("<I", len(item)) + item for item in array.reshape(-1))
    return array.tobytes()


def _raw_values(message: Any, tensor: Any, raw: bytes) -> Array:
    if tensor.datatype == "BYTES":
        return _strings(message, tensor, raw)
    dtype: np.dtype[Any] = np.dtype(NUMPY_TYPES[tensor.datatype])
    expected = math.prod(tensor.shape) * dtype.itemsize
    if len(raw) != expected:
        raise _refused(
            message,
            f"input byte size mismatch for input '{tensor.name}' for model '{message.model_name}'. "
            f"Expected {expected}, got {len(raw)}",
        )
    return np.frombuffer(raw, dtype=dtype)


def _strings(message: Any, tensor: Any, raw: bytes) -> Array:
    items: list[bytes] = []
    at = 0
    while at < len(raw):
        start = at + 4
        end = start + struct.unpack_from("<I", raw, at)[0] if start <= len(raw) else start
        if end > len(raw):
            raise _refused(message, f"unexpected end of string elements for inference input '{tensor.name}'")
        items.append(raw[start:end])
        at = end
    return _counted(message, tensor, np.array(items, dtype=np.object_))


def _typed_values(message: Any, tensor: Any) -> Array:
    field = _TYPED_FIELDS.get(tensor.datatype)
    if field is None:
        raise _refused(message, f"datatype {tensor.datatype} of input '{tensor.name}' needs raw contents")
    values = getattr(tensor.contents, field)
    try:
        array = np.array(list(values), dtype=NUMPY_TYPES[tensor.datatype])
    except OverflowError as error:
        raise _refused(message, f"value out of range of {tensor.datatype} for input '{tensor.name}'") from error
    return _counted(message, tensor, array)


def _counted(message: Any, tensor: Any, array: Array) -> Array:
    expected = math.prod(tensor.shape)
    if array.size != expected:
        what = "string elements" if tensor.datatype == "BYTES" else "elements"
        raise _refused(
            message,
            f"unexpected number of {what} {array.size} for inference input '{tensor.name}', expecting {expected}",
        )
    return array


def _refused(message: Any, text: str) -> InferenceError:
    return invalid(with_request_id(message.id, text))
