"""Runs over several gateway processes: what is offered, and what must hold afterwards, exactly.

Tests make them small, `python -m tests.bench.admission` as large as they are meant.
"""

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis

from gateway.core.rate_limit import PERIODS_US
from gateway.core.tokens import work_of
from gateway.core.types import OpenAIPayload
from tests.kit.replicas import Books, Replica, Rounds, Workshop, all_workers, books, replicas

MAX_TOKENS: Final = 50
USD_PER_MILLION: Final = 1000  # so that a token costs a tenth of a cent: 1,000,000 nano-USD
NANO_PER_TOKEN: Final = 1_000_000
LIMITED: Final = "429 rate_limited"
CLOSED: Final = {"name": "chat", "split": [{"backend": "llm", "model": "m"}], "on_store_down": "closed"}
"""No worker lets anything pass that it has no word on: a machine so busy that Redis seems late spoils no count."""


def keys(limits: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The section `keys`: each name is its tenant and its secret, too."""
    return [
        {"id": name, "tenant": name, "key_sha256": hashlib.sha256(name.encode()).hexdigest(), "limits": each}
        for name, each in limits.items()
    ]


async def redis_us(client: Redis) -> int:
    """Redis's clock."""
    seconds, micros = await client.time()
    return int(seconds) * 1_000_000 + int(micros)


def prompt(mark: str, *, used_in: int, used_out: int) -> str:
    """What to ask the upstream for; all with marks of one length are estimated alike."""
    return f"{mark} in={used_in:03d} out={used_out:03d}"


def reserved(text: str) -> int:
    """The tokens that such a prompt reserves."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS}
    work = work_of(OpenAIPayload(body=body))
    return work.input_tokens + work.output_tokens


def prices(folder: Path) -> str:
    """A price table for the upstream's model."""
    path = folder / "prices.yaml"
    path.write_text(f"prices: {{m: {{input: {USD_PER_MILLION}, output: {USD_PER_MILLION}}}}}\n")
    return str(path)


async def at_rest(
    client: Redis, prefix: str, *, poke: Callable[[], Awaitable[object]] | None = None, timeout_s: float = 5.0
) -> Books:
    """The books once nothing is held any more; `poke` is whoever comes next, and gives back what leases have lost."""
    try:
        async with asyncio.timeout(timeout_s):
            while not (told := await books(client, prefix)).are_at_rest:
                if poke is not None:
                    await poke()
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"still held: {await books(client, prefix)}") from None
    return told


async def all_of(count: int, in_flight: int, one: Callable[[int], Awaitable[None]]) -> None:
    """`one` for each number, so many at once."""
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as lanes:
        for _ in range(in_flight):
            lanes.create_task(lane())


# --- limits ----------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Offered:
    """What became of many requests with one key.

    Attributes:
        used: the tokens that each admitted one has used up.
        refused: by the limit; `unsure` had no word from Redis in time, and were refused too.
        first_us: Redis's clock before the first was sent, and after the first had passed.
        refused_us: the same around the last one, which was refused.
        reserve: the tokens that each reserves.
    """

    used: list[int]
    refused: int
    unsure: int
    first_us: tuple[int, int]
    refused_us: tuple[int, int]
    reserve: int

    @property
    def admitted(self) -> int:
        return len(self.used)


async def offer(
    replicas: Sequence[Replica],
    client: Redis,
    prefix: str,
    key: str,
    *,
    count: int,
    in_flight: int,
    is_whole: bool,
    seed: int = 0,
) -> Offered:
    """Ask `count` times at once, then one by one, each after all before it are settled, until one is refused.

    What is used up is what is reserved where `is_whole`, else any part of it.
    """
    draw = random.Random(seed)  # noqa: S311 - keeps no secret
    used: list[int] = []
    refusals: Counter[str] = Counter()
    passed = asyncio.Event()
    reserve = reserved(prompt("request-00000", used_in=0, used_out=0))

    async def one(number: int) -> None:
        spent = reserve if is_whole else draw.randint(1, reserve)
        text = prompt(f"request-{number:05d}", used_in=spent // 2, used_out=spent - spent // 2)
        answer = await draw.choice(replicas).ask(text, key=key, max_tokens=MAX_TOKENS)
        if answer.status == 200:
            used.append(spent)
            passed.set()
        else:
            refusals[f"{answer.status} {answer.code}"] += 1

    before = await redis_us(client)
    offering = asyncio.create_task(all_of(count, in_flight, one))
    await passed.wait()
    first_us = (before, await redis_us(client))
    await offering
    for _ in range(count):
        await at_rest(client, prefix)  # what an answered request gives back may come later than its answer
        asked, hits = await redis_us(client), refusals[LIMITED]
        await one(count)
        if refusals[LIMITED] > hits:
            break
    else:
        raise AssertionError(f"{len(used)} passed, and none was refused")
    refused_us = (asked, await redis_us(client))
    refused, unsure = refusals.pop(LIMITED), refusals.pop("503 limits_unavailable", 0)
    assert not refusals, refusals
    return Offered(used=used, refused=refused, unsure=unsure, first_us=first_us, refused_us=refused_us, reserve=reserve)


def check_rate(told: Books, offered: Offered, *, key: str, kind: str, amount: int, per: str) -> str:
    """Requests or tokens: the counter holds exactly what was admitted, and what was used; nothing more would pass.

    The counter is never idle in such a run. So it is the instant of the first admission, which is known to lie between
    two readings of Redis's clock, and the time that everything admitted since then has cost.
    """
    period_us = PERIODS_US[per]
    (tat_us,) = [value for name, value in told.tats_us.items() if f"key:{key}:{kind}" in name]
    amounts = offered.used if kind == "tokens" else [1] * offered.admitted
    began_us = tat_us - sum(-(-one * period_us // amount) for one in amounts)
    unsure_us = -(-period_us // amount) * offered.unsure if kind == "requests" else 0  # a request is never given back
    assert offered.first_us[0] <= began_us <= offered.first_us[1] + unsure_us, (offered, began_us)
    cost_us = -(-(offered.reserve if kind == "tokens" else 1) * period_us // amount)
    bound_us = amount * -(-period_us // amount)  # the documented burst: the whole amount at once
    assert tat_us <= offered.refused_us[1] + bound_us, "more was admitted than the limit gives"
    assert tat_us + cost_us > offered.refused_us[0] + bound_us, "less was admitted than the limit gives"
    came_back = (offered.refused_us[0] - began_us) * amount // period_us
    return f"{sum(amounts):,} of {amount:,} {kind}/{per} + {came_back:,} that came back"


def check_money(told: Books, offered: Offered, *, key: str, nano_usd: int) -> str:
    """Money: the counter holds exactly what was used, it is no more than the budget, and one more would be."""
    (spent,) = [value for name, value in told.spent.items() if f"key:{key}:usd" in name]
    assert spent == sum(offered.used) * NANO_PER_TOKEN, (spent, sum(offered.used))
    assert spent <= nano_usd < spent + offered.reserve * NANO_PER_TOKEN, (spent, nano_usd)
    return f"{spent / 1e9:.3f} of {nano_usd / 1e9:.3f} USD"


async def limits_run(
    folder: Path,
    redis_url: str,
    client: Redis,
    prefix: str,
    *,
    workers: int,
    count: int,
    in_flight: int,
    amount: int,
    seed: int = 0,
) -> dict[str, str]:
    """Three processes, a key for each kind of limit, each asked for `count` requests; what was found of each.

    `amount` is a limit of requests per minute, so that some come back meanwhile; tokens and money are as much as that
    many requests may use.
    """
    reserve = reserved(prompt("request-00000", used_in=0, used_out=0))
    tokens, nano_usd = amount * reserve, amount * reserve * NANO_PER_TOKEN + NANO_PER_TOKEN  # one token's too much
    limits: dict[str, list[dict[str, Any]]] = {
        "requests": [{"per": "minute", "requests": amount}],
        "tokens": [{"per": "hour", "tokens": tokens}],
        "usd": [{"per": "month", "usd": nano_usd / 1e9}],
    }
    rounds, found = Rounds(), dict[str, str]()
    sections = {"keys": keys(limits), "prices": prices(folder), "rules": [CLOSED], "rounds": rounds}
    async with (
        Workshop(rounds) as workshop,
        replicas(folder, workshop.base_url, [redis_url] * 3, prefix, workers=workers, **sections) as running,
    ):
        await all_workers(client, prefix, 3 * workers)
        for kind in limits:
            began_s = time.monotonic()
            offered = await offer(
                running, client, prefix, kind, count=count, in_flight=in_flight, is_whole=kind == "usd", seed=seed
            )
            took_s = time.monotonic() - began_s
            told = await at_rest(client, prefix)
            if kind == "usd":
                line = check_money(told, offered, key=kind, nano_usd=nano_usd)
                assert offered.admitted == amount
            else:
                per, most = ("minute", amount) if kind == "requests" else ("hour", tokens)
                line = check_rate(told, offered, key=kind, kind=kind, amount=most, per=per)
            asked = offered.admitted + offered.refused + offered.unsure
            found[kind] = (
                f"{offered.admitted:,} of {asked:,} admitted in {took_s:.1f} s, {offered.unsure} unsure: {line}"
            )
            assert len(workshop.log) == offered.admitted, "the upstream saw what was refused"
            workshop.log.clear()
    return found
