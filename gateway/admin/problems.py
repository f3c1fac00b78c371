"""Errors of the control plane on the wire: RFC 9457 `application/problem+json` with a stable `code`."""

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.core.error_forms import error_headers, problem_document
from gateway.core.errors import (
    GatewayError,
    InternalError,
    InvalidInput,
    InvalidRules,
    MalformedRequest,
    MethodNotAllowed,
    NotFound,
)
from gateway.core.rules.fields import RuleError
from gateway.settings.faults import fault_words

MAX_FAULTS: Final = 100  # of a body that are told

_log = logging.getLogger(__name__)


def problem(error: GatewayError, faults: Sequence[Mapping[str, str]] = ()) -> Response:
    """One error as a response; `faults` lists the faults of a body, each with its JSON pointer."""
    document = json.dumps(problem_document(error, faults))
    return Response(
        document, status_code=error.status, headers=error_headers(error), media_type="application/problem+json"
    )


def install_problems(app: FastAPI) -> None:
    """Answer every exception as a problem; one that is not foreseen is logged and tells nothing."""

    @app.exception_handler(GatewayError)
    async def _gateway_error(_: Request, error: GatewayError) -> Response:
        return problem(error)

    @app.exception_handler(RuleError)
    async def _rule_error(_: Request, error: RuleError) -> Response:
        return problem(InvalidRules(str(error), field="rules"))

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
    errors = [{"detail": fault_words(fault), "pointer": _pointer(fault["loc"][1:])} for fault in faults[:MAX_FAULTS]]
    return problem(InvalidInput(f"{errors[0]['pointer']}: {errors[0]['detail']}"), errors)


def _pointer(path: Sequence[int | str]) -> str:
    return "#/" + "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in path)
