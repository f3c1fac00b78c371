"""Errors on the wire: two forms over one closed list of codes."""

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response

from gateway.api.headers import limit_headers
from gateway.core.errors import GatewayError, error_headers, problem_document

# OpenAI's `error.type` by status; the SDKs choose their exception by status, people read the type.
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_FIRST_SERVER_ERROR = 500

ErrorForm = Callable[[GatewayError], Response]


def problem(error: GatewayError) -> Response:
    """RFC 9457 `application/problem+json`."""
    return _response(error, error.status, problem_document(error), "application/problem+json")


def openai_error(error: GatewayError) -> Response:
    """OpenAI's error object, all four keys; an upstream's own refusal of the caller's input keeps its status."""
    return _response(error, _openai_status(error), openai_document(error), "application/json")


def openai_document(error: GatewayError) -> dict[str, Any]:
    """The same, for a failure inside a stream too. What an upstream refused is told in its own words."""
    status = _openai_status(error)
    by_status = "invalid_request_error" if status < _FIRST_SERVER_ERROR else "server_error"
    is_ours = error.field and not error.upstream_status
    return {
        "error": {
            "message": f"{error.field}: {error.detail}" if is_ours else error.detail,
            "type": _OPENAI_TYPES.get(status, by_status),
            "param": error.field,
            "code": error.upstream_code or error.code,
        }
    }


def _openai_status(error: GatewayError) -> int:
    return error.upstream_status or error.status


def _response(error: GatewayError, status: int, document: Mapping[str, Any], media_type: str) -> Response:
    headers = error_headers(error) | (limit_headers(error.verdict) if error.verdict else {})
    return Response(orjson.dumps(document), status_code=status, headers=headers, media_type=media_type)
