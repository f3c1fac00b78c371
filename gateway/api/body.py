"""Bodies: read with a bound, decoded with errors that name the fault."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from python_multipart.multipart import parse_options_header
from starlette import datastructures
from starlette.formparsers import MultiPartException, MultiPartParser

from gateway.api.request_headers import Headers
from gateway.core.errors import (
    BodyTooLarge,
    ClientClosed,
    GatewayError,
    InvalidInput,
    MalformedRequest,
    RequestTimeout,
    UnsupportedMediaType,
)
from gateway.http.exchange import Exchange

MAX_FORM_PARTS = 128  # tasks take up to 64 texts or labels, each of which is a part
SMALL_JSON = 1024 * 1024
# So many of each are parsed in some 20 ms, during which nobody else is served; ten million would take seconds.
MAX_JSON_PARTS: Mapping[bytes, tuple[int, str]] = {
    b"[{": (100_000, "lists and objects"),
    b":": (100_000, "names"),
    b",": (1_000_000, "values"),
}
_QUOTE = ord('"')
DRAIN_FACTOR = 2  # a refused body is read and thrown away up to this many times the bound, so that the
DRAIN_S = 3.0  # caller gets our answer instead of a reset connection; beyond it the connection is closed


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """`max_bytes` of one body, and the time it may take to arrive."""

    max_bytes: int
    timeout_s: float


async def read_body(exchange: Exchange, limits: BodyLimits) -> bytes:
    """The whole body. Raises `BodyTooLarge` early (by Content-Length where given), `RequestTimeout`, `ClientClosed`.

    Memory is bounded by `max_bytes`, whatever the headers claim.
    """
    declared = exchange.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limits.max_bytes:
        raise _too_large(limits)
    if exchange.is_whole:  # no clock is needed
        body = await exchange.read()
        if len(body) > limits.max_bytes:
            raise _too_large(limits)
        return body
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.timeout_s):
            async for chunk in _chunks(exchange):
                size += len(chunk)
                if size > limits.max_bytes:
                    raise _too_large(limits)
                chunks.append(chunk)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {limits.timeout_s:g} s") from None
    return b"".join(chunks)


async def drain(exchange: Exchange, limits: BodyLimits) -> bool:
    """Throw away a body that was refused, within bounds, so that the answer arrives; whether it came to its end."""
    if exchange.is_whole:
        return True
    if "100-continue" in exchange.headers.get("expect", "").lower():
        return False  # the caller waits for our word before it sends; the refusal is that word
    left = limits.max_bytes * DRAIN_FACTOR
    try:
        async with asyncio.timeout(DRAIN_S):
            async for chunk in _chunks(exchange):
                left -= len(chunk)
                if left < 0:
                    return False
    except (TimeoutError, GatewayError):
        return False
    return True


async def _chunks(exchange: Exchange) -> AsyncGenerator[bytes, None]:
    while chunk := await exchange.read():
        yield chunk
    if not exchange.is_whole:
        raise ClientClosed("the caller left while sending the body")


def _too_large(limits: BodyLimits) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than the {limits.max_bytes} bytes taken here", field="body")


def media_type(headers: Headers) -> str:
    """The content type without its parameters, in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def is_json(kind: str) -> bool:
    """Whether a content type means JSON."""
    return kind == "application/json" or kind.endswith("+json")


def json_object(headers: Headers, body: bytes) -> Mapping[str, Any]:
    """The body as a JSON object. Duplicate names: the last one counts. NaN and Infinity are not JSON."""
    if not is_json(media_type(headers)):
        raise UnsupportedMediaType("send 'Content-Type: application/json'", field="content-type")
    if len(body) > SMALL_JSON:
        _check_parts(body)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(
            f"the body is not valid JSON (line {error.lineno}, column {error.colno})", field="body"
        ) from None
    if not isinstance(document, dict):
        raise MalformedRequest("the body must be a JSON object", field="body")
    return document


def _check_parts(body: bytes) -> None:
    """Raise `BodyTooLarge` for JSON of too many parts; what looks like them within strings does not count."""
    outside: bytes | None = None
    for marks, (most, what) in MAX_JSON_PARTS.items():
        if _count(body, marks) <= most:
            continue
        if outside is None:
            outside = _outside_strings(body)
        if _count(outside, marks) > most:
            raise BodyTooLarge(f"the body holds more than {most} {what}", field="body")


def _count(text: bytes, marks: bytes) -> int:
    return sum(text.count(mark) for mark in marks)


def _outside_strings(body: bytes) -> bytes:
    """JSON without its strings. Arrays do it in 0.15 s for 32 MiB of the worst text, a pattern in ten times that."""
    text = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    return text[~np.logical_xor.accumulate(text == _QUOTE)].tobytes()


async def form(headers: Headers, body: bytes) -> list[tuple[str, str | bytes]]:
    """A multipart body, part by part: uploads as bytes, fields as text."""

    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    # The boundary alone: a `charset` of the caller's choosing could make text that is no text.
    _, options = parse_options_header(headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"").decode("latin-1")
    # Without its last boundary a body was cut off, and what is missing cannot be known.
    if not boundary or f"--{boundary}--".encode("latin-1") not in body:
        raise MalformedRequest("the multipart body does not end with its boundary", field="body")
    plain = datastructures.Headers({"content-type": f'multipart/form-data; boundary="{boundary}"'})
    parser = MultiPartParser(
        plain, whole(), max_files=MAX_FORM_PARTS, max_fields=MAX_FORM_PARTS, max_part_size=len(body)
    )
    try:
        parsed = await parser.parse()
    except (MultiPartException, KeyError, ValueError):
        raise MalformedRequest("the body is not valid multipart/form-data", field="body") from None
    try:
        return [
            (name, await value.read() if isinstance(value, datastructures.UploadFile) else _utf8(value, body))
            for name, value in parsed.multi_items()
        ]
    finally:
        await parsed.close()


def gathered(parts: Iterable[tuple[str, str | bytes]]) -> dict[str, str | bytes | list[str]]:
    """Parts of a form or a query by name; texts of one name are a list. Raises `InvalidInput` for a second file."""
    by_name: dict[str, list[str | bytes]] = {}
    for name, value in parts:
        by_name.setdefault(name, []).append(value)
    fields: dict[str, str | bytes | list[str]] = {}
    for name, values in by_name.items():
        texts = [value for value in values if isinstance(value, str)]
        if len(values) > 1 and len(texts) < len(values):
            raise InvalidInput("is given twice", field=f"input.{name}"[:160])
        fields[name] = values[0] if len(values) == 1 else texts
    return fields


def _utf8(value: str, body: bytes) -> str:
    """A form field as it came. The parser reads what is not UTF-8 as Latin-1, which is another text."""
    if value.encode() not in body:
        raise MalformedRequest("text fields must be UTF-8", field="body")
    return value
