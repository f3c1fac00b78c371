"""Errors as the Open Inference Protocol has them: `{"error": text}`, in a model server's words where it has spoken."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Final

from gateway.api.headers import limit_headers
from gateway.core.error_forms import error_headers
from gateway.core.errors import BodyTooLarge, GatewayError, MalformedRequest, UnsupportedByBackend, UnsupportedMediaType
from gateway.core.texts import replied
from gateway.http.exchange import Response
from local_runtime.errors import ErrorCode, InferenceError, with_request_id
from local_runtime.protocol.http_exchange import HttpError
from local_runtime.protocol.json_text import error_body

# Triton's, by gRPC's names of its codes (server/src/http_server.cc); all others are 400 there.
_STATUSES: Final[Mapping[str, int]] = {"INTERNAL": 500, "NOT_FOUND": 404, "UNAVAILABLE": 503, "UNIMPLEMENTED": 501}
_HTTP_ERRORS: Final[Mapping[int, type[GatewayError]]] = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: BodyTooLarge,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: UnsupportedMediaType,
}


def oip_error(error: GatewayError) -> Response:
    """Status and text of Triton where a model server answered with an error, else our own."""
    headers = error_headers(error) | (limit_headers(error.verdict) if error.verdict else {})
    status = error.status if error.reply is None else _STATUSES.get(error.reply.code, HTTPStatus.BAD_REQUEST)
    if status == HTTPStatus.SERVICE_UNAVAILABLE and error.should_retry:
        headers.setdefault("retry-after", "1")
    return Response(oip_document(error), status_code=status, headers=headers, media_type="application/json")


def oip_document(error: GatewayError) -> bytes:
    """The body alone, for a failure inside a stream too."""
    if error.reply is not None:
        return error_body(replied(error.reply.text))
    return error_body(f"{error.field}: {error.detail}" if error.field and "-" in error.field else error.detail)


class _Refusing:
    __slots__ = ()

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Raise ours in its place."""
        if isinstance(error, InferenceError):
            kind = UnsupportedByBackend if error.code is ErrorCode.UNSUPPORTED else MalformedRequest
            raise kind(error.message) from error
        if isinstance(error, HttpError):
            raise _HTTP_ERRORS.get(error.status, MalformedRequest)(error.text) from error


def refusing() -> _Refusing:
    """What the reading of a body raises within is an error of ours without."""
    return _Refusing()


@contextmanager
def told_as(ours: str, theirs: str) -> Iterator[None]:
    """A model server's words about a request bear the caller's id for it, not ours."""
    try:
        yield
    except GatewayError as error:
        error.reply = error.reply and replace(
            error.reply, text=error.reply.text.replace(with_request_id(ours, ""), with_request_id(theirs, ""))
        )
        raise


def not_ready(text: str = "") -> Response:
    """503, which load balancers and other servers of this protocol know; Triton answers 400."""
    body, kind = (error_body(text), "application/json") if text else (b"", None)
    headers = {"retry-after": "1"}
    return Response(body, status_code=HTTPStatus.SERVICE_UNAVAILABLE, headers=headers, media_type=kind)
