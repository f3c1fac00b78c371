"""What every store of answers does: claims, answers that are kept and forgotten, and word of their end."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from gateway.core.answers import AROUND_BYTES, Claim, Found, Slot
from gateway.core.errors import IdempotencyUnavailable
from gateway.ports import Answers
from gateway.stores.memory_answers import MemoryAnswers
from gateway.stores.redis_answers import RedisAnswers
from gateway.stores.redis_script import connect
from gateway.wiring import monotonic_us
from tests.kit.redis import RedisServer
from tests.kit.wait import until_async

SECOND = 1_000_000
LEASE = 10 * SECOND
SLOT = Slot(kind="once", owner="t1", name="aa")
FIRST = Claim(slot=SLOT, by="one:1", fingerprint="ff")
SECOND_ONE = Claim(slot=SLOT, by="two:1", fingerprint="ff")
ROOM = 10_000


@pytest.fixture(params=["memory", "redis", "cluster"])
async def answers(request: pytest.FixtureRequest, redis_prefix: str) -> AsyncIterator[Answers]:
    if request.param == "memory":
        yield MemoryAnswers(monotonic_us, max_bytes=ROOM)
        return
    client = connect(request.getfixturevalue("redis_server" if request.param == "redis" else "redis_cluster").url)
    store = RedisAnswers(client, redis_prefix, max_bytes=ROOM, timeout_s=5)
    yield store
    await store.close()
    await client.aclose()


async def state(answers: Answers, claim: Claim, **how: int) -> str:
    return (await answers.claim(claim, **{"lease_us": LEASE, **how})).state


def at(name: str, *, kind: str = "once", owner: str = "t1") -> Claim:
    slot = Slot(kind="once" if kind == "once" else "cache", owner=owner, name=name)
    return Claim(slot=slot, by=f"x:{kind}{owner}{name}", fingerprint="ff")


async def kept(answers: Answers, claim: Claim, size: int = 3, *, for_us: int = 60 * SECOND) -> None:
    assert await state(answers, claim) == "fresh"
    assert await answers.keep(claim, b"k" * size, for_us=for_us)


async def test_a_kept_answer_is_found_with_its_times(answers: Answers) -> None:
    answer = bytes(range(256))
    assert await answers.claim(FIRST, lease_us=LEASE) == Found(state="fresh")
    assert await answers.keep(FIRST, answer, for_us=60 * SECOND)

    found = await answers.claim(SECOND_ONE, lease_us=LEASE)

    assert (found.state, found.answer) == ("kept", answer)
    assert 0 <= found.age_us < 30 * SECOND < found.left_us <= 60 * SECOND


async def test_one_of_two_has_the_claim_until_it_is_released(answers: Answers) -> None:
    assert await state(answers, FIRST) == "fresh"
    assert await state(answers, FIRST) == "fresh"
    assert await state(answers, SECOND_ONE) == "busy"
    await answers.release(SECOND_ONE)  # not its own
    assert await state(answers, SECOND_ONE) == "busy"
    await answers.release(FIRST)
    assert await state(answers, SECOND_ONE) == "fresh"


async def test_of_many_at_once_one_has_the_claim(answers: Answers) -> None:
    claims = [replace(FIRST, by=f"w:{number}") for number in range(20)]
    states = await asyncio.gather(*(state(answers, claim) for claim in claims))
    assert sorted(states) == ["busy"] * 19 + ["fresh"]


async def test_another_fingerprint_is_told_while_it_is_made_and_after(answers: Answers) -> None:
    other = replace(SECOND_ONE, fingerprint="ee")
    assert await state(answers, FIRST) == "fresh"
    assert await state(answers, other) == "other"
    await answers.keep(FIRST, b"x", for_us=60 * SECOND)
    assert await state(answers, other) == "other"


async def test_a_lease_that_has_run_out_is_free_and_its_owner_changes_nothing(answers: Answers) -> None:
    assert await state(answers, FIRST, lease_us=20_000) == "fresh"
    await until_async(lambda: _is(answers, SECOND_ONE, "fresh"))

    assert not await answers.keep(FIRST, b"late", for_us=60 * SECOND)
    await answers.release(FIRST)
    await answers.renew(FIRST, lease_us=LEASE)

    assert await state(answers, replace(FIRST, by="three:1")) == "busy"
    assert await answers.keep(SECOND_ONE, b"in time", for_us=60 * SECOND)
    assert (await answers.claim(FIRST, lease_us=LEASE)).answer == b"in time"


async def test_a_renewed_lease_lasts_from_then_on(answers: Answers) -> None:
    assert await state(answers, FIRST, lease_us=500_000) == "fresh"
    assert await state(answers, at("brief"), lease_us=500_000) == "fresh"
    await answers.renew(FIRST, lease_us=LEASE)

    await until_async(lambda: _is(answers, replace(at("brief"), by="y:1"), "fresh"))
    assert await state(answers, SECOND_ONE) == "busy"


async def test_an_answer_that_is_too_old_stays_until_it_is_made_anew(answers: Answers) -> None:
    await kept(answers, FIRST)
    assert await state(answers, SECOND_ONE, max_age_us=60 * SECOND) == "kept"
    assert await state(answers, SECOND_ONE, max_age_us=-1) == "fresh"
    assert await state(answers, FIRST) == "kept"
    assert await state(answers, FIRST, max_age_us=-1) == "busy"

    assert await answers.keep(SECOND_ONE, b"new", for_us=60 * SECOND)

    assert (await answers.claim(FIRST, lease_us=LEASE)).answer == b"new"


async def test_an_answer_is_forgotten_after_its_time(answers: Answers) -> None:
    await kept(answers, FIRST, for_us=20_000)
    await until_async(lambda: _is(answers, SECOND_ONE, "fresh"))


async def test_owners_kinds_and_names_do_not_see_each_other(answers: Answers) -> None:
    await kept(answers, FIRST)
    for other in (at("ab"), at("aa", owner="t2"), at("aa", kind="cache")):
        assert await state(answers, other) == "fresh"


async def test_what_ends_first_makes_room(answers: Answers) -> None:
    await kept(answers, at("long"), 4000, for_us=600 * SECOND)
    await kept(answers, at("brief"), 4000, for_us=100 * SECOND)
    await kept(answers, at("elsewhere", kind="cache"), 9000, for_us=SECOND)
    await kept(answers, at("new"), 4000, for_us=50 * SECOND)

    states = {name: await state(answers, replace(at(name), by="y:1")) for name in ("long", "brief", "new")}

    assert states == {"long": "kept", "brief": "fresh", "new": "kept"}
    assert await state(answers, at("elsewhere", kind="cache")) == "kept"


async def test_the_same_answer_made_anew_counts_once(answers: Answers) -> None:
    await kept(answers, at("other"), 4000, for_us=10 * SECOND)
    for _ in range(5):
        assert await state(answers, FIRST, max_age_us=-1) == "fresh"
        assert await answers.keep(FIRST, b"k" * 4000, for_us=60 * SECOND)
    assert await state(answers, replace(at("other"), by="y:1")) == "kept"


async def test_an_answer_larger_than_all_room_is_not_kept(answers: Answers) -> None:
    await kept(answers, at("huge"), ROOM - AROUND_BYTES + 1)
    assert await state(answers, at("huge")) == "fresh"


@pytest.mark.parametrize("keeps", [True, False])
async def test_who_waits_is_told_of_the_end(answers: Answers, *, keeps: bool) -> None:
    assert await state(answers, FIRST) == "fresh"
    async with answers.waiting(SLOT) as ended, asyncio.timeout(10):
        if isinstance(answers, RedisAnswers):
            await ended(30)  # told at once that the subscription has begun
        waiter = asyncio.create_task(ended(30))
        await asyncio.sleep(0)
        await (answers.keep(FIRST, b"x", for_us=SECOND) if keeps else answers.release(FIRST))
        await waiter
        await ended(0.001)  # nothing new: its time runs out


async def test_an_end_between_two_waits_is_not_missed(answers: Answers) -> None:
    async with answers.waiting(SLOT) as ended, asyncio.timeout(10):
        if isinstance(answers, RedisAnswers):
            await ended(30)
        assert await state(answers, FIRST) == "fresh"
        await answers.release(FIRST)
        await ended(30)


async def _is(answers: Answers, claim: Claim, wanted: str) -> bool:
    return await state(answers, claim) == wanted


# --- Redis alone ---------------------------------------------------------------------------------


async def test_every_key_expires_and_is_in_its_owners_slot(redis_client: Redis, redis_prefix: str) -> None:
    store = RedisAnswers(redis_client, redis_prefix, max_bytes=ROOM, timeout_s=5)
    await kept(store, at("aa"), for_us=60 * SECOND)
    await kept(store, at("bb"), for_us=5 * SECOND)
    assert await state(store, at("cc")) == "fresh"

    names = [name.decode() async for name in redis_client.scan_iter(f"{redis_prefix}*")]

    assert sorted(name.removeprefix(f"{redis_prefix}answers:{{t1}}:once:") for name in names) == [
        "claim:cc",
        "index",
        "kept:aa",
        "kept:bb",
        "sizes",
    ]
    lengths = {name: await redis_client.pttl(name) for name in names}
    assert all(0 < length <= 60_000 for length in lengths.values())
    assert all(lengths[name] > 30_000 for name in names if name.endswith(("index", "sizes")))


async def test_what_expired_by_itself_is_counted_no_longer(redis_client: Redis, redis_prefix: str) -> None:
    store = RedisAnswers(redis_client, redis_prefix, max_bytes=ROOM, timeout_s=5)
    await kept(store, at("gone"), 600, for_us=1000)
    await until_async(lambda: _is(store, at("gone"), "fresh"))
    await kept(store, at("aa"), 300)
    sizes = await redis_client.hgetall(f"{redis_prefix}answers:{{t1}}:once:sizes")
    room = b"%d" % (300 + AROUND_BYTES)
    assert sizes == {b"aa": room, b"total": room}


async def test_small_answers_take_no_more_memory_than_their_bound(redis_client: Redis, redis_prefix: str) -> None:
    bound = 500_000
    store = RedisAnswers(redis_client, redis_prefix, max_bytes=bound, timeout_s=5)
    for number in range(600):
        claim = Claim(slot=replace(SLOT, name=f"{number:064x}"), by="x:1", fingerprint="f" * 64)
        await kept(store, claim, 150)
    taken = [
        await redis_client.memory_usage(key, samples=0) async for key in redis_client.scan_iter(f"{redis_prefix}*")
    ]
    assert bound / 2 < sum(taken) < bound


async def test_a_redis_that_is_gone_or_holds_something_else_is_told_in_our_words(redis_prefix: str) -> None:
    with RedisServer() as server:
        client = connect(server.url)
        store = RedisAnswers(client, redis_prefix, max_bytes=ROOM)
        await client.set(f"{redis_prefix}answers:{{t1}}:once:kept:aa", "a string")
        with pytest.raises(IdempotencyUnavailable):
            await store.claim(FIRST, lease_us=LEASE)
        server.stop()
        for work in (
            store.claim(FIRST, lease_us=LEASE),
            store.keep(FIRST, b"x", for_us=SECOND),
            store.release(FIRST),
            store.renew(FIRST, lease_us=LEASE),
        ):
            with pytest.raises(IdempotencyUnavailable):
                await work
        async with store.waiting(SLOT) as ended:
            await ended(0.01)
        await store.close()
        await client.aclose()
