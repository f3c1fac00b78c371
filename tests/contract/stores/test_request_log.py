"""The log of requests in a real Redis: the last ones, those that failed first, each with how many it stands for."""

import json
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.core.errors import ClientClosed, InvalidInput, NoHealthyBackend, RulesUnavailable
from gateway.core.watching.record import RequestRecord
from gateway.stores.control import requests as store
from gateway.stores.control.requests import MOST, MOST_FAILED, RedisRequestLog, RedisRequests
from gateway.stores.redis_script import connect
from tests.kit.records import SECRET, answered
from tests.kit.redis import RedisServer
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until_async

pytest_plugins = ["tests.kit.redis"]


def writer(client: Redis, prefix: str, **changes: Any) -> RedisRequests:
    fields: dict[str, Any] = {"worker_id": "w1", "matched_headers": lambda: frozenset({"x-canary"})}
    return RedisRequests(client, prefix, **fields | changes)


def failed(request_id: str = "bad") -> RequestRecord:
    return answered(id=request_id, error=NoHealthyBackend("none"), route=None)


async def all_of(log: RedisRequestLog) -> list[dict[str, Any]]:
    return [dict(one) for one in (await log.page(size=1000))[0]]


async def test_requests_are_read_the_newest_first_page_by_page(redis_client: Redis, redis_prefix: str) -> None:
    requests, log = writer(redis_client, redis_prefix), RedisRequestLog(redis_client, redis_prefix)
    for i in range(5):
        requests.ended(answered(id=f"r{i}"))
    await requests.flush()
    await requests.flush()
    first, cursor = await log.page(size=2)
    assert [one["id"] for one in first] == ["r4", "r3"]
    assert cursor == first[-1]["cursor"]
    second, cursor = await log.page(before=cursor or "", size=2)
    assert [one["id"] for one in second] == ["r2", "r1"]
    last, cursor = await log.page(before=cursor or "", size=2)
    assert ([one["id"] for one in last], cursor) == (["r0"], None)
    assert (first[0]["worker"], first[0]["stands_for"], first[0]["headers"]) == ("w1", 1, {"x-canary": "yes"})


async def test_one_is_found_by_its_id_the_newest_of_it(
    redis_client: Redis, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PAGE", 2)
    requests, log = writer(redis_client, redis_prefix), RedisRequestLog(redis_client, redis_prefix)
    for total_us in (1000, 2000):
        requests.ended(answered(id="twice", total_us=total_us))
        await requests.flush()
    for i in range(4):
        requests.ended(answered(id=f"r{i}"))
    await requests.flush()
    found = await log.find("twice")
    assert found is not None
    assert found["total_ms"] == 2.0
    assert await log.find("never") is None


async def test_one_is_found_by_how_its_id_begins(redis_client: Redis, redis_prefix: str) -> None:
    requests, log = writer(redis_client, redis_prefix), RedisRequestLog(redis_client, redis_prefix)
    for name in ("0f3bc022aa", "0f3bc022ab", "0f3bc0", "5e1d77a2cc", "5e1d77a2cc"):
        requests.ended(answered(id=name))
    await requests.flush()

    async def found(begins: str) -> object:
        one = await log.find(begins)
        return one and one["id"]

    assert await found("5e1d77a2") == "5e1d77a2cc"  # sent twice, and still one id
    assert await found("0f3bc022") is None  # two begin so
    assert await found("0f3bc022ab") == "0f3bc022ab"
    assert await found("0f3bc0") == "0f3bc0"  # that is one's whole id
    assert await found("5e1d77a") is None  # too little to be sure of


async def test_what_is_no_cursor_is_refused(redis_client: Redis, redis_prefix: str) -> None:
    log = RedisRequestLog(redis_client, redis_prefix)
    with pytest.raises(InvalidInput):
        await log.page(before="no-cursor")


async def test_nothing_that_a_caller_sent_is_written(redis_client: Redis, redis_prefix: str) -> None:
    requests = writer(redis_client, redis_prefix)
    requests.ended(answered())
    requests.ended(failed())
    requests.refused(answered(request=None))
    await requests.flush()
    written = await redis_client.xrange(f"{redis_prefix}requests")
    assert len(written) == 3
    assert SECRET not in str(written)
    assert "authorization" not in str(written)


async def test_of_very_many_those_that_failed_come_first(redis_client: Redis, redis_prefix: str) -> None:
    requests, log = writer(redis_client, redis_prefix), RedisRequestLog(redis_client, redis_prefix)
    for i in range(1000):
        requests.ended(answered(id=f"ok{i}"))
    for i in range(30):
        requests.ended(failed(f"bad{i}"))
    await requests.flush()
    kept = await all_of(log)
    assert len(kept) == MOST
    assert {one["id"] for one in kept if one["code"] != "ok"} == {f"bad{i}" for i in range(30)}
    assert {one["stands_for"] for one in kept if one["code"] != "ok"} == {1}
    assert {one["stands_for"] for one in kept if one["code"] == "ok"} == {50}
    assert sum(one["stands_for"] for one in kept) == 1030
    assert [one["at_ms"] for one in kept] == sorted((one["at_ms"] for one in kept), reverse=True)


async def test_failures_leave_room_for_others(redis_client: Redis, redis_prefix: str) -> None:
    requests, log = writer(redis_client, redis_prefix), RedisRequestLog(redis_client, redis_prefix)
    for i in range(200):
        requests.ended(failed(f"bad{i}"))
        requests.refused(answered(request=None))
        requests.ended(answered(error=ClientClosed("left")))
    await requests.flush()
    kept = await all_of(log)
    assert [one["code"] for one in kept].count("no_healthy_backend") == MOST_FAILED
    assert sum(one["stands_for"] for one in kept if one["code"] == "no_healthy_backend") == 200
    assert sum(one["stands_for"] for one in kept) == 600


async def test_the_sample_is_even(redis_client: Redis, redis_prefix: str) -> None:
    """Each of many is as likely to be kept: the first half and the second are, about alike."""
    requests, log = writer(redis_client, redis_prefix), RedisRequestLog(redis_client, redis_prefix)
    records = [answered(id=str(i)) for i in range(200)]
    for _ in range(40):
        for record in records:
            requests.ended(record)
        await requests.flush()
    kept = await all_of(log)
    halves = [sum(int(one["id"]) // 100 == half for one in kept) for half in (0, 1)]
    assert sum(halves) == 1000
    # Of 1000 drawn, 500 with a standard deviation of at most 16: this is more than six of them.
    assert 400 <= halves[0] <= 600


async def test_the_log_is_bounded(redis_client: Redis, redis_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEPT", 100)
    requests = writer(redis_client, redis_prefix)
    records = [answered(id=str(i)) for i in range(MOST)]
    for _ in range(20):
        for record in records:
            requests.ended(record)
        await requests.flush()
    assert 100 <= await redis_client.xlen(f"{redis_prefix}requests") <= 300  # whole nodes of the stream are let go


async def test_it_is_written_by_itself_and_at_the_end(redis_client: Redis, redis_prefix: str) -> None:
    requests, log = writer(redis_client, redis_prefix), RedisRequestLog(redis_client, redis_prefix)
    requests.start()
    requests.ended(answered(id="a"))
    await until_async(lambda: log.find("a"))
    requests.ended(answered(id="b"))
    await requests.close()
    assert await log.find("b") is not None


async def test_without_redis_they_are_let_go(redis_server: RedisServer, redis_prefix: str) -> None:
    async with RedisSwitch(redis_server.port) as redis:
        client = connect(redis.url)
        requests, log = writer(client, redis_prefix), RedisRequestLog(client, redis_prefix)
        try:
            await redis.refuse()
            requests.ended(answered(id="gone"))
            await requests.flush()
            assert requests.lost == 1
            with pytest.raises(RulesUnavailable):
                await log.page()
            await redis.restore()
            requests.ended(answered(id="there"))
            await requests.flush()
            assert [one["id"] for one in await all_of(log)] == ["there"]
        finally:
            await client.aclose()


async def test_an_entry_of_somebody_else_is_left_out(redis_client: Redis, redis_prefix: str) -> None:
    await redis_client.xadd(f"{redis_prefix}requests", {"id": "x", "other": json.dumps({})})
    log = RedisRequestLog(redis_client, redis_prefix)
    assert await log.page() == ([], None)
    assert await log.find("x") is None
