"""Requests to `AnthropicCodec`, and the Messages API's own words."""

import orjson
import pytest

from gateway.backends.llm.anthropic_codec import AnthropicCodec
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import OpenAIPayload

NOW_S = 1_700_000_000
CODEC = AnthropicCodec(now_s=lambda: NOW_S)


def user(content="hi"):
    return {"role": "user", "content": content}


def text(words):
    return {"type": "text", "text": words}


def encoded(body, *, api="chat/completions", stream=False):
    return CODEC.encode(OpenAIPayload(body={"messages": [user()], **body}, api=api, stream=stream), "claude")


def fault_of(function, *args, **options):
    with pytest.raises(BackendError) as caught:
        function(*args, **options)
    return caught.value.fault


def call(arguments, call_id="c1", name="weather"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def use(given, call_id="c1"):
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": given}


FINISHES = [
    ("end_turn", "stop"),
    ("stop_sequence", "stop"),
    ("max_tokens", "length"),
    ("model_context_window_exceeded", "length"),
    ("tool_use", "tool_calls"),
    ("refusal", "content_filter"),
    ("of_tomorrow", "stop"),
    (None, "stop"),
    ([], "stop"),
]


def sse(*events):
    return b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), orjson.dumps(e)) for e in events)


def start(**usage):
    told = {"input_tokens": 3, "output_tokens": 1, **usage}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x", "content": [], "usage": told}
    return {"type": "message_start", "message": message}


def block(index, content):
    return {"type": "content_block_start", "index": index, "content_block": content}


def more(index, **delta):
    return {"type": "content_block_delta", "index": index, "delta": delta}


def stop(index):
    return {"type": "content_block_stop", "index": index}


def ending(stop_reason="end_turn", **usage):
    return {"type": "message_delta", "delta": {"stop_reason": stop_reason}, "usage": usage or {"output_tokens": 9}}


def stream_of(**options):
    return encoded({"stream": True, **options}, stream=True).stream()


def fed(*reads, **options):
    stream = stream_of(**options)
    return [event for read in reads for event in stream.feed(read)]


# --- errors


def error(kind, message="words"):
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}


TOO_LONG = "prompt is too long: 210000 tokens > 200000 maximum"
TOO_LONG_TOGETHER = "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000"
NO_CREDIT = "Your credit balance is too low to access the Anthropic API."
ERRORS = [
    (400, "invalid_request_error", "max_tokens: must be greater than 0", FaultKind.REFUSED_INPUT),
    (400, "invalid_request_error", TOO_LONG, FaultKind.CONTEXT_TOO_LONG),
    (400, "invalid_request_error", TOO_LONG_TOGETHER, FaultKind.CONTEXT_TOO_LONG),
    (400, "invalid_request_error", NO_CREDIT, FaultKind.DENIED),
    (401, "authentication_error", "invalid x-api-key", FaultKind.DENIED),
    (402, "billing_error", "words", FaultKind.DENIED),
    (403, "permission_error", "words", FaultKind.DENIED),
    (404, "not_found_error", "model: claude-9", FaultKind.UNKNOWN_MODEL),
    (404, "not_found_error", "Not found", FaultKind.UNSUPPORTED),
    (413, "request_too_large", "words", FaultKind.REFUSED_INPUT),
    (429, "rate_limit_error", "words", FaultKind.OVERLOADED),
    (500, "api_error", "Internal server error", FaultKind.BROKEN),
    (504, "timeout_error", "words", FaultKind.TIMEOUT),
    (529, "overloaded_error", "Overloaded", FaultKind.OVERLOADED),
]
