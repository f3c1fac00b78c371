"""What every task contract offers, and the checks that several of them share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from gateway.core.errors import BackendError, Fault, FaultKind, InvalidInput
from gateway.core.types import Delta, Message, Part, Payload, Speech, Tensor, Tensors


class Form(Protocol):
    """How backends of one kind are asked a task, and how their answers are read."""

    def payload(self, parsed: Any) -> Payload:
        """What a backend is asked."""
        ...

    def answer(self, event: Tensors | Message | Delta, parsed: Any) -> Part:
        """A backend's event in the task's own form.

        Raises `BackendError` (BROKEN) for an answer against the contract, and `InvalidInput` where only the
        backend could tell that the input does not fit (a text with too many tokens).
        """
        ...


class Contract(Form, Protocol):
    """A task's two-way form. Implementations hold only their options."""

    name: ClassVar[str]
    is_sequence: ClassVar[bool]
    """Whether its requests are steps of sequences: what the model answers depends on those before."""
    tensor_fields: ClassVar[Mapping[str, str]]
    """The caller's field behind each input tensor, for a backend's refusals."""
    speaks: ClassVar[frozenset[Speech]]
    """The kinds of backends that can answer: those that `forms` has."""
    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any]

    def parse(self, given: object, parameters: Mapping[str, Any]) -> Any:
        """A caller's `input` and `parameters` as this contract's own frozen value.

        Raises `InvalidInput` with the field's dotted name.
        """
        ...

    @property
    def forms(self) -> Mapping[Speech, Form]:
        """How each kind of backend is asked; itself for the kind that the task is made for."""
        ...


def known_fields(given: object, known: tuple[str, ...], *, at: str) -> Mapping[str, Any]:
    """`given` as a mapping with no field beyond `known`. Raises `InvalidInput` naming the first stranger."""
    if not isinstance(given, Mapping):
        raise InvalidInput(f"'{at}' must be an object", field=at)
    for name in given:
        if name not in known:
            raise InvalidInput(
                f"unknown field; '{at}' takes {', '.join(known) or 'nothing'}", field=f"{at}.{name}"[:160]
            )
    return given


def located(fault: Fault, fields: Mapping[str, str]) -> Fault:
    """A backend's refusal of the input, with the caller's field instead of the tensor's name.

    Models write `TENSOR: what is wrong`; where they do not, a contract with one tensor still knows which it was.
    """
    if fault.kind is not FaultKind.REFUSED_INPUT or fault.field is not None:
        return fault
    tensor, colon, rest = fault.message.partition(": ")
    if colon and tensor in fields:
        return replace(fault, field=fields[tensor], message=rest)
    return replace(fault, field=next(iter(fields.values()))) if len(fields) == 1 else fault


def broken(message: str) -> BackendError:
    """The error for a backend's answer that is against the contract."""
    return BackendError(Fault(kind=FaultKind.BROKEN, message=f"contract: {message}"))


def tensors_of(event: Tensors | Message | Delta) -> Tensors:
    """`event` as a tensor answer; anything else is against a tensor contract."""
    if not isinstance(event, Tensors):
        raise broken(f"a tensor answer was expected, got {type(event).__name__}")
    return event


def output(event: Tensors, name: str, *, datatype: str, shape: tuple[int | None, ...]) -> Tensor:
    """The output `name`, with its datatype and shape (None = any) checked."""
    found = next((t for t in event.outputs if t.name == name), None)
    if found is None:
        raise broken(f"output '{name}' is missing")
    fits = len(found.shape) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, found.shape, strict=True)
    )
    if found.datatype != datatype or not fits:
        raise broken(f"output '{name}' is {found.datatype} {list(found.shape)}, wanted {datatype} {list(shape)}")
    return found
