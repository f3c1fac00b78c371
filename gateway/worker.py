"""One worker of the data plane, a process of its own."""

import asyncio
import gc
import socket

from prometheus_client import CollectorRegistry

from gateway.http_server import serve_app
from gateway.settings import Settings
from gateway.stopping import stop_on_signals
from gateway.wiring import configure_logging, data_plane


async def work(settings: Settings, listener_fd: int) -> None:
    """Serve the data plane on the parent's socket until a signal, or until the parent is gone."""
    configure_logging()
    stop = stop_on_signals()
    # The parent holds the other end of our standard input: its end means that the parent died.
    loop = asyncio.get_running_loop()

    def parent_gone() -> None:
        loop.remove_reader(0)
        stop.set()

    loop.add_reader(0, parent_gone)
    listener = socket.socket(fileno=listener_fd)
    async with data_plane(settings, CollectorRegistry(), is_draining=stop.is_set) as app:
        server = settings.server
        gc.collect()
        gc.freeze()  # what is there now stays; searching through it for garbage would only hold requests up
        gc.set_threshold(20_000, 20, 50)  # a request makes hundreds of objects that die by themselves
        await serve_app(app, [listener], stop, drain_s=server.drain_timeout_s, max_message_bytes=server.max_body_bytes)
