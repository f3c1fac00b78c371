"""The admissions that all replicas share: `core.admissions.Book` as one atomic script in Redis.

Layout, all under one prefix; `{T}` is the owner, a hash tag: everything of one owner shares a slot of a Redis Cluster.
It is the tenant, or `all` for everybody where a limit is shared by all.

- `adm:{T}:rate:<key>`: a string, the theoretical arrival time in microseconds of Redis's clock; lives until then;
- `adm:{T}:places:<key>`: a string, how many are taken; 2 hours, as long as anybody renews;
- `adm:{T}:spent:<key>`: a hash of `spent` (1e-9 dollars) and `until`; a day longer than its period;
- `adm:{T}:open` (zset: admission -> end of its lease) and `adm:{T}:held` (hash: admission -> JSON of the queue, and of
  name, cost, bound and end of period of each take that it holds); 2 hours;
- `adm:{T}:queue:<name>` (zset: admission -> ticket; 2 hours) and `adm:{T}:number:<name>` (string: the last ticket; a
  day), with the name `<tenant>:<ordering key>`;
- `turn:<worker>`: the channel on which a worker hears which of its admissions have their turn.

An admission's id is `<worker>:<number>`, the worker's part made anew with each start. What is held is renewed by its
worker, in one call for each owner; its answer also says whose turn it is, so that a message that was lost does no harm.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from redis.asyncio import Redis

from gateway.core.admissions import (
    LEASE_US,
    RENEW_US,
    Ask,
    Standing,
    Wanted,
    turn_late,
    turn_lost,
    verdict_of,
)
from gateway.core.errors import LimitsUnavailable, OrderingUnavailable
from gateway.core.rate_limit import spent_of
from gateway.core.types import ALLOWED, Verdict
from gateway.ports import Admission, StoreObserver
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_script import UNREACHABLE, listen, nobody
from gateway.stores.redis_steps import Answered, Steps
from gateway.stores.refused_limits import RefusedLimits

ALL: Final = "all"
PAUSE_S: Final = 1.0  # before a broken one is made anew

_log = logging.getLogger(__name__)


class RedisAdmissions:
    """See `ports.Admissions`; `local` decides, where `Wanted` lets it, while Redis is out of reach.

    No request waits longer than `timeout_s` for Redis. `is_shared`: a limit is shared by all tenants.
    """

    def __init__(  # noqa: PLR0913 - what it works on, and bounds that tests set
        self,
        client: Redis,
        prefix: str,
        local: MemoryAdmissions,
        *,
        is_shared: bool = False,
        timeout_s: float = 0.25,
        lease_us: int = LEASE_US,
        renew_us: int = RENEW_US,
        observer: StoreObserver = nobody,
    ) -> None:
        self._client = client
        self._local = local
        self._is_shared = is_shared
        self.lease_s = lease_us / 1e6
        self._renew_s = renew_us / 1e6
        self._worker = uuid.uuid4().hex
        self._channel = f"{prefix}turn:{self._worker}"
        self._count = itertools.count(1)
        self._steps = Steps(client, prefix, self._heard, timeout_s=timeout_s, lease_us=lease_us, observer=observer)
        self._open: dict[str, RedisAdmission] = {}
        self._refused = RefusedLimits()
        self._missed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    @property
    def is_degraded(self) -> bool:
        """Whether the last word on Redis was that it is out of reach."""
        return self._steps.is_down

    def start(self) -> None:
        """Renew, and listen for turns, in the background."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._forever(self._renew_due), name="admissions-renew"),
            loop.create_task(self._forever(self._listen), name="admissions-listen"),
        ]

    async def close(self) -> None:
        """Stop. Who waits for Redis is decided by the local admissions; the client stays its owner's."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._steps.close()

    async def admit(self, wanted: Wanted) -> Admission:
        """See `ports.Admissions`."""
        if not wanted.takes and not wanted.ordering_key:
            return _FREE
        if self._steps.may_try():
            ask = self._ask(wanted)
            if self._refused.kept and (told := self._refused.verdict(ask)) is not None:
                return RedisAdmission(None, _NOTHING, told)
            admission = self._open[ask.id] = RedisAdmission(self, ask)  # a turn's message may come before the answer
            try:
                answered = await self._steps.ask(ask)
            except asyncio.CancelledError:
                del self._open[ask.id]
                raise
            if answered is None or not admission.take(answered):
                del self._open[ask.id]
            if answered is not None:
                if not answered.reply.admitted:
                    self._refused.remember(ask, answered.reply, answered.sent_s)
                return admission
        return self._without(wanted)

    def settle(self, ask: Ask, *, tokens: int, nano_usd: int) -> None:
        """Give back and put right."""
        self._open.pop(ask.id, None)
        spent = spent_of(ask.takes, tokens=tokens, nano_usd=nano_usd)
        can_wait = not ask.queue and "concurrent" not in [take.limit.kind for take in ask.takes]
        self._steps.settle(ask.owner, ask.id, spent, can_wait=can_wait)

    def _ask(self, wanted: Wanted) -> Ask:
        # Half a surrogate pair has no bytes.
        ordering_key = wanted.ordering_key.encode(errors="backslashreplace").decode()
        return Ask(
            id=f"{self._worker}:{next(self._count)}",
            owner=ALL if self._is_shared else wanted.tenant,
            takes=wanted.takes,
            queue=f"{wanted.tenant}:{ordering_key}" if ordering_key else "",
            queue_bound=wanted.queue_bound,
        )

    def _without(self, wanted: Wanted) -> Admission:
        """What becomes of a request while Redis is out of reach."""
        if wanted.ordering_key and not wanted.orders_alone:
            raise OrderingUnavailable("the store that keeps the order does not answer")
        if wanted.takes and wanted.on_store_down == "closed":
            raise LimitsUnavailable("the store that keeps the limits does not answer")
        return self._local.admitted(replace(wanted, takes=()) if wanted.on_store_down == "open" else wanted)

    def _heard(self, admission: str) -> None:
        """One has its turn; without its name: some may have been told so while nobody listened."""
        if not admission:
            self._missed.set()
        elif admission in self._open:
            self._open[admission].hear(Standing.FIRST)

    async def _renew_due(self) -> None:
        """Renew what was renewed long enough ago; settlements that wait for Redis are tried again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._renew_s / 3):
                await self._missed.wait()
        self._steps.flush()
        before_s = asyncio.get_running_loop().time() - self._renew_s
        has_missed = self._missed.is_set()
        self._missed.clear()
        await self._renew(
            [one for one in self._open.values() if one.is_due(before_s) or (has_missed and one.is_waiting)]
        )

    async def _renew(self, admissions: Sequence["RedisAdmission"]) -> None:
        ids: dict[str, list[str]] = {}
        for one in admissions:
            ids.setdefault(one.ask.owner, []).append(one.ask.id)
        if not ids:
            return
        standings, sent_s = await self._steps.renew(ids)
        for admission, standing in standings.items():
            if admission in self._open:
                self._open[admission].hear(standing, sent_s)
            if standing is Standing.GONE:
                self._open.pop(admission, None)

    async def _listen(self) -> None:
        await listen(self._client, self._channel, self._heard)

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat `step`; after a failure pause a little, each time for another length."""
        while not self._is_closing:
            try:
                await step()
            except UNREACHABLE:
                await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1))  # noqa: S311 - spreads workers, keeps no secret
            except Exception:  # noqa: BLE001 - the supervisor of these tasks: leases must stay renewed
                _log.exception("admissions_task_failed")
                await asyncio.sleep(PAUSE_S)


class RedisAdmission:
    """See `ports.Admission`. `kept_s`: when, by the loop's clock, its lease began at the latest; None before."""

    __slots__ = ("_changed", "_is_ended", "_of", "_standing", "ask", "kept_s", "verdict")

    def __init__(self, of: RedisAdmissions | None, ask: Ask, verdict: Verdict = ALLOWED) -> None:
        self._of = of
        self.ask = ask
        self.verdict = verdict
        self.kept_s: float | None = None
        self._is_ended = True
        self._standing = Standing.HELD
        self._changed: asyncio.Event | None = None

    def take(self, answered: Answered) -> bool:
        """Redis has answered: whether anything is held."""
        reply, ask = answered.reply, self.ask
        self.verdict = verdict_of(ask, reply)
        if not reply.admitted or not (ask.queue or any(take.is_held for take in ask.takes)):
            return False
        self._is_ended, self.kept_s = False, answered.sent_s
        if ask.queue and not reply.ahead:
            self._standing = Standing.FIRST
        return True

    def hear(self, standing: Standing, sent_s: float | None = None) -> None:
        """How it stands; `sent_s` where Redis was asked then, and has renewed what is not gone."""
        if sent_s is not None and standing is not Standing.GONE:
            self.kept_s = sent_s
        if self._standing is Standing.HELD or standing is Standing.GONE:
            self._standing = standing
        if self._changed is not None:
            self._changed.set()

    def is_due(self, before_s: float) -> bool:
        """Whether it holds something that was renewed before then."""
        return self.kept_s is not None and self.kept_s <= before_s

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits for its turn."""
        return self._changed is not None

    @property
    def is_lost(self) -> bool:
        """See `ports.Admission`."""
        if not self.ask.queue or self.kept_s is None or self._of is None:
            return False
        return self._standing is Standing.GONE or self._left_s(self._of) <= 0

    async def turn(self, *, within_us: int) -> None:
        """See `ports.Admission`."""
        if self._is_ended or self._of is None or not self.ask.queue:
            return
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_us / 1e6
        self._changed = asyncio.Event()
        try:
            while not self.is_lost and self._standing is not Standing.FIRST:
                wait_s = min(until_s - loop.time(), self._left_s(self._of))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
                self._changed.clear()
                if self._standing is Standing.HELD and loop.time() >= until_s:
                    raise turn_late()
        finally:
            self._changed = None
        if self.is_lost:
            raise turn_lost()

    def settle(self, *, tokens: int, nano_usd: int) -> None:
        """See `ports.Admission`."""
        if not self._is_ended and self._of is not None:
            self._is_ended = True
            self._of.settle(self.ask, tokens=tokens, nano_usd=nano_usd)

    def _left_s(self, of: RedisAdmissions) -> float:
        """How long its lease lasts at least."""
        return (self.kept_s or 0.0) + of.lease_s - asyncio.get_running_loop().time()


_NOTHING: Final = Ask(id="", owner="")
_FREE: Final = RedisAdmission(None, _NOTHING)
