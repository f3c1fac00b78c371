"""The console of the running stack, in a real Chromium: its pages are live, and what is pressed reaches every worker.

What operators do in it is in `console/`, whose world has models that can be made slow and servers that can be drained.
"""

from playwright.async_api import expect

from tests.kit.browser import chromium, looking
from tests.kit.wait import until_async

PAGES = ("rollouts", "switches", "backends", "models", "requests", "shadows", "keys", "audit", "", "rules")
EMBED = ("/v1/tasks/text-embedding", {"input": {"text": "hello"}})


async def test_every_page_opens_and_a_rule_is_switched_off_and_on(stack):
    async def answered(status: int) -> bool:
        """By every worker, as far as fresh connections meet them all."""
        seen = set()
        for _ in range(4 * stack.workers):
            async with stack.http() as http:
                seen.add((await http.post(EMBED[0], json=EMBED[1])).status_code)
        return seen == {status}

    async with chromium() as browser, looking(browser, stack.admin_url) as console:
        await console.log_in_by_hand(stack.admin_token)
        for page in PAGES:
            await console.go(page)
            await expect(console.page.locator(".banner")).to_be_hidden()
        await console.act("Switch off: embeddings", "a try")
        await until_async(lambda: answered(503), timeout_s=10)
        await expect(console.row("embeddings").get_by_text("off", exact=True)).to_be_visible()
        await console.act("Switch on: embeddings")
        await until_async(lambda: answered(200), timeout_s=10)
        for typed in ("/", "/console"):
            await console.page.goto(stack.admin_url + typed)
            await expect(console.page).to_have_url(f"{stack.admin_url}/console/")
            await expect(console.page.get_by_role("heading", name="Overview", level=1)).to_be_visible()
        assert console.strangers() == []
        assert console.faults == []
