"""The routing rules and switches that all workers share, followed by each of them. `stored_rules` has the layout.

A worker learns of a change by the channel, within a few milliseconds, and by reading all of it twice a second, which
also covers a lost message, a broken connection and a Redis that came back with other rules.
Between the workers lie those milliseconds, in which one caller may be routed by either set. A set with an instant is
held by all of them before it comes, and put in force by all at once, as far as their clocks agree.
"""

import asyncio
import contextlib
import logging
import os
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from gateway.admin_ports import Change
from gateway.core.rules import Rule, RuleSet
from gateway.core.rules.fields import RuleError
from gateway.core.switches import NO_SWITCHES, Switches
from gateway.ports import StoreObserver
from gateway.stores.redis_script import UNREACHABLE, in_time, listen, load_script, nobody, timed
from gateway.stores.stored_rules import (
    REPORTED,
    RULES,
    STORED,
    Stored,
    SwitchesError,
    channel,
    frozen_until_ms,
    heading_text,
    history_key,
    number,
    read_rules,
    read_switches,
    rules_key,
    rules_text,
    switches_of,
    switches_text,
    text,
    worker_key,
    workers_key,
)

POLL_S = 0.5
REPORT_TTL_MS = 5000
REPORT_S = 1.0  # between two reports of what a worker does, which are longer than what it says of its rules
MAX_AHEAD_S = 10.0  # an instant farther off is another clock's, and is not waited for
SEED = Change(action="seed")
_FOREIGN: Stored = ("",) * len(STORED)  # something under our name that is no hash

_log = logging.getLogger(__name__)


def _nothing() -> Mapping[str, Any]:
    return {}


class RedisRuleSource:
    """`RuleSource` that follows Redis. Whatever happens there, the newest valid set serves, and the newest switches.

    `seed` is the configuration file's set: it fills an empty Redis, and serves until Redis has been read.
    `validate` raises `RuleError` for a set that this worker cannot run. `worker_id` is unique among live
    workers. `report` says what else the control plane shall know of this worker; it is asked once a second at most.
    """

    def __init__(
        self,
        client: Redis,
        prefix: str,
        seed: RuleSet,
        validate: Callable[[Sequence[Rule]], None],
        worker_id: str,
        *,
        timeout_s: float = 0.5,
        observer: StoreObserver = nobody,
    ) -> None:
        self.report: Callable[[], Mapping[str, Any]] = _nothing
        self._client = client
        self._prefix = prefix
        self._current = seed
        self._coming: _Coming | None = None
        self._validate = validate
        self._id = worker_id
        self._timeout_s = timeout_s
        self._observer = observer
        self._seed_script = load_script("seed_rules")
        self._seen: Stored = ()
        self._rules_fault = self._switches_fault = ""
        self._changed_ms = 0  # when somebody changed last what is held here
        self._started = 0
        self._reported_s = float("-inf")
        self._workers: tuple[str, ...] = ()
        self._live = 1
        self._reachable = True
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    def current(self) -> RuleSet:
        """See `ports.RuleSource`."""
        if self._coming is not None and time.time() >= self._coming.at_s:
            self._current, self._coming = self._coming.rules, None
        return self._current

    def live_workers(self) -> int:
        """How many workers there were when Redis was read last, this one included; at least 1. Never waits."""
        return self._live

    async def start(self) -> None:
        """Seed and load, then follow in the background. A Redis out of reach is no error: the seed serves."""
        self._started = int(time.time())
        await self._refresh()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._forever(self._follow), name="rules-follow"),
            loop.create_task(self._forever(self._listen), name="rules-listen"),
        ]

    async def close(self) -> None:
        """Stop following and take this worker off the list. The client stays its owner's."""
        self._closing = True  # a client with a socket timeout may swallow the cancellation (see `connect`)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        with contextlib.suppress(*UNREACHABLE):
            async with in_time(self._timeout_s):
                await self._client.delete(worker_key(self._prefix, self._id))

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat `step`; after a failure pause for 1 to 1.5 s, a different length for each worker."""
        pause_s = 1 + zlib.crc32(self._id.encode()) % 500 / 1000
        while not self._closing:
            try:
                await step()
            except UNREACHABLE:
                await asyncio.sleep(pause_s)
            except Exception:  # noqa: BLE001 - the supervisor of these tasks: rules must stay followed
                _log.exception("rules_task_failed", extra={"worker": self._id})
                await asyncio.sleep(pause_s)

    async def _follow(self) -> None:
        self._changed.clear()
        await self._refresh()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._changed.wait()

    async def _listen(self) -> None:
        """Wake `_follow` on every announcement, until the connection breaks."""
        await listen(self._client, channel(self._prefix), lambda _: self._changed.set())

    async def _refresh(self) -> None:
        """Read everything and report, in one round trip; take what is other than before."""
        try:
            with timed(self._observer, "rules"):
                await self._read_all()
        except UNREACHABLE as error:
            if self._reachable:
                self._reachable = False
                _log.warning("rules_store_unreachable", extra={"error": type(error).__name__})
            return
        if not self._reachable:
            self._reachable = True
            _log.warning("rules_store_restored", extra={"revision": self._current.revision})

    async def _read_all(self) -> None:
        """See `_refresh`. Raises one of `UNREACHABLE`."""
        async with in_time(self._timeout_s):
            stored = await self._read_and_report()
            if stored[:2] == (None, None) or self._knows_more(stored):
                await self._seed(stored)
                stored = await self._read_and_report()
            if stored != self._seen:
                self._take(stored)
                await self._read_and_report()

    def _knows_more(self, stored: Stored) -> bool:
        """Whether Redis has forgotten changes that this worker has taken.

        It was restored without its last second, or a worker that was behind was the first to fill it.
        """
        held = self._held
        is_behind = number(stored[0]) <= held.revision and number(switches_of(stored)[0]) <= held.switches.revision
        return is_behind and number(stored[-1]) < self._changed_ms

    async def _seed(self, stored: Stored) -> None:
        """Fill an empty Redis with the set in force: the file's, or after a loss the last one with the switches."""
        held, now_ms = self._held, round(time.time() * 1000)
        revision, switches = max(1, held.revision), self._switches_with(stored, now_ms)
        heading = heading_text(SEED, revision=revision, at_ms=now_ms, count=len(held.rules))
        args: list[str | int] = [revision, rules_text(held.rules), channel(self._prefix), heading]
        args += [switches.revision, switches_text(switches.items), frozen_until_ms(switches.items)]
        args += [number(switches_of(stored)[0]), self._changed_ms]
        if await self._seed_script.run(self._client, [rules_key(self._prefix), history_key(self._prefix)], args):
            _log.info("rules_seeded", extra={"revision": revision, "switches": switches.revision})

    def _switches_with(self, stored: Stored, now_ms: int) -> Switches:
        """Those of this worker that have not ended, and those that an operator was quicker to set in an empty Redis."""
        mine = self._held.switches
        items, theirs = mine.in_force(now_ms), NO_SWITCHES
        if stored[:2] == (None, None):
            with contextlib.suppress(SwitchesError):
                theirs = read_switches(switches_of(stored))
        if theirs == NO_SWITCHES:
            return Switches(revision=mine.revision, items=items)
        known = {one.id for one in theirs.items}
        more = tuple(one for one in items if one.id not in known)
        return Switches(revision=max(theirs.revision + 1, mine.revision), items=(*theirs.items, *more))

    def _take(self, stored: Stored) -> None:
        """Put in force what has changed; each of rules and switches whole, or not at all."""
        seen, self._seen = self._seen, stored
        rules, switches = stored[: len(RULES)], switches_of(stored)
        if switches != switches_of(seen):
            self._take_switches(switches)
        if rules != seen[: len(RULES)]:
            self._take_rules(rules)
        if not self._rules_fault and not self._switches_fault:
            self._changed_ms = number(stored[-1])

    def _take_switches(self, stored: Stored) -> None:
        """The rules under them stay as they are, and are not read anew."""
        try:
            switches = read_switches(stored)
        except SwitchesError as error:
            self._switches_fault = str(error)
            kept = self.current().switches.revision
            _log.error("switches_refused", extra={"detail": self._switches_fault, "kept": kept})
            return
        self._switches_fault = ""
        self._current = replace(self.current(), switches=switches)
        if self._coming is not None:
            self._coming = _Coming(replace(self._coming.rules, switches=switches), self._coming.at_s)
        _log.info("switches_applied", extra={"revision": switches.revision, "count": len(switches.items)})

    def _take_rules(self, stored: Stored) -> None:
        """Now, or at their instant."""
        self._rules_fault = "the stored rules cannot be read"  # should what follows fail in a way nobody foresaw
        try:
            revision, rules = read_rules(stored)
            self._validate(rules)
        except RuleError as error:
            self._rules_fault = str(error)[:500]
            _log.error("rules_refused", extra={"detail": self._rules_fault, "kept": self.current().revision})
            return
        coming = RuleSet(revision=revision, rules=rules, switches=self.current().switches)
        at_s = number(stored[2]) / 1000
        if 0 < at_s - time.time() <= MAX_AHEAD_S:
            self._coming = _Coming(coming, at_s)
        else:
            self._current, self._coming = coming, None
        self._rules_fault = ""
        _log.info("rules_applied", extra={"revision": revision})

    async def _read_and_report(self) -> Stored:
        key, workers = worker_key(self._prefix, self._id), workers_key(self._prefix)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hmget(rules_key(self._prefix), *STORED)
        pipeline.hset(key, mapping=self._said())
        pipeline.pexpire(key, REPORT_TTL_MS)
        pipeline.sadd(workers, self._id)
        pipeline.pexpire(workers, REPORT_TTL_MS)
        pipeline.smembers(workers)
        for worker in self._workers:
            pipeline.exists(worker_key(self._prefix, worker))
        stored, *reported = await pipeline.execute(raise_on_error=False)
        for failure in (r for r in reported if isinstance(r, RedisError)):
            raise failure
        await self._count(reported[4], reported[5:])
        if isinstance(stored, ResponseError):  # not a hash: someone else's value under our name
            return _FOREIGN
        if isinstance(stored, RedisError):
            raise stored
        return tuple(stored)

    @property
    def _held(self) -> RuleSet:
        """The newest set, though its instant may be yet to come."""
        return self._coming.rules if self._coming is not None else self._current

    def _said(self) -> dict[Any, Any]:
        """What this worker says of itself now."""
        held = self._held
        faults = [fault for fault in (self._rules_fault, self._switches_fault) if fault]
        state = "refused" if faults else "serving"
        told = (os.getpid(), held.revision, self._started, state, "; ".join(faults), held.switches.revision)
        said: dict[Any, Any] = dict(zip(REPORTED[:-1], told, strict=True))
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            try:
                said[REPORTED[-1]] = orjson.dumps(self.report())
            except Exception:  # noqa: BLE001 - what a worker says of itself must not keep it from following the rules
                _log.exception("report_failed", extra={"worker": self._id})
        return said

    async def _count(self, members: Collection[Any], lives: Sequence[int]) -> None:
        """Which of the workers known before live still; who is new is asked next time, who is dead is struck off."""
        dead = [worker for worker, is_alive in zip(self._workers, lives, strict=True) if not is_alive]
        alive = len(self._workers) - len(dead)
        self._workers = tuple({text(member) for member in members}.difference(dead))
        if dead:
            await self._client.srem(workers_key(self._prefix), *dead)
        self._live = max(1, alive)


@dataclass(frozen=True, slots=True)
class _Coming:
    """A set that is held until its instant, in Unix seconds."""

    rules: RuleSet
    at_s: float
