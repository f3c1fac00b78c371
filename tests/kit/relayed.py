"""What callers of a relay ask and see, streamed or whole: one test for both forms.

answer = await gw.post(CHAT, asked(stream=stream))
assert text_of(answer) == "hi"     # and it came to its end
assert error_of(answer) == ...     # and it did not
"""

import json
from collections.abc import Mapping
from typing import Any

import httpx

from tests.kit.llm_plane import ASK, stream_of
from tests.kit.upstream import Script, completion, delta, json_reply, usage_chunk

DONE = "[DONE]"


def asked(*, stream: bool, **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {**ASK, **fields, **({"stream": True} if stream else {})}


def script(text: str = "hi", *, stream: bool, prompt: int = 3, made: int = 2) -> Script:
    """A good answer to it."""
    if not stream:
        return json_reply(200, completion(text, prompt=prompt, completion_tokens=made))
    return stream_of(delta(text), delta("", finish="stop"), usage_chunk(prompt, made))


def is_stream(answer: httpx.Response) -> bool:
    return answer.headers["content-type"].startswith("text/event-stream")


def payloads(answer: httpx.Response) -> list[str]:
    """What each event of a stream brought; nothing but `data` lines may stand there."""
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), answer.text
    return [block.removeprefix("data: ") for block in blocks]


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that came to its end: one `[DONE]`, and nothing behind it."""
    assert answer.status_code == 200, answer.text
    *parts, last = payloads(answer)
    assert last == DONE, answer.text
    return [json.loads(part) for part in parts]


def text_of(answer: httpx.Response) -> str:
    """What the model said, in an answer that came to its end."""
    assert answer.status_code == 200, answer.text
    if not is_stream(answer):
        return answer.json()["choices"][0]["message"]["content"]
    return said(chunks(answer))


def said(parts: list[dict[str, Any]]) -> str:
    choices = (choice for part in parts for choice in part["choices"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def broken_off(answer: httpx.Response) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """The chunks that came before a stream broke, and the error that was told then; it must not look finished."""
    assert answer.status_code == 200, answer.text
    *parts, last = payloads(answer)
    assert DONE not in answer.text
    assert '"stop"' not in answer.text
    return [json.loads(part) for part in parts], json.loads(last)["error"]


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and `Retry-After` of an answer that is an error, and no stream, in OpenAI's form."""
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], answer.headers.get("retry-after")


def served_by(answer: httpx.Response) -> tuple[str, int]:
    """The backend that the headers name, and the number of attempts."""
    return answer.headers["x-gateway-backend"], int(answer.headers["x-gateway-attempts"])
