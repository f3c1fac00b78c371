"""The console on the control plane's application. NiceGUI is one for each process, and so is the console."""

import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from gateway.admin.access.door import CONSOLE, LOGIN_PAGE
from gateway.console.shell import Shell

MAX_MESSAGE_BYTES: Final = 1024 * 1024  # of what a browser sends on a page's WebSocket; a form is a few hundred
RECONNECT_S: Final = 10.0  # a page whose connection was lost goes on where it was for so long
BUILD_S: Final = 10.0
_HERE: Final = Path(__file__).parent


@contextlib.asynccontextmanager
async def console(app: FastAPI) -> AsyncGenerator[None, None]:
    """Serve the console on `app` at `/console` while the block runs. `app` has answered no request yet.

    It keeps nothing on disk, and asks nobody but `app`.
    """
    # The library looks where it would keep files when it is imported; nothing of ours keeps any.
    os.environ.setdefault("NICEGUI_STORAGE_PATH", os.devnull)
    from nicegui import core, ui  # noqa: PLC0415 - takes a second and 60 MiB, for the control plane alone

    from gateway.console.pages import PAGES  # noqa: PLC0415 - the same
    from gateway.console.view import show  # noqa: PLC0415 - the same

    login = (_HERE / "login.html").read_text()

    @app.get(LOGIN_PAGE, include_in_schema=False)
    async def login_page() -> HTMLResponse:
        return HTMLResponse(login)

    for page in PAGES:
        ui.page(page.path, title=f"{page.title} · Gateway", response_timeout=BUILD_S)(show(page, PAGES, app))
    ui.run_with(
        app,
        mount_path=CONSOLE,
        title="Gateway",
        favicon=(_HERE / "favicon.svg").read_text(),
        dark=None,
        language="en-US",
        tailwind=False,
        binding_refresh_interval=None,
        reconnect_timeout=RECONNECT_S,
        show_welcome_message=False,
    )
    core.app.config.socket_io_js_transports = ["websocket"]
    app.add_middleware(Shell)
    async with app.router.lifespan_context(app):
        yield
