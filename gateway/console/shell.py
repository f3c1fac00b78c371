"""Around the console: the way to it, what its answers say to browsers, and the end of its WebSockets at a stop.

Who may enter is the control plane's door to say, for pages, their files and their WebSockets alike.
"""

import asyncio
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admin.access.door import CONSOLE
from gateway.http.asgi import DRAINING

POLICY: Final = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "script-src 'self' 'unsafe-inline' 'unsafe-eval'; "  # pages are Vue templates, compiled in the browser
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:"
)
"""A browser asks nobody but us, whatever a page holds, and shows no page inside of another."""
RETRY_S: Final = 3
AWAY: Final = (
    f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>Not now · Gateway</title>
<body style="font: 16px/1.5 system-ui, sans-serif; max-width: 34em; margin: 15vh auto; padding: 0 16px">
<h1>The console cannot open now</h1>
<p role="alert">Redis, which keeps the log-ins, does not answer the control plane.</p>
<p>The workers go on with the rules that they have. This page tries again every {RETRY_S} seconds.</p>"""
).encode()
_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
}
_HOME: Final = f"{CONSOLE}/"
_FILES: Final = f"{CONSOLE}/_nicegui/"  # named by the version of the library: they never change


class Shell:
    """Plain ASGI, around the whole application; what is not the console's passes as it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path = scope.get("path", "")
        if _is_way(path, scope):
            await RedirectResponse(_HOME)(scope, receive, send)  # 307; a path alone, whatever Host was asked for
        elif path != CONSOLE and not path.startswith(f"{CONSOLE}/"):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._app(scope, _until_drained(scope, receive), send)
        else:
            await self._app(scope, receive, _guarded(path, send))


def _is_way(path: str, scope: Scope) -> bool:
    """Whether it is what people type: the console without its slash, or the root, of which programs ask no HTML."""
    if path not in ("/", CONSOLE) or scope["type"] != "http" or scope["method"] != "GET":
        return False
    return path == CONSOLE or "text/html" in Headers(scope=scope).get("accept", "")


def _guarded(path: str, send: Send) -> Send:
    """A `send` that adds what protects a page."""
    is_page, is_away = not path.startswith(f"{CONSOLE}/_"), False

    async def guarded(message: Message) -> None:
        nonlocal is_away
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(_HEADERS)
            is_kept = path.startswith(_FILES) and message["status"] == HTTPStatus.OK
            headers["cache-control"] = "private, max-age=31536000, immutable" if is_kept else "no-store"
            if message["status"] == HTTPStatus.SERVICE_UNAVAILABLE and is_page:  # it cannot be told who asks
                headers.update({"refresh": str(RETRY_S), "content-type": "text/html", "content-length": str(len(AWAY))})
                is_away = True
        elif is_away:
            message = {**message, "body": b"" if message.get("more_body") else AWAY}
        await send(message)

    return guarded


def _until_drained(scope: Scope, receive: Receive) -> Receive:
    """A `receive` that ends the WebSocket when the server stops: a page is never done by itself."""
    draining = (scope.get("extensions") or {}).get(DRAINING)
    if draining is None:
        return receive

    async def received() -> Message:
        coming, stopping = asyncio.ensure_future(receive()), asyncio.ensure_future(draining.wait())
        try:
            await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else {"type": "websocket.disconnect", "code": 1001}
        finally:
            coming.cancel()
            stopping.cancel()

    return received
