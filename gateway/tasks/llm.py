"""What the forms share in which a chat model answers a tensor task: one question, one JSON document as the answer.

The schema that goes along makes servers write nothing else. Not every server honours it, and a caller's text may talk a
model into anything where it is not honoured: so each form checks the answer itself. What the text can bring about is
FAILED, which no breaker counts; an answer that is none at all is BROKEN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.types import Delta, Message, OpenAIPayload, Tensors
from gateway.tasks.contract import broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A chat model's whole answer: `text` is its document, `value` the same parsed, `choice` all that came with it."""

    text: str
    value: Mapping[str, Any]
    choice: Mapping[str, Any]


def question(
    messages: Sequence[Mapping[str, Any]], *, name: str, schema: Mapping[str, Any], max_tokens: int, **more: object
) -> OpenAIPayload:
    """`messages`, to be answered by a document of `schema` (an object's properties, all of them required).

    The likeliest answer is wanted, hence the temperature. `max_tokens` and not `max_completion_tokens`: every server
    knows it. A rule's target may take out or set any field where a server differs.
    """
    whole = {"type": "object", "properties": schema, "required": list(schema), "additionalProperties": False}
    return OpenAIPayload(
        body={
            "messages": messages,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": name, "strict": True, "schema": whole},
            },
            "temperature": 0,
            "max_tokens": max_tokens,
            **more,
        }
    )


def message_of(event: Tensors | Message | Delta) -> Message:
    """`event` as a whole answer; anything else is against the form."""
    if not isinstance(event, Message):
        raise broken(f"a whole answer of an LLM was expected, got {type(event).__name__}")
    return event


def object_of(body: bytes) -> Mapping[str, Any]:
    """An answer's own JSON. Raises `BackendError` BROKEN."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise broken("the answer is not JSON") from None
    if not isinstance(found, dict):
        raise broken("the answer is not a JSON object")
    return found


def said(event: Tensors | Message | Delta, *, fields: Sequence[str]) -> Said:
    """The document in a chat answer: an object that has `fields` and no others.

    Raises `BackendError`: BROKEN for what is no chat answer, FAILED for one that was refused, cut or is no such object.
    """
    choices = object_of(message_of(event).body).get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise broken("the chat answer has no message")
    if message.get("refusal"):
        raise failed("the model refused to answer")
    if choice.get("finish_reason") in ("length", "content_filter"):
        raise failed(f"the answer was cut: {choice['finish_reason']}")
    text = message.get("content")
    if not isinstance(text, str):
        raise failed("the chat answer has no text")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise failed("the text of the chat answer is not JSON") from None
    if not isinstance(value, dict) or set(value) != set(fields):
        raise failed(f"the text of the chat answer is not an object of {', '.join(fields)}")
    return Said(text=text, value=value, choice=choice)


def failed(message: str) -> BackendError:
    """The error for an answer that does not do, which may be the input's doing."""
    return BackendError(Fault(kind=FaultKind.FAILED, message=f"contract: {message}"))
