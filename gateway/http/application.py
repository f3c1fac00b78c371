"""What a server serves."""

from collections.abc import Mapping
from typing import Protocol

from starlette.types import Receive, Scope, Send

from gateway.http.exchange import Exchange, Ready


class Overload(Protocol):
    """Whether there may be more to do than can be done."""

    is_behind: bool


class Application(Protocol):
    """What is served."""

    @property
    def overload(self) -> Overload:
        """While it says so, `turned_away` is asked of each request."""
        ...

    def turned_away(self, method: bytes, url: bytes, headers: Mapping[bytes, bytes]) -> tuple[Ready, bytes] | bool:
        """What a request is answered instead of being served, and header lines of its own; nothing is made for it yet.

        True: it may be served, as far as its head tells; false: its head alone does not tell.
        """
        ...

    async def serve(self, exchange: Exchange) -> None:
        """One request. What it raises is answered with 500."""
        ...

    async def websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One WebSocket, as an ASGI application has it."""
        ...


class NoOverload:
    """Nobody is turned away."""

    is_behind = False
