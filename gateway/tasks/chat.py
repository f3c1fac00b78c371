"""`chat`: OpenAI messages -> a message. The body passes through; only what we must know is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import orjson

from gateway.core.errors import InvalidInput
from gateway.core.types import Answer, Delta, Message, OpenAIPayload, Tensors
from gateway.tasks.contract import broken, known_fields

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# What OpenAI's schema bounds and upstreams answer with a 5xx or nonsense when broken. All else is theirs.
NUMBERS = {"max_tokens": (1, None), "max_completion_tokens": (1, None), "n": (1, 128)}
REALS = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """`body` as the caller sent it, with every field, known or not; `is_task`: the answer is wanted in task form."""

    body: Mapping[str, Any]
    stream: bool
    is_task: bool = False


class Chat:
    """Messages in, the upstream's own answer out (OpenAI paths) or its message (task paths)."""

    name: ClassVar[str] = "chat"
    is_sequence: ClassVar[bool] = False
    tensor_fields: ClassVar[Mapping[str, str]] = {}

    input_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "messages": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"role": {"enum": list(ROLES)}, "content": {}},
                    "required": ["role"],
                },
            }
        },
        "required": ["messages"],
    }
    output_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"message": {"type": "object"}, "finish_reason": {"type": ["string", "null"]}},
        "required": ["message", "finish_reason"],
    }

    def parse(self, given: object, parameters: Mapping[str, Any]) -> ChatInput:
        """Task form: `input.messages`, and OpenAI's sampling fields under `parameters`."""
        fields = known_fields(given, ("messages",), at="input")
        if parameters.get("stream"):
            raise InvalidInput("streams are on /v1/chat/completions", field="parameters.stream")
        return replace(parse_body({**parameters, **fields}, at="input."), is_task=True)

    def payload(self, parsed: ChatInput) -> OpenAIPayload:
        """The body, untouched."""
        return OpenAIPayload(body=parsed.body, stream=parsed.stream)

    def answer(self, event: Tensors | Message | Delta, parsed: ChatInput) -> Answer | Message | Delta:
        """Relayed as it came, or as a task answer; a tensor answer is against this contract, as is the wrong form."""
        if isinstance(event, Tensors) or isinstance(event, Delta) is not parsed.stream:
            raise broken(f"a chat answer was expected, got {type(event).__name__}")
        return _as_answer(event) if parsed.is_task and isinstance(event, Message) else event


def parse_body(body: Mapping[str, Any], *, at: str = "") -> ChatInput:
    """Check an OpenAI chat body. `at` prefixes field names in errors. Unknown fields pass untouched."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidInput("must be a list with at least one message", field=f"{at}messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidInput("must be an object", field=f"{at}messages[{i}]")
        if message.get("role") not in ROLES:
            raise InvalidInput(f"must be one of {', '.join(ROLES)}", field=f"{at}messages[{i}].role")
        _check_content(message.get("content"), f"{at}messages[{i}].content")
    stream = body.get("stream")
    if not isinstance(stream, bool | None):
        raise InvalidInput("must be true or false", field=f"{at}stream")
    for name in ("stream_options", "response_format"):
        if not isinstance(body.get(name), Mapping | None):
            raise InvalidInput("must be an object", field=f"{at}{name}")
    tools = body.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InvalidInput("must be a list of objects", field=f"{at}tools")
    _check_numbers(body, at)
    return ChatInput(body=body, stream=bool(stream))


def _check_content(content: object, at: str) -> None:
    if not isinstance(content, str | list | None):
        raise InvalidInput("must be a string or a list of parts", field=at)
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise InvalidInput("must be an object with a type", field=f"{at}[{i}]")


def _check_numbers(body: Mapping[str, Any], at: str) -> None:
    for name, (low, high) in NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high and value > high):
            bound = f"a whole number from {low}" + (f" to {high}" if high else "")
            raise InvalidInput(f"must be {bound}", field=f"{at}{name}")
    for name, (least, most) in REALS.items():
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidInput(f"must be a number from {least} to {most}", field=f"{at}{name}")


def _as_answer(message: Message) -> Answer:
    """The task form of a whole chat answer."""
    try:
        choice = orjson.loads(message.body)["choices"][0]
        found = {"message": choice["message"], "finish_reason": choice.get("finish_reason")}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise broken("the chat answer has no message") from None
    if not isinstance(found["message"], Mapping):
        raise broken("the chat answer's message is not an object")
    return Answer(output=found, usage=message.usage)
