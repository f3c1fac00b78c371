"""Keys made at run time on a real Redis Cluster."""

from dataclasses import replace

from gateway.stores.redis_key_store import RedisKeyStore
from gateway.stores.redis_keys import RedisKeys
from gateway.stores.redis_script import connect
from tests.contract.stores.test_keys import key
from tests.kit.wait import until_async

pytest_plugins = ["tests.kit.redis", "tests.kit.redis_many"]


async def test_keys_are_made_found_and_revoked_over_a_cluster(redis_cluster, redis_prefix):
    client = connect(redis_cluster.url)
    store, worker = RedisKeyStore(client, redis_prefix), RedisKeys(client, redis_prefix, ())
    await worker.start()
    assert len(await worker.signing()) == 64
    for n in (1, 2):
        await store.create(key(n))
    assert (await worker.find(key(1).id)).key == key(1)
    assert [one.name for one in (await store.page(after="", size=9))[0]] == ["n1", "n2"]
    await store.change(key(1).id, lambda one: replace(one, is_disabled=True))

    async def is_out() -> bool:
        return (await worker.find(key(1).id)).key.is_disabled

    await until_async(is_out, timeout_s=1)
    await store.delete(key(1).id)
    assert [one.name for one in (await store.page(after="", size=9))[0]] == ["n2"]
    await worker.close()
    await client.aclose()
