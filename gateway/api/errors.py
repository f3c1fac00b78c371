"""Errors on the wire: one table of forms over one closed list of codes."""

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response

from gateway.api.headers import limit_headers
from gateway.core.errors import GatewayError

# OpenAI's `error.type` by status; the SDKs choose their exception by status, people read the type.
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_RATE_LIMIT, _CLIENT_MAX = 429, 500

ErrorForm = Callable[[GatewayError], Response]


def problem(error: GatewayError) -> Response:
    """RFC 9457 `application/problem+json`, with our stable `code`."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
    }
    if error.field:
        body["errors"] = [{"detail": error.detail, "field": error.field, "pointer": pointer(error.field)}]
    return _response(error, body, "application/problem+json")


def openai_error(error: GatewayError) -> Response:
    """OpenAI's error object, all four keys."""
    return _response(error, openai_body(error), "application/json")


def openai_body(error: GatewayError) -> dict[str, Any]:
    """The same, for a failure inside a stream too."""
    detail = f"{error.field}: {error.detail}" if error.field else error.detail
    return {
        "error": {
            "message": detail,
            "type": _openai_type(error.status),
            "param": error.field,
            "code": error.param_code or error.code,
        }
    }


def pointer(field: str) -> str:
    """`input.text[3]` as the JSON pointer `#/input/text/3`."""
    return "#/" + field.replace("[", ".").replace("]", "").replace("~", "~0").replace("/", "~1").replace(".", "/")


def _openai_type(status: int) -> str:
    if status == _RATE_LIMIT:
        return "rate_limit_error"
    return _OPENAI_TYPES.get(status, "invalid_request_error" if status < _CLIENT_MAX else "server_error")


def _response(error: GatewayError, body: Mapping[str, Any], media_type: str) -> Response:
    headers = limit_headers(error.verdict) if error.verdict else {}
    if error.retry_after_us is not None:
        # Whole seconds, rounded up: never earlier than true (RFC 9110, 10.2.3).
        headers["retry-after"] = str(max(1, -(-error.retry_after_us // 1_000_000)))
    if error.status == 401:  # noqa: PLR2004 - the status's own number is its clearest name
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(body), status_code=error.status, headers=headers, media_type=media_type)
