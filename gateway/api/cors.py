"""Cross-origin requests of web pages: which pages' scripts may read our answers (the Fetch standard's CORS protocol).

There are no cookies and nothing else that a browser would send by itself, so credentials are never allowed: a page
has to hold a key or a client token, and sends it in a header.
"""

from collections.abc import Collection, Mapping
from typing import Final

from starlette.types import Receive, Scope, Send

from gateway.http.application import Application
from gateway.http.exchange import Exchange, Headers, Ready, Response

ANY: Final = "*"
MAX_AGE_S: Final = 600  # how long a browser need not ask again; a change of the origins is in force after that
# What scripts may read anyway, or what no script is for.
_NOT_TOLD: Final = frozenset({"cache-control", "connection", "content-length", "content-type", "vary"})


class Cors:
    """Tells browsers which pages may read the answers of `app`, of every answer that it gives.

    What a browser asks beforehand (`OPTIONS`) is answered here, before any key is looked at: it bears none.
    """

    def __init__(self, app: Application, origins: Collection[str]) -> None:
        self._app = app
        self.overload = app.overload
        self._origins = frozenset(origins)

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request."""
        asked = exchange.headers
        told = self._told(asked.get("origin"))
        if exchange.scope["method"] == "OPTIONS" and "origin" in asked and "access-control-request-method" in asked:
            headers = _permissions(asked)
            _tell(headers, told)
            exchange.reply(Response(status_code=204, headers=headers))
            return

        def dress(headers: Headers) -> None:
            exposed = _exposed(headers)
            _tell(headers, told)
            headers.update(exposed)

        exchange.dress = dress
        await self._app.serve(exchange)

    def turned_away(self, method: bytes, url: bytes, headers: Mapping[bytes, bytes]) -> tuple[Ready, bytes] | bool:
        """A page's script is told by an answer that it may read, and not by this."""
        return False if b"origin" in headers else self._app.turned_away(method, url, headers)

    async def websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it pass: browsers let pages open them anywhere, so their handshake judges the origin."""
        await self._app.websocket(scope, receive, send)

    def _told(self, origin: str | None) -> Headers:
        """The origin, where its pages may read this; without it a browser lets no script see the answer."""
        if ANY in self._origins:
            return {"access-control-allow-origin": "*"}
        vary = {"vary": "Origin"}  # of every answer: a cache must not give one page's to another
        if origin is None or origin not in self._origins:
            return vary
        return {"access-control-allow-origin": origin, **vary}


def may_come_from(origins: Collection[str], origin: str) -> bool:
    """Whether a page of `origin` may open a WebSocket; where no origins are configured, any may, if it has a key."""
    return not origins or ANY in origins or origin in origins


def _tell(headers: Headers, told: Headers) -> None:
    """Put `told` into `headers`, which may vary by something themselves."""
    varies = [one["vary"] for one in (told, headers) if "vary" in one]
    headers.update(told)
    if varies:
        headers["vary"] = ", ".join(varies)


def _permissions(asked: Headers) -> Headers:
    """Any header may be sent: SDKs have many of their own, and what they say is judged when it comes."""
    return {
        "access-control-allow-methods": "GET, HEAD, POST",
        "access-control-allow-headers": asked.get("access-control-request-headers", "authorization"),
        "access-control-max-age": str(MAX_AGE_S),
        "vary": "Access-Control-Request-Headers",
    }


def _exposed(headers: Headers) -> Headers:
    """All headers that this answer has, by name: `*` is not known to every browser in use."""
    listed = ", ".join(name for name in headers if name not in _NOT_TOLD)
    return {"access-control-expose-headers": listed} if listed else {}
