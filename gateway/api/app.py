"""The data plane's path table."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway import __version__
from gateway.api import openai, openapi, tasks
from gateway.api.endpoint import Api, Endpoint, Handler, request_id
from gateway.api.errors import ErrorForm, openai_error, problem
from gateway.core.errors import GatewayError, MethodNotAllowed, NotFound

# Model names hold slashes in the OpenAI world ("org/model"), hence `:path`.
PATHS: tuple[tuple[str, str, Handler, ErrorForm], ...] = (
    ("POST", "/v1/infer", tasks.infer, problem),
    ("GET", "/v1/tasks", tasks.list_tasks, problem),
    ("GET", "/v1/tasks/{task}", tasks.get_task, problem),
    ("POST", "/v1/tasks/{task}", tasks.infer_task, problem),
    ("POST", "/v1/chat/completions", openai.chat_completions, openai_error),
    ("POST", "/v1/embeddings", openai.embeddings, openai_error),
    ("GET", "/v1/models", openai.list_models, openai_error),
    ("GET", "/v1/models/{model:path}", openai.get_model, openai_error),
)
_OPENAI_PREFIXES = ("/v1/chat", "/v1/embeddings", "/v1/models", "/v1/completions", "/v1/responses")


def create_app(api: Api) -> FastAPI:
    """The data plane as an ASGI application. No interactive docs page: those load scripts from elsewhere."""
    app = FastAPI(
        title="Hybrid inference gateway",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.router.redirect_slashes = False  # a redirect would answer before the key is checked
    for method, path, handler, form in PATHS:
        app.router.routes.append(Route(path, Endpoint(handler, api, form), methods=[method]))

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> Response:
        if api.is_ready():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "draining"}, status_code=503)

    app.router.routes.append(Route("/healthz/live", live))
    app.router.routes.append(Route("/healthz/ready", ready))
    written: dict[str, Any] = openapi.document(api.pipeline.tasks, api.models)
    app.openapi = lambda: written  # type: ignore[method-assign]  # FastAPI's documented way to replace it
    app.add_exception_handler(HTTPException, _no_such_path)
    return app


async def _no_such_path(request: Request, fault: Exception) -> Response:
    """404 and 405 of the router, in the form of the path's neighbours."""
    error: GatewayError
    if isinstance(fault, HTTPException) and fault.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        error = MethodNotAllowed("this path does not take this method")
    else:
        error = NotFound("there is no such path; /openapi.json lists them")
    form = openai_error if request.url.path.startswith(_OPENAI_PREFIXES) else problem
    response = form(error)
    if isinstance(fault, HTTPException) and fault.headers and "Allow" in fault.headers:
        response.headers["allow"] = fault.headers["Allow"]
    response.headers["x-request-id"] = request_id(request)
    return response
