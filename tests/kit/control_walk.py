"""Every store of the control plane used once, on whatever Redis there is: a server, a cluster, with few rights."""

import time

from redis.asyncio import Redis

from gateway.admin_ports import AuditEntry, Session
from gateway.core.rules import parse_rules
from gateway.core.shadows.comparison import Comparison
from gateway.core.shadows.shadow_reports import Pair, ShadowResult
from gateway.core.switches import Scope, Switch
from gateway.stores.control.audit import RedisAuditLog
from gateway.stores.control.figures import RedisFigures, RedisFigureSource
from gateway.stores.control.requests import RedisRequestLog, RedisRequests
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.control.sessions import RedisSessions
from gateway.stores.control.shadows import RedisShadows, RedisShadowSource
from gateway.stores.redis_deploys import ROLLOUTS, RedisDeployStore
from tests.kit.records import answered

RULES = parse_rules([{"name": "of-the-walk", "split": [{"backend": "triton", "model": "m"}]}])


async def change_rules_and_switches(client: Redis, prefix: str) -> None:
    """A revision more, and one more with its switch set and ended; no worker is needed."""
    rules = RedisRuleStore(client, prefix, timeout_s=5)
    before = (await rules.get()).revision
    assert await rules.put(RULES, expected_revision=before) == before + 1
    assert (await rules.revision(before + 1)).rules == RULES
    assert (await rules.revisions())[0].revision == before + 1
    now_ms = round(time.time() * 1000)
    switch = Switch(
        id="s",
        action="block",
        scope=Scope(kind="everything"),
        reason="a test",
        owner="o",
        created_ms=now_ms,
        expires_ms=now_ms + 60_000,
    )
    await rules.add_switch(switch)
    assert (await rules.get()).switches.items == (switch,)
    assert (await rules.end_switch("s"))[0] == switch


async def keep_who_did_what(client: Redis, prefix: str) -> None:
    """The audit log, log-ins and rollouts."""
    audit = RedisAuditLog(client, prefix, timeout_s=5)
    for n in range(3):
        await audit.add(AuditEntry(actor="a", role="admin", action="rules.put", at_ms=n))
    newest, following = await audit.page(size=2)
    assert [entry.at_ms for entry in newest] == [2, 1]
    assert [entry.at_ms for entry in (await audit.page(before=following or "", size=2))[0]] == [0]
    assert [entry.at_ms async for entry in audit.all()] == [0, 1, 2]
    sessions = RedisSessions(client, prefix, timeout_s=5)
    session = Session(actor="a", role="admin", csrf="c", expires_s=int(time.time()) + 60)
    cookie = await sessions.begin(session)
    assert await sessions.find(cookie) == session
    await sessions.end(cookie)
    assert await sessions.find(cookie) is None
    rollouts = RedisDeployStore(client, prefix, timeout_s=5, kind=ROLLOUTS)
    await rollouts.save({"id": "r", "started_ms": 1})
    assert await rollouts.claim("rule", "me")
    assert (await rollouts.owner("rule"), await rollouts.recent()) == ("me", [{"id": "r", "started_ms": 1}])
    await rollouts.release("rule", "me")


async def count_what_happens(client: Redis, prefix: str) -> None:
    """Figures, requests and comparisons with shadows, written as workers write them."""
    seconds = iter([100, 100, 101, 102])
    figures = RedisFigures(client, prefix, now_s=lambda: next(seconds))
    requests = RedisRequests(client, prefix, worker_id="w", matched_headers=frozenset)
    for _ in range(4):
        figures.ended(answered())
        requests.ended(answered())
    shadows, pair = RedisShadows(client, prefix), Pair("t", "triton/m", "local/m")
    unlike = Comparison(agreed=False, similarity=0.5, what="embedding", reason="elsewhere")
    for rule in ("r1", "r2", "r3"):
        shadows.told(ShadowResult(request_id="i", rule=rule, pair=pair, at_ms=9, outcome="answered", comparison=unlike))
    for writer in (figures, requests, shadows):
        await writer.close()
        assert writer.lost == 0
    found = await RedisFigureSource(client, prefix, now_s=lambda: 104).read(99, 104)
    counted = {second: sum(tally.requests for tally in tallies.values()) for second, tallies in found.items()}
    assert counted == {100: 2, 101: 1, 102: 1}
    log = RedisRequestLog(client, prefix, timeout_s=5)
    assert len((await log.page())[0]) == 4
    assert await log.find("r1") is not None
    source = RedisShadowSource(client, prefix, timeout_s=5)
    assert [(one["rule"], len(one["disagreements"])) for one in await source.read()] == [
        ("r1", 1),
        ("r2", 1),
        ("r3", 1),
    ]
    await source.forget("r1")
    assert [one["rule"] for one in await source.read()] == ["r2", "r3"]
