"""What must hold when all faults are healed: every kind is served again, and nothing is held by anybody."""

import asyncio
import random
import re
import time
from typing import Final

import httpx
from redis.asyncio import Redis

from tests.chaos.allowed import GRACE_S
from tests.chaos.checker import Finding
from tests.chaos.traffic import CLIENTS, Traffic
from tests.chaos.world import PREFIX, World
from tests.kit.replicas import HOST, books

IN_A_ROW: Final = 2
"""Each kind has to succeed so often, over fresh connections: both workers are met sooner or later."""
LEASE_S: Final = 10.0
NAMED_ZERO: Final = ("gateway_requests_in_flight", "gateway_requests_waiting", "gateway_breaker_open")
PERSISTENT: Final = re.compile(
    r"(\{keys\}:|\{rules\}|\{rules\}:history|\{rules\}:workers|audit|requests|deploys|rollouts|events|shadows)"
)
"""What docs/redis.md says never expires."""


async def recovered(traffic: Traffic, *, since: float) -> tuple[float, list[Finding]]:
    """Ask for every kind until it is served; how long after `since` that was, and what was not within `GRACE_S`."""
    asked = [asyncio.create_task(_served(traffic, kind, since)) for kind in CLIENTS]
    told = await asyncio.gather(*asked)
    late = [
        Finding(rule="recovery", text=f"{kind} was not served within {GRACE_S:g} s after healing: {word}")
        for kind, (_, word) in zip(CLIENTS, told, strict=True)
        if word
    ]
    return max(at for at, _ in told) - since, late


async def _served(traffic: Traffic, kind: str, since: float) -> tuple[float, str]:
    """When it was served so often in a row; and the last word where it was not."""
    draw, in_a_row, word = random.Random(f"probe/{kind}/{since}"), 0, "nothing was asked"
    while in_a_row < IN_A_ROW:
        if time.monotonic() > since + GRACE_S:
            return time.monotonic(), word
        ended = await traffic.one(kind, f"probe-{kind}", draw)
        is_served = ended.is_success or ended.code == "rate_limited"  # a limit at work is a service
        in_a_row, word = (in_a_row + 1, "") if is_served else (0, ended.code or ended.how)
        await asyncio.sleep(0 if is_served else 0.2)
    return time.monotonic(), ""


async def at_rest(world: World, traffic: Traffic) -> list[Finding]:
    """Once no client asks any more: gauges at zero, nothing held in Redis, no counter for ever, keys as was said."""
    client = Redis(host=HOST, port=world.redis.port)
    try:
        return [
            *await _gauges(world),
            *await _books(client, traffic),
            *await _without_end(client),
            *await _keys(traffic),
        ]
    finally:
        await client.aclose()


async def _gauges(world: World) -> list[Finding]:
    found = ["not read"]
    until = time.monotonic() + GRACE_S
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        while found and time.monotonic() < until:
            page = (await http.get(f"{world.gateway.ops_url}/metrics")).text
            found = [line for line in page.splitlines() if line.startswith(NAMED_ZERO) and not line.endswith(" 0.0")]
            found += [line for line in page.splitlines() if line == "gateway_redis_up 0.0"]
            await asyncio.sleep(0.3)
    return [Finding(rule="gauges", text=text) for text in found]


async def _books(client: Redis, traffic: Traffic) -> list[Finding]:
    """What workers hold in Redis is given back; what the dead held is, by whoever comes after their leases."""
    until = time.monotonic() + LEASE_S + GRACE_S
    while not (told := await books(client, PREFIX)).are_at_rest:
        if time.monotonic() > until:
            return [Finding(rule="nothing held", text=str(told))]
        for kind in ("serial", "release", "requests", "tokens", "concurrent"):
            await traffic.one(kind, f"probe-{kind}", random.Random(0))
        await asyncio.sleep(0.5)
    return []


async def _without_end(client: Redis) -> list[Finding]:
    found = []
    async for key in client.scan_iter(f"{PREFIX}*", count=1000):
        name = key.decode().removeprefix(PREFIX)
        if await client.ttl(key) == -1 and not PERSISTENT.match(name):
            found.append(Finding(rule="keys that expire", text=f"{name} would stay in Redis for ever"))
    return found


async def _keys(traffic: Traffic) -> list[Finding]:
    """A key that the control plane has said yes to works, and one that it has said was deleted does not."""
    said = [(id_, secret, "ok") for id_, secret in traffic.made.there.items()]
    said += [(id_, secret, "unauthorized") for id_, secret in traffic.made.gone.items()]
    found = []
    for id_, secret, wanted in said:
        word = await traffic.key_works(secret)
        if word != wanted:
            found.append(Finding(rule="what was promised", text=f"key {id_}: {word} where {wanted} was promised"))
    return found
