"""Applications of ASGI, such as FastAPI's, on our server."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.application import NoOverload
from gateway.http.exchange import Exchange, Headers, Response

DRAINING: Final = "gateway.draining"  # in a WebSocket's scope, its `extensions`: an event, set when the server stops
_DISCONNECT: Final = {"type": "http.disconnect"}


class Asgi:
    """An ASGI application as an `Application`; its life is begun and ended by whoever has it (no lifespan)."""

    overload = NoOverload()

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def serve(self, exchange: Exchange) -> None:
        """One request. What is sent to a caller that has left is lost."""
        is_asked = False

        async def receive() -> Message:
            nonlocal is_asked
            if not is_asked:
                body = await exchange.read()
                is_asked = exchange.is_whole
                if is_asked or not exchange.has_left:
                    return {"type": "http.request", "body": body, "more_body": not is_asked}
            await exchange.gone()
            return dict(_DISCONNECT)

        async def send(message: Message) -> None:
            await exchange.writable()
            if message["type"] == "http.response.start":
                headers, again = _headers(message)
                exchange.begin(message["status"], headers, again=again)
            elif message.get("more_body", False):
                exchange.write(message.get("body", b""))
            else:
                exchange.end(message.get("body", b""))

        await self._app(exchange.scope, receive, send)

    def turned_away(self, *_: object) -> bool:
        """Nobody is."""
        return False

    async def websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One WebSocket."""
        await self._app(scope, receive, send)


def _headers(message: Message) -> tuple[Headers, list[tuple[str, str]]]:
    """An answer's headers by name, and those whose name is there already."""
    headers: Headers = {}
    again: list[tuple[str, str]] = []
    for name, value in message.get("headers", ()):
        field = (name.decode("latin-1").lower(), value.decode("latin-1"))
        if field[0] in headers:
            again.append(field)
        else:
            headers[field[0]] = field[1]
    return headers, again


async def refuse_websocket(response: Response, send: Send) -> None:
    """A plain HTTP answer to a handshake."""
    fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]
    fields.append((b"content-length", b"%d" % len(response.body)))
    await send({"type": "websocket.http.response.start", "status": response.status_code, "headers": fields})
    await send({"type": "websocket.http.response.body", "body": response.body})
