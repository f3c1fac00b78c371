"""One open page: its frame, its only refresh loop, and the banner that says when what it shows is old."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request
from nicegui import ui

from gateway.admin.access.actors import visit_of
from gateway.admin.access.door import CONSOLE, LOGIN_PAGE
from gateway.admin.access.roles import PREFIX
from gateway.console import words
from gateway.console.client import UNAUTHORIZED, Api, ApiError
from gateway.console.dialogs import Do, button, say
from gateway.ports import JsonObject

Load = Callable[[], Awaitable[None]]

TICK_S: Final = 0.25
PATIENCE_S: Final = 3.0  # beyond which the page says that it waits for an answer
THEMES: Final = {"auto": None, "light": False, "dark": True}
_THEME_COOKIE: Final = "gateway_theme"
_STYLE: Final = (Path(__file__).parent / "console.css").read_text()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of the console; `path` is below `/console`, `build` puts its content into the open frame."""

    path: str
    title: str
    icon: str
    build: Callable[["View"], Awaitable[None]]


class View:
    """A page in one browser tab. It asks for one thing after the other: slow answers never pile up."""

    def __init__(self, page: Page, api: Api, request: Request) -> None:
        self.page = page
        self.api = api
        session = visit_of(request.scope).session
        self._until_ms = None if session is None else session.expires_s * 1000
        self._theme = request.cookies.get(_THEME_COOKIE, "auto")
        self._loads: list[tuple[float, Load]] = []
        self._due: dict[Load, float] = {}
        self._loading: asyncio.Task[None] | None = None
        self._began = self._fresh = time.monotonic()
        self._problem = ""
        self._notices: dict[str, str] = {}

    def every(self, seconds: float, load: Load) -> None:
        """Call `load` now and then every so many seconds, as long as the page is open."""
        self._loads.append((seconds, load))
        self._due[load] = 0.0

    def soon(self) -> None:
        """Load everything at the next tick: something was changed."""
        self._due = dict.fromkeys(self._due, 0.0)

    def notice(self, topic: str, text: str) -> None:
        """Say something in the banner; an empty text takes it away."""
        self._notices[topic] = text

    async def ask(self, path: str, **query: object) -> JsonObject | None:
        """What the API tells, for a dialog; None where it refuses, which is said."""
        try:
            return await self.api.get(path, **query)
        except ApiError as error:
            say(error.detail)
            return None

    def and_soon(self, do: Do) -> Do:
        """`do`, and then look at once what came of it."""

        async def done() -> JsonObject | None:
            try:
                return await do()
            finally:
                self.soon()

        return done

    # --- the frame --------------------------------------------------------------------------------

    @contextmanager
    def frame(self, pages: tuple[Page, ...]) -> Generator[None, None, None]:
        """The header, the menu and the banner; what the block makes is the page's content."""
        ui.add_css(_STYLE)
        self._dark = ui.dark_mode(THEMES.get(self._theme))
        drawer = ui.left_drawer(value=False).props("width=216 breakpoint=900 bordered show-if-above").classes("menu")
        with ui.header(elevated=False).classes("bar"):
            self._header(drawer)
        with drawer, ui.element("nav").props('aria-label="Pages"'):
            for page in pages:
                self._link(page)
        with ui.element("div").props("id=main tabindex=-1").classes("content"):  # inside of the library's <main>
            self._banner = ui.label("").classes("banner").props("role=status aria-live=polite")
            self._banner.set_visibility(False)
            ui.label(self.page.title).props("role=heading aria-level=1").classes("title")
            yield
        _preload()
        self.client = ui.context.client
        ui.timer(TICK_S, self._tick)

    def _header(self, drawer: ui.left_drawer) -> None:
        ui.html('<a class="skip" href="#main">Skip to the content</a>', sanitize=False)
        button("", drawer.toggle, icon="menu").props('aria-label="Menu"')
        ui.link("Gateway", "/").classes("brand")
        ui.space()
        actor = self.api.actor
        ui.label(f"{actor.id} · {actor.role}").classes("who").tooltip(
            f"Logged in until {words.when(self._until_ms)} UTC"
        )
        self._toggle = button("", self._next_theme)
        self._name_theme()
        button("Log out", self._log_out)

    def _link(self, page: Page) -> None:
        with ui.link(target=page.path).classes("menu-link") as link:
            ui.icon(page.icon).props("aria-hidden=true")
            ui.label(page.title)
        if page is self.page:
            link.props("aria-current=page")

    def _name_theme(self) -> None:
        self._toggle.text = f"Theme: {self._theme}"

    def _next_theme(self) -> None:
        names = tuple(THEMES)
        self._theme = names[(names.index(self._theme) + 1) % len(names)] if self._theme in names else "auto"
        self._dark.value = THEMES[self._theme]
        self._name_theme()
        kept = f"{_THEME_COOKIE}={self._theme}; path={CONSOLE}; max-age=31536000; samesite=strict"
        ui.run_javascript(f"document.cookie = '{kept}'")

    def _log_out(self) -> None:
        """By the browser itself, so that its cookie goes too."""
        headers = json.dumps({"X-CSRF-Token": self.api.csrf})
        ui.run_javascript(
            f"fetch('{PREFIX}/session', {{method: 'DELETE', headers: {headers}}})"
            f".finally(() => location.assign('{LOGIN_PAGE}'))"
        )

    # --- the refresh loop -------------------------------------------------------------------------

    def _tick(self) -> None:
        """Begin to load what is due, unless the last loads have not ended; say how old the page is."""
        now = time.monotonic()
        if self._loading is None or self._loading.done():
            due = [(seconds, load) for seconds, load in self._loads if self._due[load] <= now]
            if due:
                self._began = now
                self._loading = asyncio.create_task(self._load(due))
                self.client.on_delete(self._loading.cancel)
        self._say(now)

    async def _load(self, due: list[tuple[float, Load]]) -> None:
        with self.client:
            for seconds, load in due:
                self._due[load] = time.monotonic() + seconds - TICK_S / 2
                try:
                    await load()
                except ApiError as error:
                    if error.status == UNAUTHORIZED:
                        ui.navigate.to(LOGIN_PAGE.removeprefix(CONSOLE))
                        return
                    self._problem = error.detail
                    return
                except (LookupError, TypeError, ValueError):  # another version's control plane answers, say
                    _log.exception("a page of the console could not show an answer", extra={"page": self.page.path})
                    self._problem = "an answer could not be shown; the control plane's log says more"
                    return
            self._problem, self._fresh = "", time.monotonic()

    def _say(self, now: float) -> None:
        said = [text for text in self._notices.values() if text]
        age_s = now - self._fresh
        is_waiting = self._loading is not None and not self._loading.done() and now - self._began > PATIENCE_S
        if self._problem:
            said.insert(0, f"Not live for {age_s:.0f} s: {self._problem}. What you see is older.")
        elif is_waiting:
            said.insert(0, f"Not live: the control plane has not answered for {now - self._began:.0f} s.")
        text = " ".join(said)
        if text != self._banner.text:
            self._banner.text = text
            self._banner.set_visibility(bool(text))


def _preload() -> None:
    """Have the browser load what dialogs are made of with the page: one opens even when nobody gives files away."""
    with ui.element("div") as unseen:
        ui.dialog()
        ui.input()
        ui.number()
        ui.select([])
    unseen.set_visibility(False)


def show(page: Page, pages: tuple[Page, ...], app: FastAPI) -> Callable[[Request], Awaitable[None]]:
    """What NiceGUI calls for each browser that opens `page`; the admin API is `app`'s."""

    async def build(request: Request) -> None:
        view = View(page, Api(app, request), request)
        with view.frame(pages):
            await page.build(view)

    return build
