"""Errors on the wire: two forms over one closed list of codes."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from gateway.api.headers import limit_headers, policy_name, recall_headers, usd
from gateway.core.error_forms import error_headers, problem_document, retry_after_s
from gateway.core.errors import GatewayError, OrderingQueueFull, QueueFull
from gateway.core.types import LimitState, Verdict
from gateway.http.exchange import Response

# OpenAI's `error.type` by status; the SDKs choose their exception by status, people read the type.
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_FIRST_SERVER_ERROR = 500
_QUOTA_EXCEEDED: Final = "https://iana.org/assignments/http-problem-types#quota-exceeded"  # of the RateLimit draft
_QUEUES: Final[Mapping[type[GatewayError], str]] = {QueueFull: "queue", OrderingQueueFull: "ordering_queue"}

ErrorForm = Callable[[GatewayError], Response]


def problem(error: GatewayError) -> Response:
    """RFC 9457 `application/problem+json`."""
    return _response(error, error.status, problem_body(error), "application/problem+json")


def problem_body(error: GatewayError) -> dict[str, Any]:
    """The same as a document, in a batch and in a stream too.

    Every 429 names the `limit` that was hit, by `name` and `kind`; one of a key's own limits tells its state too.
    `retry_after_s` says in how many seconds the same request may succeed, as the header does.
    """
    document = problem_document(error)
    seconds = retry_after_s(error)
    if seconds is not None:
        document["retry_after_s"] = seconds
    kind = _QUEUES.get(type(error))
    if kind is not None:
        document["limit"] = {"name": kind, "kind": kind}
    elif error.verdict is not None and error.verdict.refused_by is not None:
        document["limit"] = _limit(error.verdict.refused_by)
        document["type"] = _QUOTA_EXCEEDED
        document["violated-policies"] = _violated(error.verdict)
    return document


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


def _limit(hit: LimitState) -> dict[str, Any]:
    """Money in US dollars, times in seconds."""
    limit = hit.limit
    is_money = limit.kind == "usd"
    told: dict[str, Any] = {
        "name": policy_name(limit),
        "kind": limit.kind,
        "amount": orjson.Fragment(usd(limit.amount)) if is_money else limit.amount,
        "per": limit.per or None,
        "remaining": orjson.Fragment(usd(hit.remaining)) if is_money else hit.remaining,
        "reset_s": -(-hit.reset_us // 1_000_000) if limit.per else None,
    }
    return {name: value for name, value in told.items() if value is not None}


def _violated(verdict: Verdict) -> list[str]:
    return [policy_name(state.limit) for state in verdict.states if state.is_refused]


def _openai_status(error: GatewayError) -> int:
    return error.upstream_status or error.status


def _response(error: GatewayError, status: int, document: Mapping[str, Any], media_type: str) -> Response:
    headers = error_headers(error) | (limit_headers(error.verdict) if error.verdict else {})
    if error.recalled is not None:
        headers |= recall_headers(error.recalled)
    return Response(orjson.dumps(document), status_code=status, headers=headers, media_type=media_type)
