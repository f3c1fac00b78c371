"""OpenAI answers written by us, for endpoints that have a protocol of their own. Pure.

One choice each: what asks for more is refused before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gateway.core import texts
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.tokens import MOST_TOKENS
from gateway.core.types import Delta, Message, Metered, OpenAIApi, OpenAIPayload, Usage

BAD_REQUEST: Final = 400
SMALL_JSON: Final = 1024 * 1024
MAX_PARTS: Final = 1_000_000
"""Lists and objects of one answer, which take half a second to be read; twenty log-probabilities for each of twenty
thousand tokens have 840,000."""
_OBJECTS: Final[Mapping[OpenAIApi, tuple[str, str]]] = {
    "chat/completions": ("chat.completion", "chat.completion.chunk"),
    "completions": ("text_completion", "text_completion"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """What all parts of one answer have in common.

    Attributes:
        created: in seconds since 1970.
        with_usage: the caller of a stream asked for its usage (`stream_options.include_usage`).
    """

    id: str
    created: int
    model: str
    api: OpenAIApi = "chat/completions"
    with_usage: bool = False

    def whole(self, said: Mapping[str, Any], finish_reason: str, usage: Usage) -> Message:
        """A whole answer; `said` is its choice's `message` or `text`."""
        document = self._document(_OBJECTS[self.api][0], said, finish_reason)
        if (counts := usage_object(usage)) is not None:
            document["usage"] = counts
        return Message(body=rewritten(document), usage=usage)

    def chunk(self, said: Mapping[str, Any], finish_reason: str | None = None) -> Delta:
        """A part of a stream; `said` is its choice's `delta` or `text`."""
        document = self._document(_OBJECTS[self.api][1], said, finish_reason)
        if self.with_usage:
            document["usage"] = None
        return Delta(data=rewritten(document))

    def used(self, usage: Usage) -> Delta | Metered:
        """What ends a stream: the usage, as a chunk where the caller asked for it and all of it is known."""
        counts = usage_object(usage)
        if not self.with_usage or counts is None:
            return Metered(usage=usage)
        document = self._document(_OBJECTS[self.api][1], {}, None) | {"choices": [], "usage": counts}
        return Delta(data=rewritten(document), usage=usage)

    def _document(self, kind: str, said: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": [choice]}


def usage_object(usage: Usage) -> dict[str, Any] | None:
    """OpenAI's `usage`; None unless input and output are both known."""
    if usage.input_tokens is None or usage.output_tokens is None:
        return None
    counts: dict[str, Any] = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return counts


def wants_usage(payload: OpenAIPayload) -> bool:
    """Whether the caller of a stream asked for its usage."""
    options = payload.body.get("stream_options")
    return isinstance(options, Mapping) and options.get("include_usage") is True


def written(document: object) -> bytes:
    """A request's body. Raises `BackendError` REFUSED_INPUT for text that is no Unicode, and for 255 levels."""
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError as error:
        text = "the body is nested too deeply, or holds text that is not valid Unicode"
        raise refused(text, field=None) from error


def rewritten(document: object) -> bytes:
    """What an endpoint sent, written anew. Raises `BackendError` BROKEN for what can be read, but not written."""
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError as error:
        raise broken("the answer is nested too deeply, or holds numbers that are too large") from error


def unsupported(text: str, *, field: str) -> BackendError:
    """The protocol has no counterpart to what `field` asks for; another endpoint may."""
    message = texts.logged(f"{field}: {text}")  # a caller's own words may stand in it
    return BackendError(Fault(kind=FaultKind.UNSUPPORTED, message=message, field=field))


def refused(text: str, *, field: str | None) -> BackendError:
    """What `field` holds is wrong for every endpoint."""
    return BackendError(Fault(kind=FaultKind.REFUSED_INPUT, message=text, field=field, status=BAD_REQUEST))


def broken(text: str) -> BackendError:
    """The endpoint's answer is not what its protocol says."""
    return BackendError(Fault(kind=FaultKind.BROKEN, message=text))


def read_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises `BackendError` BROKEN for anything else, and for more parts than any answer has."""
    if len(body) > SMALL_JSON and sum(map(body.count, (b"{", b"["))) > MAX_PARTS:
        raise broken("the answer has too many parts")
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise broken("the answer is not JSON") from error
    if not isinstance(parsed, dict):
        raise broken("the answer is not a JSON object")
    return parsed


def count(value: object) -> int | None:
    """A number of tokens; None for what is none, or more than any answer has."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS else None
