"""A place in the order that was lost while its request waited elsewhere: nothing is sent for it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.backends.scripted import ScriptedBackend
from gateway.core.admissions import Wanted
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_script import connect
from tests.kit.app import Harness, embedding, running
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until

pytest_plugins = ["tests.kit.redis"]

PATH, BODY = "/v1/tasks/text-embedding", {"input": {"text": "a"}}


class Seen(RedisAdmissions):
    """Keeps what it has given."""

    async def admit(self, wanted: Wanted):
        self.last = await super().admit(wanted)
        return self.last


@asynccontextmanager
async def ordered(
    redis_server, prefix: str, backends, *, mode: str, **options
) -> AsyncIterator[tuple[Harness, Seen, RedisSwitch]]:
    """Over a Redis behind a switch, with short leases."""
    rule = {
        "name": "embeddings",
        "match": {"task": "text-embedding"},
        "split": [{"backend": "triton", "model": "m"}],
        "fallback": [{"backend": "local", "model": "m"}] if len(backends) > 1 else [],
        "ordering": {"mode": mode},
    }
    async with RedisSwitch(redis_server.port) as switch:
        client = connect(switch.url)
        local = MemoryAdmissions(lambda: time.time_ns() // 1000, is_degraded=True)
        admissions = Seen(client, prefix, local, lease_us=500_000, renew_us=100_000)
        admissions.start()
        try:
            async with running(backends, rules=[rule], admissions=admissions, **options) as gw:
                yield gw, admissions, switch
        finally:
            await admissions.close()
            await client.aclose()


@pytest.mark.parametrize("mode", ["serial", "release"])
async def test_one_that_waited_at_the_gate_is_not_sent(redis_server, redis_prefix, mode):
    go_on = asyncio.Event()
    triton = ScriptedBackend("triton", [go_on, embedding()])
    async with ordered(redis_server, redis_prefix, [triton], mode=mode, max_in_flight=1) as (gw, admissions, switch):
        before = asyncio.create_task(gw.post(PATH, BODY))
        await until(lambda: len(triton.calls) == 1)
        asked = asyncio.create_task(gw.post(PATH, BODY, **{"x-ordering-key": "k"}))
        await until(lambda: gw.loads == {"triton": 2})
        await switch.refuse()
        await until(lambda: admissions.last.is_lost)
        go_on.set()
        assert (await before).status_code == 200
        refused = await asked
        assert (refused.status_code, refused.json()["code"]) == (503, "ordering_unavailable")
        assert len(triton.calls) == 1
        await until(lambda: not gw.loads)
