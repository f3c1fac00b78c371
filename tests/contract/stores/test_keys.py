"""Keys on a real Redis: what the control plane writes, and how soon workers know."""

import asyncio
import json
from dataclasses import replace

import pytest

from gateway.core.errors import KeysUnavailable, RulesUnavailable, StaleRevision, TooManyKeys, UnknownKey
from gateway.core.keys import ApiKey, new_id, new_secret
from gateway.core.types import Limit
from gateway.stores import redis_keys
from gateway.stores.redis_key_store import RedisKeyStore
from gateway.stores.redis_keys import RedisKeys
from gateway.stores.redis_script import connect
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until, until_async

pytest_plugins = ["tests.kit.redis"]

DEFAULT = (Limit(kind="requests", amount=9, per="minute", burst=9),)


def key(n: int = 1, **fields) -> ApiKey:
    key_id = new_id(n.to_bytes(8, "big"))
    _, secret = new_secret(key_id, bytes(32), bytes(16))
    return ApiKey(
        **{"id": key_id, "tenant": "acme", "name": f"n{n}", "secrets": (secret,), "created_s": 1000 + n, **fields}
    )


@pytest.fixture
def store(redis_client, redis_prefix):
    return RedisKeyStore(redis_client, redis_prefix)


@pytest.fixture
async def switch(redis_server):
    async with RedisSwitch(redis_server.port) as switch:
        yield switch


@pytest.fixture
async def workers(redis_client, redis_prefix):
    """Two workers that follow."""
    two = [RedisKeys(redis_client, redis_prefix, DEFAULT) for _ in range(2)]
    for worker in two:
        await worker.start()
    yield two
    for worker in two:
        await worker.close()


async def heard_by(client, prefix, count):
    """Return when so many workers listen."""

    async def listening():
        (_, number), *_ = await client.pubsub_numsub(f"{prefix}keys:changed")
        return number == count

    await until_async(listening)


# --- the control plane's side --------------------------------------------------------------------


async def test_a_key_is_there_as_it_was_made(store):
    await store.create(key(tasks=("a",), limits=DEFAULT))
    assert await store.get(key().id) == key(tasks=("a",), limits=DEFAULT)


async def test_a_change_makes_the_next_revision(store):
    await store.create(key())
    changed = await store.change(key().id, lambda one: replace(one, is_disabled=True))
    assert changed == key(is_disabled=True, revision=2)
    assert await store.get(key().id) == changed


async def test_a_change_made_from_another_revision_changes_nothing(store):
    await store.create(key())
    with pytest.raises(StaleRevision):
        await store.change(key().id, lambda one: replace(one, name="other"), expected_revision=7)
    assert (await store.get(key().id)).name == "n1"


async def test_changes_at_the_same_time_are_all_made(store):
    await store.create(key())
    fields = ({"name": "x"}, {"is_disabled": True}, {"priority": "batch"})
    await asyncio.gather(*(store.change(key().id, lambda one, f=f: replace(one, **f)) for f in fields))
    assert await store.get(key().id) == key(name="x", is_disabled=True, priority="batch", revision=4)


async def test_a_deleted_key_is_gone(store, redis_client, redis_prefix):
    await store.create(key())
    await store.delete(key().id)
    for call in (store.get(key().id), store.delete(key().id), store.change(key().id, lambda one: one)):
        with pytest.raises(UnknownKey):
            await call
    assert [name async for name in redis_client.scan_iter(f"{redis_prefix}*")] == [
        f"{redis_prefix}{{keys}}:revision".encode()
    ]


async def test_a_call_whose_answer_was_lost_is_no_conflict(store, switch, redis_prefix):
    client = connect(switch.url)
    behind = RedisKeyStore(client, redis_prefix)
    await behind.create(key(2))  # the script is known from here on
    switch.cut_after(1, b"EVALSHA")
    await behind.create(key())
    switch.cut_after(1, b"EVALSHA")
    assert (await behind.change(key().id, lambda one: replace(one, name="new"))).revision == 2
    switch.cut_after(1, b"EVALSHA")
    await behind.delete(key(2).id)
    assert await store.page(after="", size=9) == ([key(name="new", revision=2)], None)
    await client.aclose()


async def test_there_are_so_many_keys_and_no_more(redis_client, redis_prefix):
    store = RedisKeyStore(redis_client, redis_prefix, max_keys=2)
    await store.create(key(1))
    await store.create(key(2))
    with pytest.raises(TooManyKeys):
        await store.create(key(3))
    await store.change(key(1).id, lambda one: replace(one, name="still"))
    await store.delete(key(2).id)
    await store.create(key(3))


async def test_two_keys_never_have_one_id(store):
    await store.create(key())
    with pytest.raises(TooManyKeys):
        await store.create(key(name="another"))
    assert (await store.get(key().id)).name == "n1"


async def pages(store, size, **wanted):
    found, after = [], ""
    while True:
        page, following = await store.page(after=after, size=size, **wanted)
        assert len(page) == size or following is None
        found += page
        if following is None:
            return [one.name for one in found]
        after = following


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
async def test_pages_hold_every_key_once_in_the_order_of_their_making(store, size):
    for n in (3, 1, 2, 5, 7, 4, 6):
        await store.create(key(n, tenant="acme" if n % 2 else "other"))
    assert await pages(store, size) == [f"n{n}" for n in range(1, 8)]
    assert await pages(store, size, tenant="other") == ["n2", "n4", "n6"]
    assert await pages(store, size, tenant="nobody") == []


async def test_a_tenants_keys_are_found_behind_many_of_others(store, monkeypatch):
    monkeypatch.setattr("gateway.stores.redis_key_store._BATCH", 3)
    for n in range(1, 14):
        await store.create(key(n, tenant="acme" if n in (1, 11) else "other"))
    for size in (1, 2):
        assert await pages(store, size, tenant="acme") == ["n1", "n11"]


@pytest.mark.parametrize("text", [b'{"id": 1}', b"", b"no JSON", b"\xff", b"[" * 100_000])
async def test_a_key_that_cannot_be_read_is_told_and_can_be_deleted(store, redis_client, redis_prefix, text, caplog):
    await store.create(key(1))
    await store.create(key(2))
    await redis_client.hset(f"{redis_prefix}{{keys}}:all", key(1).id, text)
    with pytest.raises(RulesUnavailable, match="cannot be read"):
        await store.get(key(1).id)
    assert await store.page(after="", size=9) == ([key(2)], None)
    assert [record.key for record in caplog.records] == [key(1).id]
    await store.delete(key(1).id)
    with pytest.raises(UnknownKey):
        await store.get(key(1).id)


async def test_a_change_is_told_even_where_the_revision_is_no_text(store, workers, redis_client, redis_prefix):
    await store.create(key())
    assert not (await workers[0].find(key().id)).key.is_disabled
    await redis_client.delete(f"{redis_prefix}{{keys}}:revision")
    await redis_client.rpush(f"{redis_prefix}{{keys}}:revision", "x")
    await store.change(key().id, lambda one: replace(one, is_disabled=True))
    await until_async(lambda: _is(workers[0], lambda found: found.key.is_disabled), timeout_s=1)


async def test_a_key_that_cannot_be_listed_is_not_made(store, redis_client, redis_prefix):
    await redis_client.rpush(f"{redis_prefix}{{keys}}:order", "x")
    with pytest.raises(RulesUnavailable):
        await store.create(key())
    with pytest.raises(UnknownKey):
        await store.get(key().id)


async def test_a_redis_out_of_reach_is_told(switch, redis_prefix):
    client = connect(switch.url)
    store = RedisKeyStore(client, redis_prefix, timeout_s=0.2)
    switch.pause()
    for call in (store.get("x"), store.create(key()), store.page(after="", size=1), store.delete("x")):
        with pytest.raises(RulesUnavailable):
            await call
    await client.aclose()


# --- a worker's side -----------------------------------------------------------------------------


async def test_a_worker_finds_a_key_and_who_comes_with_it(store, workers):
    await store.create(key())
    await store.create(key(2, limits=()))
    for worker in workers:
        found = await worker.find(key().id)
        assert found.key == key()
        assert found.caller.limits == DEFAULT
        assert (await worker.find(key(2).id)).caller.limits == ()
        assert await worker.find(key(3).id) is None


async def test_what_is_known_is_not_asked_for_again(store, redis_client, redis_prefix):
    worker = RedisKeys(redis_client, redis_prefix, DEFAULT)  # it does not follow
    await store.create(key())
    first = await worker.find(key().id)
    assert await worker.find(key(2).id) is None
    await store.delete(key().id)
    await store.create(key(2))
    assert await worker.find(key().id) is first
    assert await worker.find(key(2).id) is None


async def test_all_who_ask_at_once_share_a_round_trip(store, redis_client, redis_prefix, monkeypatch):
    worker = RedisKeys(redis_client, redis_prefix, DEFAULT)
    for n in range(20):
        await store.create(key(n))
    asked = []
    original = redis_client.hmget

    async def counted(name, ids):
        asked.append(list(ids))
        return await original(name, ids)

    monkeypatch.setattr(redis_client, "hmget", counted)
    found = await asyncio.gather(*(worker.find(key(n % 20).id) for n in range(200)))
    assert [one.key.name for one in found] == [f"n{n % 20}" for n in range(200)]
    assert sum(len(ids) for ids in asked) == 20
    assert len(asked) <= 2


async def test_all_workers_hear_of_a_change_at_once(store, workers, redis_client, redis_prefix, monkeypatch):
    monkeypatch.setattr(redis_keys, "POLL_S", 3600)
    await heard_by(redis_client, redis_prefix, 2)
    await store.create(key())
    await store.create(key(2))
    others = [await worker.find(key(2).id) for worker in workers]
    for worker in workers:
        assert not (await worker.find(key().id)).key.is_disabled
    await store.change(key().id, lambda one: replace(one, is_disabled=True))
    for worker in workers:
        await until_async(lambda w=worker: _is(w, lambda found: found.key.is_disabled), timeout_s=1)
    await store.delete(key().id)
    for worker in workers:
        await until_async(lambda w=worker: _is(w, lambda found: found is None), timeout_s=1)
    # No other key had to be read anew.
    assert [await worker.find(key(2).id) for worker in workers] == others
    assert all(a is b for a, b in zip(others, [await worker.find(key(2).id) for worker in workers], strict=True))


async def test_a_change_whose_message_is_lost_is_known_within_a_second(store, redis_client, redis_prefix, monkeypatch):
    async def deaf(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(redis_keys, "listen", deaf)
    two = [RedisKeys(redis_client, redis_prefix, DEFAULT) for _ in range(2)]
    for worker in two:
        await worker.start()
    await store.create(key())
    for worker in two:
        await until_async(lambda w=worker: _is(w, lambda found: found is not None), timeout_s=1)
    await store.change(key().id, lambda one: replace(one, is_disabled=True))
    for worker in two:
        await until_async(lambda w=worker: _is(w, lambda found: found.key.is_disabled), timeout_s=1)
        await worker.close()


async def test_a_change_behind_a_broken_subscription_is_known(store, switch, redis_prefix):
    client = connect(switch.url)
    worker = RedisKeys(client, redis_prefix, DEFAULT, timeout_s=0.2)
    await worker.start()
    await store.create(key())
    await until_async(lambda: _is(worker, lambda found: found is not None))
    await switch.refuse()
    await store.change(key().id, lambda one: replace(one, is_disabled=True))
    await until(lambda: worker._is_away)
    assert not (await worker.find(key().id)).key.is_disabled  # it cannot know
    await switch.restore()
    await until_async(lambda: _is(worker, lambda found: found.key.is_disabled))
    await worker.close()
    await client.aclose()


async def _is(worker, true):
    return true(await worker.find(key().id))


async def test_a_key_that_changes_while_it_is_read_is_read_again(
    store, workers, redis_client, redis_prefix, monkeypatch
):
    await heard_by(redis_client, redis_prefix, 2)
    await store.create(key())
    worker, original = workers[0], redis_client.hmget

    async def overtaken(name, ids):
        texts = await original(name, ids)
        monkeypatch.setattr(redis_client, "hmget", original)
        await store.change(key().id, lambda one: replace(one, is_disabled=True))
        await until(lambda: key().id in worker._heard)
        return texts

    monkeypatch.setattr(redis_client, "hmget", overtaken)
    assert (await worker.find(key().id)).key.is_disabled


async def test_without_redis_known_keys_are_good_for_a_time_and_others_are_not_refused(
    store, switch, redis_prefix, monkeypatch
):
    client = connect(switch.url)
    worker = RedisKeys(client, redis_prefix, DEFAULT, timeout_s=0.2)
    await worker.start()
    signing = await worker.signing()
    await store.create(key())
    assert await worker.find(key(2).id) is None
    await until_async(lambda: _is(worker, lambda found: found is not None))
    switch.pause()
    with pytest.raises(KeysUnavailable):
        await worker.find(key(3).id)
    with pytest.raises(KeysUnavailable):  # once it is known that nobody answers, nobody waits either
        await worker.find(key(2).id)
    assert (await worker.find(key().id)).key == key()
    assert await worker.signing() == signing
    monkeypatch.setattr(redis_keys, "MAX_AWAY_S", 0.0)
    with pytest.raises(KeysUnavailable):
        await worker.find(key().id)
    await switch.restore()
    await until_async(lambda: _finds(worker, key().id))
    assert await worker.find(key(3).id) is None
    await worker.close()
    await client.aclose()


async def _finds(worker, key_id):
    try:
        return await worker.find(key_id)
    except KeysUnavailable:
        return None


async def test_nobody_waits_longer_than_for_one_call(switch, redis_prefix, monkeypatch):
    monkeypatch.setattr(redis_keys, "_BATCH", 2)
    client = connect(switch.url)
    worker = RedisKeys(client, redis_prefix, DEFAULT, timeout_s=0.2)
    assert await worker.find(key().id) is None
    calls, original = [], client.hmget

    async def counted(name, ids):
        calls.append(ids)
        return await original(name, ids)

    monkeypatch.setattr(client, "hmget", counted)
    switch.pause()
    refused = await asyncio.gather(*(worker.find(key(n).id) for n in range(2, 20)), return_exceptions=True)
    assert {type(one) for one in refused} == {KeysUnavailable}
    assert len(calls) == 1
    await worker.close()
    await client.aclose()


async def test_a_message_of_somebody_else_stops_nothing(store, workers, redis_client, redis_prefix, caplog):
    await store.create(key())
    assert await workers[0].find(key().id) is not None
    await heard_by(redis_client, redis_prefix, 2)
    for said in ("", "x", "1", "[]", "[[], 1, {}]", '[{"a": 1}, null, "x"]', "[" * 100_000, '{"a": 1, "b": 2, "c": 3}'):
        await redis_client.publish(f"{redis_prefix}keys:changed", said)
    await store.change(key().id, lambda one: replace(one, is_disabled=True))
    await until(lambda: key().id in workers[0]._heard)
    assert (await workers[0].find(key().id)).key.is_disabled
    assert caplog.records == []


async def test_a_key_that_cannot_be_read_lets_nobody_in_and_refuses_nobody(store, workers, redis_client, redis_prefix):
    await redis_client.hset(f"{redis_prefix}{{keys}}:all", key().id, json.dumps({"id": key().id, "newer": True}))
    with pytest.raises(KeysUnavailable):
        await workers[0].find(key().id)


async def test_a_redis_that_lost_its_keys_lets_nobody_in(store, workers, redis_client, redis_prefix):
    await store.create(key())
    assert await workers[0].find(key().id) is not None
    await redis_client.delete(f"{redis_prefix}{{keys}}:all", f"{redis_prefix}{{keys}}:revision")
    await until_async(lambda: _is(workers[0], lambda found: found is None), timeout_s=2)


async def test_a_worker_remembers_no_more_than_it_may(store, redis_client, redis_prefix):
    worker = RedisKeys(redis_client, redis_prefix, DEFAULT, max_known=5)
    await store.create(key(0))
    first = await worker.find(key(0).id)
    for n in range(1, 40):
        if n % 2:
            await store.create(key(n))
        await worker.find(key(n).id)
        assert await worker.find(key(0).id) is first  # used all the time, so never forgotten
    assert (len(worker._known), len(worker._unknown)) == (5, 5)


async def test_all_workers_sign_with_one_secret(workers, redis_client, redis_prefix):
    first, second = [await worker.signing() for worker in workers]
    assert first == second
    assert len(first) == 64
    # A secret that is lost is put back by those who know it, one that is replaced is taken by all.
    await redis_client.delete(f"{redis_prefix}{{keys}}:signing")
    await until_async(lambda: redis_client.exists(f"{redis_prefix}{{keys}}:signing"))
    assert await redis_client.get(f"{redis_prefix}{{keys}}:signing") == first
    await redis_client.set(f"{redis_prefix}{{keys}}:signing", "ab" * 32)
    for worker in workers:
        await until_async(lambda w=worker: _signs(w, b"ab" * 32))


@pytest.mark.parametrize("there", [b"", b"short", ["a", "list"]])
async def test_nothing_is_signed_with_what_is_no_secret_and_keys_are_good_all_the_same(
    store, workers, redis_client, redis_prefix, caplog, there
):
    name = f"{redis_prefix}{{keys}}:signing"
    await store.create(key())
    before = await workers[0].signing()
    if isinstance(there, bytes):
        await redis_client.set(name, there)
    else:
        async with redis_client.pipeline(transaction=True) as steps:  # a worker that sees none would make one
            steps.delete(name)
            steps.rpush(name, *there)
            await steps.execute()
    await until(lambda: workers[0]._signing is None)
    with pytest.raises(KeysUnavailable):
        await workers[0].signing()
    assert (await workers[0].find(key().id)).key == key()
    assert await workers[0].find(key(2).id) is None
    assert "signing_secret_unusable" in caplog.text
    assert "key_store_unreachable" not in caplog.text
    await redis_client.delete(name)
    await redis_client.set(name, before)
    await until(lambda: workers[0]._signing == before)


async def _signs(worker, secret):
    return await worker.signing() == secret


async def test_without_redis_from_the_start_nothing_is_signed(switch, redis_prefix):
    await switch.refuse()
    client = connect(switch.url)
    worker = RedisKeys(client, redis_prefix, DEFAULT, timeout_s=0.2)
    await worker.start()
    with pytest.raises(KeysUnavailable):
        await worker.signing()
    with pytest.raises(KeysUnavailable):
        await worker.find(key().id)
    await worker.close()
    await client.aclose()
