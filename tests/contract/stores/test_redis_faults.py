"""The faults of admissions (RL-06, RL-08, RL-09) against a real Redis behind a switch."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.admissions import LEASE_US, RENEW_US, Wanted
from gateway.core.errors import DeadlineExceeded, LimitsUnavailable, OrderingUnavailable
from gateway.core.rate_limit import counters, takes
from gateway.core.types import Caller, Limit
from gateway.ports import Admission
from gateway.stores import redis_steps
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_script import connect
from tests.kit.redis import RedisServer
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until, until_async

pytest_plugins = ["tests.kit.redis"]

SECOND = 1_000_000
BOUND_S = 5.0  # no test waits for this; a hang would
PLENTY = Limit(kind="requests", amount=100_000, per="day", burst=100_000)
FEW = Limit(kind="requests", amount=5, per="day", burst=5)
PLACES = Limit(kind="concurrent", amount=3)


def wanted(*limits: Limit, **told: Any) -> Wanted:
    counted = counters(Caller(key_id="k", tenant="t", limits=limits), "task", "model", "interactive")
    return Wanted(tenant="t", takes=takes(counted, tokens=0, nano_usd=0), queue_bound=100, **told)


def worker(client: Any, prefix: str, *, timeout_s: float = 0.5, workers: int = 1, **times: int) -> RedisAdmissions:
    local = MemoryAdmissions(lambda: time.time_ns() // 1000, workers=lambda: workers, is_degraded=True)
    return RedisAdmissions(client, prefix, local, timeout_s=timeout_s, **times)


@pytest.fixture
async def switch(redis_server) -> AsyncIterator[RedisSwitch]:
    async with RedisSwitch(redis_server.port) as switch:
        yield switch


@pytest.fixture(params=[(LEASE_US, RENEW_US)])
async def admissions(request, switch, redis_prefix, monkeypatch) -> AsyncIterator[RedisAdmissions]:
    monkeypatch.setattr(redis_steps, "RETRY_AFTER_S", 0.05)
    client = connect(switch.url)
    lease_us, renew_us = request.param
    admissions = worker(client, redis_prefix, lease_us=lease_us, renew_us=renew_us)
    admissions.start()
    yield admissions
    await admissions.close()
    await client.aclose()


def leases(lease_us: int, renew_us: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("admissions", [(lease_us, renew_us)], indirect=True)


async def admitted(admissions: RedisAdmissions, *limits: Limit, times: int = 1, **told: Any) -> list[Admission]:
    async with asyncio.timeout(BOUND_S):
        return [await admissions.admit(wanted(*limits, **told)) for _ in range(times)]


async def is_redis_s_own(admissions: RedisAdmissions) -> bool:
    return not (await admissions.admit(wanted(PLENTY))).verdict.degraded


async def restored(admissions: RedisAdmissions) -> None:
    """Return with the first verdict that is Redis's own again."""
    await until_async(lambda: is_redis_s_own(admissions))


async def fault(switch: RedisSwitch, name: str) -> None:
    if name == "refuse":
        await switch.refuse()
    else:
        switch.pause()


# --- RL-06: a refusal that can be used ------------------------------------------------------------


async def test_a_request_after_retry_after_passes(redis_client, redis_prefix):
    admissions = worker(redis_client, redis_prefix, timeout_s=BOUND_S)
    limit = Limit(kind="requests", amount=5, per="second", burst=3)
    # All in one round trip: however slow this machine is, no interval passes between them.
    said = [one.verdict for one in await asyncio.gather(*(admissions.admit(wanted(limit)) for _ in range(6)))]
    assert [v.states[0].remaining for v in said] == [2, 1, 0, 0, 0, 0]
    assert [v.allowed for v in said] == [True] * 3 + [False] * 3
    hit = said[-1].refused_by
    assert hit is not None
    assert 0 < hit.retry_after_us <= hit.reset_us <= 600_000
    assert hit.retry_after_us == hit.reset_us - 400_000  # both speak of one instant
    await asyncio.sleep(hit.retry_after_us / 1e6)
    (again,) = await admitted(admissions, limit)
    assert again.verdict.allowed
    await admissions.close()


# --- RL-08: no counter without an expiry, nothing taken for nobody --------------------------------


async def test_a_cut_after_the_first_count_leaves_no_key_without_expiry(switch, admissions, redis_client, redis_prefix):
    limit = Limit(kind="requests", amount=10, per="second", burst=2)
    switch.cut_after(1, b"EVALSHA")
    await admitted(admissions, limit, PLACES)
    await restored(admissions)
    keys = [key async for key in redis_client.scan_iter(f"{redis_prefix}adm:*")]
    assert keys
    for key in keys:
        assert await redis_client.pttl(key) != -1
    await admitted(admissions, limit, times=4)
    await asyncio.sleep(0.4)  # two windows
    (after,) = await admitted(admissions, limit)
    assert after.verdict.allowed
    assert not after.verdict.degraded


async def test_what_was_admitted_though_nobody_heard_it_is_given_back(switch, admissions, redis_client, redis_prefix):
    await restored(admissions)
    switch.cut_after(1, b"EVALSHA")
    (first,) = await admitted(admissions, PLACES, ordering_key="o", orders_alone=True)
    switch.pause()
    (second,) = await admitted(admissions, PLACES, ordering_key="o", orders_alone=True)
    assert second.verdict.degraded
    await switch.restore()
    first.settle(tokens=0, nano_usd=0)
    await restored(admissions)

    async def is_given_back() -> bool:
        return not await redis_client.exists(f"{redis_prefix}adm:{{t}}:places:key:k:concurrent:3/:0")

    await until_async(is_given_back)
    (after,) = await admitted(admissions, PLACES, ordering_key="o")
    assert after.verdict.states[0].remaining == 2
    await after.turn(within_us=0)


async def test_callers_that_leave_while_it_hangs_leave_nothing_behind(switch, admissions):
    await restored(admissions)
    switch.pause()
    tasks = [asyncio.ensure_future(admissions.admit(wanted(PLACES, ordering_key="o"))) for _ in range(3)]
    await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await switch.restore()
    await restored(admissions)
    await until(lambda: not admissions._steps._settlements)
    after = await admitted(admissions, PLACES, ordering_key="o", times=3)
    assert all(one.verdict.allowed and not one.verdict.degraded for one in after)
    await after[0].turn(within_us=0)
    assert len(admissions._open) == 3


async def test_a_script_that_redis_forgot_is_loaded_again(admissions, redis_client):
    await admitted(admissions, FEW)
    await redis_client.script_flush()
    said = await asyncio.gather(*(admissions.admit(wanted(PLENTY)) for _ in range(20)))
    assert sorted(one.verdict.states[0].remaining for one in said) == list(range(99_980, 100_000))
    assert not any(one.verdict.degraded for one in said)


# --- RL-09: the store's failure is not the caller's quota -----------------------------------------


@pytest.mark.parametrize("name", ["refuse", "pause"])
async def test_a_redis_out_of_reach_is_answered_locally_and_comes_back(switch, admissions, caplog, name):
    caplog.set_level(logging.WARNING)
    (before,) = await admitted(admissions, PLENTY)
    assert not before.verdict.degraded

    await fault(switch, name)
    during = [one.verdict for one in await admitted(admissions, PLENTY, times=20)]
    assert all(v.degraded and v.allowed for v in during)
    assert [v.states[0].remaining for v in during] == [100_000 - n for n in range(1, 21)]  # counted by the worker
    assert admissions.is_degraded
    together = await asyncio.gather(*(admissions.admit(wanted(PLENTY)) for _ in range(50)))
    assert all(one.verdict.degraded and one.verdict.allowed for one in together)

    await switch.restore()
    await restored(admissions)
    assert not admissions.is_degraded
    assert [r.message for r in caplog.records if r.name == redis_steps.__name__] == [
        "limiter_degraded",
        "limiter_restored",
    ]


@pytest.mark.parametrize("name", ["refuse", "pause"])
async def test_what_a_rule_says_of_it_is_done(switch, admissions, name):
    await restored(admissions)
    await fault(switch, name)
    opened = await admitted(admissions, FEW, times=8, on_store_down="open")
    assert all(one.verdict.allowed and one.verdict.degraded for one in opened)
    with pytest.raises(LimitsUnavailable):
        await admitted(admissions, FEW, on_store_down="closed")
    with pytest.raises(OrderingUnavailable):
        await admitted(admissions, FEW, ordering_key="o", on_store_down="open")
    first, second = await admitted(admissions, FEW, times=2, ordering_key="o", orders_alone=True)
    assert (first.verdict.ticket, second.verdict.ticket) == (1, 2)
    turn = asyncio.ensure_future(second.turn(within_us=60 * SECOND))
    await first.turn(within_us=0)
    first.settle(tokens=0, nano_usd=0)
    async with asyncio.timeout(BOUND_S):
        await turn
    await admitted(admissions, on_store_down="closed")  # it has no limits


async def test_each_worker_has_its_part_of_a_limit(switch, redis_prefix):
    await switch.refuse()
    client = connect(switch.url)
    admissions = worker(client, redis_prefix, workers=2)
    said = await admitted(admissions, replace(FEW, amount=4, burst=4), times=4)
    assert [one.verdict.allowed for one in said] == [True, True, False, False]
    assert all(one.verdict.degraded for one in said)
    await admissions.close()
    await client.aclose()


async def test_while_it_is_down_one_at_a_time_tries_it(switch, admissions, monkeypatch):
    await switch.refuse()
    await admitted(admissions, PLENTY)
    await switch.restore()
    switch.pause()
    monkeypatch.setattr(redis_steps, "RETRY_AFTER_S", 60)
    sent = []
    round_trip = admissions._steps._round_trip

    async def counted(calls: Any) -> Any:
        sent.append(calls)
        return await round_trip(calls)

    monkeypatch.setattr(admissions._steps, "_round_trip", counted)
    admissions._steps._try_at_s = 0.0
    said = await asyncio.gather(*(admissions.admit(wanted(PLENTY)) for _ in range(50)))
    assert all(one.verdict.degraded for one in said)
    assert [len(calls) for calls in sent] == [1]


async def test_a_settlement_waits_for_redis(switch, admissions, redis_client, redis_prefix):
    held = await admitted(admissions, PLACES, times=3)
    switch.pause()
    for one in held:
        one.settle(tokens=0, nano_usd=0)
    await until(lambda: admissions.is_degraded)
    await switch.restore()
    await restored(admissions)
    await until(lambda: not admissions._steps._settlements)
    (after,) = await admitted(admissions, PLACES)
    assert after.verdict.states[0].remaining == 2


@leases(300_000, 60_000)
async def test_a_place_that_could_not_be_renewed_is_lost(switch, admissions):
    first, second = await admitted(admissions, times=2, ordering_key="o")
    switch.pause()
    with pytest.raises(OrderingUnavailable):
        async with asyncio.timeout(BOUND_S):
            await second.turn(within_us=60 * SECOND)
    assert first.is_lost


@leases(10 * SECOND, 90_000)
async def test_turns_come_after_the_connection_was_cut(switch, admissions):
    first, second = await admitted(admissions, times=2, ordering_key="o")
    turn = asyncio.ensure_future(second.turn(within_us=60 * SECOND))
    await switch.refuse()
    first.settle(tokens=0, nano_usd=0)
    await switch.restore()
    async with asyncio.timeout(BOUND_S):
        await turn


async def test_close_answers_who_waits(switch, redis_prefix):
    client = connect(switch.url)
    admissions = worker(client, redis_prefix, timeout_s=BOUND_S)
    switch.pause()
    task = asyncio.ensure_future(admissions.admit(wanted(PLENTY)))
    await asyncio.sleep(0.02)
    await admissions.close()
    assert (await task).verdict.degraded
    (after,) = await admitted(admissions, PLACES)
    after.settle(tokens=0, nano_usd=0)
    await client.aclose()


async def test_a_redis_that_restarts_is_used_again(redis_prefix, monkeypatch):
    monkeypatch.setattr(redis_steps, "RETRY_AFTER_S", 0.05)
    with RedisServer() as server:
        client = connect(server.url)
        admissions = worker(client, redis_prefix)
        assert not (await admitted(admissions, PLENTY))[0].verdict.degraded
        server.stop()
        assert (await admitted(admissions, PLENTY))[0].verdict.degraded
        await asyncio.to_thread(server.start)
        await restored(admissions)
        await admissions.close()
        await client.aclose()


async def test_a_foreign_value_under_a_counters_name_is_not_quota(admissions, redis_client, redis_prefix):
    await redis_client.set(f"{redis_prefix}adm:{{t}}:rate:key:k:requests:5/day:5", "garbage", px=60_000)
    (said,) = await admitted(admissions, FEW)
    assert (said.verdict.allowed, said.verdict.degraded, said.verdict.states[0].remaining) == (True, False, 4)


async def test_asks_that_are_sent_again_wake_nobody_before_its_turn(switch, admissions, redis_client, redis_prefix):
    await restored(admissions)
    await until_async(lambda: _is_heard(redis_client, redis_prefix))
    for _ in range(5):
        switch.cut_after(1, b"EVALSHA")
        first, *others = await asyncio.gather(*(admissions.admit(wanted(ordering_key="o")) for _ in range(3)))
        await first.turn(within_us=0)
        for other in others:
            with pytest.raises(DeadlineExceeded):
                await other.turn(within_us=50_000)
        for one in (first, *others):
            one.settle(tokens=0, nano_usd=0)


async def _is_heard(client: Any, prefix: str) -> bool:
    """Whether a worker hears of turns."""
    return bool(await client.pubsub_channels(f"{prefix}turn:*"))


# --- a busy worker --------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 2], ids=["before it is sent", "while it is under way"])
async def test_a_worker_that_is_held_up_does_not_take_its_own_delay_for_redis_s(redis_client, redis_prefix, turns):
    admissions = worker(redis_client, redis_prefix, timeout_s=0.25)
    await admitted(admissions, PLENTY)
    asked = asyncio.create_task(admissions.admit(wanted(PLENTY)))
    for _ in range(turns):
        await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 - the loop is what is held up
    assert not (await asked).verdict.degraded
    assert not admissions.is_degraded
    await admissions.close()


async def test_an_overloaded_worker_has_its_limits_from_redis(redis_client, redis_prefix):
    admissions = worker(redis_client, redis_prefix, timeout_s=0.25)
    await admitted(admissions, PLENTY)

    async def request() -> bool:
        admission = await admissions.admit(wanted(PLENTY))
        time.sleep(0.002)  # noqa: ASYNC251 - its work: all of them together take longer than any may wait for Redis
        return admission.verdict.degraded

    assert not any(await asyncio.gather(*(request() for _ in range(300))))
    await admissions.close()


async def test_what_many_tenants_hold_is_renewed_in_small_round_trips(redis_client, redis_prefix, monkeypatch):
    monkeypatch.setattr(redis_steps, "MAX_TOGETHER", 2)
    admissions = worker(redis_client, redis_prefix, timeout_s=BOUND_S)
    tenants = ["a", "a", "a", "b", "c"]
    held = [await admissions.admit(replace(wanted(PLACES), tenant=tenant)) for tenant in tenants]
    sizes, round_trip = [], admissions._steps._round_trip

    async def seen(calls: Any) -> Any:
        sizes.append(sum(len(call.renewals) for call in calls))
        return await round_trip(calls)

    monkeypatch.setattr(admissions._steps, "_round_trip", seen)
    before_s = asyncio.get_running_loop().time()
    await admissions._renew(held)
    assert sizes == [2, 2, 1]
    assert all(one.kept_s >= before_s for one in held)
    await admissions.close()
