"""What the refusals of Anthropic's API mean. Pure.

The API names each error's kind (https://docs.anthropic.com/en/api/errors), which is told in OpenAI's words here, so
that `openai_faults` can judge it; servers that offer the same API answer in those words themselves. Two differ:
`api_error` is the API's own failure, as its refusals of input have a kind of their own; and an account without credit
is no fault of the caller's, though it comes as one.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from gateway.backends.llm.openai_faults import (
    CONTEXT_CODE,
    UpstreamError,
    Waiting,
    error_in,
    error_of,
    fault_for,
    fault_in_answer,
)
from gateway.core.errors import Fault, FaultKind

_STATUSES: Final[Mapping[str | None, int]] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
_PAYMENT_REQUIRED: Final = 402
_NO_CREDIT: Final = re.compile(r"\bcredit balance\b", re.IGNORECASE)
_TOO_LONG: Final = re.compile(r"\bexceed context limit\b", re.IGNORECASE)  # "input length and `max_tokens` exceed ..."


def fault_of(status: int, body: bytes, waiting: Waiting) -> Fault:
    """The fault behind a status that is not 200."""
    error = error_of(body)
    if error is None or error.type not in _STATUSES:
        return fault_for(status, error, waiting)
    return _named(error, status, waiting)


def fault_in_event(parsed: Mapping[str, Any]) -> Fault:
    """The fault behind an error that came with status 200, as an event of a stream or as a whole body."""
    error = error_in(parsed) or UpstreamError()
    return _named(error, _STATUSES[error.type], Waiting()) if error.type in _STATUSES else fault_in_answer(error)


def _named(error: UpstreamError, status: int, waiting: Waiting) -> Fault:
    text = error.message or ""
    if error.type == "not_found_error":
        error = replace(error, param="model")  # its words are but the model's name
    elif _TOO_LONG.search(text):
        error = replace(error, code=CONTEXT_CODE)
    elif error.type == "invalid_request_error" and _NO_CREDIT.search(text):
        status = _PAYMENT_REQUIRED
    fault = fault_for(status, error, waiting)
    is_own = error.type == "api_error" and fault.kind is FaultKind.FAILED
    return replace(fault, kind=FaultKind.BROKEN, retry_after_us=None) if is_own else fault
