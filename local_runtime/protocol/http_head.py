"""The head of a request: bytes in, a value out. Pure.

llhttp decides what is well formed, and is strict where requests have been smuggled past servers: a second or malformed
length, a length beside a transfer coding, a field folded over two lines, a space before a colon, a line that ends in a
bare LF. What it lets through and nothing here could serve is refused below.
"""

from http import HTTPStatus
from typing import Final

import httptools
import msgspec

from local_runtime.protocol.http_exchange import HttpError

_SERVED_VERSIONS: Final = ("1.1", "1.0")


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What of a head matters here.

    Args:
        method: in capital letters.
        path: of the target, percent signs still in it; neither host nor query.
        is_http10: the client knows no chunks and no interim answers.
        keeps_alive: the client may go on with another request.
        content_length: bytes of the body; 0 for a chunked one.
        is_chunked: the body says itself where it ends.
        expects_continue: the client waits to be told that its body is wanted.
        content_encoding: how the body is compressed, in lower case; empty for not at all.
        accept_encoding: how the answer may be, in lower case.
        json_length: `Inference-Header-Content-Length` as it came; None without one.
    """

    method: bytes
    path: bytes
    is_http10: bool = False
    keeps_alive: bool = True
    content_length: int = 0
    is_chunked: bool = False
    expects_continue: bool = False
    content_encoding: bytes = b""
    accept_encoding: bytes = b""
    json_length: bytes | None = None


def parse_head(data: bytes) -> Head:
    """A head, from its first letter to the empty line that ends it. Raises HttpError with the status to refuse it with.

    An offer to go on in another protocol (h2c, websocket) is ignored, as a server may (RFC 9110, 7.8).
    """
    found = _Found()
    parser = found.parser = httptools.HttpRequestParser(found)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"malformed HTTP request: {error}") from error
    finally:
        del found.parser  # each holds the other: let no garbage collection be needed
    if not found.is_whole:
        raise HttpError(HTTPStatus.BAD_REQUEST, "malformed HTTP request")
    return _head(found, parser)


class _Found:
    """What the parser finds. It is asked in the middle of its work, since it forgets at the end of a request."""

    def __init__(self) -> None:
        self.parser: httptools.HttpRequestParser  # set before it is fed
        self.target = b""
        self.fields: dict[bytes, bytes] = {}
        self.is_whole = False
        self.keeps_alive = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        before = self.fields.get(name)
        # Several fields of one name are one list (RFC 9110, 5.3).
        self.fields[name] = value if before is None else before + b"," + value

    def on_headers_complete(self) -> None:
        self.is_whole = True
        self.keeps_alive = self.parser.should_keep_alive()


def _head(found: _Found, parser: httptools.HttpRequestParser) -> Head:
    version = parser.get_http_version()
    if version not in _SERVED_VERSIONS:
        raise HttpError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.1 and HTTP/1.0 are offered")
    method = parser.get_method()
    if method == b"CONNECT":
        raise HttpError(HTTPStatus.NOT_IMPLEMENTED, "this server is no proxy")
    is_http10 = version == "1.0"
    fields = found.fields
    coding = fields.get(b"transfer-encoding")
    if coding is not None:
        _check_coding(coding, is_http10=is_http10)
    return Head(
        method=method,
        path=_path(found.target),
        is_http10=is_http10,
        keeps_alive=found.keeps_alive,
        content_length=int(fields.get(b"content-length", b"0")),  # the parser has checked it
        is_chunked=coding is not None,
        expects_continue=not is_http10 and fields.get(b"expect", b"").lower() == b"100-continue",
        content_encoding=fields.get(b"content-encoding", b"").strip().lower(),
        accept_encoding=fields.get(b"accept-encoding", b"").lower(),
        json_length=fields.get(b"inference-header-content-length"),
    )


def _check_coding(coding: bytes, *, is_http10: bool) -> None:
    """RFC 9112, 6.1: a coding that is not known has its own status, and HTTP/1.0 knows none at all."""
    if is_http10:
        raise HttpError(HTTPStatus.BAD_REQUEST, "malformed HTTP request: HTTP/1.0 has no Transfer-Encoding")
    if coding.strip().lower() != b"chunked":
        raise HttpError(HTTPStatus.NOT_IMPLEMENTED, "Transfer-Encoding must be chunked and nothing else")


def _path(target: bytes) -> bytes:
    """The path of a target, which may be a whole address, as proxies ask for it."""
    target = target.partition(b"?")[0]
    if target.startswith(b"/"):
        return target
    _, is_address, rest = target.partition(b"://")
    return b"/" + rest.partition(b"/")[2] if is_address else target
