"""The console in a real Chromium, over two real Tritons, real Redis, two workers and the control plane."""

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from tests.kit.browser import Console, chromium, looking
from tests.kit.redis import RedisServer
from tests.kit.serving import ADMIN_TOKEN, Serving, control_plane, serving
from tests.kit.tritons import Triton, tritons
from tests.kit.wait import until, until_async

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

VIEWER, OPERATOR = (f"gw-test-{role}-{'x' * 32}" for role in ("viewer", "operator"))
PAGES = ("", "rules", "rollouts", "switches", "backends", "models", "requests", "shadows", "keys", "audit")
FAST = {"backend": "triton", "model": "echo", "version": "1"}
SPARE = {"backend": "triton", "model": "spare"}
MATCH = {"task": "tensor", "model": "echo"}
RULES = [
    {"name": "fast", "match": MATCH, "split": [{**FAST, "weight": 1}]},
    {"name": "spare", "match": MATCH, "split": [SPARE]},
    {
        "name": "weighed",
        "match": {"task": "tensor", "model": "weighed"},
        "split": [{**FAST, "weight": 90}, {**SPARE, "weight": 10}],
    },
    {"name": "others", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]},
]
CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "VERSION" data_type: TYPE_INT32 dims: [ 1 ] }} ]
instance_group [ {{ count: {count} kind: KIND_CPU }} ]
version_policy: {{ all {{ }} }}
"""
# Answers its own version after X milliseconds; a file `slow` beside it, at any time, makes it slower.
MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])
        self.slow = os.path.join(args["model_repository"], args["model_version"], "slow")

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            time.sleep(x.max() / 1000 + (0.4 if os.path.exists(self.slow) else 0.0))
            version = np.full((len(x), 1), self.version, np.int32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("VERSION", version)]))
        return answers
"""


def infer(wait_ms: int = 0) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "shape": [1, 1], "datatype": "INT32", "data": [wait_ms]}]}


@dataclass
class Client:
    """Callers who never stop: `seen` has the moment, the status and the rule of each answer."""

    url: str
    seen: list[tuple[float, int, str]] = field(default_factory=list)

    async def loop(self, number: int, stop: asyncio.Event) -> None:
        headers = {"authorization": f"Bearer tenant-{number}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30, trust_env=False) as http:
            while not stop.is_set():
                answer = await http.post("/v2/models/echo/infer", json=infer())
                self.seen.append((time.time(), answer.status_code, answer.headers.get("x-gateway-rule", "")))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 0.03)

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        loops = [asyncio.create_task(self.loop(number, stop)) for number in range(2)]
        try:
            await until(lambda: len(self.seen) > 10, timeout_s=20)
            yield
        finally:
            stop.set()
            await asyncio.gather(*loops)

    def last_rules(self, count: int = 10) -> set[str]:
        return {rule for _, _, rule in self.seen[-count:]}

    async def until_only(self, rule: str) -> float:
        """Wait until all go by this rule; when the last came that did not."""
        await until(lambda: len(self.seen) > 10 and self.last_rules() == {rule}, timeout_s=10)
        return max((at for at, _, one in self.seen if one != rule), default=0.0)


@dataclass
class Whole:
    """Everything together."""

    serving: Serving
    admin: httpx.AsyncClient
    redis: RedisServer
    servers: list[Triton]
    browser: Browser

    @property
    def url(self) -> str:
        return str(self.admin.base_url).partition("/admin")[0]

    def looking(self, **options: Any) -> contextlib.AbstractAsyncContextManager[Console]:
        return looking(self.browser, self.url, **options)

    async def reset(self) -> None:
        """The rules as at first, and no switches."""
        for one in (await self.admin.get("/switches")).json()["items"]:
            assert (await self.admin.delete(f"/switches/{one['id']}")).status_code == 200
        revision = (await self.admin.get("/rules")).json()["revision"]
        put = await self.admin.put("/rules", json={"rules": RULES}, headers={"if-match": str(revision)})
        assert put.status_code == 200, put.text


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[list[Triton]]:
    models = iter((name, CONFIG.format(name=name, count=1), MODEL) for name in ("echo", "spare", "hold"))
    folder = tmp_path_factory.mktemp("tritons")

    def with_versions() -> Iterator[tuple[str, str, str]]:
        yield from models
        for one in folder.glob("*/repository/echo"):
            (one / "2").mkdir()
            (one / "2" / "model.py").write_text(MODEL)

    with tritons(folder, 2, with_versions()) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory, servers) -> AsyncIterator[Whole]:
    sections = {
        "backends": {"triton": {"kind": "triton", "url": ",".join(one.server.grpc for one in servers)}},
        "tasks": {"tensor": {"contract": "tensor", "timeout_ms": 60_000, "attempt_timeout_ms": 30_000}},
        "rules": RULES,
        "keys": [
            {
                "id": f"tenant-{n}",
                "tenant": f"tenant-{n}",
                "key_sha256": hashlib.sha256(f"tenant-{n}".encode()).hexdigest(),
            }
            for n in range(2)
        ],
        "admin": {
            "keys": [
                {"id": role, "role": role, "key_sha256": hashlib.sha256(secret.encode()).hexdigest()}
                for role, secret in (("viewer", VIEWER), ("operator", OPERATOR))
            ]
        },
    }
    with RedisServer() as redis:
        sections["redis"] = {"url": redis.url, "prefix": f"test:{uuid.uuid4().hex[:8]}:"}
        async with (
            serving(tmp_path_factory.mktemp("serving"), "", "--workers", "2", **sections) as data_plane,
            control_plane(data_plane.config) as admin,
            chromium() as browser,
        ):
            yield Whole(data_plane, admin, redis, servers, browser)


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(whole: Whole) -> AsyncIterator[Whole]:
    await whole.reset()
    yield whole


# --- what operators do ----------------------------------------------------------------------------


async def test_an_operators_day(fresh: Whole):
    client = Client(fresh.serving.url)
    begin = (await fresh.admin.get("/rules")).json()["revision"]
    async with fresh.looking() as console, client.under_way():
        await console.log_in(ADMIN_TOKEN)
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
