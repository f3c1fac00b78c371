"""Triton's generate extension (provisional): JSON fields are inputs, and outputs are fields. Pure.

Source: `protocol/extension_generate.md`. A field that is no input of the model is a parameter.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from local_runtime.messages import Array, InferAnswer, InferRequest, ModelMetadata
from local_runtime.protocol.json_text import dump, parse
from local_runtime.protocol.oip_json import Arrays, Asked, TensorForm
from local_runtime.protocol.oip_layout import read_id
from local_runtime.protocol.oip_parameters import request_fields
from local_runtime.protocol.oip_tensors import Malformed, refusing
from local_runtime.protocol.oip_values import to_json

# Triton's words for a model that answers more or less often than once, and for one called over HTTP in one piece.
ONE_ANSWER: Final = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)
DECOUPLED: Final = "HTTP end point doesn't support models with decoupled transaction policy"
_Tensor = TypeVar("_Tensor")


def decode_generate(metadata: ModelMetadata, version: str, body: bytes) -> InferRequest:
    """The body of a generate call as a request for the runtime; see `read_generate`."""
    asked = read_generate(metadata, body, Arrays)
    return InferRequest(
        model=metadata.name, version=version, inputs=asked.inputs, request_id=asked.request_id, **asked.fields
    )


def read_generate(metadata: ModelMetadata, body: bytes, form: TensorForm[_Tensor]) -> Asked[_Tensor]:
    """The body of a generate call; INVALID_ARG naming the field that is wrong.

    A single value stands for a tensor of one element, a list for the last dimension (nested lists for the last
    ones); dimensions before it are 1.
    """
    document = parse(body)
    specs = {spec.name: spec for spec in metadata.inputs}
    inputs: dict[str, _Tensor] = {}
    parameters: dict[str, Any] = {}
    with refusing():
        for name, value in document.items():
            if name in specs:
                spec = specs[name]
                shape = _shape(value)
                shape = [1] * (len(spec.shape) - len(shape)) + shape
                inputs[name] = form.from_json(name, spec.datatype, shape, value if isinstance(value, list) else [value])
            elif name == "parameters":
                if not isinstance(value, dict):
                    raise Malformed("Unable to parse 'parameters': must be an object")
                parameters.update(value)
            elif name != "id":
                parameters[name] = value
        return Asked(inputs=inputs, request_id=read_id(document), fields=request_fields(parameters))


def encode_generate(answer: InferAnswer, *, request_id: str) -> bytes:
    """An answer as one JSON object; see `generated`."""
    values = {name: to_json(name, array) for name, array in answer.outputs.items()}
    return generated((answer.model, answer.version), values, request_id=request_id, parameters=answer.parameters)


def generated(
    model: tuple[str, str], outputs: Mapping[str, Any], *, request_id: str, parameters: Mapping[str, Any]
) -> bytes:
    """An answer of `model` (name and version) as one JSON object, its members sorted by name as in Triton.

    `outputs` are values in row order; one value stands alone.
    """
    document = {"model_name": model[0], "model_version": model[1], **parameters}
    if request_id:
        document["id"] = request_id
    document.update({name: _value(values) for name, values in outputs.items()})
    return dump(dict(sorted(document.items())))


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
