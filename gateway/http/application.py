"""What a server serves."""

from typing import Protocol

from starlette.types import Receive, Scope, Send

from gateway.http.exchange import Exchange


class Application(Protocol):
    """What is served."""

    async def serve(self, exchange: Exchange) -> None:
        """One request. What it raises is answered with 500."""
        ...

    async def websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One WebSocket, as an ASGI application has it."""
        ...
