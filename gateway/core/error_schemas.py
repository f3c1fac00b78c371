"""Errors as an OpenAPI document tells them, the same for both planes: see `error_forms` for what is sent."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from gateway.core.errors import GatewayError

PROBLEM: Final = "application/problem+json"
_COME_BACK: Final = {
    "retry-after": {"schema": {"type": "integer", "minimum": 1}, "description": "seconds"},
    "retry-after-ms": {"schema": {"type": "integer", "minimum": 1}, "description": "milliseconds, where it is known"},
    "x-should-retry": {"schema": {"const": "false"}, "description": "where coming back is pointless"},
}


def refusal_answers(
    errors: Iterable[type[GatewayError]], content: Callable[[Sequence[str]], Mapping[str, Any]]
) -> dict[str, Any]:
    """The answers of a call that may raise `errors`, by status. The description of each is its codes.

    `content` makes an answer's content of these codes. 429 and 503 say when to come back.
    """
    codes: dict[int, list[str]] = {}
    for error in dict.fromkeys(errors):
        codes.setdefault(error.status, []).append(error.code)
    answers: dict[str, Any] = {}
    for status, of_status in sorted(codes.items()):
        answers[str(status)] = {"description": ", ".join(of_status), "content": content(of_status)}
        if status in (429, 503):
            answers[str(status)]["headers"] = dict(_COME_BACK)
    return answers


def problem_schema(codes: Sequence[str], more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The schema of `error_forms.problem_document` with these codes; `more` are the properties of one plane alone."""
    fault = {
        "type": "object",
        "properties": {
            "detail": {"type": "string", "description": "what is wrong with it"},
            "pointer": {"type": "string", "description": "where in the body: a JSON pointer (RFC 6901)"},
            "field": {"type": "string", "description": "the name of a field, a parameter or a header"},
        },
        "required": ["detail"],
    }
    return {
        "type": "object",
        "description": "An error (RFC 9457).",
        "properties": {
            "type": {"type": "string", "description": "a URI; `about:blank`: `code` says it all"},
            "title": {"type": "string", "description": "the code in words, always the same"},
            "status": {"type": "integer", "description": "the HTTP status"},
            "detail": {"type": "string", "description": "what was wrong this time, for people"},
            "code": {"enum": list(codes), "description": "what was wrong, for programs: docs/errors.md"},
            "errors": {"type": "array", "items": fault, "description": "the faults of the input, one by one"},
            **more,
        },
        "required": ["type", "title", "status", "detail", "code"],
    }
