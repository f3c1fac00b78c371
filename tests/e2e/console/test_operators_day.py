"""What operators do in the console, in a real Chromium over the real stack."""

import asyncio

import httpx
import pytest
from playwright.async_api import expect

from tests.kit.browser import Console
from tests.kit.console import OPERATOR, VIEWER, Client, Whole, infer
from tests.kit.serving import ADMIN_TOKEN
from tests.kit.wait import until_async

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]


async def test_an_operators_day(fresh: Whole):
    client = Client(fresh.serving.url)
    begin = (await fresh.admin.get("/rules")).json()["revision"]
    async with fresh.looking() as console, client.under_way():
        await console.log_in_by_hand(ADMIN_TOKEN)
        await switches_a_rule_off(console, client)
        await drains_a_replica(console, fresh)
        await sees_a_rollout_taken_back(console, client, fresh)
        await rolls_back(console, client, begin)
        await finds_it_all_in_the_audit_log(console)
        assert console.strangers() == []
        assert console.faults == []
    assert {status for _, status, _ in client.seen} == {200}


# When a place's name is first drawn into the first chart, by the browser's clock, which is ours.
APPEARS = """
(name) => {
  const look = () => {
    const chart = document.querySelector(".chart svg");
    if (!window.appeared && chart && chart.textContent.includes(name)) window.appeared = Date.now();
  };
  new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true});
}
"""


async def switches_a_rule_off(console: Console, client: Client) -> None:
    await client.until_only("fast")
    chart = await console.tab()
    await console.go("", chart)
    drawn = chart.locator("svg")
    await expect(drawn.get_by_text("triton/echo:1").first).to_be_attached()
    await chart.evaluate(APPEARS, "triton/spare")
    await console.go("rules")
    pressed = await console.act("Switch off: fast", "the new weights are wrong")
    last = await client.until_only("spare")
    await expect(drawn.get_by_text("triton/spare").first).to_be_attached()
    in_chart = await chart.evaluate("window.appeared") / 1000
    print(f"\nswitched off: the client within {last - pressed:.2f} s, the chart within {in_chart - pressed:.2f} s")
    await expect(chart.get_by_role("table").get_by_text("triton/spare", exact=True).first).to_be_visible()
    await console.shot("overview-moved", chart)
    await expect(console.row("fast").get_by_text("off", exact=True)).to_be_visible()
    await console.shot("rule-off")
    await console.act("Switch on: fast")
    await client.until_only("fast")
    await chart.close()


async def drains_a_replica(console: Console, whole: Whole) -> None:
    replica = whole.servers[0].server.grpc
    headers = {"authorization": "Bearer tenant-0"}
    async with httpx.AsyncClient(base_url=whole.serving.url, headers=headers, timeout=60, trust_env=False) as http:
        held = [asyncio.create_task(http.post("/v2/models/hold/infer", json=infer(1500))) for _ in range(6)]
        await console.go("backends")
        row = console.row(replica)
        await console.act(f"Drain: triton@{replica}", "its disk is replaced")
        await expect(row.get_by_text("draining", exact=False)).to_be_visible()
        await console.shot("draining")
        await expect(row.get_by_text("drained: 0 in flight")).to_be_visible(timeout=30_000)
        answers = await asyncio.gather(*held)
        assert {answer.status_code for answer in answers} == {200}
    await console.go("switches")
    await expect(console.page.get_by_text(f"replica triton@{replica}").first).to_be_visible()
    await console.shot("switches")
    await console.go("backends")
    await console.act(f"Resume: triton@{replica}")
    await expect(row.get_by_text("draining", exact=False)).to_have_count(0)


async def sees_a_rollout_taken_back(console: Console, client: Client, whole: Whole) -> None:
    page = console.page
    await console.go("rollouts")
    await page.get_by_role("button", name="Start a rollout").click()
    dialog = page.get_by_role("dialog")
    for label, value in (
        ("Version", "2"),
        ("Steps in percent", "50, 100"),
        ("Seconds at each step", "600"),
        ("has a p99 above (ms)", "200"),
        ("after so many requests", "20"),
        ("Reason", "version 2 is better"),
    ):
        await dialog.get_by_label(label).fill(value)
    await console.shot("rollout-dialog")
    await dialog.get_by_role("button", name="Start", exact=True).click()
    await expect(dialog).to_have_count(0)
    await expect(page.get_by_text("running", exact=True)).to_be_visible()
    await expect(page.get_by_text("50 %, step 1 of 2")).to_be_visible()
    await console.shot("rollout-running")
    slow = [one.repository / "echo" / "2" / "slow" for one in whole.servers]
    for one in slow:
        one.touch()
    try:
        await expect(page.get_by_text("rolled back", exact=True)).to_be_visible(timeout=60_000)
    finally:
        for one in slow:
            one.unlink()
    await console.shot("rollout-taken-back")
    await console.go("rules")
    await expect(page.get_by_text("triton/echo:1", exact=True).first).to_be_visible()


async def rolls_back(console: Console, client: Client, revision: int) -> None:
    await console.go("rules")
    await console.act("Switch off: fast", "to be rolled back")
    await client.until_only("spare")
    await console.act(f"Roll back to it: revision {revision}", "it was better before")
    await client.until_only("fast")
    await expect(console.page.get_by_text("it was better before")).to_be_visible()
    await console.shot("rolled-back")


async def finds_it_all_in_the_audit_log(console: Console) -> None:
    await console.go("audit")
    table = console.page.get_by_role("table")
    for told in (
        *("session.begin", "the new weights are wrong", "its disk is replaced", "switch.end", "rollout.start"),
        *("guard (system)", "to be rolled back", "rules.rollback", "it was better before"),
    ):
        await expect(table.get_by_text(told, exact=True).first).to_be_visible()
    await console.shot("audit")


async def test_the_second_of_two_operators_sees_what_the_first_has_changed(fresh: Whole):
    async with fresh.looking() as first, fresh.looking() as second:
        for console, token in ((first, ADMIN_TOKEN), (second, OPERATOR)):
            await console.log_in(token)
            await console.go("rules")
            await console.page.get_by_role("button", name="Weights: weighed").click()
        for console, presses in ((first, 2), (second, 5)):
            await expect(console.page.get_by_label("Weight of triton/echo:1")).to_be_focused()
            await console.page.keyboard.press("Tab")
            for _ in range(presses):
                await console.page.keyboard.press("ArrowRight")
            await expect(console.page.get_by_text(f"triton/spare: {10 + presses}", exact=False)).to_be_visible()
        await expect(first.page.get_by_role("status", name="Effect")).to_contain_text("equests")
        await first.page.get_by_role("button", name="Save").click()
        await expect(first.page.get_by_role("dialog")).to_have_count(0)
        await second.page.get_by_role("button", name="Save").click()
        dialog = second.page.get_by_role("dialog")
        await expect(dialog.get_by_text("rule 'weighed': split[1].weight: 10 -> 12")).to_be_visible()
        await second.shot("conflict")
        await second.page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
    weights = {rule["name"]: rule for rule in (await fresh.admin.get("/rules")).json()["rules"]}["weighed"]["split"]
    assert [target["weight"] for target in weights] == [90, 12]


async def test_a_request_is_explained(fresh: Whole):
    client = Client(fresh.serving.url)
    async with fresh.looking() as console:
        async with client.under_way():
            pass
        await console.log_in(VIEWER)
        await console.go("requests")
        page, dialog = console.page, console.page.get_by_role("dialog")
        await page.get_by_role("button", name="Explain: ").first.click()
        await expect(dialog.get_by_text("Rule 'fast', at revision")).to_be_visible()
        await expect(dialog.get_by_text("taken", exact=True)).to_be_visible()
        await console.shot("explained")
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        await page.get_by_role("button", name="Explain a request").click()
        await dialog.get_by_label("Task").fill("tensor")
        await dialog.get_by_label("Model").fill("weighed")
        await dialog.get_by_role("button", name="Explain", exact=True).click()
        await expect(page.get_by_text("Rule 'weighed', at revision")).to_be_visible()


async def test_a_keys_secret_is_shown_once(fresh: Whole):
    async with fresh.looking() as console:
        await console.log_in(ADMIN_TOKEN)
        await console.go("keys")
        page, dialog = console.page, console.page.get_by_role("dialog")
        await page.get_by_role("button", name="Make a key").click()
        await dialog.get_by_label("Name").fill("an app")
        await dialog.get_by_label("Tenant").fill("acme")
        await dialog.get_by_label("Requests per minute").fill("60")
        await page.keyboard.press("Enter")
        secret = await page.locator(".secret").text_content()
        await page.get_by_role("button", name="I have kept it").click()
        await expect(dialog).to_have_count(0)
        await expect(console.row("an app").get_by_text("60 requests per minute")).to_be_visible()
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=fresh.serving.url, headers=headers, trust_env=False) as http:
            assert (await http.post("/v2/models/echo/infer", json=infer())).status_code == 200
            await console.act("Disable: an app", "it was on a lost laptop")
            await expect(console.row("an app").get_by_text("disabled")).to_be_visible()
            await until_async(lambda: is_refused(http))


async def is_refused(http: httpx.AsyncClient) -> bool:
    return (await http.post("/v2/models/echo/infer", json=infer())).status_code == 401


async def test_a_switch_counts_down_and_says_that_it_has_ended(fresh: Whole):
    async with fresh.looking() as console:
        await console.log_in(OPERATOR)
        await console.go("switches")
        body = {"action": "block", "scope": {"tenant": "gone"}, "reason": "a short one", "ttl_s": 3}
        assert (await fresh.admin.post("/switches", json=body)).status_code == 201
        await expect(console.row("tenant gone")).to_be_visible()
        await expect(console.page.get_by_text("block for tenant gone expired by itself.")).to_be_visible()
        await expect(console.row("tenant gone")).to_have_count(0)
