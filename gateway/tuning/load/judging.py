"""What an answer is worth: a status that says so is not enough. Pure."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from gateway.core.sse import SseParser, SseTooLarge
from gateway.tuning.load.http_wire import Answer
from gateway.tuning.load.outcomes import TRUNCATED, WRONG_ANSWER, Outcome
from gateway.tuning.report import OK

Judge = Callable[[Answer], Outcome]

GOOD: Final = 200
WHOLE_BYTES: Final = 64 * 1024  # a larger JSON body is looked at by its ends: to parse it would keep others waiting
JSON_BYTES: Final = 4 * 2**20  # read of any answer: a document may take twenty times as much once it is read
_DONE: Final = b"[DONE]"


def task(answer: Answer) -> Outcome:
    """An answer of the task API: a JSON object with an `output`."""
    if answer.status != GOOD or answer.trouble:
        return failed(answer)
    body = answer.body
    if len(body) > WHOLE_BYTES:
        is_right = body.startswith(b"{") and body.rstrip().endswith(b"}") and b'"output"' in body
    else:
        document = _json(body)
        is_right = isinstance(document, dict) and "output" in document
    return _ended(answer, OK if is_right else WRONG_ANSWER)


def tensors(answer: Answer) -> Outcome:
    """An answer of `/v2` in binary form: a JSON head with outputs, and behind it as many bytes as these say."""
    if answer.status != GOOD or answer.trouble:
        return failed(answer)
    body = answer.body
    length = answer.headers.get(b"inference-header-content-length", b"%d" % len(body))
    document = _json(body[: int(length)]) if length.isdigit() else None
    outputs = document.get("outputs") if isinstance(document, dict) else None
    is_right = isinstance(outputs, list) and bool(outputs) and _binary_bytes(outputs) == len(body) - int(length)
    return _ended(answer, OK if is_right else WRONG_ANSWER)


def chat(answer: Answer) -> Outcome:
    """A streamed answer of `/v1/chat/completions`: events with choices, then `[DONE]`; an error event is an error."""
    if answer.status != GOOD or (answer.trouble and not answer.parts):
        return failed(answer)
    stream = _Stream()
    stream.read(answer)
    code = stream.code
    if code == OK and not stream.is_done:
        code = answer.trouble or (TRUNCATED if stream.has_choices else WRONG_ANSWER)
    return Outcome(
        code=code,
        ended_at=answer.ended_at,
        first_token_at=stream.tokens_at[0] if stream.tokens_at else 0.0,
        gaps_ms=[(b - a) * 1e3 for a, b in zip(stream.tokens_at, stream.tokens_at[1:], strict=False)],
        tokens=stream.counted or len(stream.tokens_at),
        is_repeated=_is_repeated(answer),
    )


def failed(answer: Answer) -> Outcome:
    """An answer that is no good one: the gateway's code for it, where it has one."""
    code = answer.trouble
    if not code:
        code = code_of(_json(answer.body)) or f"http_{answer.status}"
    after = answer.headers.get(b"retry-after", b"")
    return Outcome(
        code=code,
        ended_at=answer.ended_at,
        retry_after_s=float(after) if after.isdigit() else 0.0,
    )


def code_of(document: Any) -> str:
    """The code in a problem document, or in an error of OpenAI's form; empty where there is none."""
    if not isinstance(document, dict):
        return ""
    error = document.get("error")
    if isinstance(error, dict):
        document = error
    for name in ("code", "type"):
        if isinstance(code := document.get(name), str) and code.replace("_", "").isalnum():
            return code[:64]
    return ""


class _Stream:
    """What the events of a stream say."""

    def __init__(self) -> None:
        self.code = OK
        self.is_done = self.has_choices = False
        self.tokens_at: list[float] = []
        self.counted = 0

    def read(self, answer: Answer) -> None:
        parser = SseParser()
        for part, at in zip(answer.parts, answer.at, strict=True):
            try:
                events = parser.feed(part)
            except SseTooLarge:
                self.code = WRONG_ANSWER
                return
            for event in events:
                self._take(event, at)

    def _take(self, event: bytes, at: float) -> None:
        if event == _DONE:
            self.is_done = True
            return
        document = _json(event)
        if not isinstance(document, dict):
            self.code = WRONG_ANSWER
        elif "error" in document:
            self.code = code_of(document) or WRONG_ANSWER
        else:
            usage = document.get("usage")
            if isinstance(usage, dict) and isinstance(made := usage.get("completion_tokens"), int):
                self.counted = made
            choices = document.get("choices")
            self.has_choices |= bool(choices)
            if isinstance(choices, list) and any(_has_text(choice) for choice in choices):
                self.tokens_at.append(at)


def _has_text(choice: Any) -> bool:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    return isinstance(delta, dict) and any(
        delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")
    )


def _binary_bytes(outputs: list[Any]) -> int:
    sizes = [
        one.get("parameters", {}).get("binary_data_size", 0)
        for one in outputs
        if isinstance(one, Mapping) and isinstance(one.get("parameters", {}), Mapping)
    ]
    return sum(sizes) if len(sizes) == len(outputs) and all(isinstance(size, int) for size in sizes) else -1


def _ended(answer: Answer, code: str) -> Outcome:
    return Outcome(code=code, ended_at=answer.ended_at, is_repeated=_is_repeated(answer))


def _is_repeated(answer: Answer) -> bool:
    return b"age" in answer.headers or b"idempotency-replayed" in answer.headers


def _json(text: bytes) -> Any:
    if len(text) > JSON_BYTES:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
