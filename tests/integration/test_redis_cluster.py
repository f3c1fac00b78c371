"""A Redis Cluster of real nodes: all stores, slots that move, and nodes that die or hang."""

import asyncio
from datetime import date

import pytest
from redis.crc import key_slot
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.core.admissions import Wanted
from gateway.core.errors import Fault, FaultKind
from gateway.core.models import Outcomes
from gateway.core.rate_limit import counters
from gateway.core.routing import Plan
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.types import Caller, Limit, Place, Route, Usage
from gateway.core.watching.record import RequestRecord
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.leases import RedisLeases
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_deaths import RedisDeaths
from gateway.stores.redis_deploys import RedisDeployStore
from gateway.stores.redis_events import RedisEvents
from gateway.stores.redis_outcomes import RedisOutcomeCounter, RedisOutcomes
from gateway.stores.redis_rules import RedisRuleSource
from gateway.stores.redis_script import UNREACHABLE, connect, listen, load_script
from gateway.stores.redis_sequences import RedisSequenceStore
from gateway.stores.redis_usage import RedisUsage, RedisUsageSource
from tests.kit.control_walk import change_rules_and_switches, count_what_happens, keep_who_did_what
from tests.kit.redis import HOST
from tests.kit.redis_many import RedisCluster, say
from tests.kit.wait import until, until_async

BOUND_S = 20.0  # no test waits for this; a hang would
PLACE = Place(backend="triton", model="m", version="2", replica="a:1")
RULES = [{"name": "r", "split": [{"backend": "triton", "model": "m"}]}]


@pytest.fixture
async def client(redis_cluster):
    client = connect(redis_cluster.url)
    yield client
    await client.aclose()


def on_each_master(prefix: str) -> list[str]:
    """A key for each of the three masters, in their order."""
    third = 16384 // 3 + 1
    found: dict[int, str] = {}
    for n in range(1000):
        found.setdefault(key_slot(f"{prefix}{n}".encode()) // third, f"{prefix}{n}")
    return [found[i] for i in range(3)]


# --- all stores -----------------------------------------------------------------------------------


async def test_rules_reach_workers(client, redis_prefix):
    seed = RuleSet(revision=0, rules=parse_rules(RULES))
    workers = [RedisRuleSource(client, redis_prefix, seed, lambda _: None, f"w{n}") for n in range(3)]
    store = RedisRuleStore(client, redis_prefix)
    try:
        for worker in workers:
            await worker.start()
        revision = await store.put(parse_rules([{**RULES[0], "name": "new"}]), expected_revision=1)
        applied = await store.applied(revision, timeout_s=BOUND_S)
    finally:
        for worker in workers:
            await worker.close()
    assert (applied.workers, applied.of) == (3, 3)
    assert {worker.current() for worker in workers} == {await store.get()}
    assert await store.workers() == []


async def test_usage_and_outcomes_are_booked(client, redis_prefix):
    days = iter([date(2026, 3, 1), date(2026, 3, 2), date(2026, 3, 3)])
    usage, counter = (
        RedisUsage(client, redis_prefix, today=lambda: next(days)),
        RedisOutcomeCounter(client, redis_prefix),
    )
    for model in ("m1", "m2", "m3"):
        place = Place(backend="triton", model=model, version="1")
        route = Route(backend="triton", model=model, version="1", rule="r", attempts=1)
        plan = Plan(rule="r", revision=1, candidates=(place,))
        record = RequestRecord(
            id="i", task="t", tenant="a", key_id="k", total_us=1, plan=plan, route=route, usage=Usage(input_tokens=7)
        )
        usage.ended(record)
        counter.ended(record)
    await usage.close()
    await counter.close()
    rows = await RedisUsageSource(client, redis_prefix).read(date(2026, 2, 27), date(2026, 3, 4))
    assert [(row.day.day, row.model, row.requests, row.input_tokens) for row in rows] == [
        (n, f"m{n}", 1, 7) for n in (1, 2, 3)
    ]
    for model in ("m1", "m2", "m3"):
        assert await RedisOutcomes(client, redis_prefix).read(model) == {"1": Outcomes(requests=1, failures=0)}


@pytest.mark.parametrize("part", [change_rules_and_switches, keep_who_did_what, count_what_happens])
async def test_the_control_planes_stores_work(client, redis_prefix, part):
    await part(client, redis_prefix)


async def test_sequences_leases_deploys_and_events(client, redis_prefix):
    sequences = RedisSequenceStore(client, redis_prefix, timeout_s=BOUND_S)
    numbers = [await sequences.pin(f"o{n}", PLACE, [1, 2, 3], idle_us=10**9, for_us=0) for n in range(4)]
    assert numbers == [1, 2, 3, None]
    pin = await sequences.find("o0", for_us=0)
    assert pin is not None
    await sequences.lose("o0", pin)
    assert (await sequences.find("o0", for_us=0)).is_lost
    leases = RedisLeases(client, redis_prefix)
    assert [await leases.take(name, 30) for name in ("a", "b", "a")] == [True, True, False]
    deploys, events = RedisDeployStore(client, redis_prefix), RedisEvents(client, redis_prefix)
    await deploys.save({"id": "d", "started_ms": 1})
    assert [await deploys.claim("m", owner) for owner in ("a", "b")] == [True, False]
    await deploys.release("m", "a")
    assert (await deploys.owner("m"), await deploys.load("d")) == ("", {"id": "d", "started_ms": 1})
    for n in range(102):
        await events.add({"n": n})
    assert [event["n"] for event in await events.read()] == list(range(101, 1, -1))


async def test_word_of_a_death_crosses_nodes(redis_cluster, redis_prefix):
    """Each client subscribes at any node, and publishes at the channel's."""
    clients = [connect(redis_cluster.url) for _ in range(6)]
    workers = [RedisDeaths(client, redis_prefix) for client in clients]
    heard: set[int] = set()
    for n, worker in enumerate(workers):
        worker.start(lambda _place, _fault, n=n: heard.add(n))
    try:

        async def all_but_the_teller() -> bool:
            workers[0].tell(PLACE, Fault(kind=FaultKind.DEAD, message="", dead_model="m"))
            return heard == {1, 2, 3, 4, 5}

        await until_async(all_but_the_teller)
    finally:
        for worker, client in zip(workers, clients, strict=True):
            await worker.close()
            await client.aclose()


async def test_limits_are_exact_and_tickets_in_order(redis_cluster, redis_prefix):
    """Three workers, and tenants on all three nodes."""
    tenants = on_each_master("acme")
    clients = [connect(redis_cluster.url) for _ in range(3)]
    workers = [RedisAdmissions(c, redis_prefix, MemoryAdmissions(lambda: 0), timeout_s=BOUND_S) for c in clients]
    for worker in workers:
        worker.start()
    try:
        limit = Limit(kind="requests", amount=50, per="day", burst=50)
        for_all = {t: counters(Caller(key_id=t, tenant=t, limits=(limit,)), "t", "m", "batch") for t in tenants}
        asks = [
            worker.admit(Wanted(tenant=tenant, takes=for_all[tenant]))
            for _ in range(30)
            for worker in workers
            for tenant in tenants
        ]
        admitted = await asyncio.gather(*asks)
        assert sum(one.verdict.allowed for one in admitted) == 150
        assert not any(one.verdict.degraded for one in admitted)
        ordered: list[int] = []

        async def one(worker: RedisAdmissions) -> None:
            admission = await worker.admit(Wanted(tenant=tenants[0], ordering_key="k", queue_bound=100))
            await admission.turn(within_us=10**7)
            ordered.append(admission.verdict.ticket)
            await asyncio.sleep(0)
            admission.settle(tokens=0, nano_usd=0)

        await asyncio.gather(*(one(workers[n % 3]) for n in range(30)))
        assert ordered == list(range(1, 31))
    finally:
        for worker, client in zip(workers, clients, strict=True):
            await worker.close()
            await client.aclose()


# --- the client -----------------------------------------------------------------------------------


async def test_a_pipeline_over_all_nodes_answers_in_order_and_an_error_stays_alone(client, redis_prefix):
    keys = [f"{redis_prefix}{n}" for n in range(60)]
    pipeline = client.pipeline(transaction=False)
    for n, key in enumerate(keys):
        pipeline.set(key, n)
        pipeline.get(key)
    pipeline.hget(keys[0], "no hash")
    *answers, last = await pipeline.execute(raise_on_error=False)
    assert answers == [each for n in range(60) for each in (True, str(n).encode())]
    assert isinstance(last, ResponseError)
    pipeline.hget(keys[0], "no hash")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await pipeline.execute()
    assert await client.pipeline().execute() == []
    with pytest.raises(ValueError, match="transactions"):
        client.pipeline(transaction=True)


async def test_scripts_come_back_on_every_node(client, redis_prefix, redis_cluster):
    script = load_script("claim")
    keys = on_each_master(redis_prefix)
    for _ in range(2):
        for master in redis_cluster.masters:
            say(master, "SCRIPT", "FLUSH")
        pipeline = client.pipeline()
        for key in keys:
            pipeline.evalsha(script.sha, 1, key, "me", 1000)
        assert [type(answer) for answer in await pipeline.execute(raise_on_error=False)] == [NoScriptError] * 3
        assert [await script.run(client, [key], ["me", 1000]) for key in keys] == [1, 1, 1]
        for key in keys:
            pipeline.evalsha(script.sha, 1, key, "me", 1000)
        assert await pipeline.execute() == [1, 1, 1]


async def test_a_slot_may_move_while_it_is_used(client, redis_cluster, redis_prefix):
    script = load_script("claim")
    (key, *_), (source, target, _) = on_each_master(redis_prefix), redis_cluster.masters
    slot, ids = key_slot(key.encode()), [say(node, "CLUSTER", "MYID").decode() for node in (source, target)]
    await client.set(key, "here")
    say(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    say(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    say(source, "MIGRATE", HOST, target.port, key, 0, 1000)
    try:
        assert await client.get(key) == b"here"  # asked for at the target
        pipeline = client.pipeline()
        pipeline.get(key)
        pipeline.evalsha(script.sha, 1, key, "me", 1000)
        found, run = await pipeline.execute(raise_on_error=False)
        assert found == b"here"
        assert run == 0 or isinstance(run, NoScriptError)  # another's, on a node that may not know the script
    finally:
        for node in (target, source):
            say(node, "CLUSTER", "SETSLOT", slot, "NODE", ids[1])
    pipeline = client.pipeline()
    for _ in range(3):
        pipeline.get(key)
    assert await pipeline.execute() == [b"here"] * 3  # moved
    assert await client.get(key) == b"here"
    other = connect(redis_cluster.url)
    assert await other.get(key) == b"here"
    await other.aclose()
    say(target, "DEL", key)
    for node in redis_cluster.masters:  # back, for the tests that follow
        say(node, "CLUSTER", "SETSLOT", slot, "NODE", ids[0])
    say(source, "CLUSTER", "BUMPEPOCH")
    await until_async(lambda: client.set(key, "back"))


async def test_no_node_answers():
    client = connect("redis+cluster://127.0.0.1:1,127.0.0.1:2")
    for _ in range(3):
        with pytest.raises(UNREACHABLE):
            await client.get("a")
    (answer,) = await client.pipeline().get("a").execute(raise_on_error=False)
    assert isinstance(answer, RedisError)
    await client.aclose()


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def own_cluster():
    """For tests that break it."""
    with RedisCluster() as cluster:
        yield cluster


async def works(client, key: str) -> bool:
    try:
        async with asyncio.timeout(0.4):
            await client.set(key, "x")
    except UNREACHABLE:
        return False
    return True


@pytest.mark.parametrize("how", ["stop", "hang"])
async def test_a_replica_takes_over_and_the_others_go_on_meanwhile(own_cluster, redis_prefix, how):
    """A node that hangs gives no error at all: the callers' own bounds tell that it is gone."""
    client = connect(own_cluster.url)
    script = load_script("claim")
    first, second, third = keys = on_each_master(redis_prefix)
    heard: list[str] = []

    async def follow() -> None:
        while True:
            try:
                await listen(client, f"{redis_prefix}c", heard.append)
            except UNREACHABLE:
                await asyncio.sleep(0.05)

    following = asyncio.create_task(follow())
    try:
        assert [await script.run(client, [key], ["me", 60_000]) for key in keys] == [1, 1, 1]
        await until(lambda: "" in heard)
        getattr(own_cluster.masters[0], how)()
        for _ in range(3):  # at once, and as often as one likes
            assert await works(client, second)
            assert await works(client, third)
        await until_async(lambda: works(client, first), timeout_s=BOUND_S)
        assert await script.run(client, [f"{first}"], ["x", 60_000]) == 1  # its script was never there: NOSCRIPT

        async def is_heard() -> bool:
            await works_publish(client, f"{redis_prefix}c")
            return "word" in heard

        await until_async(is_heard, timeout_s=BOUND_S)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await client.aclose()


async def test_a_dead_node_fails_only_its_part_of_a_pipeline(own_cluster, redis_prefix):
    client = connect(own_cluster.url)
    keys = on_each_master(redis_prefix)
    for key in keys:
        await client.set(key, "x")
    own_cluster.replica.stop()  # nobody takes over
    own_cluster.masters[0].stop()
    pipeline = client.pipeline()
    for _ in range(20):
        for key in keys:
            pipeline.incr(f"{key}:{{{key}}}")
        dead, *alive = await pipeline.execute(raise_on_error=False)
        assert isinstance(dead, Exception)
    assert alive == [20, 20]  # and the others' are not sent again
    await client.aclose()


async def works_publish(client, channel: str) -> None:
    try:
        async with asyncio.timeout(0.4):
            await client.publish(channel, "word")
    except UNREACHABLE:
        return
