"""What spans say, by OpenTelemetry's names where it has some, else below `gateway.`. Every name is in this one file.

Source of `gen_ai.*`: the GenAI semantic conventions, which are still in development
(open-telemetry/semantic-conventions-genai); of `http.*`, `server.*`, `error.type`: semantic conventions 1.41.

No words of callers and of backends are in here but for `content`, which is asked for where content is recorded alone.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.types import OpenAIPayload, Usage
from gateway.core.watching.record import RequestRecord
from gateway.core.watching.steps import TracedAttempt

MAX_CONTENT: Final = 65_536  # characters of one attribute's texts
MAX_MESSAGES: Final = 1000  # of one attribute
MAX_NUMBER: Final = 2**53  # of what a caller may choose freely; OTLP has 64 bits
MAX_TEXT: Final = 1024  # characters of the same
Value = str | int | float | bool
Attributes = Mapping[str, Value]

_OPERATIONS: Final[Mapping[str, str]] = {
    "chat/completions": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_ASKED: Final = (
    ("gen_ai.request.max_tokens", ("max_completion_tokens", "max_tokens", "max_output_tokens")),
    ("gen_ai.request.temperature", ("temperature",)),
    ("gen_ai.request.top_p", ("top_p",)),
)


class Endpoint(NamedTuple):
    """An LLM backend: whose protocol it speaks, and its address where it has but one (port 0: it has several)."""

    provider: str
    address: str = ""
    port: int = 0


def of_request(record: RequestRecord) -> Attributes:
    """The server span's."""
    trace, route = record.trace, record.route
    told: dict[str, Value] = {
        "http.request.method": trace.method if trace else "",
        "url.scheme": trace.scheme if trace else "",
        "url.path": trace.path if trace else "",
        "http.route": trace.route if trace else "",
        "http.response.status_code": record.status,
        "error.type": record.code if record.error else "",
        "gateway.request_id": record.id,
        "gateway.task": record.task,
        "gateway.tenant": record.tenant,
        "gateway.key": record.key_id,
        "gateway.rule": record.rule,
        "gateway.rules_revision": record.revision,
        "gateway.refused_by": record.refused_by,
        "gateway.recall": record.recalled,
    }
    if route is not None:
        told |= {"gateway.backend": route.backend, "gateway.model": route.model, "gateway.attempts": route.attempts}
    return _clean(told)


def of_attempt(tried: TracedAttempt, endpoint: Endpoint | None) -> Attributes:
    """An attempt's: where it went, how long it waited, and of an LLM what it was asked and used."""
    place = tried.place
    told: dict[str, Value] = {"gateway.backend": place.backend, "gateway.model": place.model}
    if version := tried.version or place.version:
        told["gateway.version"] = version
    if place.replica:
        told["gateway.replica"] = place.replica
    if tried.gate_us:
        told["gateway.gate_wait_seconds"] = tried.gate_us / 1e6
    if tried.queue_us is not None:
        told["gateway.backend_queue_seconds"] = tried.queue_us / 1e6
    if tried.fault is not None:
        told["error.type"] = tried.fault.kind.value
    elif tried.is_dropped:
        told["error.type"] = "cancelled"
    if tried.payload is not None:
        told |= _generative(tried, tried.payload, endpoint or Endpoint(place.backend))
    return _clean(told)


def text(value: str) -> str:
    """As OTLP can carry it: one text that it cannot would cost all the spans that are sent with it."""
    cut = value[:MAX_TEXT]
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode()


def operation(payload: OpenAIPayload) -> str:
    """`gen_ai.operation.name`."""
    return _OPERATIONS[payload.api]


def content(tried: TracedAttempt) -> Attributes:
    """What an LLM was told, and what it answered: texts alone, no pictures and no tools."""
    payload = tried.payload
    if payload is None:
        return {}
    told = {"gen_ai.input.messages": _json(_asked_messages(payload.body))}
    if tried.body:
        told["gen_ai.output.messages"] = _json(_answered_messages(tried.body))
    elif tried.events:
        told["gen_ai.output.messages"] = _json(_streamed_messages(tried.events))
    return told


def _clean(told: Mapping[str, Value]) -> Attributes:
    """Without what is empty."""
    return {name: text(value) if isinstance(value, str) else value for name, value in told.items() if value != ""}


def _generative(tried: TracedAttempt, payload: OpenAIPayload, endpoint: Endpoint) -> dict[str, Value]:
    told: dict[str, Value] = {
        "gen_ai.operation.name": operation(payload),
        "gen_ai.provider.name": endpoint.provider,
        "gen_ai.request.model": tried.place.model,
        "gen_ai.request.stream": payload.stream,
        **_used(tried.usage),
    }
    for name, fields in _ASKED:
        given = next((value for field in fields if (value := payload.body.get(field)) is not None), None)
        if isinstance(given, int | float) and not isinstance(given, bool) and abs(given) < MAX_NUMBER:
            told[name] = given
    if tried.first_part_us is not None:
        told["gen_ai.response.time_to_first_chunk"] = tried.first_part_us / 1e6
    host, _, port = tried.place.replica.rpartition(":")
    address, number = (host, int(port)) if host and port.isdecimal() else (endpoint.address, endpoint.port)
    if address:
        told |= {"server.address": address, "server.port": number}
    return told


def _used(usage: Usage) -> dict[str, Value]:
    told = {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "gateway.cost_usd": None if usage.cost_nano_usd is None else usage.cost_nano_usd / NANO_USD_PER_USD,
    }
    return {name: value for name, value in told.items() if value is not None}


# --- content ---------------------------------------------------------------------------------------------


def _asked_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = body.get("messages") or body.get("input") or body.get("prompt")
    messages = given if isinstance(given, list) else [given]
    return [
        _message(one if isinstance(one, Mapping) else {"role": "user", "content": one})
        for one in messages[:MAX_MESSAGES]
    ]


def _answered_messages(body: bytes) -> list[dict[str, Any]]:
    try:
        choices = orjson.loads(body).get("choices") or []
        said = [(one.get("message") or {"content": one.get("text")}, one.get("finish_reason")) for one in choices]
        return [_message({"role": "assistant", **message}) | {"finish_reason": why or ""} for message, why in said]
    except (ValueError, AttributeError, TypeError):
        return []


def _streamed_messages(events: Sequence[bytes]) -> list[dict[str, Any]]:
    """A message of each choice; what cannot be read is left out."""
    said: dict[int, list[str]] = {}
    ends: dict[int, str] = {}
    for event in events:
        with contextlib.suppress(ValueError, AttributeError, TypeError, KeyError):
            for index, text, end in _pieces(orjson.loads(event)):
                said.setdefault(index, []).append(text if isinstance(text, str) else "")
                if isinstance(end, str):
                    ends[index] = end
    return [
        _message({"role": "assistant", "content": "".join(said[index])}) | {"finish_reason": ends.get(index, "")}
        for index in sorted(said)[:MAX_MESSAGES]
    ]


def _pieces(event: Mapping[str, Any]) -> Iterator[tuple[int, Any, Any]]:
    """What an event brings of each choice: its number, some text, and why it ended."""
    if event.get("type") == "response.output_text.delta":
        yield int(event["output_index"]), event["delta"], None
    for choice in event.get("choices") or ():
        text = (choice.get("delta") or {}).get("content") or choice.get("text")
        yield int(choice["index"]), text, choice.get("finish_reason")


def _message(one: Mapping[str, Any]) -> dict[str, Any]:
    given = one.get("content")
    parts = given if isinstance(given, list) else [given]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    role = one.get("role")
    return {
        "role": role if role in _ROLES else "user",
        "parts": [{"type": "text", "content": text} for text in texts if isinstance(text, str)],
    }


def _json(messages: list[dict[str, Any]]) -> str:
    """As the conventions want it, with the texts cut where together they are too long."""
    parts = [part for message in messages for part in message["parts"]]
    left = MAX_CONTENT
    for part in parts:
        part["content"] = part["content"][:left].encode("utf-8", "replace").decode()
        left -= len(part["content"])
    return orjson.dumps(messages).decode()
