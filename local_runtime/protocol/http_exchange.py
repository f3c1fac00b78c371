"""What goes over HTTP whatever the call: answers in one piece, errors, bodies (bounded, compressed or not). Pure."""

import zlib
from http import HTTPStatus

import msgspec

from local_runtime.protocol.json_text import error_body

JSON_TYPE = b"application/json"
BINARY_TYPE = b"application/octet-stream"
_WORTH_PACKING = 1024  # bytes; below, it costs time and saves no packet
_ANY_WRAPPING = 32 + zlib.MAX_WBITS  # zlib tells gzip from deflate by the first bytes
_GZIP_WRAPPING = 16 + zlib.MAX_WBITS


class HttpError(Exception):
    """The request fails at the level of HTTP, with this status."""

    def __init__(self, status: int, text: str, *, headers: "tuple[tuple[bytes, bytes], ...]" = ()) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = headers


class Reply(msgspec.Struct):
    """An answer in one piece."""

    content: bytes = b""
    status: int = 200
    content_type: bytes = JSON_TYPE
    headers: "tuple[tuple[bytes, bytes], ...]" = ()


def plain_body(body: bytes, encoding: bytes, *, max_bytes: int) -> bytes:
    """The body, decompressed. Raises HttpError: 413 for more than `max_bytes`, 415, or 400."""
    if not encoding or encoding == b"identity":
        return body
    return _decompressed(body, encoding, max_bytes=max_bytes)


def compressed(reply: Reply, accept_encoding: bytes) -> Reply:
    """The answer as the client accepts it: gzip before deflate, as it is where it takes neither or gains nothing."""
    if len(reply.content) < _WORTH_PACKING:
        return reply
    accepted = {token.strip() for token in accept_encoding.split(b",")}
    if b"gzip" in accepted:
        wrapping, name = _GZIP_WRAPPING, b"gzip"
    elif b"deflate" in accepted:
        wrapping, name = zlib.MAX_WBITS, b"deflate"
    else:
        return reply
    packer = zlib.compressobj(level=1, wbits=wrapping)
    reply.content = packer.compress(reply.content) + packer.flush()
    reply.headers = (*reply.headers, (b"content-encoding", name))
    return reply


def error_reply(status: int, text: object, headers: "tuple[tuple[bytes, bytes], ...]" = ()) -> Reply:
    """An error as every client of the protocol reads it."""
    return Reply(status=status, content=error_body(text), headers=headers)


def _decompressed(body: bytes, encoding: bytes, *, max_bytes: int) -> bytes:
    if encoding not in (b"gzip", b"deflate"):
        raise HttpError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding must be gzip or deflate, not {encoding.decode('latin1')}",
        )
    unpacker = zlib.decompressobj(wbits=_ANY_WRAPPING)
    try:
        plain = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"the body is not {encoding.decode()}: {error}") from error
    if len(plain) > max_bytes:
        raise too_large(max_bytes)
    if not unpacker.eof or unpacker.unused_data:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"the {encoding.decode()} body is cut short or followed by other bytes")
    return plain


def too_large(max_bytes: int) -> HttpError:
    """The refusal of a body beyond the limit."""
    return HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"request body exceeds the limit of {max_bytes} bytes (--http-max-input-size)",
    )
