"""A request's head: where it ends, what in it is passed over, and what it says."""

import json
import re
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote

import httptools
from starlette.types import Scope

MAX_BYTES: Final = 64 * 1024  # request line and headers; nginx takes 32 KiB, httptools any size, in quadratic time
MALFORMED: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 30\r\n"
    b"connection: close\r\n\r\nInvalid HTTP request received."
)
_UPGRADE: Final = re.compile(rb"(?im)^upgrade:[^\r\n]*\r?\n")
_WEBSOCKET: Final = re.compile(rb"(?im)^upgrade:[ \t]*websocket[ \t]*\r?$")
_CONNECTION_UPGRADE: Final = re.compile(rb"(?im)^connection:[^\r\n]*\bupgrade\b")
_BODY: Final = re.compile(rb"(?im)^(content-length|transfer-encoding|expect):")
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}

Address = tuple[str, int]
Field = tuple[bytes, bytes]


def end_of_head(came: bytes | bytearray, start: int) -> int | None:
    """Where the first empty line from `start` on ends; None where there is none. Lines may end without a CR."""
    with_cr = came.find(b"\n\r\n", start)
    bare = came.find(b"\n\n", start, with_cr + 1 if with_cr >= 0 else len(came))
    if bare >= 0:
        return bare + 2
    return with_cr + 3 if with_cr >= 0 else None


def without_offers(head: bytes) -> bytes:
    """A whole head without those to go on in another protocol."""
    return _UPGRADE.sub(b"", head)


def wants_websocket(head: bytes) -> bool:
    """Whether a whole head offers a WebSocket, as RFC 6455 (4.1) has it, and nothing else."""
    return (
        head.startswith(b"GET ")
        and len(_UPGRADE.findall(head)) == 1
        and _WEBSOCKET.search(head) is not None
        and _CONNECTION_UPGRADE.search(head) is not None
        and _BODY.search(head) is None
    )


def described(
    parser: httptools.HttpRequestParser,
    url: bytes,
    fields: list[Field],
    *,
    server: Address | None,
    client: Address | None,
) -> Scope:
    """A request as ASGI describes it. Raises `ValueError` and `HttpParserError` for what is no address."""
    if url.startswith(b"/") and b"#" not in url:
        raw_path, _, query = url.partition(b"?")
    else:  # "http://host/path", to proxies
        parsed = httptools.parse_url(url)
        raw_path, query = parsed.path, parsed.query or b""
    path = raw_path.decode("ascii")
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": parser.get_http_version(),
        "server": server,
        "client": client,
        "scheme": "http",
        "root_path": "",
        "method": parser.get_method().decode("ascii"),
        "path": unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": fields,
    }


def is_coded_twice(fields: list[Field]) -> bool:
    """Whether a body is something else (gzip) within its chunks, which nobody here undoes.

    One that is not chunked in the end is refused by the parser: nobody knows where it ends.
    """
    codings = b",".join([value for name, value in fields if name == b"transfer-encoding"]).split(b",")
    return len(codings) > 1 and codings[-1].strip().lower() == b"chunked"


def too_large() -> bytes:
    """The answer to a head that is."""
    title = "Request header fields too large"
    return _refused(431, title, f"request line and headers may have {MAX_BYTES} bytes", code="malformed_request")


def unknown_coding() -> bytes:
    """The answer to a body in a transfer coding that is not known (RFC 9112, 6.1)."""
    return _refused(501, "Not implemented", "Transfer-Encoding must be chunked and nothing else", code="unsupported")


def _refused(status: int, title: str, detail: str, *, code: str) -> bytes:
    problem = {"type": "about:blank", "title": title, "status": status, "detail": detail, "code": code}
    body = json.dumps(problem).encode()
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/problem+json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
        % (status, HTTPStatus(status).phrase.encode(), len(body), body)
    )
