"""What gRPC says in headers: how a call begins and how it ends. Pure.

Source: grpc/doc PROTOCOL-HTTP2.md, http-grpc-status-mapping.md and statuscodes.md.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import unquote_to_bytes

from gateway.backends.grpc import http2
from gateway.backends.grpc.http2 import ErrorCode

# By number.
NAMES: Final = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
_OF_HTTP: Final[Mapping[bytes, str]] = {
    b"400": "INTERNAL",
    b"401": "UNAUTHENTICATED",
    b"403": "PERMISSION_DENIED",
    b"404": "UNIMPLEMENTED",
    b"429": "UNAVAILABLE",
    b"502": "UNAVAILABLE",
    b"503": "UNAVAILABLE",
    b"504": "UNAVAILABLE",
}
_OF_RESET: Final[Mapping[int, str]] = {
    ErrorCode.REFUSED_STREAM: "UNAVAILABLE",
    ErrorCode.CANCEL: "CANCELLED",
    ErrorCode.ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED",
    ErrorCode.INADEQUATE_SECURITY: "PERMISSION_DENIED",
}
MAX_DETAILS: Final = 16 * 1024  # of a text as it is sent; models may make errors of whole inputs
_TIMEOUT_DIGITS: Final = 10**8  # grpc-timeout has at most eight digits
_METADATA_NAME = re.compile(rb"(?!grpc-)[0-9a-z_.-]+")
_METADATA_VALUE = re.compile(rb"[\x20-\x7e]*")
_FIXED: Final = b"".join(
    (
        http2.literal(b"te", b"trailers"),
        http2.literal(b"content-type", b"application/grpc"),
        http2.literal(b"user-agent", b"hybrid-inference-gateway"),
    )
)


class GrpcError(Exception):
    """A call that did not end well.

    Attributes:
        code: gRPC's name of the status.
        details: the server's own text (of a long one, the beginning), or ours where there is none.
        never_sent: the server surely did nothing of the call, so that it may be made again whatever it does.
        is_reply: the server itself answered with this status; False for what befell the connection, or came from here.
    """

    def __init__(self, code: str, details: str, *, never_sent: bool = False, is_reply: bool = False) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details
        self.never_sent = never_sent
        self.is_reply = is_reply

    def again(self) -> "GrpcError":
        """The same to be raised, whose traceback nobody keeps: with it, frames and all they have would be a cycle."""
        return GrpcError(self.code, self.details, never_sent=self.never_sent, is_reply=self.is_reply)


class RequestHeaders:
    """The blocks of headers of one connection's requests, in the order in which they are sent."""

    def __init__(self, authority: bytes) -> None:
        self._authority = http2.literal(b":authority", authority)
        self._fixed: dict[bytes, bytes] = {}  # by path: what is the same for every call
        self._note = http2.NO_TABLE

    def block(self, path: bytes, timeout_us: int, metadata: bytes) -> bytes:
        """The block of one call; `metadata` is encoded already."""
        fixed = self._fixed.get(path)
        if fixed is None:
            fixed = b"".join((http2.POST, http2.HTTP, http2.literal(b":path", path), self._authority, _FIXED))
            self._fixed[path] = fixed
        note, self._note = self._note, b""
        if timeout_us < _TIMEOUT_DIGITS:
            timeout = b"%du" % max(1, timeout_us)
        else:
            timeout = b"%dS" % min(timeout_us // 1_000_000, _TIMEOUT_DIGITS - 1)
        return b"".join((note, fixed, http2.literal(b"grpc-timeout", timeout), metadata))


def encoded_metadata(metadata: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Headers of the caller's; ValueError for a name (lower case, not gRPC's own) or value that cannot be sent."""
    for name, value in metadata:
        if not _METADATA_NAME.fullmatch(name) or not _METADATA_VALUE.fullmatch(value):
            raise ValueError(f"metadata {name[:40]!r} cannot be sent")
    return b"".join(http2.literal(name, value) for name, value in metadata)


def status_error(trailers: Mapping[bytes, bytes]) -> GrpcError | None:
    """What the last headers of an answer say; None is OK."""
    number = trailers.get(b"grpc-status")
    if number == b"0":
        return None
    if number is None:
        return GrpcError("UNKNOWN", "the answer ended without a grpc-status")
    name = NAMES[int(number)] if number.isdigit() and int(number) < len(NAMES) else "UNKNOWN"
    details = unquote_to_bytes(trailers.get(b"grpc-message", b"")[:MAX_DETAILS]).decode("utf-8", "replace")
    return None if name == "OK" else GrpcError(name, details, is_reply=True)


def http_error(http_status: bytes) -> GrpcError:
    """The answer of something that does not speak gRPC."""
    shown = http_status.decode("ascii", "replace")
    return GrpcError(_OF_HTTP.get(http_status, "UNKNOWN"), f"an HTTP answer with status {shown}, which is not gRPC")


def reset_error(code: int) -> GrpcError:
    """A stream that the server reset."""
    is_refused = code == ErrorCode.REFUSED_STREAM
    return GrpcError(_OF_RESET.get(code, "INTERNAL"), f"RST_STREAM with error code {code}", never_sent=is_refused)
