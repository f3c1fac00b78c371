"""OpenAI chat bodies, answers and streams. Pure: bytes in, core events or `BackendError` out.

Answers pass through as the upstream's own bytes; they are read only for what the gateway must know: that they are
whole, that they are no error in disguise, and what they used up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gateway.backends.llm.openai_faults import error_in, fault_in_answer
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.sse import SseParser, SseTooLarge
from gateway.core.types import Delta, Message, Metered, OpenAIPayload, Usage

DONE: Final = b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A body ready to send. `added_usage`: usage was asked for by us, not by the caller."""

    body: bytes
    added_usage: bool


def encode(payload: OpenAIPayload, model: str) -> ChatRequest:
    """The caller's body in a copy, with the backend's own model name, and usage asked for where streamed.

    Raises `BackendError` REFUSED_INPUT if the body cannot be written as JSON (lone surrogates, 255 levels and more).
    """
    body = {**payload.body, "model": model}
    if payload.stream or body.get("stream"):
        body["stream"] = payload.stream
    options = body.get("stream_options")
    added_usage = False
    # Anything but an object or null is the caller's mistake: let the upstream say so.
    if payload.stream and (options is None or isinstance(options, Mapping)):
        options = dict(options or {})
        added_usage = options.get("include_usage") is not True
        body["stream_options"] = {**options, "include_usage": True}
    try:
        return ChatRequest(body=orjson.dumps(body), added_usage=added_usage)
    except orjson.JSONEncodeError as error:
        raise BackendError(
            Fault(
                kind=FaultKind.REFUSED_INPUT,
                message="the body is nested too deeply, or holds text that is not valid Unicode",
            )
        ) from error


def message(body: bytes) -> Message:
    """A whole answer. Raises `BackendError` unless it is a chat completion in JSON."""
    parsed = _object(body)
    error = error_in(parsed)
    if error is not None:
        raise BackendError(fault_in_answer(error))
    if not isinstance(parsed.get("choices"), list):
        raise _broken("the answer has no choices")
    return Message(body=body, usage=usage_of(parsed) or Usage())


def usage_of(parsed: Mapping[str, Any]) -> Usage | None:
    """The token counts of an answer or a chunk; None where it has none."""
    usage = parsed.get("usage")
    if not isinstance(usage, dict):
        return None
    return Usage(input_tokens=_count(usage.get("prompt_tokens")), output_tokens=_count(usage.get("completion_tokens")))


class ChatStream:
    """Reads of a chat stream in, `Delta`s and `Metered` usage out.

    A chunk that exists only because we asked for usage comes as `Metered` alone and is not passed on. Where several
    events carry usage, the last one counts (they are running totals).
    `Delta.data` never holds a line break: one that came as several `data` lines is joined by spaces, which JSON allows
    wherever a raw line break may stand.
    """

    def __init__(self, *, drop_usage: bool) -> None:
        self._parser = SseParser()
        self._drop_usage = drop_usage
        self.is_done = False

    def feed(self, read: bytes) -> Iterator[Delta | Metered]:
        """The events completed by this read; none after `[DONE]`. To be used up before the next read is fed.

        Raises `BackendError` at an error event and at an event that is not JSON.
        """
        fault: SseTooLarge | None = None
        try:
            payloads = self._parser.feed(read)
        except SseTooLarge as error:
            payloads, fault = error.complete, error
        for payload in payloads:
            if payload.strip() == DONE:
                self.is_done = True
                return
            if payload:
                yield from self._events(payload)
        if fault is not None:
            raise _broken(str(fault)) from fault

    def end(self) -> None:
        """The body has ended. Raises `BackendError` BROKEN if that was before `[DONE]`."""
        if not self.is_done:
            place = "between two events" if self._parser.at_boundary else "inside an event"
            raise _broken(f"the stream ended {place}, without [DONE]")

    def _events(self, payload: bytes) -> Iterator[Delta | Metered]:
        if b"\n" in payload:
            _object(payload)  # a break inside a string is no JSON: it must not become a space there
            payload = payload.replace(b"\n", b" ")
        is_plain = payload[:1] == b"{" and payload[-1:] == b"}"
        # `error` also as a value: {"object": "error"}. Everything else needs no reading.
        if is_plain and b'"usage"' not in payload and b'"error"' not in payload:
            yield Delta(data=payload)
            return
        parsed = _object(payload)
        error = error_in(parsed)
        if error is not None:
            raise BackendError(fault_in_answer(error))
        usage = usage_of(parsed)
        if usage is None or not self._drop_usage or parsed.get("choices"):
            yield Delta(data=payload)
        if usage is not None:
            yield Metered(usage=usage)


def _object(body: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _broken("the answer is not JSON") from error
    if not isinstance(parsed, dict):
        raise _broken("the answer is not a JSON object")
    return parsed


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _broken(text: str) -> BackendError:
    return BackendError(Fault(kind=FaultKind.BROKEN, message=text))
