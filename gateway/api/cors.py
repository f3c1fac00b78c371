"""Cross-origin requests of web pages: which pages' scripts may read our answers (the Fetch standard's CORS protocol).

There are no cookies and nothing else that a browser would send by itself, so credentials are never allowed: a page
has to hold a key or a client token, and sends it in a header.
"""

from collections.abc import Collection, Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ANY: Final = "*"
MAX_AGE_S: Final = 600  # how long a browser need not ask again; a change of the origins is in force after that
# What scripts may read anyway, or what no script is for.
_NOT_TOLD: Final = frozenset({b"cache-control", b"connection", b"content-length", b"content-type", b"vary"})

_Fields = list[tuple[bytes, bytes]]


class Cors:
    """Tells browsers which pages may read the answers of `app`, of every answer that it gives.

    What a browser asks beforehand (`OPTIONS`) is answered here, before any key is looked at: it bears none.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. WebSockets pass: browsers let pages open them anywhere, so their handshake judges the origin."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = dict(scope["headers"])
        told = self._told(asked.get(b"origin"))
        if scope["method"] == "OPTIONS" and b"origin" in asked and b"access-control-request-method" in asked:
            fields = [*told, *_permissions(asked)]
            await send({"type": "http.response.start", "status": 204, "headers": fields})
            await send({"type": "http.response.body", "body": b""})
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                fields = list(message.get("headers", ()))
                message["headers"] = [*fields, *told, *_exposed(name for name, _ in fields)]
            await send(message)

        await self._app(scope, receive, sending)

    def _told(self, origin: bytes | None) -> _Fields:
        """The origin, where its pages may read this; without it a browser lets no script see the answer."""
        if ANY in self._origins:
            return [(b"access-control-allow-origin", b"*")]
        vary = [(b"vary", b"Origin")]  # of every answer: a cache must not give one page's to another
        if origin is None or origin.decode("latin-1") not in self._origins:
            return vary
        return [(b"access-control-allow-origin", origin), *vary]


def may_come_from(origins: Collection[str], origin: str) -> bool:
    """Whether a page of `origin` may open a WebSocket; where no origins are configured, any may, if it has a key."""
    return not origins or ANY in origins or origin in origins


def _permissions(asked: dict[bytes, bytes]) -> _Fields:
    """Any header may be sent: SDKs have many of their own, and what they say is judged when it comes."""
    return [
        (b"access-control-allow-methods", b"GET, HEAD, POST"),
        (b"access-control-allow-headers", asked.get(b"access-control-request-headers", b"authorization")),
        (b"access-control-max-age", str(MAX_AGE_S).encode()),
        (b"vary", b"Access-Control-Request-Headers"),
    ]


def _exposed(names: Iterable[bytes]) -> _Fields:
    """All headers that this answer has, by name: `*` is not known to every browser in use."""
    told = dict.fromkeys(name.lower() for name in names)
    listed = b", ".join(name for name in told if name not in _NOT_TOLD)
    return [(b"access-control-expose-headers", listed)] if listed else []
