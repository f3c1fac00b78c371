"""Who may see the console's pages, how they look, and what they say when they are not live."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.kit.console import OPERATOR, RULES, TENANTS, VIEWER, Client, Whole, whole_console
from tests.kit.serving import ADMIN_TOKEN

PAGES = ("", "rules", "rollouts", "switches", "backends", "models", "requests", "shadows", "keys", "audit")
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory) -> AsyncIterator[Whole]:
    async with whole_console(tmp_path_factory.mktemp("console")) as running:
        await running.reset()
        await fill(running)
        yield running


async def fill(whole: Whole) -> None:
    """Something to see on every page: requests, a key with a limit for a day, a rollout, a shadow's comparisons."""
    rules = [{**RULES[0], "shadow": {"backend": "triton", "model": "spare", "percent": 100}}, *RULES[1:]]
    revision = (await whole.admin.get("/rules")).json()["revision"]
    assert (await whole.admin.put("/rules", json={"rules": rules, "revision": revision})).status_code == 200
    async with Client(whole.serving.url).under_way():
        pass
    limits = [{"requests": 100, "per": "day"}]
    made = await whole.admin.post("/keys", json={"name": "an app", "tenant": TENANTS[0], "limits": limits})
    assert made.status_code == 201, made.text
    target = {"backend": "triton", "model": "echo", "version": "2"}
    begun = await whole.admin.post("/rollouts", json={"rule": "fast", "target": target})
    assert begun.status_code == 201, begun.text
    assert (await whole.admin.post(f"/rollouts/{begun.json()['id']}/abort", json={"note": "a try"})).status_code == 200


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(whole: Whole) -> AsyncIterator[Whole]:
    await whole.reset()
    yield whole


# --- who may ----------------------------------------------------------------------------------------


async def test_nobody_comes_in_without_a_log_in(whole: Whole):
    async with httpx.AsyncClient(base_url=whole.url, trust_env=False) as http:
        for path in (*(f"/console/{page}" for page in PAGES), "/console/_nicegui/x", "/console"):
            answer = await http.get(path)
            assert (answer.status_code, answer.headers["location"][:14]) == (303, "/console/login"), path
        bearer = await http.get("/console/", headers={"authorization": f"Bearer {ADMIN_TOKEN}"})
        assert bearer.status_code == 303
        login = await http.get("/console/login")
        assert "frame-ancestors 'none'" in login.headers["content-security-policy"]


async def test_a_wrong_key_is_told_and_a_log_out_ends_open_pages(whole: Whole):
    async with whole.looking() as console:
        await console.page.goto(f"{whole.url}/console/rules")
        await console.page.get_by_label("Admin key or token").fill("wrong" * 10)
        await console.page.keyboard.press("Enter")
        await expect(console.page.get_by_role("alert")).not_to_be_empty()
        await console.page.get_by_label("Admin key or token").fill(OPERATOR)
        await console.page.keyboard.press("Enter")
        await expect(console.page.get_by_role("heading", name="Tasks and rules")).to_be_visible()
        other = await console.tab()
        await console.go("switches", other)
        await console.page.get_by_role("button", name="Log out").click()
        for page in (console.page, other):
            await expect(page.get_by_label("Admin key or token")).to_be_visible()


async def test_a_viewer_sees_all_and_can_change_nothing(fresh: Whole):
    async with fresh.looking() as console:
        await console.log_in(VIEWER)
        for path, gone in (
            ("rules", "Switch off: fast"),
            ("switches", "Set a switch"),
            ("backends", f"Drain: triton@{fresh.servers[0].server.grpc}"),
            ("rollouts", "Start a rollout"),
            ("models", "Unload: echo"),
            ("keys", "Make a key"),
        ):
            await console.go(path)
            await expect(console.page.get_by_role("table").first).to_be_visible()
            await expect(console.page.get_by_role("button", name=gone)).to_have_count(0)
        await console.go("rules")
        await expect(console.row("fast")).to_be_visible()


# --- how it looks and feels ---------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "phone"), [("light", False), ("dark", False), ("light", True), ("dark", True)])
async def test_every_page_can_be_read(fresh: Whole, scheme: str, phone: bool):
    body = {"action": "block", "scope": {"tenant": "nobody"}, "reason": "a try", "ttl_s": 600}
    assert (await fresh.admin.post("/switches", json=body)).status_code == 201
    async with fresh.looking(scheme=scheme, phone=phone) as console:
        await console.log_in(ADMIN_TOKEN)
        for path in PAGES:
            await console.go(path)
            await console.page.wait_for_load_state("networkidle")
            await expect(console.page.locator(".folding").first).to_be_visible()
            await console.shot(f"{path or 'overview'}-{'phone-' if phone else ''}{scheme}")
            await expect(console.page.locator(".banner")).to_be_hidden()
            assert await console.too_faint() == [], path
            assert not await console.is_too_wide(), path
        assert console.strangers() == []
        assert console.faults == []


async def test_everything_works_by_keyboard(fresh: Whole):
    async with fresh.looking() as console:
        page, press = console.page, console.page.keyboard.press
        await console.log_in(ADMIN_TOKEN)
        await console.go("rules")
        await expect(console.row("fast")).to_be_visible()
        await press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to the content"
        await press("Enter")
        assert await page.evaluate("document.activeElement.id") == "main"
        for _ in range(20):
            await press("Tab")
            if await page.evaluate("document.activeElement.ariaLabel") == "Switch off: fast":
                break
        width = await page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
        assert width == "3px", "the focus cannot be seen"
        await press("Enter")
        reason = page.get_by_role("dialog").get_by_label("Reason")
        await expect(reason).to_be_focused()
        await press("Enter")
        await expect(page.get_by_role("alert").get_by_text("Reason is needed.")).to_be_visible()
        await press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await expect(page.get_by_role("button", name="Switch off: fast")).to_be_focused()
        await press("Enter")
        await expect(reason).to_be_focused()
        await page.keyboard.type("by keyboard")
        await press("Enter")
        await expect(console.row("fast").get_by_text("off", exact=True)).to_be_visible()


async def test_it_says_when_it_is_not_live(fresh: Whole):
    async with fresh.looking() as console:
        await console.log_in(ADMIN_TOKEN)
        await console.go("rules")
        await expect(console.row("fast")).to_be_visible()
        banner = console.page.get_by_role("status").filter(has_text="Not live")
        fresh.redis.hang()
        try:
            await expect(banner).to_be_visible()
            await expect(console.row("fast")).to_be_visible()
            await console.shot("not-live")
        finally:
            fresh.redis.resume()
        await expect(banner).to_have_count(0)


async def test_it_keeps_nothing_on_disk(whole: Whole):
    assert not (Path.cwd() / ".nicegui").exists()
    assert "ERROR" not in whole.serving.config.with_suffix(".admin.log").read_text()
