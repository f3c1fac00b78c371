"""One suite for every `Admissions`: memory and Redis; and what only several workers on one Redis can show."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from gateway.core.admissions import LEASE_US, RENEW_US, Wanted
from gateway.core.errors import DeadlineExceeded, OrderingUnavailable
from gateway.core.rate_limit import counters, takes
from gateway.core.types import Caller, Limit
from gateway.ports import Admission, Admissions
from gateway.stores import redis_admissions
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from tests.kit.wait import until

pytest_plugins = ["tests.kit.redis"]

SECOND = 1_000_000
USD = 10**9
REQUESTS = Limit(kind="requests", amount=3, per="hour", burst=3)
MANY = Limit(kind="requests", amount=50, per="day", burst=50)
TOKENS = Limit(kind="tokens", amount=100, per="day", burst=100)
BUDGET = Limit(kind="usd", amount=10 * USD, per="month")
PLACES = Limit(kind="concurrent", amount=2)


class Never(MemoryAdmissions):
    """Local admissions that must not be asked."""

    def admitted(self, wanted: Wanted):
        raise AssertionError("the worker was asked alone while Redis answers")


def wall_us() -> int:
    return time.time_ns() // 1000


def wanted(
    *limits: Limit, order: str = "", bound: int = 100, tokens: int = 0, nano_usd: int = 0, tenant: str = "t"
) -> Wanted:
    counted = counters(Caller(key_id="k", tenant=tenant, limits=limits), "task", "model", "interactive")
    taken = takes(counted, tokens=tokens, nano_usd=nano_usd)
    return Wanted(tenant=tenant, takes=taken, ordering_key=order, queue_bound=bound)


class Workers:
    """Workers on one Redis; a loaded machine may stall a test for longer than a request would wait."""

    def __init__(self, client: Redis, prefix: str) -> None:
        self.client, self.prefix = client, prefix
        self.all: list[RedisAdmissions] = []

    def start(self, *, lease_us: int = LEASE_US, renew_us: int = RENEW_US, is_dead: bool = False) -> RedisAdmissions:
        one = RedisAdmissions(
            self.client, self.prefix, Never(wall_us), timeout_s=10, lease_us=lease_us, renew_us=renew_us
        )
        self.all.append(one)
        if not is_dead:
            one.start()
        return one


@pytest.fixture
async def workers(redis_client, redis_prefix) -> AsyncIterator[Workers]:
    workers = Workers(redis_client, redis_prefix)
    yield workers
    for one in workers.all:
        await one.close()


@pytest.fixture(params=["memory", "redis"])
async def admissions(request, workers) -> Admissions:
    return MemoryAdmissions(wall_us) if request.param == "memory" else workers.start()


async def first_come(admissions: Admissions, count: int, order: str = "o") -> list[Admission]:
    return [await admissions.admit(wanted(order=order)) for _ in range(count)]


def end(*admissions: Admission, tokens: int = 0, nano_usd: int = 0) -> None:
    for one in admissions:
        one.settle(tokens=tokens, nano_usd=nano_usd)


# --- limits ---------------------------------------------------------------------------------------


async def test_remaining_falls_2_1_0_and_then_refuses(admissions):
    said = [(await admissions.admit(wanted(REQUESTS))).verdict for _ in range(5)]
    assert [v.allowed for v in said] == [True] * 3 + [False] * 2
    assert [v.states[0].remaining for v in said] == [2, 1, 0, 0, 0]
    assert all(0 < v.refused_by.retry_after_us <= 1200 * SECOND for v in said[3:])
    assert not any(v.degraded for v in said)


async def test_all_or_none(admissions):
    for _ in range(3):
        await admissions.admit(wanted(REQUESTS))
    refused = await admissions.admit(wanted(MANY, PLACES, REQUESTS, order="o"))
    assert refused.verdict.refused_by.limit == REQUESTS
    end(refused)
    passed = await admissions.admit(wanted(MANY, PLACES, order="o"))
    assert [state.remaining for state in passed.verdict.states] == [49, 1]
    assert passed.verdict.ticket == 1


async def test_what_was_really_used_up_is_put_in_the_stead_of_what_was_reserved(admissions):
    first = await admissions.admit(wanted(TOKENS, BUDGET, tokens=60, nano_usd=6 * USD))
    assert first.verdict.allowed
    assert not (await admissions.admit(wanted(TOKENS, tokens=60))).verdict.allowed
    assert not (await admissions.admit(wanted(BUDGET, nano_usd=6 * USD))).verdict.allowed
    end(first, first, tokens=20, nano_usd=3 * USD)
    after = await admissions.admit(wanted(TOKENS, BUDGET, tokens=60, nano_usd=6 * USD))
    assert [state.remaining for state in after.verdict.states] == [20, 1 * USD]
    end(after, tokens=90, nano_usd=9 * USD)
    last = await admissions.admit(wanted(TOKENS, BUDGET))
    assert [state.remaining for state in last.verdict.states] == [0, 0]
    assert not (await admissions.admit(wanted(TOKENS, tokens=1))).verdict.allowed


async def test_places_come_back_once(admissions):
    first, second, third = [await admissions.admit(wanted(PLACES)) for _ in range(3)]
    assert [one.verdict.allowed for one in (first, second, third)] == [True, True, False]
    end(first, first, third)
    assert [(await admissions.admit(wanted(PLACES))).verdict.allowed for _ in range(2)] == [True, False]


async def test_many_at_once_never_overrun(admissions):
    said = await asyncio.gather(*(admissions.admit(wanted(MANY)) for _ in range(400)))
    left = [one.verdict.states[0].remaining for one in said if one.verdict.allowed]
    assert sorted(left) == list(range(50))


async def test_counters_of_tenants_are_their_own(admissions):
    shared = Limit(kind="requests", amount=3, per="hour", burst=3, shared_by="tenant")
    said = [(await admissions.admit(wanted(shared, tenant=tenant))).verdict for tenant in ("a", "b", "a")]
    assert [v.states[0].remaining for v in said] == [2, 2, 1]


async def test_who_wants_nothing_is_admitted(admissions):
    admission = await admissions.admit(wanted())
    assert admission.verdict.allowed
    assert not admission.is_lost
    await admission.turn(within_us=0)
    end(admission, tokens=7)


# --- order ----------------------------------------------------------------------------------------


async def test_each_has_its_turn_when_all_before_it_have_ended(admissions):
    first, second, third = await first_come(admissions, 3)
    assert [one.verdict.ticket for one in (first, second, third)] == [1, 2, 3]
    await first.turn(within_us=0)
    turns = [asyncio.ensure_future(one.turn(within_us=60 * SECOND)) for one in (second, third)]
    end(first)
    await asyncio.wait_for(turns[0], 10)
    assert not turns[1].done()
    end(second)
    await asyncio.wait_for(turns[1], 10)
    assert not third.is_lost
    end(third)
    (next_one,) = await first_come(admissions, 1)
    assert next_one.verdict.ticket == 4
    await next_one.turn(within_us=0)


async def test_one_that_ends_before_its_turn_is_passed_over(admissions):
    first, second, third = await first_come(admissions, 3)
    turn = asyncio.ensure_future(second.turn(within_us=60 * SECOND))
    await asyncio.sleep(0)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    end(second, first)
    await third.turn(within_us=10 * SECOND)


async def test_who_waits_too_long_is_told_so(admissions):
    _, second = await first_come(admissions, 2)
    with pytest.raises(DeadlineExceeded):
        await second.turn(within_us=10_000)


async def test_a_queue_has_its_bound_and_other_queues_their_own(admissions):
    said = [(await admissions.admit(wanted(MANY, order="o", bound=2))).verdict for _ in range(3)]
    assert [(v.allowed, v.is_queue_full) for v in said] == [(True, False), (True, False), (False, True)]
    other = await admissions.admit(wanted(MANY, order="p", bound=2))
    assert other.verdict.ticket == 1
    assert other.verdict.states[0].remaining == 47


async def test_who_leaves_while_it_is_admitted_takes_nothing(admissions):
    limit = Limit(kind="concurrent", amount=40)
    tasks = [asyncio.ensure_future(admissions.admit(wanted(limit, order="o"))) for _ in range(40)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    stayed = [one for one in await asyncio.gather(*tasks, return_exceptions=True) if not isinstance(one, BaseException)]
    end(*stayed)
    after = [await admissions.admit(wanted(limit)) for _ in range(40)]
    assert all(one.verdict.allowed for one in after)


# --- several workers on one Redis -----------------------------------------------------------------


async def test_workers_share_tickets_turns_and_places(workers):
    a, b = workers.start(), workers.start()
    first, second, third = [await one.admit(wanted(order="o")) for one in (a, b, a)]
    assert [one.verdict.ticket for one in (first, second, third)] == [1, 2, 3]
    turns = [asyncio.ensure_future(one.turn(within_us=60 * SECOND)) for one in (second, third)]
    end(first)
    await asyncio.wait_for(turns[0], 10)
    assert not turns[1].done()
    end(second)
    await asyncio.wait_for(turns[1], 10)
    held = [await one.admit(wanted(PLACES)) for one in (a, b, a)]
    assert [one.verdict.allowed for one in held] == [True, True, False]


async def test_a_turn_comes_though_its_message_was_lost(workers, monkeypatch):
    async def deaf(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(redis_admissions, "listen", deaf)
    a, b = workers.start(renew_us=90_000), workers.start(renew_us=90_000)
    (first,), (second,) = await first_come(a, 1), await first_come(b, 1)
    turn = asyncio.ensure_future(second.turn(within_us=60 * SECOND))
    await asyncio.sleep(0)
    end(first)
    await asyncio.wait_for(turn, 10)


async def test_what_a_dead_worker_held_is_given_back_once(workers):
    dead = workers.start(lease_us=200_000, is_dead=True)
    alive = workers.start(renew_us=90_000)
    takes = (TOKENS, PLACES)
    left = [await dead.admit(wanted(*takes, tokens=40, order="o")) for _ in range(2)]
    waiting = await alive.admit(wanted(order="o"))
    assert waiting.verdict.ticket == 3
    await waiting.turn(within_us=10 * SECOND)
    assert all(one.is_lost for one in left)
    for one in left:
        with pytest.raises(OrderingUnavailable):
            await one.turn(within_us=SECOND)
    fresh = await alive.admit(wanted(*takes, tokens=40))
    assert [state.remaining for state in fresh.verdict.states] == [60, 1]
    end(*left, tokens=40)
    await dead.close()  # sends them; they change nothing any more
    after = await alive.admit(wanted(*takes))
    assert [state.remaining for state in after.verdict.states] == [60, 0]


async def test_what_is_renewed_outlives_its_lease(workers):
    worker = workers.start(lease_us=SECOND, renew_us=30_000)
    first, second = await first_come(worker, 2)
    begun_s = second.kept_s
    await until(lambda: second.kept_s > begun_s + 1)
    assert not first.is_lost
    with pytest.raises(DeadlineExceeded):
        await second.turn(within_us=0)


async def test_who_waits_for_a_turn_whose_place_is_gone_is_told_at_once(workers):
    worker = workers.start(renew_us=90_000)
    _, second = await first_come(worker, 2)
    turn = asyncio.ensure_future(second.turn(within_us=60 * SECOND))
    await asyncio.sleep(0)
    await workers.client.delete(*[key async for key in workers.client.scan_iter(f"{workers.prefix}adm:*")])
    with pytest.raises(OrderingUnavailable):
        await asyncio.wait_for(turn, 10)


async def test_an_owners_keys_share_a_slot_whatever_its_orders_are_called(workers):
    worker = workers.start()
    for order in ("}", "{x}", "a{b}c", "\ud800 alone", 'quotes " and spaces', "\N{SNOWMAN}\x00"):
        admission = await worker.admit(wanted(MANY, TOKENS, order=order))
        assert (admission.verdict.allowed, admission.verdict.ticket) == (True, 1)
    keys = [key async for key in workers.client.scan_iter(f"{workers.prefix}adm:*")]
    assert len(keys) == 2 + 1 + 6 * 2
    assert len({key_slot(key) for key in keys}) == 1


async def test_what_waits_to_be_given_back_is_sent_when_a_worker_stops(workers):
    worker, other = workers.start(), workers.start()
    held = [await worker.admit(wanted(PLACES)) for _ in range(2)]
    end(*held)
    await worker.close()
    assert (await other.admit(wanted(PLACES))).verdict.states[0].remaining == 1
