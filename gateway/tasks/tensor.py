"""`tensor`: any model's tensors as they are, in the words of the Open Inference Protocol."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from gateway.core.errors import InvalidInput, UnknownModel
from gateway.core.texts import triton_plain
from gateway.core.types import Delta, Message, SequenceStep, Speech, Tensor, TensorPayload, Tensors
from gateway.core.values import quick_value
from gateway.tasks import oip
from gateway.tasks.contract import Form, known_fields, tensors_of
from local_runtime.errors import InferenceError
from local_runtime.protocol.oip_json import Asked, read_document

_FIELDS: Final = ("model", "version", "inputs", "outputs")
MAX_VERSION: Final = 20  # digits: Triton reads versions as int64
_SHOWN: Final = 100  # characters of a name that is none


@quick_value
class TensorInput:
    """A call of a model that the caller names itself; `version` empty = the server's choice."""

    model: str
    version: str
    payload: TensorPayload
    sequence: SequenceStep | None = None


class TensorTask:
    """Tensors in, tensors out; the rules say which servers are asked for the model."""

    name: ClassVar[str] = "tensor"
    is_sequence: ClassVar[bool] = False
    tensor_fields: ClassVar[Mapping[str, str]] = {}
    speaks: ClassVar[frozenset[Speech]] = frozenset({"tensors"})

    _tensor: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "datatype": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "data": {"type": "array"},
        },
        "required": ["name", "datatype", "shape", "data"],
    }
    input_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "model": {"type": "string", "description": "its name on the model servers"},
            "version": {"type": "string", "pattern": "^[0-9]*$", "description": "default: the servers' choice"},
            "inputs": {"type": "array", "items": _tensor},
            "outputs": {"type": "array", "items": {"type": "object", "required": ["name"]}},
        },
        "required": ["model", "inputs"],
        "additionalProperties": False,
    }
    output_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"outputs": {"type": "array", "items": _tensor}},
        "required": ["outputs"],
    }

    @property
    def forms(self) -> Mapping[Speech, Form]:
        """Tensors alone."""
        return {"tensors": self}

    def parse(self, given: object, parameters: Mapping[str, Any]) -> TensorInput:
        """Task form: model, version, inputs and outputs, the protocol's own parameters under `parameters`."""
        fields = known_fields(given, _FIELDS, at="input")
        model, version = fields.get("model"), fields.get("version", "")
        if not isinstance(model, str):
            raise InvalidInput("must be the name of a model", field="input.model")
        if not isinstance(version, str) or not (version == "" or (version.isascii() and version.isdecimal())):
            raise InvalidInput('must be a number in quotes, such as "1"', field="input.version")
        document = {name: fields[name] for name in ("inputs", "outputs") if name in fields}
        try:
            asked = read_document(model, document | {"parameters": parameters}, oip.Wire)
        except InferenceError as error:
            raise InvalidInput(triton_plain(error.message), field="input.inputs") from error
        check_name(model, version)
        return named(model, version, asked)

    def payload(self, parsed: TensorInput) -> TensorPayload:
        """The tensors, untouched."""
        return parsed.payload

    def answer(self, event: Tensors | Message | Delta, parsed: TensorInput) -> Tensors:  # noqa: ARG002 - the contract's form
        """The tensors, untouched."""
        return tensors_of(event)


def named(model: str, version: str, asked: Asked[Tensor], *, stream: bool = False) -> TensorInput:
    """A call of `model`, whose name was checked."""
    return TensorInput(
        model=model, version=version, payload=oip.payload(asked, stream=stream), sequence=oip.sequence(asked)
    )


def check_name(model: str, version: str = "") -> None:
    """Raise `UnknownModel` for what no model or version can be called, before anybody looks for it, or remembers it."""
    if not oip.is_name(model) or len(version) > MAX_VERSION:
        shown = model[:_SHOWN].encode("ascii", "backslashreplace").decode()
        raise UnknownModel(f"Request for unknown model: '{shown}' is not found")
