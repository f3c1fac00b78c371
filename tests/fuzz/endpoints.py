"""Hostile endpoints: what an LLM server that was taken over, or is broken, may answer."""

import gzip
import json
from collections.abc import Mapping
from typing import Final

from tests.kit.upstream import (
    FIN,
    HOLD,
    LAST_CHUNK,
    Pause,
    Script,
    chunk,
    completion,
    head,
    json_reply,
    reply,
    sse_head,
)

_ANSWER: Final = json.dumps(completion()).encode()
_BIG: Final = 64 * 1024
_OK: Final = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def _often(part: bytes, count: int) -> list[bytes | Pause]:
    """So many times; between them whoever hears it may leave."""
    return [step for _ in range(count) for step in (part, Pause(0.001))]


def scripts(port: int) -> Mapping[str, Script]:
    """By name; `port` is that of a listener which must hear nothing."""
    elsewhere = f"http://127.0.0.1:{port}/v1/chat/completions"
    return {
        **{f"redirect-{status}": [head(status, {"location": elsewhere, "content-length": "0"})] for status in (301,
        302, 307, 308)},
        "gzip-bomb": reply(200, gzip.compress(bytes(200 * 2**20)), headers={"content-encoding": "gzip"}),
        "gzip-stream": [sse_head({"content-encoding": "gzip"}), b"5\r\nhello\r\n0\r\n\r\n"],
        "endless-head": [b"HTTP/1.1 200 OK\r\n", *_often(b"x: " + b"a" * _BIG + b"\r\n", 40), HOLD],
        "many-headers": [_OK.encode() + b"x: y\r\n" * 50_000 + b"content-length: 2\r\n\r\n{}"],
        "endless-body": [f"{_OK}content-length: 99999999999\r\n\r\n".encode(), *_often(b"a" * 2**20, 90), HOLD],
        "endless-chunks": [f"{_OK}transfer-encoding: chunked\r\n\r\n".encode(), *_often(b"1\r\na\r\n" * 10_000, 90),
        HOLD],
        "endless-event": [sse_head(), *_often(b"100000\r\n" + b"a" * 2**20 + b"\r\n", 20), HOLD],
        "endless-extension": [f"{_OK}transfer-encoding: chunked\r\n\r\n1;".encode(), *_often(b"a" * _BIG, 20), HOLD],
        "informed-for-ever": [*_often(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 1000, 100), HOLD],
        "silence": [HOLD],
        "half-a-head": [b"HTTP/1.1 200 O", FIN],
        "no-http": [b"SSH-2.0-OpenSSH\r\n", FIN],
        "two-lengths": [f"{_OK}content-length: {len(_ANSWER)}\r\ncontent-length: 2\r\n\r\n".encode() + _ANSWER],
        "length-and-chunks": [f"{_OK}content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n".encode(),
        chunk(_ANSWER), LAST_CHUNK],
        "another-answer-behind": [*reply(200, _ANSWER), *reply(200, b'{"smuggled-answer":1}')],
        "headers-for-the-caller": json_reply(200, completion(), {"set-cookie": "x=1", "x-gateway-backend": "evil",
        "location": elsewhere}),
        "folded-header": [f"{_OK}x: y\r\n set-cookie: x=1\r\ncontent-length: {len(_ANSWER)}\r\n\r\n".encode(), _ANSWER],
        "NUL-in-a-header": [f"{_OK}x: a\0b\r\ncontent-length: {len(_ANSWER)}\r\n\r\n".encode() + _ANSWER],
        "retry-after-for-ever": json_reply(429, {"error": {"message": "x\r\nset-cookie: x=1"}},
        {"retry-after": "9" * 400}),
        "error-with-controls": json_reply(400, {"error": {"message": "a\r\nset-cookie: x=1\x1b[31m\0",
        "code": "a\r\nb", "param": "\ud800"}}),
        "status-999": [b"HTTP/1.1 999 x\r\ncontent-length: 2\r\n\r\n{}"],
        "status-0": [b"HTTP/1.1 0 x\r\ncontent-length: 2\r\n\r\n{}"],
        "switching": [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", HOLD],
        "deep-json": reply(200, b"[" * 500_000),
        "no-json": reply(200, b"\xff\xfe\0"),
        "null": reply(200, b"null"),
        "numbers": reply(200,
        b'{"choices":[{"message":{"content":1e400}}],"usage":{"prompt_tokens":-5,"completion_tokens":1e99}}'),
        "large-usage": json_reply(200, completion(prompt=10**30, completion_tokens=10**30)),
        "negative-usage": json_reply(200, completion(prompt=-5, completion_tokens=-5)),
        "html": reply(200, b"<script>alert(1)</script>", content_type="text/html"),
        "broken-event": [sse_head(), b"9\r\ndata: {x\n\r\n0\r\n\r\n"],
        "event-of-NUL": [sse_head(), b"a\r\ndata: \0\0\n\n\r\n0\r\n\r\n"],
    }  # fmt: skip
