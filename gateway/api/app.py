"""The data plane's path table, as an ASGI application with nothing between it and the server."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import batch, client_tokens, openai, openapi, tasks
from gateway.api.body import BodyLimits, drain
from gateway.api.cors import Cors
from gateway.api.endpoint import Api, Endpoint, Handler, request_id
from gateway.api.errors import ErrorForm, openai_error, problem
from gateway.api.oip import paths as oip
from gateway.api.oip.errors import oip_error
from gateway.api.request_headers import headers_of
from gateway.api.stream import StreamEndpoint
from gateway.core.errors import MethodNotAllowed, NotFound
from gateway.core.trace import ROUTE

# Model names hold slashes in the OpenAI world ("org/model"), hence `:path`.
PATHS: Final[tuple[tuple[str, str, Handler, ErrorForm], ...]] = (
    ("POST", "/v1/infer", tasks.infer, problem),
    ("POST", "/v1/infer/batch", batch.infer_batch, problem),
    ("POST", "/v1/client-tokens", client_tokens.create, problem),
    ("GET", "/v1/tasks", tasks.list_tasks, problem),
    ("GET", "/v1/tasks/{task}", tasks.get_task, problem),
    ("POST", "/v1/tasks/{task}", tasks.infer_task, problem),
    ("POST", "/v1/chat/completions", openai.chat_completions, openai_error),
    ("POST", "/v1/completions", openai.completions, openai_error),
    ("POST", "/v1/responses", openai.responses, openai_error),
    ("POST", "/v1/embeddings", openai.embeddings, openai_error),
    ("GET", "/v1/models", openai.list_models, openai_error),
    ("GET", "/v1/models/{model:path}", openai.get_model, openai_error),
)
_WEBSOCKET: Final = "websocket"  # in the table in the place of a method
_WITHOUT_V1: Final = ("/chat", "/completions", "/responses", "/embeddings", "/models")
_OPENAI_PREFIXES: Final = tuple(
    f"/v1{path}" for path in (*_WITHOUT_V1, "/audio", "/batches", "/files", "/images", "/moderations", "/v1/")
)


class App:
    """Finds a request's path and method in the table; what the endpoints do not catch, the server answers with 500."""

    def __init__(self, table: Mapping[str, Mapping[str, ASGIApp]], *, protocol: ASGIApp, body: BodyLimits) -> None:
        self._protocol = protocol
        self._body = body
        self._fixed = {path: methods for path, methods in table.items() if "{" not in path}
        patterns = ((path, compile_path(path), methods) for path, methods in table.items() if "{" in path)
        self._patterns = [(path, regex, convertors, methods) for path, (regex, _, convertors), methods in patterns]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        methods = self._fixed.get(scope["path"])
        if methods is None:
            methods = self._matched(scope)
        else:
            scope[ROUTE] = scope["path"]
        method = _WEBSOCKET if scope["type"] == "websocket" else scope["method"]
        answer = methods.get("GET" if method == "HEAD" else method)
        if answer is None and scope["type"] == "http" and oip.is_ours(scope["path"]):
            answer = self._protocol
        if answer is None:
            answer = _no_answer(scope, list(methods))
            if scope["type"] == "http" and not await drain(headers_of(scope), receive, self._body):
                answer.headers["connection"] = "close"  # or the rest would be read for ever
        await answer(scope, receive, send)

    def _matched(self, scope: Scope) -> Mapping[str, ASGIApp]:
        """The methods of a path with parameters, which are put into the scope; empty where there is no such path."""
        for path, regex, convertors, methods in self._patterns:
            found = regex.match(scope["path"])
            if found:
                scope[ROUTE] = path
                scope["path_params"] = {
                    name: convertors[name].convert(text) for name, text in found.groupdict().items()
                }
                return methods
        return {}


def create_app(api: Api) -> ASGIApp:
    """The data plane over `api`."""
    table: dict[str, dict[str, ASGIApp]] = {}
    for method, path, handler, form in PATHS:
        table.setdefault(path, {})[method] = Endpoint(handler, api, form)
    document = openapi.document(api.pipeline.tasks, api.models)
    table["/v1/tasks/{task}/stream"] = {_WEBSOCKET: StreamEndpoint(api)}
    table["/openapi.json"] = {"GET": _plain(lambda: JSONResponse(document))}
    table["/healthz/live"] = {"GET": _plain(lambda: JSONResponse({"status": "live"}))}
    table["/healthz/ready"] = {"GET": _plain(lambda: _ready(api))}
    table["/v2/health/live"] = {"GET": _plain(oip.live)}
    table["/v2/health/ready"] = {"GET": _plain(lambda: oip.ready(is_ready=api.is_ready()))}
    app = App(table, protocol=Endpoint(oip.serve, api, oip_error), body=api.body)
    return Cors(app, api.cors_origins) if api.cors_origins else app


def _ready(api: Api) -> Response:
    if api.is_ready():
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "draining"}, status_code=503)


def _plain(respond: Callable[[], Response]) -> ASGIApp:
    """An answer that needs no key."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await respond()(scope, receive, send)

    return answer


def _no_answer(scope: Scope, methods: Sequence[str]) -> Response:
    """404 or 405, in the form of the path's neighbours."""
    path = scope["path"]
    is_short, is_double = path.startswith(_WITHOUT_V1), path.startswith("/v1/v1/")
    form = openai_error if is_short or path.startswith(_OPENAI_PREFIXES) else problem
    if is_short or is_double:
        response = form(NotFound("there is no such path; a client's base URL ends with one /v1"))
    elif not methods:
        response = form(NotFound("there is no such path; /openapi.json lists them"))
    elif _WEBSOCKET in methods:
        response = form(NotFound("this path is a WebSocket's: begin with its handshake"))
    else:
        response = form(MethodNotAllowed("this path does not take this method"))
        response.headers["allow"] = ", ".join(sorted({*methods, *(("HEAD",) if "GET" in methods else ())}))
    response.headers["x-request-id"] = request_id(headers_of(scope))
    return response
