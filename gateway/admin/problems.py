"""Errors of the control plane on the wire: RFC 9457 `application/problem+json` with a stable `code`."""

import json
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.core.errors import (
    GatewayError,
    InternalError,
    InvalidInput,
    MalformedRequest,
    MethodNotAllowed,
    NotFound,
)
from gateway.core.routing import RuleError, RulesUnavailable, StaleRevision

MEDIA_TYPE = "application/problem+json"
_log = logging.getLogger(__name__)


class InvalidRules(GatewayError):
    """A rule set that cannot be taken; `detail` names the rule and the field."""

    code, status, title = "invalid_rules", 422, "Rules cannot be taken"


class UnknownRule(GatewayError):
    """No rule of that name."""

    code, status, title = "unknown_rule", 404, "Unknown rule"


class RevisionRequired(GatewayError):
    """A replacement that does not say which revision it was made from."""

    code, status, title = "revision_required", 428, "Revision required"


class RevisionStale(GatewayError):
    """A change made from a revision that is no longer the newest."""

    code, status, title = "revision_stale", 412, "Revision is stale"


class StoreUnavailable(GatewayError):
    """The shared store cannot be reached, or holds what cannot be read."""

    code, status, title = "store_unavailable", 503, "Store unavailable"


def problem(error: GatewayError, errors: Sequence[dict[str, str]] = ()) -> Response:
    """One error as a response; `errors` lists the faults of a body, each with its JSON pointer."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
    }
    if errors:
        body["errors"] = list(errors)
    headers = {}
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = "1"
    return Response(json.dumps(body), status_code=error.status, headers=headers, media_type=MEDIA_TYPE)


def install_problems(app: FastAPI) -> None:
    """Answer every exception as a problem; one that is not foreseen is logged and tells nothing."""

    @app.exception_handler(GatewayError)
    async def _gateway_error(_: Request, error: GatewayError) -> Response:
        return problem(error)

    @app.exception_handler(RuleError)
    async def _rule_error(_: Request, error: RuleError) -> Response:
        return problem(InvalidRules(str(error)), [{"detail": str(error), "pointer": "#/rules"}])

    @app.exception_handler(StaleRevision)
    async def _stale(_: Request, error: StaleRevision) -> Response:
        return problem(RevisionStale(str(error)))

    @app.exception_handler(RulesUnavailable)
    async def _unavailable(_: Request, error: RulesUnavailable) -> Response:
        return problem(StoreUnavailable(str(error)))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        return _invalid_body(error)

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> Response:
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            return problem(MethodNotAllowed("this path does not take this method"))
        if error.status_code == HTTPStatus.NOT_FOUND:
            return problem(NotFound("no such path"))
        return problem(MalformedRequest("the request cannot be read"))

    @app.exception_handler(Exception)
    async def _unforeseen(_: Request, error: Exception) -> Response:
        _log.error("admin_failed", exc_info=error)
        return problem(InternalError("the control plane failed"))


def _invalid_body(error: RequestValidationError) -> Response:
    """A body that is not JSON, or not of the path's shape; each fault with its JSON pointer."""
    faults = error.errors()
    if any(fault["type"] == "json_invalid" for fault in faults):
        return problem(MalformedRequest("the body is not valid JSON"))
    errors = [{"detail": fault["msg"], "pointer": _pointer(fault["loc"][1:])} for fault in faults]
    return problem(InvalidInput(f"{errors[0]['pointer']}: {errors[0]['detail']}"), errors)


def _pointer(path: Sequence[int | str]) -> str:
    return "#/" + "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in path)
