"""`/shadows` over a real Redis, in which workers have written."""

import httpx
import pytest

from gateway.admin.app import create_admin_app
from gateway.admin.plane import Plane
from gateway.admin_ports import AuditEntry
from gateway.core.shadows.comparison import Comparison
from gateway.core.shadows.shadow_reports import Pair, ShadowResult
from gateway.stores.control.shadows import RedisShadows, RedisShadowSource
from gateway.stores.redis_script import connect
from tests.kit.admin_plane import bearing
from tests.kit.redis import HOST
from tests.kit.serving import free_port

pytest_plugins = ["tests.kit.redis"]

TOKEN = "admin-secret"  # noqa: S105 - made up here
UNLIKE = Comparison(agreed=False, similarity=0.5, what="text", reason="the texts differ")
RULES = ["a", "a/b:c", "b"]


class Audit:
    """An `AuditLog` on a variable."""

    def __init__(self) -> None:
        self.entries: list[AuditEntry] = []

    async def add(self, entry: AuditEntry) -> None:
        self.entries.append(entry)


def result(rule: str, number: int = 1) -> ShadowResult:
    return ShadowResult(
        request_id=f"r{number}",
        rule=rule,
        pair=Pair("chat", f"llm/m{number}", "llm2/s"),
        at_ms=1_700_000_000_250,
        outcome="answered",
        comparison=UNLIKE,
        real_us=1000,
        shadow_us=500,
        real_nano_usd=1000,
        shadow_nano_usd=3000,
    )


@pytest.fixture
def audit():
    return Audit()


@pytest.fixture
async def admin(redis_client, redis_prefix, audit):
    writer = RedisShadows(redis_client, redis_prefix)
    for rule in RULES:
        for number in (1, 2):
            writer.told(result(rule, number))
    await writer.flush()
    source = RedisShadowSource(redis_client, redis_prefix, timeout_s=5)
    async with bearing(create_admin_app(Plane(shadows=source, audit=audit), TOKEN), TOKEN) as client:
        yield client


async def items(admin: httpx.AsyncClient) -> list[str]:
    answer = await admin.get("/shadows")
    assert answer.status_code == 200, answer.text
    return [one["rule"] for one in answer.json()["items"]]


async def test_a_report_on_the_wire(admin):
    answer = await admin.get("/shadows", params={"limit": 1})
    assert answer.json()["items"] == [
        {
            "rule": "a",
            "task": "chat",
            "place": "llm/m1",
            "shadow": "llm2/s",
            "sent": 1,
            "compared": 1,
            "agreed": 0,
            "agreement": 0.0,
            "similarity_mean": 0.5,
            "similarity_p10": pytest.approx(0.5, abs=0.05),
            "failed": 0,
            "last_failure": None,
            "skipped": 0,
            "primary_ms_mean": 1.0,
            "shadow_ms_mean": 0.5,
            "latency_delta_ms": -0.5,
            "shadow_cost_usd": 3e-6,
            "cost_delta_usd": 2e-6,
            "since": "2023-11-14T22:13:20.250Z",
            "disagreements": [
                {
                    "request_id": "r1",
                    "at": "2023-11-14T22:13:20.250Z",
                    "similarity": 0.5,
                    "what": "text",
                    "reason": "the texts differ",
                }
            ],
        }
    ]


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 6, 500])
async def test_pages_have_every_report_once(admin, limit):
    found, cursor = [], ""
    while cursor is not None:
        page = (await admin.get("/shadows", params={"limit": limit, "cursor": cursor})).json()
        assert 0 < len(page["items"]) <= limit
        found += [(one["rule"], one["place"]) for one in page["items"]]
        cursor = page["next"]
    assert found == [(rule, place) for rule in RULES for place in ("llm/m1", "llm/m2")]


@pytest.mark.parametrize("cursor", ["x", "e30=", "WzFd", "%", "A" * 3000])
async def test_a_cursor_that_is_none_is_refused(admin, cursor):
    answer = await admin.get("/shadows", params={"cursor": cursor})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")


@pytest.mark.parametrize("rule", RULES)
async def test_a_report_is_forgotten(admin, audit, rule):
    answer = await admin.delete(f"/shadows/{rule}", headers={"x-change-reason": "a new shadow"})
    assert (answer.status_code, answer.content) == (204, b"")
    assert await items(admin) == [name for name in RULES if name != rule for _ in (1, 2)]
    [entry] = audit.entries
    assert (entry.action, entry.target, entry.reason, entry.outcome) == ("shadow.forget", rule, "a new shadow", "ok")


async def test_what_has_no_report_is_forgotten_too(admin):
    assert (await admin.delete("/shadows/none")).status_code == 204
    assert len(await items(admin)) == 2 * len(RULES)


async def test_a_redis_that_is_away(redis_prefix):
    client = connect(f"redis://{HOST}:{free_port()}/0")
    async with bearing(create_admin_app(Plane(shadows=RedisShadowSource(client, redis_prefix)), TOKEN), TOKEN) as admin:
        for answer in (await admin.get("/shadows"), await admin.delete("/shadows/a")):
            assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
    await client.aclose()
