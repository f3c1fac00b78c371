"""`gateway ...` against a control plane on a real socket: the real one, or one that says what a test wants."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

from gateway.__main__ import app
from tests.kit.redis import HOST
from tests.kit.serving import free_port

TOKEN = "admin-secret"  # noqa: S105 - made up here


def command(url: str, *args: str, stdin: str | None = None, env: Mapping[str, str | None] | None = None):
    """What `gateway ARGS` prints and ends with, against the control plane at `url`."""
    environ = {"GATEWAY_ADMIN_URL": url, "GATEWAY_ADMIN_TOKEN": TOKEN, "COLUMNS": "160", **(env or {})}
    return CliRunner(env=environ).invoke(app, list(args), input=stdin)


@contextmanager
def served(plane: Any) -> Iterator[str]:
    """The address of an application that is served by a thread."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(plane, host=HOST, port=port, log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://{HOST}:{port}"
    finally:
        server.should_exit = True
        thread.join()


class Scripted:
    """`answers` by `METHOD /path`: a document, a text, a (status, document), or a function that makes one of the body.

    `asked`: what was, with its query, and its body.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, Any]] = []

    async def answer(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/admin/v1")
        raw = await request.body()
        body = json.loads(raw) if raw else None
        query = f"?{request.url.query}" if request.url.query else ""
        self.asked.append((f"{request.method} {path}{query}", body))
        answer = self.answers.get(f"{request.method} {path}")
        if callable(answer):
            answer = answer(body)
        if answer is None:
            answer = (404, {"status": 404, "code": "not_found", "detail": "no such path"})
        if isinstance(answer, str):
            return PlainTextResponse(answer)
        status, document = answer if isinstance(answer, tuple) else (200, answer)
        return Response(json.dumps(document), status_code=status, media_type="application/json")

    @property
    def app(self) -> Starlette:
        """It as an application."""
        return Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST", "PATCH", "DELETE"])])
