"""Deploys and outcomes in Redis."""

import asyncio

import pytest

from gateway.core.errors import BackendBroke, Fault, FaultKind, RulesUnavailable
from gateway.core.models import Outcomes
from gateway.core.routing import Plan
from gateway.core.types import Place, Route
from gateway.core.watching.record import RequestRecord
from gateway.stores import redis_deploys, redis_outcomes
from gateway.stores.redis_deploys import ROLLOUTS, RedisDeployStore
from gateway.stores.redis_outcomes import RedisOutcomeCounter, RedisOutcomes
from gateway.stores.redis_script import connect
from tests.kit.serving import free_port
from tests.kit.wait import until_async

pytest_plugins = ["tests.kit.redis"]


@pytest.fixture
def store(redis_client, redis_prefix) -> RedisDeployStore:
    return RedisDeployStore(redis_client, redis_prefix, timeout_s=5)


async def test_documents_are_kept_the_newest_first(store, monkeypatch):
    monkeypatch.setattr(redis_deploys, "KEPT", 3)
    assert await store.load("d1") is None
    for n in range(1, 6):
        await store.save({"id": f"d{n}", "started_ms": n, "status": "failed"})
    await store.save({"id": "d4", "started_ms": 4, "status": "done"})
    assert [one["id"] for one in await store.recent()] == ["d5", "d4", "d3"]
    assert (await store.load("d4"))["status"] == "done"
    assert await store.load("d1") is None


async def test_what_is_under_way_is_not_forgotten(store, monkeypatch):
    monkeypatch.setattr(redis_deploys, "KEPT", 2)
    await store.save({"id": "d1", "started_ms": 1, "status": "running"})
    for n in range(2, 6):
        await store.save({"id": f"d{n}", "started_ms": n, "status": "done"})
    assert [one["id"] for one in await store.recent()] == ["d5", "d4", "d1"]


async def test_rollouts_and_deploys_have_keys_of_their_own(store, redis_client, redis_prefix):
    rollouts = RedisDeployStore(redis_client, redis_prefix, timeout_s=5, kind=ROLLOUTS)
    await rollouts.save({"id": "d1", "started_ms": 1, "status": "running"})
    assert await rollouts.claim("m", "o")
    assert await store.recent() == []
    assert await store.owner("m") == ""
    assert await redis_client.exists(f"{redis_prefix}rollouts", f"{redis_prefix}rolling:m") == 2


async def test_a_model_is_one_owners(store, redis_client, redis_prefix):
    owners = [f"o{n}" for n in range(5)]
    taken = await asyncio.gather(*(store.claim("m", owner) for owner in owners))
    assert sum(taken) == 1
    owner = owners[taken.index(True)]
    assert await store.owner("m") == owner
    assert await store.claim("m", owner)
    assert 0 < await redis_client.pttl(f"{redis_prefix}deploying:m") <= redis_deploys.CLAIM_TTL_MS
    await store.release("m", "another")
    assert await store.owner("m") == owner
    await store.release("m", owner)
    assert await store.owner("m") == ""


async def test_without_redis_every_call_says_so(redis_prefix):
    client = connect(f"redis://127.0.0.1:{free_port()}/0")
    store, outcomes = RedisDeployStore(client, redis_prefix), RedisOutcomes(client, redis_prefix)
    calls = (store.save({"id": "d"}), store.load("d"), store.recent(), store.claim("m", "o"), outcomes.read("m"))
    for call in calls:
        with pytest.raises(RulesUnavailable):
            await call
    await client.aclose()


# --- outcomes -------------------------------------------------------------------------------------


def record(*versions: str, faults: tuple[FaultKind, ...] = (), failed: bool = False, told: str = "") -> RequestRecord:
    """`told`: the version that the server says it answered with."""
    places = tuple(Place(backend="triton", model="m", version=version) for version in versions)
    answers = None if failed or len(faults) >= len(places) else places[len(faults)]
    return RequestRecord(
        id="i",
        task="t",
        tenant="a",
        key_id="k",
        total_us=1,
        error=BackendBroke("no") if failed else None,
        plan=Plan(rule="r", revision=1, candidates=places) if versions else None,
        route=answers
        and Route(backend="triton", model="m", version=told or answers.version, rule="r", attempts=len(faults) + 1),
        faults=tuple(Fault(kind=kind, message="", place=p) for kind, p in zip(faults, places, strict=False)),
    )


async def test_attempts_are_counted_by_the_version_that_they_went_to(redis_client, redis_prefix, monkeypatch):
    monkeypatch.setattr(redis_outcomes, "FLUSH_S", 0.01)
    workers = [RedisOutcomeCounter(redis_client, redis_prefix) for _ in range(2)]
    for worker in workers:
        worker.start()
        worker.began("t")
        worker.ended(record("2", "1"))  # answered by the first
        worker.ended(record("2", "1", faults=(FaultKind.FAILED,)))  # and by the second
        worker.ended(record("2", "1", faults=(FaultKind.TIMEOUT, FaultKind.BROKEN), failed=True))  # by nobody
        worker.ended(record("2", faults=(FaultKind.REFUSED_INPUT,), failed=True))  # the caller's own fault
        worker.ended(record("2", failed=True))  # the caller left
        worker.ended(record("", "1"))  # no version named
        worker.ended(record("2", "", faults=(FaultKind.REFUSED_INPUT,), told="1"))  # a fallback without a name
        worker.ended(record())  # refused before it had a plan
        worker.refused(record())
    outcomes = RedisOutcomes(redis_client, redis_prefix)
    expected = {"2": Outcomes(requests=2, failures=4), "1": Outcomes(requests=2, failures=2)}

    async def is_told() -> bool:
        return await outcomes.read("m") == expected

    await until_async(is_told)
    for worker in workers:
        worker.ended(record("2"))
        await worker.close()  # writes what is left
    assert (await outcomes.read("m"))["2"].requests == 4
    assert 0 < await redis_client.ttl(f"{redis_prefix}outcomes:m") <= redis_outcomes.FORGET_AFTER_S
    assert await outcomes.read("nobody") == {}


def test_ratios_and_differences():
    now, before = Outcomes(requests=90, failures=10), Outcomes(requests=40, failures=10)
    assert now.ratio == 0.1
    assert now.since(before) == Outcomes(requests=50, failures=0)
    assert before.since(now) == Outcomes(requests=0, failures=0)
    assert Outcomes().ratio == 0.0
