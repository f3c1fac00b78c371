"""Anthropic's Messages API for OpenAI's chat/completions. Pure: payloads and bytes in, bytes and core events out.

Anthropic's own API, and the servers that offer the same (vLLM, llama.cpp), where their errors come in OpenAI's form.
What becomes of each request field is in `anthropic_request`.

Usage: OpenAI's prompt tokens hold the cached ones, Anthropic's do not, so the three kinds are added up. That writing to
the cache costs a quarter more is not in the price table: it is counted as plain input.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from gateway.backends.llm.anthropic_faults import fault_in_event, fault_of
from gateway.backends.llm.anthropic_request import messages_body
from gateway.backends.llm.codec import Encoded
from gateway.backends.llm.openai_codec import MAX_CALLS
from gateway.backends.llm.openai_faults import Waiting
from gateway.backends.llm.openai_writer import Writer, broken, count, read_object, rewritten, wants_usage, written
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.sse import SseParser, SseTooLarge
from gateway.core.types import Delta, Message, Metered, OpenAIPayload, Usage

VERSION: Final = "2023-06-01"  # of the API, https://docs.anthropic.com/en/api/versioning
_FINISHES: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_COUNTS: Final = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")


class AnthropicCodec:
    """The Messages API behind a base URL that ends in /v1.

    Args:
        now_s: the wall clock in seconds since 1970, for OpenAI's `created`, which the API does not tell.
        max_tokens: bounds the answer where the caller does not: the API wants a bound.
    """

    probe_path: str = "/models"

    def __init__(self, *, now_s: Callable[[], int], max_tokens: int = 4096) -> None:
        self._max_tokens = max_tokens
        self._now_s = now_s

    def headers(self, api_key: str | None) -> Mapping[str, str]:
        """The API's version, and the key."""
        return {"anthropic-version": VERSION} | ({"x-api-key": api_key} if api_key else {})

    def encode(self, payload: OpenAIPayload, model: str) -> Encoded:
        """A chat body as a messages request; raises `BackendError` as `anthropic_request` says."""
        if payload.api != "chat/completions":
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message=f"the Messages API has no /{payload.api}"))
        body = messages_body(payload.body, model, stream=payload.stream, max_tokens=self._max_tokens)
        created, with_usage = self._now_s(), wants_usage(payload)
        return Encoded(
            path="/messages",
            body=written(body),
            message=lambda answer: message(answer, created=created),
            stream=(lambda: MessagesStream(created=created, with_usage=with_usage)) if payload.stream else None,
        )

    def fault(self, status: int, body: bytes, waiting: Waiting) -> Fault:
        """The fault behind a status that is not 200."""
        return fault_of(status, body, waiting)


def message(body: bytes, *, created: int) -> Message:
    """A whole answer. Raises `BackendError` unless it is a message."""
    parsed = read_object(body)
    _raise_error(parsed)
    blocks = parsed.get("content")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise broken("the answer has no content")
    text = "".join(_text(block, "text") for block in blocks if block.get("type") == "text")
    thoughts = "".join(_text(block, "thinking") for block in blocks if block.get("type") == "thinking")
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    said: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if thoughts:
        said["reasoning_content"] = thoughts
    if calls:
        said["tool_calls"] = calls
    writer = Writer(id=_text(parsed, "id"), created=created, model=_text(parsed, "model"))
    return writer.whole({"message": said}, _finish(parsed.get("stop_reason")), _usage(_counts(parsed.get("usage"))))


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": rewritten(block.get("input") or {}).decode()}
    return {"id": block.get("id"), "type": "function", "function": function}


class MessagesStream:
    """Reads of a messages stream in; `Delta`s in OpenAI's form and `Metered` usage out.

    The first chunk, with the role, waits for something to be said: the API begins a message before it has read the
    prompt, and until something is said another endpoint can still be asked. The finish reason and the usage chunk come
    at `message_stop`, which is the stream's own end.
    """

    def __init__(self, *, created: int, with_usage: bool) -> None:
        self.is_done = False
        self._has_begun = False
        self._parser = SseParser()
        self._writer = Writer(id="", created=created, model="", with_usage=with_usage)
        self._counts: dict[str, int] = {}
        self._stop_reason: object = None
        self._calls: dict[object, _Call] = {}  # those under way, by the index of their block
        self._call_count = 0
        self._readers: Mapping[object, Callable[[Mapping[str, Any]], Iterator[Delta | Metered]]] = {
            "message_start": self._start,
            "content_block_start": self._block_start,
            "content_block_delta": self._block_delta,
            "content_block_stop": self._block_stop,
            "message_delta": self._delta,
            "message_stop": self._stop,
        }

    def feed(self, read: bytes) -> Iterator[Delta | Metered]:
        """The events completed by this read; raises `BackendError` at an error event and at one that is not JSON."""
        fault: SseTooLarge | None = None
        try:
            payloads = self._parser.feed(read)
        except SseTooLarge as error:
            payloads, fault = error.complete, error
        for payload in payloads:
            if self.is_done:
                return
            event = read_object(payload)
            _raise_error(event)
            reader = self._readers.get(_key(event.get("type")))
            if reader is not None:  # pings, and what later versions add
                yield from reader(event)
        if fault is not None:
            raise broken(str(fault)) from fault

    def end(self) -> Iterator[Delta | Metered]:
        """Nothing. Raises `BackendError` BROKEN if the body ended before `message_stop`."""
        if not self.is_done:
            place = "between two events" if self._parser.at_boundary else "inside an event"
            raise broken(f"the stream ended {place}, without message_stop")
        yield from ()

    def _start(self, event: Mapping[str, Any]) -> Iterator[Delta | Metered]:
        begun = _object(event, "message")
        self._writer = Writer(
            id=_text(begun, "id"),
            created=self._writer.created,
            model=_text(begun, "model"),
            with_usage=self._writer.with_usage,
        )
        self._counts = _counts(begun.get("usage"))
        # The output is yet to come: a stream that breaks must not count as one of these few tokens.
        yield Metered(usage=_usage(self._counts | {"output_tokens": None}))

    def _block_start(self, event: Mapping[str, Any]) -> Iterator[Delta | Metered]:
        block = _object(event, "content_block")
        if block.get("type") == "tool_use":
            if self._call_count >= MAX_CALLS:
                raise broken("the stream has too many tool calls")
            call = self._calls[_key(event.get("index"))] = _Call(self._call_count)
            self._call_count += 1
            function = {"name": block.get("name"), "arguments": ""}
            yield from self._tool(
                {"index": call.index, "id": block.get("id"), "type": "function", "function": function}
            )
            if block.get("input"):  # the whole of it at once
                yield from self._arguments(call, rewritten(block["input"]).decode())
        else:
            yield from self._said(block)

    def _block_delta(self, event: Mapping[str, Any]) -> Iterator[Delta | Metered]:
        delta = _object(event, "delta")
        call = self._calls.get(_key(event.get("index")))
        if delta.get("type") != "input_json_delta":
            yield from self._said(delta)
        elif call is not None and (piece := _text(delta, "partial_json")):
            yield from self._arguments(call, piece)

    def _block_stop(self, event: Mapping[str, Any]) -> Iterator[Delta | Metered]:
        call = self._calls.pop(_key(event.get("index")), None)
        if call is not None and not call.has_arguments:  # a call without arguments: its readers want JSON all the same
            yield from self._arguments(call, "{}")

    def _delta(self, event: Mapping[str, Any]) -> Iterator[Delta | Metered]:
        self._counts |= _counts(event.get("usage"))
        self._stop_reason = _object(event, "delta").get("stop_reason") or self._stop_reason
        yield from ()

    def _stop(self, _event: Mapping[str, Any]) -> Iterator[Delta | Metered]:
        yield from self._chunk({}, _finish(self._stop_reason))
        yield self._writer.used(_usage(self._counts))
        self.is_done = True

    def _said(self, part: Mapping[str, Any]) -> Iterator[Delta]:
        """What a block starts with or gains: text, or thoughts."""
        if part.get("type") in ("text", "text_delta") and (text := _text(part, "text")):
            yield from self._chunk({"content": text})
        elif part.get("type") in ("thinking", "thinking_delta") and (text := _text(part, "thinking")):
            yield from self._chunk({"reasoning_content": text})

    def _arguments(self, call: "_Call", piece: str) -> Iterator[Delta]:
        call.has_arguments = True
        return self._tool({"index": call.index, "function": {"arguments": piece}})

    def _tool(self, call: Mapping[str, Any]) -> Iterator[Delta]:
        return self._chunk({"tool_calls": [call]})

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> Iterator[Delta]:
        if not self._has_begun:
            self._has_begun = True
            yield self._writer.chunk({"delta": {"role": "assistant", "content": ""}})
        yield self._writer.chunk({"delta": delta}, finish_reason)


class _Call:
    """A tool call under way; `index` counts the calls alone."""

    __slots__ = ("has_arguments", "index")

    def __init__(self, index: int) -> None:
        self.index = index
        self.has_arguments = False


def _raise_error(event: Mapping[str, Any]) -> None:
    if event.get("error") or event.get("type") == "error":
        raise BackendError(fault_in_event(event))


def _finish(stop_reason: object) -> str:
    return _FINISHES.get(stop_reason, "stop") if isinstance(stop_reason, str) else "stop"


def _counts(usage: object) -> dict[str, Any]:
    """The counts that are told, by Anthropic's names."""
    if not isinstance(usage, Mapping):
        return {}
    counts = {name: count(usage.get(name)) for name in _COUNTS}
    details = usage.get("output_tokens_details")
    counts["thinking_tokens"] = count(details.get("thinking_tokens")) if isinstance(details, Mapping) else None
    return {name: value for name, value in counts.items() if value is not None}


def _usage(counts: Mapping[str, Any]) -> Usage:
    fresh, cached = counts.get("input_tokens"), counts.get("cache_read_input_tokens")
    written_to_cache = counts.get("cache_creation_input_tokens", 0)
    return Usage(
        input_tokens=None if fresh is None else fresh + (cached or 0) + written_to_cache,
        output_tokens=counts.get("output_tokens"),
        cached_tokens=cached,
        reasoning_tokens=counts.get("thinking_tokens"),
    )


def _object(event: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = event.get(name)
    if not isinstance(found, dict):
        raise broken(f"an event of the stream has no {name}")
    return found


def _key(value: object) -> object:
    """What can be looked up, whatever an endpoint sends."""
    return value if isinstance(value, int | str) else None


def _text(block: Mapping[str, Any], name: str) -> str:
    found = block.get(name)
    return found if isinstance(found, str) else ""
