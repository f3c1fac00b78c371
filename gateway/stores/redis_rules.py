"""The routing rules that all workers share, and what each worker says it runs.

Layout, all under one prefix and in one slot of a Redis Cluster, so that a worker needs one node alone to follow:
- `{prefix}{rules}`: a hash of `revision`, `rules` (the JSON of `core.rules.rules_document`) and `at_ms` (from when they
  are in force, in Unix milliseconds; 0 or missing = at once);
- `{prefix}rules:changed`: the channel on which a new revision is announced;
- `{prefix}{rules}:worker:<id>`: a hash that a worker renews twice a second and that expires 5 s after its last word;
- `{prefix}{rules}:workers`: the set of their ids.

A worker learns of a change by the channel, within a few milliseconds, and by reading the rules twice a
second, which also covers a lost message, a broken connection and a Redis that came back with other rules.
Between the workers lie those milliseconds, in which one caller may be routed by either set. A set with an instant is
held by all of them before it comes, and put in force by all at once, as far as their clocks agree.
"""

import asyncio
import contextlib
import json
import logging
import os
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from gateway.admin_ports import Applied, WorkerState
from gateway.core.errors import RulesUnavailable, StaleRevision
from gateway.core.rule_fields import RuleError
from gateway.core.rules import Rule, RuleSet, parse_rules, rules_document
from gateway.stores.redis_script import UNREACHABLE, in_time, listen, load_script

POLL_S = 0.5
REPORT_TTL_MS = 5000
APPLIED_POLL_S = 0.01
MAX_AHEAD_S = 10.0  # an instant farther off is another clock's, and is not waited for
_RULES = "{rules}"  # in braces: a hash tag
STORED = ("revision", "rules", "at_ms")
FIELDS = ("pid", "revision", "started", "state", "detail")

_log = logging.getLogger(__name__)


class RedisRuleSource:
    """`RuleSource` that follows Redis. Whatever happens there, the newest valid set serves.

    `seed` is the configuration file's set: it fills an empty Redis, and serves until Redis has been read.
    `validate` raises `RuleError` for a set that this worker cannot run. `worker_id` is unique among live
    workers.
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
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._current = seed
        self._coming: _Coming | None = None
        self._validate = validate
        self._id = worker_id
        self._timeout_s = timeout_s
        self._seed_script = load_script("seed_rules")
        self._seen: _Stored | None = None
        self._state, self._detail = "serving", ""
        self._started = 0
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
                await self._client.delete(f"{self._prefix}{_RULES}:worker:{self._id}")

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
        await listen(self._client, f"{self._prefix}rules:changed", lambda _: self._changed.set())

    async def _refresh(self) -> None:
        """Read the rules and report, in one round trip; take the rules if they are others than before."""
        try:
            async with in_time(self._timeout_s):
                stored = await self._read_and_report()
                if stored == _NOTHING:
                    await self._seed()
                    stored = await self._read_and_report()
                if stored != self._seen:
                    self._take(stored)
                    await self._read_and_report()
        except UNREACHABLE as error:
            if self._reachable:
                self._reachable = False
                _log.warning("rules_store_unreachable", extra={"error": type(error).__name__})
            return
        if not self._reachable:
            self._reachable = True
            _log.warning("rules_store_restored", extra={"revision": self._current.revision})

    async def _seed(self) -> None:
        """Fill an empty Redis with the set in force: the file's at first, the last one after a loss."""
        revision = max(1, self.current().revision)
        keys = [f"{self._prefix}{_RULES}"]
        args: list[str | int] = [revision, _document(self.current().rules), f"{self._prefix}rules:changed"]
        if await self._seed_script.run(self._client, keys, args):
            _log.info("rules_seeded", extra={"revision": revision})

    def _take(self, stored: "_Stored") -> None:
        """Put the stored set in force, or refuse it whole."""
        self._seen = stored
        self._state, self._detail = "refused", "the stored rules cannot be read"
        try:
            rules = _rule_set(stored)
            self._validate(rules.rules)
        except RuleError as error:
            self._detail = str(error)[:500]
            _log.error("rules_refused", extra={"detail": self._detail, "kept": self.current().revision})
            return
        at_s = _instant_s(stored)
        if 0 < at_s - time.time() <= MAX_AHEAD_S:
            self._coming = _Coming(rules, at_s)
        else:
            self._current, self._coming = rules, None
        self._state, self._detail = "serving", ""
        _log.info("rules_applied", extra={"revision": rules.revision})

    async def _read_and_report(self) -> "_Stored":
        key = f"{self._prefix}{_RULES}:worker:{self._id}"
        held = self._coming.rules if self._coming is not None else self._current
        report = (os.getpid(), held.revision, self._started, self._state, self._detail)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hmget(f"{self._prefix}{_RULES}", *STORED)
        pipeline.hset(key, mapping=dict(zip(FIELDS, report, strict=True)))
        pipeline.pexpire(key, REPORT_TTL_MS)
        pipeline.sadd(f"{self._prefix}{_RULES}:workers", self._id)
        pipeline.pexpire(f"{self._prefix}{_RULES}:workers", REPORT_TTL_MS)
        pipeline.smembers(f"{self._prefix}{_RULES}:workers")
        for worker in self._workers:
            pipeline.exists(f"{self._prefix}{_RULES}:worker:{worker}")
        stored, *reported = await pipeline.execute(raise_on_error=False)
        for failure in (r for r in reported if isinstance(r, RedisError)):
            raise failure
        await self._count(reported[4], reported[5:])
        if isinstance(stored, ResponseError):  # not a hash: someone else's value under our name
            return ("", "", None)
        if isinstance(stored, RedisError):
            raise stored
        return tuple(stored)

    async def _count(self, members: Collection[Any], lives: Sequence[int]) -> None:
        """Which of the workers known before live still; who is new is asked next time, who is dead is struck off."""
        dead = [worker for worker, is_alive in zip(self._workers, lives, strict=True) if not is_alive]
        alive = len(self._workers) - len(dead)
        self._workers = tuple({_text(member) for member in members}.difference(dead))
        if dead:
            await self._client.srem(f"{self._prefix}{_RULES}:workers", *dead)
        self._live = max(1, alive)


class RedisRuleStore:
    """The control plane's side: read the set, replace it, and see how far it has got.

    Raises `RulesUnavailable` when Redis does not answer within `timeout_s` or holds what cannot be read.
    """

    def __init__(self, client: Redis, prefix: str, timeout_s: float = 1.0) -> None:
        self._client = client
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._put_script = load_script("put_rules")

    async def get(self) -> RuleSet:
        """The newest set; revision 0 and no rules where none was ever stored."""
        async with self._bounded():
            stored = tuple(await self._client.hmget(f"{self._prefix}{_RULES}", STORED))
        if stored == _NOTHING:
            return RuleSet(revision=0, rules=())
        try:
            return _rule_set(stored)
        except RuleError as error:
            revision = _text(stored[0]) or "0"
            raise RulesUnavailable(f"the stored rules (revision {revision}) cannot be read: {error}") from error

    async def put(self, rules: Sequence[Rule], *, expected_revision: int, at_ms: int = 0) -> int:
        """Replace the set that has `expected_revision` (0 = none yet); returns the new revision.

        Workers put it in force at `at_ms` (Unix milliseconds), or as soon as they hear of it.
        Raises `StaleRevision` and changes nothing when another set is in force.
        """
        args: list[str | int] = [expected_revision, _document(rules), f"{self._prefix}rules:changed", at_ms]
        async with self._bounded():
            done, revision = await self._put_script.run(self._client, [f"{self._prefix}{_RULES}"], args)
        if not done:
            raise StaleRevision(expected=expected_revision, current=revision)
        return int(revision)

    async def workers(self) -> list[WorkerState]:
        """The live workers, by id. One that died without a word stays on the list for 5 s."""
        async with self._bounded():
            ids = sorted(_text(i) for i in await self._client.smembers(f"{self._prefix}{_RULES}:workers"))
            pipeline = self._client.pipeline(transaction=False)
            for worker_id in ids:
                pipeline.hmget(f"{self._prefix}{_RULES}:worker:{worker_id}", *FIELDS)
            reports = await pipeline.execute() if ids else []
            gone = [i for i, report in zip(ids, reports, strict=True) if report[0] is None]
            if gone:
                await self._client.srem(f"{self._prefix}{_RULES}:workers", *gone)
        return [_worker(i, r) for i, r in zip(ids, reports, strict=True) if r[0] is not None]

    async def applied(self, revision: int, timeout_s: float = 1.0) -> Applied:
        """Wait until all live workers run `revision` or a later one, or the time is up; says how many do."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        running = of = 0
        with contextlib.suppress(RulesUnavailable):  # saved all the same: the last count seen is the answer
            while True:
                workers = await self.workers()
                running, of = sum(w.revision >= revision for w in workers), len(workers)
                if running == of or loop.time() - began_s >= timeout_s:
                    break
                await asyncio.sleep(APPLIED_POLL_S)
        return Applied(workers=running, of=of, ms=round((loop.time() - began_s) * 1000))

    @contextlib.asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with in_time(self._timeout_s):
                yield
        except UNREACHABLE as error:
            raise RulesUnavailable("Redis, the store of rules, does not answer") from error


_Stored = tuple[Any, ...]  # the values of STORED, as bytes or text; None where missing
_NOTHING: _Stored = (None, None, None)


@dataclass(frozen=True, slots=True)
class _Coming:
    """A set that is held until its instant, in Unix seconds."""

    rules: RuleSet
    at_s: float


def _document(rules: Sequence[Rule]) -> str:
    return json.dumps(rules_document(rules), separators=(",", ":"))


def _rule_set(stored: _Stored) -> RuleSet:
    """Read a stored set whole. Raises `RuleError`."""
    try:
        revision, document = int(stored[0]), json.loads(stored[1])
    except (TypeError, ValueError, RecursionError) as error:
        raise RuleError("rules: not a revision and a JSON list") from error
    return RuleSet(revision=revision, rules=parse_rules(document))


def _instant_s(stored: _Stored) -> float:
    """From when a stored set is in force; what is not a number is no reason to wait."""
    try:
        return int(stored[2] or 0) / 1000
    except ValueError:
        return 0.0


def _text(value: Any) -> str:
    """A reply as text, whether or not the client decodes; missing is empty."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _worker(worker_id: str, report: Sequence[Any]) -> WorkerState:
    pid, revision, started, state, detail = report
    return WorkerState(
        id=worker_id,
        pid=int(pid),
        revision=int(revision),
        started=int(started),
        state=_text(state),
        detail=_text(detail),
    )
