"""Triton's generate extension (provisional): JSON fields are inputs, and outputs are fields. Pure.

Source: `protocol/extension_generate.md`. A field that is no input of the model is a parameter.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from local_runtime.messages import Array, InferAnswer, InferRequest, ModelMetadata
from local_runtime.protocol.oip_json import dump, parse
from local_runtime.protocol.oip_parameters import request_fields
from local_runtime.protocol.oip_tensors import Malformed, refusing
from local_runtime.protocol.oip_values import from_json, to_json


def decode_generate(metadata: ModelMetadata, version: str, body: bytes) -> InferRequest:
    """The body of a generate call; INVALID_ARG naming the field that is wrong.

    A single value stands for a tensor of one element, a list for the last dimension (nested lists for the last
    ones); dimensions before it are 1.
    """
    document = parse(body)
    specs = {spec.name: spec for spec in metadata.inputs}
    inputs: dict[str, Array] = {}
    parameters: dict[str, Any] = {}
    with refusing():
        for name, value in document.items():
            if name in specs:
                spec = specs[name]
                shape = _shape(value)
                shape = [1] * (len(spec.shape) - len(shape)) + shape
                inputs[name] = from_json(name, spec.datatype, shape, value if isinstance(value, list) else [value])
            elif name == "parameters":
                if not isinstance(value, dict):
                    raise Malformed("Unable to parse 'parameters': must be an object")
                parameters.update(value)
            elif name != "id":
                parameters[name] = value
        request_id = document.get("id", "")
        if not isinstance(request_id, str):
            raise Malformed("Unable to parse 'id': must be a string")
        return InferRequest(
            model=metadata.name, version=version, inputs=inputs, request_id=request_id, **request_fields(parameters)
        )


def encode_generate(answer: InferAnswer, *, request_id: str) -> bytes:
    """An answer as one JSON object: outputs by name, one value where there is one, else a list in row order."""
    document: dict[str, Any] = {"model_name": answer.model, "model_version": answer.version}
    if request_id:
        document["id"] = request_id
    document.update(answer.parameters)
    for name, array in answer.outputs.items():
        document[name] = _value(to_json(name, array))
    return dump(document)


def _shape(value: Any) -> list[int]:
    shape: list[int] = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return shape


def _value(values: "Array | Sequence[str]") -> Any:
    if len(values) != 1:
        return values
    return values[0].item() if isinstance(values, np.ndarray) else values[0]
