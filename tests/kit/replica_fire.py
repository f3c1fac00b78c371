"""Fires over several gateway processes: errors, callers who leave, a Redis that pauses, a kill. All is given back."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis

from gateway.stores.redis_usage import RedisUsageSource
from tests.kit.redis_switch import RedisSwitch
from tests.kit.replica_runs import MAX_TOKENS, all_of, at_rest, keys, prices, prompt
from tests.kit.replicas import Books, Replica, Rounds, Workshop, all_workers, replicas
from tests.kit.wait import until_async

KEY: Final = "fire"
PLACES: Final = 6
PER_DAY: Final = 86_400  # so that a request, or a token, comes back each second
SECOND_US: Final = 1_000_000
BACK_WITHIN_S: Final = 10.0 + 3.0  # a lease, and a renewal
MARGIN_S: Final = 10.0  # of a busy machine
LIMITS: Final[list[dict[str, Any]]] = [
    {"per": "day", "requests": PER_DAY},
    {"per": "day", "tokens": PER_DAY},
    {"per": "month", "usd": 10_000},
    {"concurrent": PLACES},
]


@dataclass(slots=True)
class Fire:
    """The processes, each with a switch of its own before Redis, and what was answered so far."""

    running: Sequence[Replica]
    switches: Sequence[RedisSwitch]
    workshop: Workshop
    client: Redis
    prefix: str
    draw: random.Random
    seen: Counter[str]

    async def burn(self, count: int, *, in_flight: int) -> None:
        """So many requests: some fail in the upstream, some callers leave, some have ordering keys."""
        await all_of(count, in_flight, self._one)

    async def _one(self, number: int) -> None:
        draw = self.draw
        await asyncio.sleep(draw.random() * 0.04)  # callers think, or those that are refused would ask for ever
        replica = draw.choice(self.alive)
        words = draw.choice([""] * 9 + [" status=500", " status=400", " cut"])
        text = prompt(f"fire-{number:04d}", used_in=draw.randrange(20), used_out=draw.randrange(1, 40))
        text += f" ms={draw.randrange(30)}{words}"
        name = draw.choice(("", "one", "two"))
        asking = asyncio.ensure_future(replica.ask(text, key=KEY, ordering_key=name, max_tokens=MAX_TOKENS))
        if draw.randrange(5) == 0:
            await asyncio.wait((asking,), timeout=draw.random() * 0.04)
            asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            answer = await asking
            self.seen[answer.code or "ok"] += 1

    @property
    def alive(self) -> list[Replica]:
        return [one for one in self.running if not one.is_killed]

    async def poke(self) -> None:
        """Whoever comes next."""
        await self.alive[0].ask("poke in=000 out=001", key=KEY, max_tokens=MAX_TOKENS)

    async def serves(self, replica: Replica) -> bool:
        """Whether it has found its way back to the upstream, and to Redis: alone, it shows its part of the limit."""
        answer = await replica.ask("poke in=000 out=001", key=KEY, max_tokens=MAX_TOKENS)
        remaining = int(answer.headers.get("x-ratelimit-remaining-requests", 0))
        return answer.status == 200 and remaining > PER_DAY // 2

    async def hold(self, number: int) -> None:
        """Keep a place until the caller leaves."""
        replica = self.alive[number % len(self.alive)]
        await replica.ask("hold ms=60000", key=KEY, max_tokens=MAX_TOKENS)

    async def rest(self, *, within_s: float) -> Books:
        """The books once nothing is held."""
        return await at_rest(self.client, self.prefix, poke=self.poke, timeout_s=within_s)

    async def used(self) -> tuple[int, int, int]:
        """Requests, tokens and nano-dollars in the books of usage, which every worker writes each second."""
        today = datetime.now(UTC).date()
        rows = await RedisUsageSource(self.client, self.prefix).read(today - timedelta(days=1), today)
        requests = sum(row.requests for row in rows)
        return (
            requests,
            sum(row.input_tokens + row.output_tokens for row in rows),
            sum(row.cost_nano_usd for row in rows),
        )


@contextlib.asynccontextmanager
async def fire(
    folder: Path, redis_port: int, client: Redis, prefix: str, *, workers: int, seed: int = 0
) -> AsyncIterator[Fire]:
    """Three processes that are about to burn."""
    rounds = Rounds()
    async with contextlib.AsyncExitStack() as stack:
        workshop = await stack.enter_async_context(Workshop(rounds))
        switches = [await stack.enter_async_context(RedisSwitch(redis_port)) for _ in range(3)]
        urls = [switch.url for switch in switches]
        sections = {"keys": keys({KEY: LIMITS}), "prices": prices(folder), "rounds": rounds}
        run = replicas(folder, workshop.base_url, urls, prefix, workers=workers, **sections)
        running = await stack.enter_async_context(run)
        await all_workers(client, prefix, 3 * workers)
        draw = random.Random(seed)  # noqa: S311 - keeps no secret
        yield Fire(running, switches, workshop, client, prefix, draw, Counter())


async def check_used(burning: Fire, *, first_us: tuple[int, int]) -> None:
    """Limits hold exactly what the books of usage say was used up."""
    told = await burning.rest(within_s=MARGIN_S)
    (tat_us,) = [value for name, value in told.tats_us.items() if ":tokens" in name]
    (spent,) = told.spent.values()

    async def are_equal() -> bool:
        _, tokens, nano_usd = await burning.used()
        return nano_usd == spent and first_us[0] <= tat_us - tokens * SECOND_US <= first_us[1]

    try:
        await until_async(are_equal, timeout_s=MARGIN_S)
    except TimeoutError:
        raise AssertionError((told, await burning.used(), first_us)) from None
