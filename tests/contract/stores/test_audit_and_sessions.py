"""The audit log and the console's log-ins over a real Redis."""

import time

import pytest

from gateway.admin_ports import AuditEntry, Session
from gateway.core.errors import MalformedRequest, RulesUnavailable
from gateway.stores.control import audit
from gateway.stores.control.audit import RedisAuditLog
from gateway.stores.control.sessions import RedisSessions
from gateway.stores.redis_script import connect
from tests.kit.redis_switch import RedisSwitch

pytest_plugins = ["tests.kit.redis"]


def entry(n: int, **fields) -> AuditEntry:
    return AuditEntry(**{"actor": "ana", "role": "admin", "action": f"a{n}", "at_ms": n, **fields})


def session(**fields) -> Session:
    return Session(
        **{"actor": "ana", "role": "viewer", "csrf": "c", "expires_s": int(time.time()) + 60, "key": "k", **fields}
    )


@pytest.fixture
def log(redis_client, redis_prefix) -> RedisAuditLog:
    return RedisAuditLog(redis_client, redis_prefix)


@pytest.fixture
def sessions(redis_client, redis_prefix) -> RedisSessions:
    return RedisSessions(redis_client, redis_prefix)


async def test_entries_come_back_as_they_were_written(log):
    full = entry(1, target="é", before={"a": [1, None]}, after=False, reason="why", address="::1", outcome="frozen")
    for one in (full, entry(2)):
        await log.add(one)
    assert [entry.action async for entry in log.all()] == ["a1", "a2"]
    page, following = await log.page()
    assert following is None
    assert [(one.action, one.target, one.before, one.reason, one.address, one.outcome) for one in page] == [
        ("a2", "", None, "", "", "ok"),
        ("a1", "é", {"a": [1, None]}, "why", "::1", "frozen"),
    ]


@pytest.mark.parametrize("size", [1, 2, 7, 100])
async def test_pages_are_all_of_it_once(log, size):
    for n in range(14):
        await log.add(entry(n))
    found, before = [], ""
    while before is not None:
        page, before = await log.page(before=before, size=size)
        assert len(page) <= size
        found += page
    assert [one.at_ms for one in found] == list(range(13, -1, -1))
    assert (await log.page(before=found[-1].id)) == ([], None)


async def test_all_goes_through_pages(log, monkeypatch):
    monkeypatch.setattr(audit, "PAGE", 4)
    for n in range(12):
        await log.add(entry(n))
    assert [one.at_ms async for one in log.all()] == list(range(12))


async def test_of_very_many_the_oldest_go(redis_client, redis_prefix):
    log = RedisAuditLog(redis_client, redis_prefix, kept=200)
    for n in range(1000):
        await log.add(entry(n))
    kept = [one.at_ms async for one in log.all()]
    assert 200 <= len(kept) < 400  # Redis takes whole nodes of its tree away
    assert 0 not in kept


async def test_what_cannot_be_read_is_passed_over(log, redis_client, redis_prefix):
    await redis_client.xadd(f"{redis_prefix}audit", {"entry": "["})
    await redis_client.xadd(f"{redis_prefix}audit", {"other": "x"})
    await redis_client.xadd(f"{redis_prefix}audit", {"entry": "[1]"})
    await log.add(entry(1))
    await redis_client.xadd(
        f"{redis_prefix}audit", {"entry": '{"actor":"b","role":"r","action":"x","at_ms":2,"later":1}'}
    )
    assert [one.action async for one in log.all()] == ["a1", "x"]


@pytest.mark.parametrize("before", ["x", "1", "-", "1-1 ", "(1-1"])
async def test_a_cursor_that_is_none(log, before):
    with pytest.raises(MalformedRequest):
        await log.page(before=before)


async def test_a_session_is_found_by_its_cookie_until_it_ends(sessions):
    kept = session()
    cookie = await sessions.begin(kept)
    other = await sessions.begin(session(actor="ben"))
    assert await sessions.find(cookie) == kept
    await sessions.end(cookie)
    await sessions.end(cookie)
    assert await sessions.find(cookie) is None
    assert (await sessions.find(other)).actor == "ben"


async def test_a_session_is_over_when_its_time_is(sessions, redis_client, redis_prefix):
    assert await sessions.find(await sessions.begin(session(expires_s=int(time.time()) - 1))) is None
    cookie = await sessions.begin(session())
    (name,) = [name async for name in redis_client.scan_iter(f"{redis_prefix}session:*")]
    assert 0 < await redis_client.ttl(name) <= 60
    assert cookie.encode() not in name


@pytest.mark.parametrize("cookie", ["", "x", "*" * 43, "a" * 44, "a" * 100_000, "\u00e9" * 43])
async def test_what_is_no_cookie_of_ours_is_not_looked_for(cookie, redis_prefix):
    client = connect("redis://127.0.0.1:1/0")
    assert await RedisSessions(client, redis_prefix).find(cookie) is None
    await client.aclose()


async def test_what_another_version_has_written_is_no_session(sessions, redis_client, redis_prefix):
    cookie = await sessions.begin(session())
    (name,) = [name async for name in redis_client.scan_iter(f"{redis_prefix}session:*")]
    for written in ("{", "[]", '{"who": "ana"}', "null"):
        await redis_client.set(name, written)
        assert await sessions.find(cookie) is None


def test_a_session_tells_no_secret():
    assert "secret" not in repr(session(csrf="secret"))


async def test_without_redis_both_say_so(redis_server, redis_prefix):
    async with RedisSwitch(redis_server.port) as switch:
        client = connect(switch.url)
        await switch.refuse()
        log = RedisAuditLog(client, redis_prefix, timeout_s=0.2)
        sessions = RedisSessions(client, redis_prefix, timeout_s=0.2)
        for doing in (log.add(entry(1)), log.page(), anext(log.all()), sessions.begin(session())):
            with pytest.raises(RulesUnavailable):
                await doing
        for doing in (sessions.find("a" * 43), sessions.end("a" * 43)):
            with pytest.raises(RulesUnavailable):
                await doing
        await client.aclose()
