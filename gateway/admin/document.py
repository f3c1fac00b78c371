"""What FastAPI's OpenAPI document leaves out: which refusals each operation can give, as they are sent.

A route names those of its own, `openapi_extra=refuses(UnknownKey)`. What the door refuses (`EVERYWHERE`), and what
follows from what an operation takes (a body, a revision, a name in its path), is added here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI

from gateway.admin.access.roles import PREFIX, ROWS
from gateway.core.error_schemas import PROBLEM, problem_schema, refusal_answers
from gateway.core.errors import (
    CLOSED_LIST,
    BodyTooLarge,
    Forbidden,
    GatewayError,
    InternalError,
    InvalidInput,
    MalformedRequest,
    NotFound,
    RateLimited,
    RequestTimeout,
    RulesUnavailable,
    Unauthorized,
)

EVERYWHERE: Final[tuple[type[GatewayError], ...]] = (
    Unauthorized,
    Forbidden,
    RequestTimeout,
    BodyTooLarge,
    InvalidInput,
    RateLimited,
    InternalError,
    RulesUnavailable,
)
"""Whatever is asked under `/admin/v1`: the door's, and our own faults. 405 is for paths that lack the method."""

_OWN: Final = "x-refusals"
_ERRORS: Final[Mapping[str, type[GatewayError]]] = {error.code: error for error in CLOSED_LIST}
_HEALTH: Final = "/healthz/"
_WITH_SLASHES: Final = {PREFIX + row.path.replace(":path", "") for row in ROWS if ":path" in row.path}


def refuses(*errors: type[GatewayError]) -> dict[str, Any]:
    """The refusals of one route beside `EVERYWHERE`, as its `openapi_extra`."""
    return {_OWN: [error.code for error in errors]}


def install_document(app: FastAPI) -> None:
    """Have `app` tell them in its document."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _tell(made())
        return made()

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to change its document


def _tell(document: dict[str, Any]) -> None:
    """Put them into every operation, in the place of FastAPI's form of an invalid body, which is never sent."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    told: dict[str, None] = {}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            errors = list(_refusals(path, operation))
            operation["responses"].pop("422", None)
            operation["responses"] |= refusal_answers(errors, _content)
            told |= dict.fromkeys(error.code for error in errors)
    schemas["Problem"] = problem_schema(list(told), _STALE)


def _refusals(path: str, operation: dict[str, Any]) -> Iterator[type[GatewayError]]:
    own = [_ERRORS[code] for code in operation.pop(_OWN, ())]
    if path.startswith(_HEALTH):
        yield InternalError
        yield from own
        return
    yield from EVERYWHERE
    if "requestBody" in operation or any(one["name"] == "if-match" for one in operation.get("parameters", ())):
        yield MalformedRequest
    if "{" in path and path not in _WITH_SLASHES:
        yield NotFound  # with a `/` in the name it is another path
    yield from own


def _content(codes: Sequence[str]) -> dict[str, Any]:
    """A problem with one of these codes."""
    one_of_them = {"properties": {"code": {"enum": list(codes)}}}
    return {PROBLEM: {"schema": {"allOf": [{"$ref": "#/components/schemas/Problem"}, one_of_them]}}}


_STALE: Final[Mapping[str, Any]] = {
    "expected": {"type": "integer", "description": "with `revision_stale`: the revision that the change was made from"},
    "current": {"type": "integer", "description": "with `revision_stale`: the newest revision"},
    "changes": {
        "type": "array",
        "description": "with `revision_stale` of the rules: what others have changed since, as in `GET /rules/diff`",
        "items": {"type": "object"},
    },
}
