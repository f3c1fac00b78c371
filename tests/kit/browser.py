"""A real Chromium, headless, that looks at the console: who uses it sees what an operator would see.

Pictures go to `GATEWAY_ARTIFACTS`, or to .run/artifacts; they are never committed.
"""

import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

ROOT = Path(__file__).resolve().parents[2]
MISSING = "the console's tests need Chromium: `apt-get install chromium`"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
DESKTOP = {"width": 1360, "height": 860}
PHONE = {"width": 360, "height": 740}
expect.set_options(timeout=15_000)

# Of every text that can be seen: its contrast with what is behind it (WCAG 2, 1.4.3), where that is too little.
_CONTRAST = """
() => {
  const parse = (text) => { const found = text.match(/[\\d.]+/g).map(Number); return [...found, 1].slice(0, 4); };
  const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const found = [];
    for (; element && !(found.length && found.at(-1)[3] === 1); element = element.parentElement) {
      found.push(parse(getComputedStyle(element).backgroundColor));
    }
    return found.reverse().reduce((under, colour) => over(colour, under), [255, 255, 255, 1]);
  };
  const seen = {visibilityProperty: true, opacityProperty: true}, bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || element.closest("script, style, svg, .q-icon") || !element.checkVisibility(seen)) continue;
    const style = getComputedStyle(element), behind = ground(element), ink = over(parse(style.color), behind);
    const [less, more] = [light(ink), light(behind)].sort((x, y) => x - y), ratio = (more + 0.05) / (less + 0.05);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) bad.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}, ${style.color} on ${behind}`);
  }
  return bad;
}
"""


def binary() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise RuntimeError(MISSING)
    return found


def artifacts() -> Path:
    folder = Path(os.environ.get("GATEWAY_ARTIFACTS") or ROOT / ".run" / "artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass
class Console:
    """One operator's browser: `page` is the tab in front; `asked` are the hosts of all that it asked for."""

    url: str
    context: BrowserContext
    page: Page
    asked: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Write down what a tab asks for, and what its scripts complain about."""
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("websocket", lambda socket: self.asked.append(socket.url))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda said: self.faults.append(said.text) if said.type == "error" else None)

    async def log_in(self, token: str) -> None:
        """Have the cookie, as the page of the log-in gets it."""
        answer = await self.context.request.post(f"{self.url}/admin/v1/session", data={"token": token})
        assert answer.ok, await answer.text()

    async def log_in_by_hand(self, token: str) -> None:
        await self.page.goto(f"{self.url}/console/")
        await self.page.get_by_label("Admin key or token").fill(token)
        await self.page.keyboard.press("Enter")
        await expect(self.page.get_by_role("heading", name="Overview", level=1)).to_be_visible()

    async def tab(self) -> Page:
        """One more tab of the same log-in."""
        page = await self.context.new_page()
        self.watch(page)
        return page

    async def go(self, path: str, page: Page | None = None) -> None:
        await (page or self.page).goto(f"{self.url}/console/{path}")
        await expect((page or self.page).get_by_role("heading", level=1)).to_be_visible()

    def row(self, name: str) -> Any:
        return self.page.get_by_role("row").filter(has=self.page.get_by_text(name, exact=True))

    async def act(self, label: str, reason: str = "") -> float:
        """Press the button with this label, give the reason, and confirm by Enter; when that was (Unix seconds)."""
        await self.page.get_by_role("button", name=label, exact=True).first.click()
        dialog = self.page.get_by_role("dialog")
        await expect(dialog.get_by_label("Reason")).to_be_focused()
        await self.page.keyboard.insert_text(reason)
        await self.page.keyboard.press("Enter")
        pressed = time.time()
        await expect(dialog).to_have_count(0)
        return pressed

    async def shot(self, name: str, page: Page | None = None) -> None:
        await (page or self.page).screenshot(path=artifacts() / f"{name}.png", full_page=True)

    async def too_faint(self) -> list[str]:
        """Texts of the page in front whose contrast is too little."""
        return await self.page.evaluate(_CONTRAST)

    async def is_too_wide(self) -> bool:
        """Whether the page, or a table in it, has to be scrolled sideways."""
        return await self.page.evaluate(
            "document.documentElement.scrollWidth > innerWidth"
            " || [...document.querySelectorAll('.folding')].some((one) => one.scrollWidth > one.clientWidth)"
        )

    def strangers(self) -> list[str]:
        """What was asked of others than the control plane."""
        own = (self.url, self.url.replace("http", "ws", 1), "data:", "blob:")
        return [url for url in self.asked if not url.startswith(own)]


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as player:
        browser = await player.chromium.launch(executable_path=binary(), args=list(FLAGS), headless=True)
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def looking(browser: Browser, url: str, *, phone: bool = False, scheme: str = "light") -> AsyncIterator[Console]:
    """A new operator, with no cookies."""
    context = await browser.new_context(viewport=PHONE if phone else DESKTOP, color_scheme=scheme)
    console = Console(url, context, await context.new_page())
    console.watch(console.page)
    try:
        yield console
    finally:
        await context.close()
