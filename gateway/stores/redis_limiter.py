"""The limiter that all replicas share: `core.rate_limit` as one atomic script in Redis.

Layout: the counter of a charge is the string `{prefix}limit:{<owner>}:<key>`, for example
`gw:limit:{k1}:k1:requests:60/minute:10`. The braces are a hash tag: all charges of one admission have one
owner, so their counters share a slot of a Redis Cluster. Its value is the theoretical arrival time in
microseconds of Redis's clock, and it expires when that time has passed; no counter is ever without an expiry.

Concurrent charges travel together: while one round trip is under way, new charges wait and go with the next,
so a busy worker needs one connection and a fraction of the work per charge.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.core.rate_limit import Charge, Outcome, verdict
from gateway.core.types import Verdict
from gateway.ports import Limiter
from gateway.stores.redis_script import UNREACHABLE, load_script

RETRY_AFTER_S = 1.0  # how long Redis is left alone after a failure
MAX_TOGETHER = 256  # admissions in one round trip; bounds how long Redis is kept busy by one worker

_log = logging.getLogger(__name__)


class RedisLimiter:
    """`Limiter` over Redis; `local` decides, marked as degraded, while Redis is out of reach.

    No charge waits longer than `timeout_s`. After a failure Redis is skipped for a second; then one charge
    tries it while the others still go to `local`. A charge whose caller leaves may have been taken.
    """

    def __init__(self, client: Redis, prefix: str, local: Limiter, timeout_s: float = 0.25) -> None:
        self._client = client
        self._prefix = prefix
        self._local = local
        self._timeout_s = timeout_s
        self._script = load_script("charge")
        self._waiting: list[_Waiting] = []
        self._sender: asyncio.Task[None] | None = None
        self._down = False
        self._try_at_s = 0.0

    @property
    def degraded(self) -> bool:
        """Whether the last word on Redis was that it is out of reach."""
        return self._down

    async def charge(self, charges: Sequence[Charge]) -> Verdict:
        """See `ports.Limiter`."""
        if not charges:
            return verdict((), ())
        loop = asyncio.get_running_loop()
        if self._down:
            if loop.time() < self._try_at_s:
                return await self._by_local(charges)
            self._try_at_s = loop.time() + RETRY_AFTER_S  # this charge is the probe
        waiting = _Waiting(tuple(charges), loop.create_future(), loop.time())
        self._waiting.append(waiting)
        if self._sender is None:
            self._sender = loop.create_task(self._send_all(), name="redis-limiter")
        outcomes = await waiting.outcomes
        return verdict(charges, outcomes) if outcomes else await self._by_local(charges)

    async def close(self) -> None:
        """Stop; charges still waiting are decided by the local limiter. The client stays its owner's."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)

    async def _by_local(self, charges: Sequence[Charge]) -> Verdict:
        return replace(await self._local.charge(charges), degraded=True)

    async def _send_all(self) -> None:
        """Send what waits until nothing does. Every future gets an answer, whatever happens here."""
        together: list[_Waiting] = []
        try:
            while self._waiting:
                together = [w for w in self._waiting[:MAX_TOGETHER] if not w.outcomes.done()]
                del self._waiting[:MAX_TOGETHER]
                if together:
                    await self._send(together)
        finally:
            self._sender = None
            for waiting in (*together, *self._waiting):
                waiting.answer(None)
            self._waiting.clear()

    async def _send(self, together: Sequence["_Waiting"]) -> None:
        """One round trip. On failure all that wait are answered at once, so that none waits twice."""
        now_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(together[0].since_s + self._timeout_s - now_s):
                replies = await self._round_trip(together, load=False)
                forgotten = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
                if forgotten:  # Redis restarted: nothing of these has run
                    again = await self._round_trip([together[i] for i in forgotten], load=True)
                    for i, reply in zip(forgotten, again, strict=True):
                        replies[i] = reply
        except UNREACHABLE as error:
            self._failed(error)
            return
        failure = next((reply for reply in replies if isinstance(reply, RedisError)), None)
        for waiting, reply in zip(together, replies, strict=True):
            waiting.answer(None if isinstance(reply, RedisError) else _outcomes(reply))
        if failure is None:
            self._works()
        else:
            self._failed(failure)

    async def _round_trip(self, together: Sequence["_Waiting"], *, load: bool) -> list[Any]:
        """The script's reply, or its `ResponseError`, for each admission."""
        calls = [self._call(waiting.charges) for waiting in together]
        if len(calls) == 1 and not load:  # the usual case of a quiet worker, at half the work of a pipeline
            try:
                return [await self._client.evalsha(*calls[0])]
            except ResponseError as error:
                return [error]
        pipeline = self._client.pipeline(transaction=False)
        if load:
            pipeline.script_load(self._script.source)
        for call in calls:
            pipeline.evalsha(*call)
        replies = await pipeline.execute(raise_on_error=False)
        return replies[1:] if load else replies

    def _call(self, charges: Sequence[Charge]) -> tuple[Any, ...]:
        """`EVALSHA`'s arguments; see `lua/charge.lua`."""
        keys = [f"{self._prefix}limit:{{{c.owner}}}:{c.key}" for c in charges]
        numbers = [n for c in charges for n in (c.emission_interval_us, c.burst, c.cost)]
        return (self._script.sha, len(keys), *keys, "", *numbers)

    def _failed(self, error: Exception) -> None:
        self._try_at_s = asyncio.get_running_loop().time() + RETRY_AFTER_S
        if not self._down:
            self._down = True
            _log.warning("limiter_degraded", extra={"error": type(error).__name__})
        for waiting in self._waiting:
            waiting.answer(None)
        self._waiting.clear()

    def _works(self) -> None:
        if self._down:
            self._down = False
            _log.warning("limiter_restored")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One admission on its way; its future holds the outcomes, or None where Redis could not tell."""

    charges: tuple[Charge, ...]
    outcomes: asyncio.Future[tuple[Outcome, ...] | None]
    since_s: float

    def answer(self, outcomes: tuple[Outcome, ...] | None) -> None:
        """Wake the caller, unless it has left or been answered."""
        if not self.outcomes.done():
            self.outcomes.set_result(outcomes)


def _outcomes(reply: Sequence[int]) -> tuple[Outcome, ...]:
    """The script's flat reply, five numbers for each charge."""
    return tuple(
        Outcome(
            allowed=reply[i] == 1,
            tat_us=reply[i + 1],
            remaining=reply[i + 2],
            reset_us=reply[i + 3],
            retry_after_us=reply[i + 4],
        )
        for i in range(0, len(reply), 5)
    )
