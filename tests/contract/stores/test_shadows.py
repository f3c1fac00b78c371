"""Reports on shadows in a real Redis: what all workers' copies add up to, by rule and pair of places."""

import pytest

from gateway.core.errors import RulesUnavailable
from gateway.core.shadows.comparison import Comparison
from gateway.core.shadows.shadow_reports import MOST_DISAGREEMENTS, Pair, ShadowResult
from gateway.stores.control import shadows as module
from gateway.stores.control.shadows import KEPT_S, MAX_LISTED, RedisShadows, RedisShadowSource
from gateway.stores.redis_script import connect
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until_async

pytest_plugins = ["tests.kit.redis"]

PAIR = Pair("text-embedding", "triton/m:1", "local/m")
AGREED = Comparison(agreed=True, similarity=0.995, what="embedding")
UNLIKE = Comparison(agreed=False, similarity=0.5, what="embedding", reason="a vector points elsewhere")
RULES = ["nlu", "nlu/en:eu", "nlu:last", "a-b_c.d"]  # all that names may hold


def result(rule="nlu", *, pair=PAIR, outcome="answered", **changes) -> ShadowResult:
    plain = {"request_id": "r", "at_ms": 1_700_000_000_000, "comparison": AGREED, "real_us": 1000, "shadow_us": 3000}
    return ShadowResult(rule=rule, pair=pair, outcome=outcome, **{**plain, **changes})


@pytest.fixture
def shadows(redis_client, redis_prefix):
    return RedisShadows(redis_client, redis_prefix)


@pytest.fixture
def source(redis_client, redis_prefix):
    return RedisShadowSource(redis_client, redis_prefix, timeout_s=5)


async def test_what_all_workers_tell_adds_up(redis_client, redis_prefix, shadows, source):
    other = RedisShadows(redis_client, redis_prefix)
    for at_ms, worker in ((20, shadows), (10, other), (30, shadows)):
        worker.told(result(at_ms=at_ms))
        worker.told(result(comparison=UNLIKE, request_id=f"r{at_ms}", at_ms=at_ms))
        worker.told(result(outcome="failed", failure=f"timeout{at_ms}", at_ms=at_ms))
        worker.told(result(outcome="skipped", at_ms=at_ms))
        await worker.flush()
    [found] = await source.read()
    assert (found["rule"], found["task"], found["place"], found["shadow"]) == ("nlu", *PAIR)
    assert (found["sent"], found["compared"], found["agreed"], found["failed"], found["skipped"]) == (9, 6, 3, 3, 3)
    assert (found["latency_delta_ms"], found["agreement"], found["last_failure"]) == (2.0, 0.5, "timeout30")
    assert found["since_ms"] == 20
    assert [one["request_id"] for one in found["disagreements"]] == ["r30", "r10", "r20"]


async def test_rules_and_pairs_have_reports_of_their_own(shadows, source):
    pairs = [PAIR, PAIR._replace(place="local/m"), PAIR._replace(task="ocr")]
    for rule in RULES:
        for pair in pairs:
            shadows.told(result(rule, pair=pair, comparison=UNLIKE, request_id=f"{rule} {pair.place}"))
    await shadows.flush()
    found = await source.read()
    assert [one["rule"] for one in found] == [rule for rule in sorted(RULES) for _ in pairs]
    assert [(one["task"], one["place"], one["shadow"]) for one in found[:3]] == sorted(map(tuple, pairs))
    for one in found:
        assert [told["request_id"] for told in one["disagreements"]] == [f"{one['rule']} {one['place']}"]


@pytest.mark.parametrize("rule", RULES)
async def test_a_report_that_is_forgotten_begins_anew(shadows, source, rule):
    for name in RULES:
        shadows.told(result(name, comparison=UNLIKE))
    await shadows.flush()
    await source.forget(rule)
    await source.forget("not there")
    assert [one["rule"] for one in await source.read()] == [name for name in sorted(RULES) if name != rule]
    shadows.told(result(rule, at_ms=1_800_000_000_000))
    await shadows.flush()
    [found] = [one for one in await source.read() if one["rule"] == rule]
    assert (found["sent"], found["since_ms"], found["disagreements"]) == (1, 1_800_000_000_000, [])


async def test_nothing_grows_without_bound(redis_client, redis_prefix, shadows, source, monkeypatch):
    monkeypatch.setattr(module, "MAX_PAIRS", 3)
    for number in range(2 * MAX_LISTED):
        shadows.told(result(comparison=UNLIKE, request_id=str(number)))
    for number in range(5):
        shadows.told(result(pair=PAIR._replace(place=str(number))))
    await shadows.flush()
    found = await source.read()
    assert [one["place"] for one in found] == ["0", "1", "triton/m:1"]
    newest = [str(number) for number in range(2 * MAX_LISTED - 1, 2 * MAX_LISTED - 1 - MOST_DISAGREEMENTS, -1)]
    assert [one["request_id"] for one in found[-1]["disagreements"]] == newest
    assert await redis_client.llen(f"{redis_prefix}shadows:last:nlu") == MAX_LISTED
    for key in ("counts", "last"):
        assert KEPT_S - 60 < await redis_client.ttl(f"{redis_prefix}shadows:{key}:nlu") <= KEPT_S


async def test_a_rule_that_is_silent_for_long_leaves_the_index(redis_client, redis_prefix, shadows):
    shadows.told(result("old", at_ms=1))
    await shadows.flush()
    shadows.told(result("new", at_ms=KEPT_S * 1000 + 2))
    await shadows.flush()
    assert await redis_client.zrange(f"{redis_prefix}shadows", 0, -1) == [b"new"]


async def test_it_writes_by_itself_and_once_more_at_the_end(shadows, source):
    shadows.start()
    shadows.told(result())
    await until_async(lambda: _sent(source, 1))
    shadows.told(result())
    await shadows.close()
    assert await _sent(source, 2)


async def _sent(source: RedisShadowSource, count: int) -> bool:
    return [one["sent"] for one in await source.read()] == [count]


async def test_a_redis_that_is_away_costs_results_and_nothing_else(redis_server, redis_prefix, caplog, monkeypatch):
    async with RedisSwitch(redis_server.port) as switch:
        client = connect(switch.url)
        shadows, source = RedisShadows(client, redis_prefix), RedisShadowSource(client, redis_prefix, timeout_s=5)
        switch.pause()
        monkeypatch.setattr(module, "TIMEOUT_S", 0.05)
        shadows.told(result())
        await shadows.flush()
        await switch.refuse()
        shadows.told(result())
        await shadows.flush()
        assert [record.message for record in caplog.records] == ["not_written"]
        with pytest.raises(RulesUnavailable):
            await source.read()
        with pytest.raises(RulesUnavailable):
            await source.forget("nlu")
        await switch.restore()
        monkeypatch.setattr(module, "TIMEOUT_S", 5.0)
        shadows.told(result(request_id="later"))
        await shadows.flush()
        assert [one["rule"] for one in await source.read()] == ["nlu"]
        await client.aclose()
