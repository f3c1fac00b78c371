"""Lua == Python: `admissions.lua` on a real Redis against `core.admissions.Book` on random histories, state and all."""

import asyncio
import contextlib
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.core.admissions import Ask, Book, Standing
from gateway.core.rate_limit import Take, boundaries_us
from gateway.core.types import Limit
from gateway.stores.redis_script import connect
from gateway.stores.redis_steps import Steps
from tests.kit.redis import RedisServer

pytest_plugins = ["tests.kit.redis"]

NOW = 1_700_000_012_345_677
MINUTE = 60_000_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR
LEASE = 3 * MINUTE
# Keys expire by the real clock, which must not pass within a test: all counts in minutes, but for an interval whose
# first nine multiples are seconds away from them.
ODD = 205 * MINUTE + 7_000_003
TAKES = [
    Take(
        key="k:requests",
        limit=Limit(kind="requests", amount=6, per="hour", burst=3),
        cost=HOUR // 6,
        bound=HOUR // 2,
        is_held=False,
    ),
    Take(
        key="k:odd/day:model=a{b}c",
        limit=Limit(kind="requests", amount=7, per="day", burst=9),
        cost=ODD,
        bound=9 * ODD,
        is_held=False,
    ),
    *(
        Take(
            key="t:tokens",
            limit=Limit(kind="tokens", amount=100, per="hour", burst=50),
            cost=cost,
            bound=HOUR // 2,
            is_held=held,
        )
        for cost, held in [(0, True), (HOUR // 3, True), (HOUR // 5, True), (HOUR, True), (HOUR // 10, False)]
    ),
    *(
        Take(key=f"k:usd:{per}", limit=Limit(kind="usd", amount=10**15, per=per), cost=cost, bound=10**15, is_held=held)
        for per in ("day", "month")
        for cost, held in [(0, True), (333_333_333_333_333, True), (999_999_999_999_999, False)]
    ),
    *(
        Take(key=key, limit=Limit(kind="concurrent", amount=2), cost=1, bound=bound, is_held=True)
        for key, bound in [("one", 1), ("few", 3), ("many", 40)]
    ),
]
OWNERS = ["t1", "t2"]
QUEUES = ["", "", "q", 't1:ä key {of} "all" / sorts\x01']


# What may happen in one round trip: admissions end, others are renewed, others come.
rounds = st.tuples(
    st.one_of(st.integers(0, 6), st.integers(0, 120), st.integers(0, 40 * 24 * 60), st.integers(-24 * 60, 0)),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 90)), max_size=2),
    st.lists(st.integers(0, 30), max_size=3),
    st.lists(
        st.tuples(
            st.sampled_from(OWNERS),
            st.lists(st.sampled_from(TAKES), max_size=4),
            st.sampled_from(QUEUES),
            st.integers(1, 4),
            st.booleans(),
        ),
        max_size=4,
    ),
)
histories = st.lists(rounds, min_size=1, max_size=20)


class Player:
    """One history on both, the same ids and instants."""

    def __init__(self, client: Redis) -> None:
        self.prefix = f"history:{uuid.uuid4().hex}:"
        self.woken: list[str] = []
        self.steps = Steps(client, self.prefix, self.woken.append, timeout_s=10, lease_us=LEASE)
        self.client = client
        self.book = Book(LEASE)
        self.asks: list[Ask] = []
        self.now = NOW
        self.count = itertools.count()

    async def play(self, gap: int, ended: Any, renewed: Any, coming: Any) -> None:
        self.now = max(NOW, self.now + gap * MINUTE)
        self.steps._now_us = self.now
        expected = self.end(ended)
        asks = self.come(coming)
        replies, late = {}, []
        for owner in OWNERS:
            for ask in [ask for ask in asks if ask.owner == owner]:
                replies[ask.id], woken = self.book.admit(ask, now_us=self.now)
                late += woken
        answers = await asyncio.gather(*(self.steps.ask(ask) for ask in asks))
        if self.steps._sender is not None:
            await self.steps._sender
        assert [answer.reply for answer in answers if answer] == [replies[ask.id] for ask in asks]
        assert sorted(self.woken) == sorted(expected + late)
        self.woken.clear()
        await self.renew(renewed)
        self.asks = list({ask.id: ask for ask in (*self.asks, *asks)}.values())
        assert await self.kept() == self.specified()

    def end(self, ended: Any) -> list[str]:
        """Some of the newest end, also those that are gone already."""
        woken: list[str] = []
        for back, used in ended:
            ask = self.asks[-1 - back] if back < len(self.asks) else Ask(id="w:none", owner="t1")
            spent = [used * (i + 1) * MINUTE for i, _ in enumerate(take for take in ask.takes if take.is_held)]
            woken += self.book.settle(ask.owner, ask.id, spent, now_us=self.now)
            self.steps.settle(ask.owner, ask.id, spent)
        return woken

    def come(self, coming: Any) -> list[Ask]:
        asks = []
        for owner, taken, queue, bound, is_again in coming:
            again = [ask for ask in self.asks[-3:] if ask.owner == owner and is_again and ask not in asks]
            name = f"w:{next(self.count)}"
            ask = Ask(id=name, owner=owner, takes=tuple(taken), queue=queue, queue_bound=bound)
            asks.append(again[0] if again else ask)
        return asks

    async def renew(self, renewed: Any) -> None:
        ids: dict[str, list[str]] = {}
        for back in renewed:
            ask = self.asks[-1 - back] if back < len(self.asks) else Ask(id="w:none", owner="t2")
            ids.setdefault(ask.owner, []).append(ask.id)
        expected: list[str] = []
        standings: dict[str, Standing] = {}
        for owner, names in ids.items():
            said, woken = self.book.renew(owner, names, now_us=self.now)
            expected += woken
            standings.update(zip(names, said, strict=True))
        told, _ = await self.steps.renew(ids) if ids else ({}, 0.0)
        assert told == standings
        assert self.woken == expected
        self.woken.clear()

    async def kept(self) -> dict[str, Any]:
        """What lies in Redis; of counters that say the same as none, nothing."""
        kept: dict[str, Any] = {}
        async for raw in self.client.scan_iter(f"{self.prefix}*", count=1000):
            key = raw.decode().removeprefix(f"{self.prefix}adm:")
            assert await self.client.pttl(raw) > 0, key
            form = key.split(":")[1]
            if form in ("rate", "places", "number"):
                kept[key] = int(await self.client.get(raw))
            elif form in ("open", "queue"):
                kept[key] = [
                    (name.decode(), int(n)) for name, n in await self.client.zrange(raw, 0, -1, withscores=True)
                ]
            elif form == "spent":
                kept[key] = tuple(int(one) for one in await self.client.hmget(raw, "spent", "until"))
            else:
                fields = await self.client.hgetall(raw)
                kept[key] = {name.decode(): json.loads(held) for name, held in fields.items()}
        return {key: value for key, value in kept.items() if self.counts(key, value)}

    def counts(self, key: str, value: Any) -> bool:
        form = key.split(":")[1]
        return value > self.now if form == "rate" else value[1] > self.now if form == "spent" else bool(value)

    def specified(self) -> dict[str, Any]:
        """The same of the book."""
        told: dict[str, Any] = {}
        for owner, own in self.book._owners.items():
            root = f"{{{owner}}}:"
            told |= {f"{root}rate:{key}": tat for key, tat in own.tats_us.items()}
            told |= {f"{root}places:{key}": count for key, count in own.places.items()}
            told |= {f"{root}spent:{key}": spent for key, spent in own.spent.items()}
            told |= {f"{root}queue:{name}": list(line.items()) for name, line in own.queues.items()}
            told |= {f"{root}number:{name}": number for name, number in own.numbers.items()}
            ends = sorted((one.until_us, name) for name, one in own.open.items())
            told[f"{root}open"] = [(name, end) for end, name in ends]
            told[f"{root}held"] = {name: held_of(one) for name, one in own.open.items()}
        return {key: value for key, value in told.items() if self.counts(key, value)}


@contextlib.asynccontextmanager
async def playing(client: Redis) -> AsyncIterator[Player]:
    player = Player(client)
    try:
        yield player
    finally:
        await player.steps.close()


def held_of(one: Any) -> list[str]:
    words = {"rate": "rate", "places": "places", "budget": "spent"}
    told = [one.queue]
    for take, until_us in zip(one.held, one.untils_us, strict=True):
        told += [f"{words[take.form]}:{take.key}", str(take.cost), str(take.bound), str(until_us)]
    return told


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all examples of a property."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(redis_server: RedisServer, runner: asyncio.Runner) -> Iterator[Redis]:
    client = connect(redis_server.url)
    yield client
    runner.run(client.aclose())


@settings(max_examples=150)
@given(history=histories)
def test_lua_equals_the_book_on_random_histories(client, runner, history):
    async def play() -> None:
        async with playing(client) as player:
            for one in history:
                await player.play(*one)

    runner.run(play())


def take(kind: str, cost: int) -> Take:
    return next(one for one in TAKES if one.limit.kind == kind and one.cost == cost and one.is_held)


def test_of_many_dead_leases_each_step_gives_some_back(client, runner):
    place, minutes = take("concurrent", 1), LEASE // MINUTE
    crowd = [(OWNERS[0], [TAKES[-1]], "q", 400, False) for _ in range(300)]

    async def play() -> None:
        async with playing(client) as player:
            await player.play(0, [], [], crowd[:40])
            await player.play(minutes, [], [], [(OWNERS[0], [], "", 0, False)])
            assert len(player.book._owners[OWNERS[0]].open) == 40 - 16
            await player.play(0, [], [], [(OWNERS[0], [place], "q", 400, False)] * 3)
            await player.play(0, [], [], [(OWNERS[0], [], "q", 400, False)] * 270)
            await player.play(minutes, [], [5], [])
            assert len(player.book._owners[OWNERS[0]].open) > 1
            await player.play(0, [], [5], [])
            assert len(player.book._owners[OWNERS[0]].open) == 1

    runner.run(play())


def test_what_was_spent_in_a_period_that_is_over_is_put_right_in_none(client, runner):
    spending = (OWNERS[0], [take("usd", 333_333_333_333_333)], "", 0, False)

    async def play() -> None:
        async with playing(client) as player:
            await player.play(0, [], [], [spending])
            await player.play(24 * 60, [], [0], [])
            await player.play(0, [], [], [spending])
            await player.play(0, [(1, 90)], [], [])
            await player.play(0, [(0, 90)], [], [])

    runner.run(play())


async def lives_ms(client: Redis, prefix: str) -> dict[str, int]:
    return {
        key.decode().removeprefix(f"{prefix}adm:{{t1}}:"): await client.pttl(key)
        async for key in client.scan_iter(f"{prefix}*")
    }


def test_by_its_own_clock_every_key_expires_in_its_time(client, runner):
    async def play() -> None:
        prefix = f"ttl:{uuid.uuid4().hex}:"
        steps = Steps(client, prefix, lambda _: None, timeout_s=10, lease_us=LEASE)
        takes = (TAKES[0], take("tokens", HOUR // 3), take("usd", 333_333_333_333_333), TAKES[-1])
        answered = await steps.ask(Ask(id="w:1", owner="t1", takes=takes, queue="q", queue_bound=1))
        assert answered is not None
        assert answered.reply.admitted
        now_us = time.time_ns() // 1000
        assert abs(answered.reply.now_us - now_us) < MINUTE
        lives = await lives_ms(client, prefix)
        day_ends_us = boundaries_us("day", answered.reply.now_us)[1]
        wanted_ms = {
            "open": 2 * HOUR // 1000,
            "held": 2 * HOUR // 1000,
            "queue:q": 2 * HOUR // 1000,
            "number:q": DAY // 1000,
            "rate:k:requests": HOUR // 6 // 1000,
            "rate:t:tokens": HOUR // 3 // 1000,
            "places:many": 2 * HOUR // 1000,
            "spent:k:usd:day": (day_ends_us - answered.reply.now_us + DAY) // 1000,
        }
        assert lives.keys() == wanted_ms.keys()
        for key, wanted in wanted_ms.items():
            assert wanted - 10_000 < lives[key] <= wanted + 1, key
        for key in lives:  # what is renewed lives on, as long as it is
            await client.pexpire(f"{prefix}adm:{{t1}}:{key}", 60_000)
        assert await steps.renew({"t1": ["w:1"]}) != ({}, 0.0)
        renewed = await lives_ms(client, prefix)
        kept = {key for key, left in renewed.items() if left > 60_000}
        assert kept == {"open", "held", "queue:q", "number:q", "places:many"}
        steps.settle("t1", "w:1", [0, 0, 0])
        await steps.close()
        assert (await lives_ms(client, prefix)).keys() == {"number:q", "rate:k:requests"}

    runner.run(play())
