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
    return _response(error, problem_document(error), "application/problem+json")


def openai_error(error: GatewayError) -> Response:
    """OpenAI's error object, all four keys."""
    return _response(error, openai_document(error), "application/json")


def openai_document(error: GatewayError) -> dict[str, Any]:
    """The same, for a failure inside a stream too."""
    by_status = "invalid_request_error" if error.status < _FIRST_SERVER_ERROR else "server_error"
    return {
        "error": {
            "message": f"{error.field}: {error.detail}" if error.field else error.detail,
            "type": _OPENAI_TYPES.get(error.status, by_status),
            "param": error.field,
            "code": error.upstream_code or error.code,
        }
    }


def _response(error: GatewayError, document: Mapping[str, Any], media_type: str) -> Response:
    headers = error_headers(error) | (limit_headers(error.verdict) if error.verdict else {})
    return Response(orjson.dumps(document), status_code=error.status, headers=headers, media_type=media_type)
