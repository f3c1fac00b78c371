"""What FastAPI's OpenAPI document leaves out: the refusals of every operation, as they are sent."""

from typing import Any, Final

from fastapi import FastAPI

from gateway.core.errors import (
    CONTROL_PLANE,
    BackendBroke,
    BodyTooLarge,
    Forbidden,
    GatewayError,
    InternalError,
    InvalidInput,
    MalformedRequest,
    NoHealthyBackend,
    NotFound,
    RateLimited,
    RequestTimeout,
    Unauthorized,
    UnknownModel,
    UnsupportedByBackend,
)

REFUSALS: Final[tuple[type[GatewayError], ...]] = (
    MalformedRequest,
    Unauthorized,
    Forbidden,
    NotFound,
    UnknownModel,
    RequestTimeout,
    BodyTooLarge,
    InvalidInput,
    RateLimited,
    NoHealthyBackend,
    UnsupportedByBackend,
    BackendBroke,
    InternalError,
    *CONTROL_PLANE,
)
"""Whatever is asked; 405 is for paths that lack the method."""


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
    refusals = _refusals()
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = _problem()
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"] |= refusals


def _refusals() -> dict[str, Any]:
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    told = {}
    for status in sorted({error.status for error in REFUSALS}):
        codes = ", ".join(error.code for error in REFUSALS if error.status == status)
        told[str(status)] = {"description": codes, "content": content}
    return told


def _problem() -> dict[str, Any]:
    fault = {
        "type": "object",
        "properties": {"detail": {"type": "string"}, "pointer": {"type": "string"}, "field": {"type": "string"}},
        "required": ["detail"],
    }
    return {
        "type": "object",
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "code": {"enum": [error.code for error in REFUSALS]},
            "errors": {"type": "array", "items": fault},
            "expected": {"type": "integer", "description": "of a change made from a stale revision"},
            "current": {"type": "integer"},
            "changes": {"type": "array", "items": {}},
        },
        "required": ["type", "title", "status", "detail", "code"],
    }
