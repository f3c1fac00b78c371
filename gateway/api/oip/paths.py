"""The Open Inference Protocol with Triton's extensions, on `/v2`: which path is which call.

What only a model server can say is asked of the servers of the tensor task's rule; inference takes the walk of every
other request. Errors are `{"error": text}`.
"""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

from gateway.api.endpoint import Visit
from gateway.api.oip import infer as oip_infer
from gateway.api.oip import models as oip_models
from gateway.api.oip.errors import oip_error
from gateway.core.errors import MethodNotAllowed, NotFound
from gateway.http.exchange import Response
from local_runtime.protocol.http_routes import METHODS, Route, known_route

CALLS: Final[Mapping[str, Callable[[Visit, Route], Awaitable[Response]]]] = {
    "infer": oip_infer.infer,
    "generate": oip_infer.generate,
    "generate_stream": oip_infer.generate_stream,
    "server": oip_models.server,
    "metadata": oip_models.metadata,
    "model_ready": oip_models.model_ready,
    "config": oip_models.config,
    "stats": oip_models.statistics,
    "index": oip_models.index,
    "load": oip_models.load,
    "unload": oip_models.unload,
    "shared_memory_status": oip_models.no_regions,
    "not_offered": oip_models.not_offered,
}


def is_ours(path: str) -> bool:
    """Whether a path, real or not, is one of this protocol's."""
    return path == "/v2" or path.startswith("/v2/")


async def serve(visit: Visit) -> Response:
    """Any call, for callers with a key. The server's own live and ready need none, and are not here."""
    found = known_route(visit.scope["raw_path"])
    if found is None:
        raise NotFound("Not Found")
    method = METHODS[found.call].decode()
    if method and visit.scope["method"] not in (method, "HEAD" if method == "GET" else method):
        response = oip_error(MethodNotAllowed("Method Not Allowed"))
        response.headers["allow"] = "GET, HEAD" if method == "GET" else method
        return response
    return await CALLS[found.call](visit, found)


def live() -> Response:
    """The process runs. No body, as in Triton: its aio client never reads one, and would lose the connection."""
    return Response()


def ready(*, is_ready: bool) -> Response:
    """Whether the gateway takes requests; of models, their own paths tell."""
    return (
        Response() if is_ready else Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE, headers={"retry-after": "1"})
    )
