"""What an LLM's answer says: text and tool calls of each choice, out of a whole OpenAI body or a stream's events.

For those who compare answers; what goes to callers is never read for it. Thoughts (`reasoning`) are not what it says.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from gateway.core.types import Delta

MAX_BYTES: Final = 256 * 1024  # of JSON: a document of nothing but small lists takes milliseconds for each 100 KiB
MAX_EVENTS: Final = 2_000  # of a stream, of a token or more each
_ENDS: Final = (b"response.completed", b"response.incomplete")
"""Events of the responses API that hold the whole response."""


class Unreadable(ValueError):
    """Not an answer that can be read; the text says why, without the answer's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of an answer's choices.

    Attributes:
        calls: each tool call as one text that is the same for the same function and arguments.
        is_whole: false where only its beginning was read.
    """

    text: str = ""
    calls: Sequence[str] = ()
    is_whole: bool = True


def in_body(body: bytes) -> Sequence[Choice]:
    """The choices of a whole answer of any of OpenAI's APIs. Raises `Unreadable`."""
    document = _object(body)
    choices = document.get("choices")
    if isinstance(choices, list):
        return [_whole(choice) for choice in choices]
    if isinstance(document.get("output"), list):
        return [_of_items(document["output"])]
    raise Unreadable("an answer has neither choices nor output")


def of_message(message: object) -> Choice:
    """A chat message. Raises `Unreadable`."""
    if not isinstance(message, Mapping):
        raise Unreadable("a message is not an object")
    calls = [call.get("function") for call in _objects(message.get("tool_calls"))]
    calls.append(message.get("function_call"))
    named = [_call(one.get("name"), one.get("arguments")) for one in calls if isinstance(one, Mapping)]
    return Choice(text=_text(message.get("content")) + _text(message.get("refusal")), calls=named)


def in_stream(events: Sequence[Delta]) -> Sequence[Choice]:
    """The choices of a streamed answer, its parts joined. Raises `Unreadable`."""
    for event in reversed(events):
        if event.event in _ENDS and len(event.data) <= MAX_BYTES:
            response = _object(event.data).get("response")
            if isinstance(response, Mapping) and isinstance(response.get("output"), list):
                return [_of_items(response["output"])]
    choices: dict[object, _Joined] = {}
    read = 0
    is_whole = len(events) <= MAX_EVENTS
    for event in events[:MAX_EVENTS]:
        read += len(event.data)
        if read > MAX_BYTES:
            is_whole = False
            break
        _join(_object(event.data), choices)
    if not choices:
        raise Unreadable("a stream says nothing that can be read")
    return [choices[index].choice(is_whole=is_whole) for index in sorted(choices, key=str)]


@dataclass(slots=True)
class _Joined:
    """What a stream has said of one choice."""

    texts: list[str] = field(default_factory=list)
    calls: dict[object, list[str]] = field(default_factory=dict)  # name, then the pieces of the arguments

    def choice(self, *, is_whole: bool) -> Choice:
        calls = [_call(name, "".join(pieces)) for name, *pieces in self.calls.values()]
        return Choice(text="".join(self.texts), calls=calls, is_whole=is_whole)

    def add_call(self, index: object, function: object) -> None:
        if isinstance(function, Mapping):
            pieces = self.calls.setdefault(_key(index), [""])
            pieces[0] += _plain(function.get("name"))
            pieces.append(_plain(function.get("arguments")))


def _join(document: Mapping[str, Any], choices: dict[object, _Joined]) -> None:
    """One more event."""
    if document.get("type") == "response.output_text.delta":
        choices.setdefault(0, _Joined()).texts.append(_plain(document.get("delta")))
        return
    for choice in _objects(document.get("choices")):
        joined = choices.setdefault(_key(choice.get("index", 0)), _Joined())
        joined.texts.append(_plain(choice.get("text")))
        delta = choice.get("delta")
        if isinstance(delta, Mapping):
            joined.texts.append(_text(delta.get("content")) + _text(delta.get("refusal")))
            for call in _objects(delta.get("tool_calls")):
                joined.add_call(call.get("index", 0), call.get("function"))
            joined.add_call("function_call", delta.get("function_call"))


def _whole(choice: object) -> Choice:
    """An entry of `choices`: a chat message, or a completion's text."""
    if not isinstance(choice, Mapping):
        raise Unreadable("a choice is not an object")
    return of_message(choice["message"]) if "message" in choice else Choice(text=_text(choice.get("text")))


def _of_items(items: Iterable[object]) -> Choice:
    """The output of the responses API."""
    texts, calls = [], []
    for item in items:
        if not isinstance(item, Mapping):
            raise Unreadable("an item of the output is not an object")
        if item.get("type") == "message":
            texts.append(_text(item.get("content")))
        elif item.get("type") == "function_call":
            calls.append(_call(item.get("name"), item.get("arguments")))
    return Choice(text="".join(texts), calls=calls)


def _call(name: object, arguments: object) -> str:
    """A call as one text. Arguments are JSON, in whatever order and spacing; what is not is taken as it is."""
    written = _plain(arguments)
    try:
        value = orjson.loads(written) if written else {}
        arguments_text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        arguments_text = written
    return f"{_plain(name)}({arguments_text})"


def _text(content: object) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(content, list):
        return "".join(_plain(part.get("text") or part.get("refusal")) for part in _objects(content))
    return _plain(content)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else ""


def _objects(value: object) -> Sequence[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else ()


def _key(index: object) -> object:
    """What an index of a stream is told apart by, whatever it is."""
    return index if isinstance(index, int | str) else 0


def _object(data: bytes) -> Mapping[str, Any]:
    if len(data) > MAX_BYTES:
        raise Unreadable("an answer is too long to be read again")
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise Unreadable("an answer is not JSON") from None
    if not isinstance(found, dict):
        raise Unreadable("an answer is not a JSON object")
    return found
