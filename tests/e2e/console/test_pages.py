"""Who may see the console's pages, how they look, and what they say when they are not live."""

from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.kit.console import NO_KEY, OPERATOR, RULES, TENANTS, VIEWER, Client, Whole
from tests.kit.serving import ADMIN_TOKEN

PAGES = ("", "rules", "rollouts", "switches", "backends", "models", "requests", "shadows", "keys", "audit")
pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def filled(whole: Whole) -> None:
    """Something to see on every page: requests, a key with a limit for a day, a rollout, a shadow's comparisons."""
    await whole.reset()
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


# --- who may ----------------------------------------------------------------------------------------


async def test_nobody_comes_in_without_a_log_in(whole: Whole):
    async with httpx.AsyncClient(base_url=whole.url, trust_env=False) as http:
        for path in (*(f"/console/{page}" for page in PAGES), "/console/_nicegui/x"):
            answer = await http.get(path)
            assert (answer.status_code, answer.headers["location"][:14]) == (303, "/console/login"), path
        typed = await http.get("/console")
        assert (typed.status_code, typed.headers["location"]) == (307, "/console/")
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


# --- what is off, and what is much ------------------------------------------------------------------


async def test_what_is_off_says_so_and_why(fresh: Whole):
    async with fresh.looking() as console:
        page, button = console.page, console.page.get_by_role("button")
        await console.log_in(OPERATOR)
        await console.go("rules")
        talk = console.row("talk").first
        for text in ("in this order", "1. hosted/big (off)", "2. shut/small (off)", "no place is on"):
            await expect(talk.get_by_text(text, exact=True)).to_be_visible()
        await expect(page.get_by_role("button", name="Weights: weighed")).to_be_visible()
        for name in ("Weights: talk", "Roll out: talk"):  # its weights have no say
            await expect(page.get_by_role("button", name=name)).to_have_count(0)
        await page.get_by_label("Filter by name, task, place").fill("IN ORDER hosted")
        await expect(page.get_by_text("1 of 5 rules are shown")).to_be_visible()
        await expect(console.row("fast")).to_have_count(0)
        await console.go("backends")
        for name, why in (("hosted", NO_KEY), ("shut", "switched off in the configuration")):
            row = console.row(name)
            await expect(row.get_by_text("off", exact=True)).to_be_visible()
            await expect(row.get_by_text(why)).to_be_visible()
            await expect(row.get_by_role("button")).to_have_count(0)
        await expect(button.filter(has_text="Drain")).to_have_count(2)
        await console.shot("off")


async def test_keys_are_shown_in_pages_and_their_limits_are_changed(fresh: Whole):
    for number in range(51):
        body = {"name": f"many {number}", "tenant": "many", "limits": [{"tokens": 7, "per": "hour"}]}
        assert (await fresh.admin.post("/keys", json=body)).status_code == 201
    async with fresh.looking() as console:
        page = console.page
        await console.log_in(ADMIN_TOKEN)
        await console.go("keys")
        await page.get_by_label("Only this tenant's").fill("many")
        await expect(page.get_by_text("Keys 1 to 50 of 'many'", exact=True)).to_be_visible()
        await page.get_by_role("button", name="Next page").click()
        await expect(page.get_by_text("Keys 51 to 51 of 'many'", exact=True)).to_be_visible()
        await page.get_by_role("button", name="Limits: many").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog.get_by_text("These stay: 7 tokens per hour")).to_be_visible()
        await dialog.get_by_label("Dollars per day").fill("0.5")
        await dialog.get_by_label("Reason").fill("it is a trial")
        await page.keyboard.press("Enter")
        await expect(dialog).to_have_count(0)
        await expect(page.get_by_text("0.5 usd per day; 7 tokens per hour", exact=True)).to_be_visible()
        await page.get_by_role("button", name="Page before").click()
        await expect(page.get_by_text("Keys 1 to 50 of 'many'", exact=True)).to_be_visible()


# --- how it looks and feels ---------------------------------------------------------------------------


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
async def test_every_page_can_be_read(fresh: Whole, phone: bool):
    body = {"action": "block", "scope": {"tenant": "nobody"}, "reason": "a try", "ttl_s": 600}
    assert (await fresh.admin.post("/switches", json=body)).status_code == 201
    async with fresh.looking(phone=phone) as console:
        page = console.page
        await console.log_in(ADMIN_TOKEN)
        for path in PAGES:
            await console.go(path)
            await expect(page.locator(".folding").first).to_be_visible()
            await expect(page.locator(".folding tbody tr").first).to_be_visible()
            for scheme in ("light", "dark"):
                await page.emulate_media(color_scheme=scheme)
                await expect(page.locator(f"body.body--{scheme}")).to_be_visible()
                await console.shot(f"{path or 'overview'}-{'phone-' if phone else ''}{scheme}")
                assert await console.too_faint() == [], (path, scheme)
            await expect(page.locator(".banner")).to_be_hidden()
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
            # A dialog opens all the same, and says what it is refused with.
            await console.page.get_by_role("button", name="Switch off: fast").click()
            dialog = console.page.get_by_role("dialog")
            await dialog.get_by_label("Reason").fill("in the dark")
            await console.page.keyboard.press("Enter")
            await expect(dialog.get_by_role("alert")).to_have_text("Redis, which keeps the log-ins, does not answer")
            other = await console.tab()
            await other.goto(f"{console.url}/console/switches")
            await expect(other.get_by_role("alert")).to_contain_text("does not answer the control plane")
            await console.shot("cannot-open", other)
        finally:
            fresh.redis.resume()
        await expect(banner).to_have_count(0)
        await expect(other.get_by_role("heading", name="Switches", level=1)).to_be_visible()


async def test_it_keeps_nothing_on_disk(whole: Whole):
    assert not (Path.cwd() / ".nicegui").exists()
    assert "ERROR" not in whole.serving.config.with_suffix(".admin.log").read_text()
