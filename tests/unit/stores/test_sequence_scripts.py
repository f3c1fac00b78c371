"""Lua == Python: the sequence scripts on a real Redis against `core.sequences.Pins` on random histories."""

import asyncio
import uuid
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.sequences import Pin, Pins
from gateway.core.types import Place
from gateway.stores.redis_script import connect
from gateway.stores.redis_sequences import RedisSequenceStore

pytest_plugins = ["tests.kit.redis"]

NOW = 1_700_000_000_000_000
MINUTE = 60_000_000  # leases of minutes: keys expire by the real clock, which must not pass within a test
PLACES = [Place(backend="b", model="m", replica=r) for r in ("r1", "r2")] + [Place(backend="b", model="n", version="3")]
NUMBERS = [1, 2, 2**53 + 1, 2**64 - 1]

owners = st.integers(0, 2).map(str)
leases = {
    "idle_us": st.integers(1, 5).map(lambda n: n * MINUTE + 7),
    "for_us": st.integers(0, 3).map(lambda n: n * MINUTE),
}
places = st.sampled_from(PLACES)
steps = st.one_of(
    st.tuples(st.just("find"), owners, st.fixed_dictionaries({"for_us": leases["for_us"]})),
    st.tuples(
        st.just("pin"),
        owners,
        st.fixed_dictionaries({"place": places, "tried": st.permutations(NUMBERS).map(lambda n: n[:2]), **leases}),
    ),
    st.tuples(
        st.sampled_from(["lose", "end"]),
        owners,
        st.fixed_dictionaries({"place": places, "number": st.sampled_from(NUMBERS)}) | st.just({}),
    ),
)
histories = st.lists(st.tuples(st.integers(0, 9 * MINUTE), steps), min_size=1, max_size=25)


def pin_of(seen: Pin | None, said: dict) -> Pin:
    """The pin that a step is about: the one last seen of its owner, or any."""
    if said or seen is None:
        return Pin(place=said.get("place", PLACES[0]), number=said.get("number", 1), idle_us=0)
    return seen


async def play(store: RedisSequenceStore, history) -> None:
    spec, now = Pins(), NOW
    seen: dict[str, Pin | None] = {}
    for gap, (what, owner, said) in history:
        now += gap
        store._now = now
        if what == "find":
            seen[owner] = expected = spec.find(owner, **said, now_us=now)
            assert await store.find(owner, **said) == expected
        elif what == "pin":
            place, tried, lease = said["place"], said["tried"], {k: said[k] for k in ("idle_us", "for_us")}
            expected = spec.pin(owner, place, tried, **lease, now_us=now)
            assert await store.pin(owner, place, tried, **lease) == expected
            if expected is not None:
                seen[owner] = Pin(place=place, number=expected, idle_us=lease["idle_us"])
        else:
            pin = pin_of(seen.get(owner), said)
            getattr(spec, what)(owner, pin, now_us=now)
            await getattr(store, what)(owner, pin)
        assert await kept(store, now) == specified(spec, now)


async def kept(store: RedisSequenceStore, now: int) -> dict:
    """What is alive in Redis: the end of each pin's and each number's lease."""
    ends = {}
    async for key in store._client.scan_iter(f"{store._prefix}*", count=1000):
        end = int(await store._client.hget(key, "until"))
        if end > now:
            ends[key.decode().removeprefix(store._prefix)] = end
    return ends


def specified(spec: Pins, now: int) -> dict:
    """The same of the specification."""
    pins = {f"pin:{owner}": row.until_us for owner, row in spec._rows.items()}
    numbers = {f"number:{b}/{m}:{n}": claim.until_us for (b, m, n), claim in spec._claims.items()}
    return {key: end for key, end in (pins | numbers).items() if end > now}


@pytest.fixture(scope="module")
def runner():
    """One event loop for all examples of a property."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(redis_server, runner):
    client = connect(redis_server.url)
    yield client
    runner.run(client.aclose())


@settings(max_examples=150)
@given(history=histories)
def test_lua_equals_python_on_random_histories(client, runner, history):
    store = RedisSequenceStore(client, f"history:{uuid.uuid4().hex}:", timeout_s=10)
    runner.run(play(store, history))


def test_by_its_own_clock_every_key_expires_after_lease_and_request(client, runner):
    prefix = f"ttl:{uuid.uuid4().hex}:"
    store = RedisSequenceStore(client, prefix, timeout_s=10)

    async def lives_ms() -> list[int]:
        return [await client.pttl(key) async for key in client.scan_iter(f"{prefix}*")]

    async def history() -> None:
        assert await store.pin("o", PLACES[0], [7], idle_us=5 * MINUTE, for_us=MINUTE) == 7
        pinned = await lives_ms()
        assert len(pinned) == 2
        assert all(350_000 < left <= 360_000 for left in pinned)
        found = await store.find("o", for_us=10 * MINUTE)
        assert found == replace(found, place=PLACES[0], number=7, idle_us=5 * MINUTE, is_lost=False)
        assert 0 <= found.silent_us < 10_000_000
        assert all(890_000 < left <= 900_000 for left in await lives_ms())
        await store.end("o", found)
        assert await store.find("o", for_us=0) is None
        assert len(await lives_ms()) == 1  # its number stays its owner's while late requests may be under way

    runner.run(history())


def test_however_many_ask_at_once_nobody_is_refused(client, runner):
    store = RedisSequenceStore(client, f"many:{uuid.uuid4().hex}:", timeout_s=10)
    lease = {"idle_us": MINUTE, "for_us": 0}

    async def many() -> None:
        pinned = [store.pin(str(n), PLACES[0], [n + 1], **lease) for n in range(200)]
        assert await asyncio.gather(*pinned) == list(range(1, 201))
        found = await asyncio.gather(*(store.find(str(n), for_us=0) for n in range(200)))
        assert [pin.number for pin in found] == list(range(1, 201))

    runner.run(many())
