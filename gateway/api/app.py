"""The data plane's path table, with nothing between it and the server."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

import orjson
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from gateway.api import batch, client_tokens, openai, openapi, tasks
from gateway.api.body import BodyLimits, drain
from gateway.api.cors import Cors
from gateway.api.endpoint import Api, Endpoint, Handler, request_id, request_id_line
from gateway.api.errors import ErrorForm, openai_error, problem
from gateway.api.oip import paths as oip
from gateway.api.oip.errors import oip_error
from gateway.api.request_headers import Headers, headers_of
from gateway.api.shedding import Shedding, behind
from gateway.api.stream import StreamEndpoint
from gateway.core.errors import MethodNotAllowed, NotFound
from gateway.core.trace import ROUTE
from gateway.http.application import Application
from gateway.http.asgi import refuse_websocket
from gateway.http.exchange import Exchange, Ready, Response

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
_NO_METHODS: Final[Mapping[str, "Answers"]] = MappingProxyType({})
_WITHOUT_V1: Final = ("/chat", "/completions", "/responses", "/embeddings", "/models")
_OPENAI_PREFIXES: Final = tuple(
    f"/v1{path}" for path in (*_WITHOUT_V1, "/audio", "/batches", "/files", "/images", "/moderations", "/v1/")
)
_OPEN_PATHS: Final = (b"/v1/tasks/", b"/v2/models/")  # that go on with a name


class Answers(Protocol):
    """What answers the requests of a path and method."""

    async def serve(self, exchange: Exchange) -> None:
        """Answer one."""
        ...


class App:
    """Finds a request's path and method in the table; what the endpoints do not catch, the server answers with 500."""

    def __init__(
        self,
        table: Mapping[str, Mapping[str, Answers]],
        sockets: Mapping[str, StreamEndpoint],
        *,
        protocol: Endpoint,
        body: BodyLimits,
        shedding: Shedding,
    ) -> None:
        self._table = table
        self._sockets = sockets
        self._protocol = protocol
        self._body = body
        self.overload = shedding
        self._refusals = _refusals()
        paths = [*table, *sockets]
        self._fixed = frozenset(path for path in paths if "{" not in path)
        patterns = ((path, compile_path(path)) for path in paths if "{" in path)
        self._patterns = [(path, regex, convertors) for path, (regex, _, convertors) in patterns]

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request."""
        scope = exchange.scope
        method, methods = scope["method"], self._table.get(self._route(scope), _NO_METHODS)
        answers = methods.get("GET" if method == "HEAD" else method)
        if answers is None and oip.is_ours(scope["path"]):
            answers = self._protocol
        if answers is not None:
            await answers.serve(exchange)
            return
        response = self._no_answer(scope, exchange.headers)
        if not await drain(exchange, self._body):
            response.headers["connection"] = "close"  # or the rest would be read for ever
        exchange.reply(response)

    def turned_away(self, method: bytes, url: bytes, headers: Mapping[bytes, bytes]) -> tuple[Ready, bytes] | bool:
        """429 for what the worker sheds, in the form of the path, before the key is looked at."""
        if method != b"POST" or b"expect" in headers:
            return False
        refusal = self._refusals.get(url) or self._refusal_at(url)
        if refusal is None:
            return False
        return not self.overload.turns_away(headers) or (refusal, request_id_line(headers))

    def _refusal_at(self, url: bytes) -> Ready | None:
        """Of a path that goes on with a name, or with a query."""
        for path in _OPEN_PATHS:
            if url.startswith(path):
                return self._refusals[path]
        return self._refusals.get(url.partition(b"?")[0])

    async def websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket; see ASGI."""
        socket = self._sockets.get(self._route(scope))
        if socket is None:
            await refuse_websocket(self._no_answer(scope, headers_of(scope)), send)
        else:
            await socket(scope, receive, send)

    def _route(self, scope: Scope) -> str:
        """The path of a request as the table has it, which is told in its scope; empty where it is not there."""
        route: str = scope["path"]
        if route not in self._fixed:
            route = self._matched(scope)
        scope[ROUTE] = route
        return route

    def _matched(self, scope: Scope) -> str:
        """A path with parameters, which are put into the scope."""
        for path, regex, convertors in self._patterns:
            found = regex.match(scope["path"])
            if found:
                scope["path_params"] = {
                    name: convertors[name].convert(text) for name, text in found.groupdict().items()
                }
                return path
        return ""

    def _no_answer(self, scope: Scope, headers: Headers) -> Response:
        """404 or 405, in the form of the path's neighbours."""
        path, route = scope["path"], scope[ROUTE]
        methods = self._table.get(route, _NO_METHODS)
        is_short, is_double = path.startswith(_WITHOUT_V1), path.startswith("/v1/v1/")
        form = openai_error if is_short or path.startswith(_OPENAI_PREFIXES) else problem
        if is_short or is_double:
            response = form(NotFound("there is no such path; a client's base URL ends with one /v1"))
        elif route in self._sockets:
            response = form(NotFound("this path is a WebSocket's: begin with its handshake"))
        elif not methods:
            response = form(NotFound("there is no such path; /openapi.json lists them"))
        else:
            response = form(MethodNotAllowed("this path does not take this method"))
            response.headers["allow"] = ", ".join(sorted({*methods, *(("HEAD",) if "GET" in methods else ())}))
        response.headers["x-request-id"] = request_id(headers)
        return response


class Plain:
    """An answer that needs no key."""

    def __init__(self, respond: Callable[[], Response]) -> None:
        self._respond = respond

    async def serve(self, exchange: Exchange) -> None:
        """See `Answers`."""
        exchange.reply(self._respond())


def create_app(api: Api) -> Application:
    """The data plane over `api`."""
    table: dict[str, dict[str, Answers]] = {}
    for method, path, handler, form in PATHS:
        table.setdefault(path, {})[method] = Endpoint(handler, api, form)
    document = orjson.dumps(openapi.document(api.pipeline.tasks, api.models))
    table["/openapi.json"] = {"GET": Plain(lambda: _json(document))}
    table["/healthz/live"] = {"GET": Plain(lambda: _json(b'{"status":"live"}'))}
    table["/healthz/ready"] = {"GET": Plain(lambda: _ready(api))}
    table["/v2/health/live"] = {"GET": Plain(oip.live)}
    table["/v2/health/ready"] = {"GET": Plain(lambda: oip.ready(is_ready=api.is_ready()))}
    sockets = {"/v1/tasks/{task}/stream": StreamEndpoint(api)}
    protocol = Endpoint(oip.serve, api, oip_error)
    app = App(table, sockets, protocol=protocol, body=api.body, shedding=api.shedding)
    return Cors(app, api.cors_origins) if api.cors_origins else app


def _refusals() -> Mapping[bytes, Ready]:
    """What is shed, by its path, or by the beginning of one that goes on with a name."""
    forms = {path.encode(): form for method, path, _, form in PATHS if method == "POST" and "{" not in path}
    forms |= dict(zip(_OPEN_PATHS, (problem, oip_error), strict=True))
    return {path: Ready(form(behind())) for path, form in forms.items()}


def _ready(api: Api) -> Response:
    if api.is_ready():
        return _json(b'{"status":"ready"}')
    return _json(b'{"status":"draining"}', status_code=503)


def _json(body: bytes, *, status_code: int = 200) -> Response:
    return Response(body, status_code=status_code, media_type="application/json")
