"""Three gateway processes over one Redis keep one limit, to the last request, token and nano-dollar; and nothing stays
taken when requests fail, callers leave, processes are killed and Redis pauses.

Small runs; `python -m tests.bench.admission` makes them large.
"""

import asyncio

import pytest

from tests.kit.replica_fire import BACK_WITHIN_S, KEY, MARGIN_S, PLACES, check_used, fire
from tests.kit.replica_runs import MAX_TOKENS, limits_run, redis_us
from tests.kit.wait import until, until_async

pytest_plugins = ["tests.kit.redis"]
pytestmark = pytest.mark.alone


async def test_three_processes_admit_exactly_what_the_limits_give(tmp_path, redis_server, redis_client, redis_prefix):
    told = await limits_run(
        tmp_path, redis_server.url, redis_client, redis_prefix, workers=1, count=240, in_flight=24, amount=60
    )
    assert set(told) == {"requests", "tokens", "usd"}


async def test_nothing_stays_taken_whatever_burns(tmp_path, redis_server, redis_client, redis_prefix):
    async with fire(tmp_path, redis_server.port, redis_client, redis_prefix, workers=1) as burning:
        # Errors and leaves: everything is back at once, and tokens and money are what was really used up.
        before_us = await redis_us(redis_client)
        first = await burning.running[0].ask("first in=020 out=040", key=KEY, max_tokens=MAX_TOKENS)
        assert first.status == 200
        first_us = before_us, await redis_us(redis_client)
        await burning.burn(300, in_flight=12)
        await check_used(burning, first_us=first_us)
        assert set(burning.seen) >= {"ok", "rate_limited", "invalid_input", "backend_error"}, burning.seen
        # Redis pauses, and cuts; a process is killed: everything is back within a lease. Who has an ordering key may
        # have to wait for it: the next fault comes meanwhile, so that one lease is enough for all of them.
        burning.switches[1].pause()
        burned = [asyncio.create_task(burning.burn(60, in_flight=12))]
        await asyncio.wait(burned, timeout=1)
        await burning.switches[2].refuse()
        burned.append(asyncio.create_task(burning.burn(60, in_flight=12)))
        await asyncio.wait(burned, timeout=1)
        burned.append(asyncio.create_task(burning.burn(100, in_flight=12)))
        await until(lambda: burning.workshop.running >= 2, timeout_s=30)
        burning.running[0].kill()
        await asyncio.gather(*burned)
        for switch in burning.switches:
            await switch.restore()
        await burning.rest(within_s=BACK_WITHIN_S + MARGIN_S)
        # All places are free again, and no more than all.
        for replica in burning.alive:
            await until_async(lambda replica=replica: burning.serves(replica), timeout_s=30)
        holding = [asyncio.create_task(burning.hold(number)) for number in range(PLACES)]
        await until(lambda: burning.workshop.running == PLACES, timeout_s=15)
        assert (await burning.alive[0].ask("one too many", key=KEY, max_tokens=MAX_TOKENS)).code == "rate_limited"
        for each in holding:
            each.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        await burning.rest(within_s=MARGIN_S)
