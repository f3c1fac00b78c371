"""The control plane's door: who may enter, and how much they may carry. Plain ASGI, before any routing."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admin.problems import problem
from gateway.core.errors import BodyTooLarge, ClientClosed, GatewayError, Unauthorized

MAX_BODY_BYTES = 1024 * 1024  # a thousand rules are a third of that
GUARDED = "/admin/"


class Door:
    """Lets a request under `/admin/` in when it bears the token and its body is at most 1 MiB.

    The body is read here, whole, so that one of unknown length is bounded too.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()  # what a client sends as UTF-8 comes to us as Latin-1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._identify(headers)
            body = await _body(headers, receive)
        except GatewayError as error:
            await problem(error)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    def _identify(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # The comparison takes the same time wherever the first difference is.
        same = hmac.compare_digest(token.strip().encode("latin-1"), self._token)
        if scheme.lower() != "bearer" or not self._token or not same:
            raise Unauthorized("missing or unknown admin token")


async def _body(headers: Headers, receive: Receive) -> bytes:
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body may have {MAX_BODY_BYTES} bytes")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientClosed("the caller left")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body may have {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, then what the server still has to say."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
