"""An application on our own server, on a loopback port of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gateway.http.application import Application
from gateway.http.server import bind, serve_app


@contextlib.asynccontextmanager
async def served(app: Application) -> AsyncIterator[str]:
    """Its URL, until the block ends."""
    stop = asyncio.Event()
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        serving = asyncio.create_task(serve_app(app, [listener], stop, drain_s=1))
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            stop.set()
            await serving
