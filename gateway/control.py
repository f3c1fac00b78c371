"""The control plane, a process of its own."""

import logging

from gateway.console.mount import MAX_MESSAGE_BYTES, console
from gateway.http.asgi import Asgi
from gateway.http.server import bind, serve_app
from gateway.settings import Settings
from gateway.stopping import stop_on_signals
from gateway.wiring import configure_logging
from gateway.wiring_control import control_plane

_log = logging.getLogger(__name__)


async def admin(settings: Settings) -> None:
    """Serve the control plane until a signal."""
    configure_logging()
    stop = stop_on_signals()
    async with control_plane(settings) as app, console(app):
        listener = bind(settings.server.admin_host, settings.server.admin_port)
        address = f"{settings.server.admin_host}:{settings.server.admin_port}"
        _log.info("serving the control plane", extra={"address": address})
        await serve_app(
            Asgi(app),
            [listener],
            stop,
            drain_s=settings.server.drain_timeout_s,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
