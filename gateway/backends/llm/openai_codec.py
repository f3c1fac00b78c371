"""OpenAI bodies, answers and streams. Pure: bytes in, core events or `BackendError` out.

Answers pass through as the upstream's own bytes. A whole one is read for what the gateway must know: that it is one,
that it is no error in disguise, and what it used up. Of a stream only those few events are read that bear one of these
or, against the protocol, tool calls without a number; the rest are looked at as bytes.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from gateway.backends.llm.codec import Encoded, Stream
from gateway.backends.llm.openai_faults import UpstreamError, Waiting, error_in, error_object, fault_in_answer, fault_of
from gateway.backends.llm.openai_writer import broken, count, read_object, rewritten, written
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.sse import SseParser, SseTooLarge
from gateway.core.types import Delta, Deltas, Message, Metered, OpenAIApi, OpenAIPayload, Usage

DONE: Final = b"[DONE]"
MAX_CALLS: Final = 1024  # tool calls of one choice, and choices with some: more is an upstream that has run away
ALL_APIS: Final[tuple[OpenAIApi, ...]] = ("chat/completions", "completions", "responses", "embeddings")

# A key never stands inside of a JSON string: there its quotes are escaped. `null` tells nothing and is not read.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ERROR = re.compile(rb'"error"(?!\s*:\s*null\b)')  # also as a value: {"object": "error"}
_TOOL_CALLS = re.compile(rb'"tool_calls"\s*:\s*\[\s*\{')

_ENDS: Final = frozenset({b"response.completed", b"response.incomplete", b"response.failed"})
_TELLING: Final = _ENDS | {b"error"}
_TYPED = re.compile(rb'"type"\s*:\s*"(?:response\.completed|response\.incomplete|response\.failed|error)"')
_Event = TypeVar("_Event")


class OpenAICodec:
    """The protocol of OpenAI and of all that speak like it. `apis`: those that the endpoint has."""

    probe_path = "/models"

    def __init__(self, apis: Collection[OpenAIApi] = ALL_APIS) -> None:
        self._apis = frozenset(apis)

    def headers(self, api_key: str | None) -> Mapping[str, str]:
        """The key as a bearer token."""
        return {"authorization": f"Bearer {api_key}"} if api_key else {}

    def encode(self, payload: OpenAIPayload, model: str) -> Encoded:
        """The caller's body in a copy, with the endpoint's own model name, and usage asked for where streamed.

        Raises `BackendError`: UNSUPPORTED for an API that the endpoint lacks, REFUSED_INPUT if the body cannot be
        written as JSON (lone surrogates, 255 levels and more).
        """
        api = payload.api
        if api not in self._apis:
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message=f"the endpoint has no /{api}"))
        stream = payload.stream and api != "embeddings"
        body = {**payload.body, "model": model}
        if api != "embeddings" and (stream or body.get("stream")):
            body["stream"] = stream
        make: Callable[[], Stream] = ResponsesStream
        if api != "responses":
            make = partial(ChatStream, drop_usage=stream and _ask_for_usage(body))
        return Encoded(
            path=f"/{api}",
            body=written(body),
            message=partial(message, api=api),
            stream=make if stream else None,
        )

    def fault(self, status: int, body: bytes, waiting: Waiting) -> Fault:
        """The fault behind a status that is not 200."""
        return fault_of(status, body, waiting)


def _ask_for_usage(body: dict[str, Any]) -> bool:
    """Have usage told in the stream; whether the caller had not asked for that itself."""
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        return False  # the caller's mistake: let the upstream say so
    options = dict(options or {})
    body["stream_options"] = {**options, "include_usage": True}
    return options.get("include_usage") is not True


# --- whole answers --------------------------------------------------------------------------------------


def message(body: bytes, *, api: OpenAIApi = "chat/completions") -> Message:
    """A whole answer. Raises `BackendError` unless it is one of this API.

    A response of the responses API that says that it has failed, without an error, is an answer like any other.
    """
    parsed = read_object(body)
    error = error_in(parsed)
    if error is not None:
        raise BackendError(fault_in_answer(error))
    if api == "responses":
        is_answer = parsed.get("object") == "response"
    else:
        is_answer = isinstance(parsed.get("data" if api == "embeddings" else "choices"), list)
    if not is_answer:
        raise broken(f"the answer is none of {api}")
    return Message(body=body, usage=usage_of(parsed) or Usage())


def usage_of(parsed: Mapping[str, Any]) -> Usage | None:
    """The token counts of an answer or an event, in the words of either API; None where it has none."""
    usage = parsed.get("usage")
    if not isinstance(usage, dict):
        return None
    told = usage.get
    cached, reasoning = told("prompt_cache_hit_tokens"), None  # DeepSeek
    if isinstance(details := told("prompt_tokens_details") or told("input_tokens_details"), dict):
        cached = details.get("cached_tokens", cached)
    if isinstance(details := told("completion_tokens_details") or told("output_tokens_details"), dict):
        reasoning = details.get("reasoning_tokens")
    return Usage(
        input_tokens=_count(told("prompt_tokens"), told("input_tokens")),
        output_tokens=_count(told("completion_tokens"), told("output_tokens")),
        cached_tokens=count(cached),
        reasoning_tokens=count(reasoning),
    )


def _count(value: object, other: object) -> int | None:
    """The first of these that is a number of tokens."""
    found = count(value)
    return count(other) if found is None else found


# --- streams --------------------------------------------------------------------------------------------


class ChatStream:
    """Reads of a chat or completions stream in, `Deltas`, `Delta`s and `Metered` usage out.

    A read of whole events that tell nothing, as nearly all are, is passed on as it came.

    An event that exists only because we asked for usage comes as `Metered` alone and is not passed on. Where several
    events tell usage, the last one counts (they are running totals).
    `Delta.data` never holds a line break: one that came as several `data` lines is joined by spaces, which JSON allows
    wherever a raw line break may stand.
    """

    def __init__(self, *, drop_usage: bool) -> None:
        self._parser = SseParser()
        self._drop_usage = drop_usage
        self._calls: dict[object, _ToolCalls] = {}
        self.is_done = False

    def feed(self, read: bytes) -> Iterable[Delta | Deltas | Metered]:
        """The events completed by this read; none after `[DONE]`. To be used up before the next read is fed.

        Raises `BackendError` at an error event and at an event that is not JSON.
        """
        if not _is_telling(read) and self._parser.takes_whole(read):
            return (Deltas(wire=read),)
        return self._one_by_one(read)

    def _one_by_one(self, read: bytes) -> Iterator[Delta | Metered]:
        payloads, fault = _completed(self._parser.feed, read)
        for payload in payloads:
            if payload[:1] != b"{":
                mark = payload.strip()
                if mark == DONE:
                    self.is_done = True
                    return
                if not mark:
                    continue
            yield self._event(payload)
        if fault is not None:
            raise fault

    def end(self) -> Iterator[Delta | Metered]:
        """The body has ended. Raises `BackendError` BROKEN if that was before `[DONE]`."""
        if not self.is_done:
            raise _early(self._parser, "[DONE]")
        yield from ()

    def _event(self, payload: bytes) -> Delta | Metered:
        if b"\n" in payload:
            payload = _one_line(payload)
        if payload[:1] == b"{" and payload[-1:] == b"}" and not _is_telling(payload):
            return Delta(data=payload)
        has_calls = _TOOL_CALLS.search(payload) is not None
        parsed = read_object(payload)
        error = error_in(parsed)
        if error is not None:
            raise BackendError(fault_in_answer(error))
        if has_calls and self._number_calls(parsed):
            payload = rewritten(parsed)
        usage = usage_of(parsed)
        if usage is not None and self._drop_usage and not parsed.get("choices"):
            return Metered(usage=usage)
        return Delta(data=payload, usage=usage)

    def _number_calls(self, parsed: Mapping[str, Any]) -> bool:
        """Give tool calls their missing `index`; whether any lacked it."""
        choices = parsed.get("choices")
        has_changed = False
        for choice in choices if isinstance(choices, list) else ():
            delta = choice.get("delta") if isinstance(choice, dict) else None
            calls = delta.get("tool_calls") if isinstance(delta, dict) else None
            if isinstance(calls, list):
                numbers = self._calls.setdefault(_key(choice.get("index")), _ToolCalls())
                if max(len(self._calls), numbers.count) > MAX_CALLS:
                    raise broken("the stream has too many tool calls")
                # No short cut: every call has to be seen, as later ones may lean on it.
                changes = [numbers.complete(call) for call in calls if isinstance(call, dict)]
                has_changed = has_changed or any(changes)
        return has_changed


def _is_telling(text: bytes) -> bool:
    """Whether it has to be read as JSON: it may tell usage, or an error, or bear tool calls."""
    found = text.find  # faster than `in`, which takes its word for a number first
    return (
        (found(b'"usage"') >= 0 and _USAGE.search(text) is not None)
        or (found(b'"error"') >= 0 and _ERROR.search(text) is not None)
        or (found(b'"tool_calls"') >= 0 and _TOOL_CALLS.search(text) is not None)
    )


class _ToolCalls:
    """The tool calls of one choice as they come, for servers that leave out which call a piece belongs to."""

    def __init__(self) -> None:
        self._by_id: dict[object, int] = {}
        self._current = 0
        self._next = 0

    @property
    def count(self) -> int:
        """How many have an id."""
        return len(self._by_id)

    def complete(self, call: dict[str, Any]) -> bool:
        """Set `index` where it is missing; whether it was.

        A new id begins a new call, and so does a function's name without an id; what has neither goes on with the call
        before it.
        """
        index, call_id = call.get("index"), call.get("id") or None
        function = call.get("function")
        is_missing = not isinstance(index, int)
        if is_missing:
            has_name = isinstance(function, dict) and bool(function.get("name"))
            if call_id is not None:
                index = self._by_id.get(_key(call_id), self._next)
            else:
                index = self._next if has_name else self._current
            call["index"] = index
        assert isinstance(index, int)  # noqa: S101 - for the type checker: it is, or was set above
        if call_id is not None:
            self._by_id[_key(call_id)] = index
        self._current = index
        self._next = max(self._next, index + 1)
        return is_missing


class ResponsesStream:
    """Reads of a stream of the responses API in, named `Delta`s out; the last one tells usage.

    It ends with the event that bears the whole response. `[DONE]`, which some servers send after it, is no event.
    """

    def __init__(self) -> None:
        self._parser = SseParser()
        self._has_said = False
        self.is_done = False

    def feed(self, read: bytes) -> Iterator[Delta | Metered]:
        """The events completed by this read, up to the last. To be used up before the next read is fed.

        Raises `BackendError` at an error event, at a failure before anything else, and at an event that is not JSON.
        """
        events, fault = _completed(self._parser.feed_named, read)
        for name, payload in events:
            if self.is_done:
                return
            if payload and payload.strip() != DONE:
                yield self._event(name, _one_line(payload) if b"\n" in payload else payload)
                self._has_said = True
        if fault is not None:
            raise fault

    def end(self) -> Iterator[Delta | Metered]:
        """The body has ended. Raises `BackendError` BROKEN if that was before the response's own end."""
        if not self.is_done:
            raise _early(self._parser, "the response's end")
        yield from ()

    def _event(self, name: bytes, payload: bytes) -> Delta:
        is_telling = name in _TELLING if name else _TYPED.search(payload) is not None
        if not is_telling and payload[:1] == b"{" and payload[-1:] == b"}":
            return Delta(data=payload, event=name)
        parsed = read_object(payload)
        type_ = parsed.get("type")
        kind = name or (type_.encode() if isinstance(type_, str) else b"")
        if kind == b"error":
            raise BackendError(fault_in_answer(error_in(parsed) or error_object(parsed)))
        response = parsed.get("response")
        if kind not in _ENDS:
            return Delta(data=payload, event=name)
        if not isinstance(response, dict):
            raise broken("the stream ended without a response")
        if kind == b"response.failed" and not self._has_said:
            raise BackendError(fault_in_answer(error_in(response) or UpstreamError()))
        self.is_done = True
        return Delta(data=payload, event=name, usage=usage_of(response))


def _completed(feed: Callable[[bytes], list[_Event]], read: bytes) -> tuple[list[_Event], BackendError | None]:
    """What `feed` makes of a read, and what is to be raised behind it where the next event is too large."""
    try:
        return feed(read), None
    except SseTooLarge as error:
        return error.complete, broken(str(error))


def _one_line(payload: bytes) -> bytes:
    """Several lines joined. A break inside a string is no JSON: it must not become a space there."""
    read_object(payload)
    return payload.replace(b"\n", b" ")


def _key(value: object) -> object:
    """What can be looked up, whatever an upstream sends."""
    return value if isinstance(value, int | str) else None


def _early(parser: SseParser, missing: str) -> BackendError:
    place = "between two events" if parser.at_boundary else "inside an event"
    return broken(f"the stream ended {place}, without {missing}")
