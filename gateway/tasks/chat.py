"""`chat`: OpenAI bodies -> an answer in words. The body passes through; only what we must know is read."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

import orjson

from gateway.core.errors import InvalidInput
from gateway.core.types import Answer, Delta, Message, OpenAIApi, OpenAIPayload, Speech, Tensors
from gateway.core.values import quick_value
from gateway.tasks.contract import Form, broken, known_fields

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
# What OpenAI's schema bounds and upstreams answer with a 5xx or nonsense when broken. All else is theirs.
WHOLES: Final[Mapping[OpenAIApi, Mapping[str, tuple[int, int | None]]]] = {
    "chat/completions": {"max_tokens": (1, None), "max_completion_tokens": (1, None), "n": (1, 128)},
    "completions": {"max_tokens": (0, None), "n": (1, 128)},
    "responses": {"max_output_tokens": (1, None)},
}
REALS: Final = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}
OBJECTS: Final[Mapping[OpenAIApi, tuple[str, ...]]] = {
    "chat/completions": ("stream_options", "response_format"),
    "completions": ("stream_options",),
    "responses": ("stream_options", "text", "reasoning"),
}
_ELSEWHERE: Final = ("previous_response_id", "conversation", "prompt")
"""Fields of the responses API with which the upstream has an input already."""


@quick_value
class ChatInput:
    """`body` as the caller sent it, with every field, known or not; `is_task`: the answer is wanted in task form."""

    body: Mapping[str, Any]
    api: OpenAIApi = "chat/completions"
    stream: bool = False
    is_task: bool = False


class Chat:
    """Words in, the upstream's own answer out (OpenAI paths) or its message (task paths)."""

    name: ClassVar[str] = "chat"
    is_sequence: ClassVar[bool] = False
    speaks: ClassVar[frozenset[Speech]] = frozenset({"openai"})
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

    @property
    def forms(self) -> Mapping[Speech, Form]:
        """It is asked in OpenAI's words alone."""
        return {"openai": self}

    def parse(self, given: object, parameters: Mapping[str, Any]) -> ChatInput:
        """Task form: `input.messages`, and OpenAI's sampling fields under `parameters`."""
        fields = known_fields(given, ("messages",), at="input")
        if parameters.get("stream"):
            raise InvalidInput("streams are on /v1/chat/completions", field="parameters.stream")
        return replace(parse_chat({**parameters, **fields}, at="input."), is_task=True)

    def payload(self, parsed: ChatInput) -> OpenAIPayload:
        """The body, untouched."""
        return OpenAIPayload(body=parsed.body, api=parsed.api, stream=parsed.stream)

    def answer(self, event: Tensors | Message | Delta, parsed: ChatInput) -> Answer | Message | Delta:
        """Relayed as it came, or as a task answer; a tensor answer is against this contract, as is the wrong form."""
        if isinstance(event, Tensors) or isinstance(event, Delta) is not parsed.stream:
            raise broken(f"a chat answer was expected, got {type(event).__name__}")
        return _as_answer(event) if parsed.is_task and isinstance(event, Message) else event


Parse = Callable[[Mapping[str, Any]], ChatInput]
"""Check a body of one API; unknown fields pass untouched. Raises `InvalidInput` that names the field."""


def parse_chat(body: Mapping[str, Any], *, at: str = "") -> ChatInput:
    """Check the body of a chat completion. `at` prefixes field names in errors."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidInput("must be a list with at least one message", field=f"{at}messages")
    for i, message in enumerate(messages):
        _check_message(message, f"{at}messages[{i}]")
    return _checked(body, "chat/completions", at)


def parse_completion(body: Mapping[str, Any]) -> ChatInput:
    """Check the body of a plain completion: texts, or tokens by their numbers."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str | list) or prompt == []:
        raise InvalidInput("must be a text, or a list of texts or of token numbers", field="prompt")
    for i, part in enumerate(prompt if isinstance(prompt, list) else ()):
        if isinstance(part, list):
            if not part or not all(_is_whole(token, 0, None) for token in part):
                raise InvalidInput("must be a list of token numbers, at least one", field=f"prompt[{i}]")
        elif not isinstance(part, str) and not _is_whole(part, 0, None):
            raise InvalidInput("must be a text, a token number, or a list of these", field=f"prompt[{i}]")
    return _checked(body, "completions")


def parse_responses(body: Mapping[str, Any]) -> ChatInput:
    """Check the body of the responses API, as far as one request tells all: what works in the background does not."""
    given = body.get("input")
    has_more = any(body.get(name) for name in _ELSEWHERE)
    if not isinstance(given, str | list | None) or (not given and not has_more):
        raise InvalidInput("must be a text or a list with at least one item", field="input")
    for i, item in enumerate(given if isinstance(given, list) else ()):
        if not isinstance(item, Mapping):
            raise InvalidInput("must be an object", field=f"input[{i}]")
        if item.get("type") in (None, "message") and "role" in item:
            _check_message(item, f"input[{i}]")
    if not isinstance(body.get("instructions"), str | None):
        raise InvalidInput("must be a text", field="instructions")
    if body.get("background"):
        raise InvalidInput(
            "answers are not kept here: what works in the background could not be read", field="background"
        )
    return _checked(body, "responses")


def _checked(body: Mapping[str, Any], api: OpenAIApi, at: str = "") -> ChatInput:
    """`body` as the input of `api`, after the checks that all of them share."""
    stream = body.get("stream")
    if not isinstance(stream, bool | None):
        raise InvalidInput("must be true or false", field=f"{at}stream")
    for name in OBJECTS[api]:
        if not isinstance(body.get(name), Mapping | None):
            raise InvalidInput("must be an object", field=f"{at}{name}")
    tools = body.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InvalidInput("must be a list of objects", field=f"{at}tools")
    for name, (low, high) in WHOLES[api].items():
        value = body.get(name)
        if value is not None and not _is_whole(value, low, high):
            bound = f"a whole number from {low}" + (f" to {high}" if high else "")
            raise InvalidInput(f"must be {bound}", field=f"{at}{name}")
    for name, (least, most) in REALS.items():
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidInput(f"must be a number from {least} to {most}", field=f"{at}{name}")
    return ChatInput(body=body, api=api, stream=bool(stream))


def _check_message(message: object, at: str) -> None:
    if not isinstance(message, Mapping):
        raise InvalidInput("must be an object", field=at)
    if message.get("role") not in ROLES:
        raise InvalidInput(f"must be one of {', '.join(ROLES)}", field=f"{at}.role")
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise InvalidInput("must be a string or a list of parts", field=f"{at}.content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise InvalidInput("must be an object with a type", field=f"{at}.content[{i}]")


def _is_whole(value: object, low: int, high: int | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high)


def _as_answer(message: Message) -> Answer:
    """The task form of a whole chat answer."""
    try:
        choice = orjson.loads(message.body)["choices"][0]
        found = {"message": choice["message"], "finish_reason": choice.get("finish_reason")}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise broken("the chat answer has no message") from None
    if not isinstance(found["message"], Mapping):
        raise broken("the chat answer's message is not an object")
    try:
        orjson.dumps(found)
    except orjson.JSONEncodeError:
        raise broken("the chat answer's message is nested too deeply to be written again") from None
    return Answer(output=found, usage=message.usage)
