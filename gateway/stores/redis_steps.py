"""Steps of admissions on their way to Redis: those that wait go together, and none waits longer than its bound.

While one round trip is under way, new steps wait and go with the next, those of one owner in one call: a busy worker
needs one connection and a fraction of the work per admission. After a failure Redis is left alone for a second; then
one step tries it.

A settlement that nobody waits for, as what it gives back is a part of a rate or a budget, goes with the next asks, or
after `SETTLED_SOON_S`: a worker with little to do would else ask Redis twice for each request.

An ask whose answer is lost, or comes for nobody, may have been admitted: it is settled with nothing used up. A
settlement is repeated until Redis has answered, or until its lease has given all back long since.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.core.admissions import Ask, Reply, Standing
from gateway.core.rate_limit import Row, Take, boundaries_us
from gateway.ports import StoreObserver
from gateway.stores.redis_link import Link
from gateway.stores.redis_script import UNREACHABLE, in_time, load_script, nobody

RETRY_AFTER_S = 1.0  # how long Redis is left alone after a failure
MAX_TOGETHER: Final = 256  # steps in one round trip; bounds how long Redis is kept busy by one worker
SETTLED_SOON_S: Final = 0.002
SETTLED_WITHIN_S: Final = 60.0  # six leases
CLOSED_WITHIN_S: Final = 0.25
_WORDS: Final = {"requests": "rate", "tokens": "rate", "concurrent": "places", "usd": "spent"}

_log = logging.getLogger(__name__)


class Answered(NamedTuple):
    """Redis's answer to an ask; `sent_s`, by the loop's clock, is before its lease began."""

    reply: Reply
    sent_s: float


class Steps:
    """The script `admissions`, run on one Redis; `heard` is told of admissions whose turn has come."""

    def __init__(
        self,
        client: Redis,
        prefix: str,
        heard: Callable[[str], None],
        *,
        timeout_s: float,
        lease_us: int,
        observer: StoreObserver = nobody,
    ) -> None:
        self._client = client
        self._link = Link(client)
        self._prefix = prefix
        self._heard = heard
        self._timeout_s = timeout_s
        self._lease_us = lease_us
        self._observer = observer
        self._script = load_script("admissions")
        self._asks: list[_Waiting] = []
        self._settlements: list[_Settlement] = []
        self._now_us: int | None = None  # the instant, where it is not Redis's own: in tests
        self._ends: dict[str, tuple[int, int, int]] = {}
        self._sender: asyncio.Task[None] | None = None
        self._is_due = False  # some settlement must not wait for the next asks
        self._soon: asyncio.TimerHandle | None = None
        self._is_down = False
        self._is_closed = False
        self._try_at_s = 0.0

    @property
    def is_down(self) -> bool:
        """Whether the last word on Redis was that it is out of reach."""
        return self._is_down

    def may_try(self) -> bool:
        """Whether Redis may be asked now; while it is out of reach, true once a second."""
        if self._is_down:
            now_s = asyncio.get_running_loop().time()
            if now_s < self._try_at_s:
                return False
            self._try_at_s = now_s + RETRY_AFTER_S
        return not self._is_closed

    async def ask(self, ask: Ask) -> Answered | None:
        """Redis's answer; None where there is none within the bound. One whose caller leaves takes nothing."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(ask, loop.create_future())
        self._asks.append(waiting)
        self._start()
        try:
            return await waiting.answered
        except asyncio.CancelledError:
            if not waiting.answered.cancelled() and waiting.answered.result() is not None:
                self._undo(ask)
                self.flush()
            raise

    def settle(self, owner: str, admission: str, spent: Sequence[int], *, can_wait: bool = False) -> None:
        """It has ended. Never waits, never raises. `can_wait`: a moment, for the next asks."""
        if self._is_closed:
            return
        self._to_settle(owner, admission, spent)
        if not can_wait:
            self.flush()
        elif self._sender is None:
            self._flush_soon()

    def flush(self) -> None:
        """Send settlements that have waited, if Redis may be asked now."""
        self._is_due = bool(self._settlements)
        if self._is_due and self._sender is None and self.may_try():
            self._start()

    def _flush_soon(self) -> None:
        if self._soon is None and not self._is_closed:
            self._soon = asyncio.get_running_loop().call_later(SETTLED_SOON_S, self._flush_now)

    def _flush_now(self) -> None:
        self._soon = None
        self.flush()

    async def renew(self, admissions: Mapping[str, Sequence[str]]) -> tuple[dict[str, Standing], float]:
        """Keep those of each owner for another lease: how they stand, as far as is told, and when Redis was asked.

        However many they are, each round trip is a small one: its bound is for Redis, not for its size.
        """
        sent_s, standings = asyncio.get_running_loop().time(), dict[str, Standing]()
        try:
            for calls in _renewals(admissions):
                replies = await self._round_trip(calls)
                for call, reply in zip(calls, replies, strict=True):
                    if not isinstance(reply, RedisError):
                        self._hear(reply[1])
                        standings.update(zip(call.renewals, map(Standing, reply[2]), strict=True))
        except UNREACHABLE:
            pass  # the others are due still
        return standings, sent_s

    async def close(self) -> None:
        """Stop: asks that wait have no answer, settlements are tried once more. The client stays its owner's."""
        self._is_closed = True
        if self._soon is not None:
            self._soon.cancel()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        self._is_down, self._timeout_s = False, min(self._timeout_s, CLOSED_WITHIN_S)
        self._is_due = bool(self._settlements)
        await self._send_all()
        await self._link.close()

    def _start(self) -> None:
        if self._sender is None and not self._is_closed:
            self._sender = asyncio.get_running_loop().create_task(self._send_all(), name="redis-admissions")

    async def _send_all(self) -> None:
        """Send what waits until nothing does, or Redis fails. Every ask gets an answer, whatever happens here."""
        try:
            while self._asks or self._is_due:
                await self._send_some()
                if self._is_down:
                    break
            else:
                if self._settlements:
                    self._flush_soon()
        finally:
            self._sender = None
            for waiting in self._asks:
                waiting.answer(None)
            self._asks.clear()

    async def _send_some(self) -> None:
        """One round trip. On failure all that are in it are answered at once, so that none waits twice."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        asks = [waiting for waiting in self._asks[:MAX_TOGETHER] if not waiting.answered.done()]
        settlements = [one for one in self._settlements[:MAX_TOGETHER] if one.until_s > now_s]
        del self._asks[:MAX_TOGETHER], self._settlements[:MAX_TOGETHER]
        self._is_due = self._is_due and bool(self._settlements)
        calls = _by_owner(settlements, asks)
        try:
            if calls:
                try:
                    replies = await self._round_trip(calls)
                except UNREACHABLE:
                    self._observer("admit", None)
                    raise
                self._observer("admit", loop.time() - now_s)
                self._told(calls, replies, now_s)
        except UNREACHABLE as error:
            self._failed(error)
        finally:
            for call in calls:
                if not call.is_answered:
                    self._settlements += call.settlements
                    for waiting in call.asks:
                        waiting.answer(None)
                        self._undo(waiting.ask)

    async def _round_trip(self, calls: Sequence["_Call"]) -> list[Any]:
        """The script's reply, or its `ResponseError`, for each call. Raises `UNREACHABLE`, in time."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._timeout_s
        if len(calls) == 1:  # as all lie together, but in a cluster
            words = self._words(calls[0])
            reply = await self._link.call("EVALSHA", self._script.sha, *words, timeout_s=self._timeout_s)
            if reply is not None:
                return [reply]
        async with in_time(until_s - loop.time()):
            replies = await self._by_library(calls)
        self._link.open()
        return replies

    async def _by_library(self, calls: Sequence["_Call"]) -> list[Any]:
        replies = await self._run(calls, by_source=False)
        forgotten = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if forgotten:  # Redis restarted: nothing of these has run
            again = await self._run([calls[i] for i in forgotten], by_source=True)
            for i, reply in zip(forgotten, again, strict=True):
                replies[i] = reply
        return replies

    async def _run(self, calls: Sequence["_Call"], *, by_source: bool) -> list[Any]:
        script = self._script.source if by_source else self._script.sha
        if len(calls) == 1:  # the usual case, at half the work of a pipeline
            run = self._client.eval if by_source else self._client.evalsha
            try:
                return [await run(script, *self._words(calls[0]))]
            except ResponseError as error:
                return [error]
        pipeline = self._client.pipeline(transaction=False)
        add = pipeline.eval if by_source else pipeline.evalsha
        for call in calls:
            add(script, *self._words(call))
        return list(await pipeline.execute(raise_on_error=False))

    def _words(self, call: "_Call") -> tuple[Any, ...]:
        """The number of keys, the keys and the arguments; see `lua/admissions.lua`."""
        root = f"{self._prefix}adm:{{{call.owner}}}:"
        words: list[Any] = ["" if self._now_us is None else self._now_us, self._lease_us]
        for one in call.settlements:
            words += ("settle", one.admission, len(one.spent), *one.spent)
        if call.renewals:
            words += ("renew", len(call.renewals), *call.renewals)
        for waiting in call.asks:
            self._add(waiting.ask, words)
        # In one piece: the client would spend a microsecond on each of them.
        return (2, f"{root}open", f"{root}held", msgspec.msgpack.encode(words))

    def _add(self, ask: Ask, words: list[Any]) -> None:
        words += ("admit", ask.id, len(ask.takes), ask.queue_bound if ask.queue else "")
        for take in ask.takes:
            key, limit, cost, bound, is_held, _ = take
            word = _WORDS[limit.kind]
            words += (word, key, cost, bound, is_held)
            if word == "spent":
                words += self._ends_us(take)
        if ask.queue:
            words.append(ask.queue)

    def _ends_us(self, take: Take) -> tuple[int, int, int]:
        """The ends of periods that may count, computed anew only when one has passed."""
        now_us, per = self._now_us or time.time_ns() // 1000, take.limit.per
        ends = self._ends.get(per)
        if ends is None or not ends[0] <= now_us < ends[1]:
            ends = self._ends[per] = boundaries_us(per, now_us)
        return ends

    def _told(self, calls: Sequence["_Call"], replies: Sequence[Any], sent_s: float) -> None:
        failure: RedisError | None = None
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, RedisError):
                failure = reply
                continue
            call.is_answered = True
            self._hear(reply[1])
            for waiting, flat in zip(call.asks, reply[2:], strict=True):
                answered = Answered(_reply(reply[0], flat), sent_s)
                if not waiting.answer(answered) and answered.reply.admitted:
                    self._undo(waiting.ask)  # its caller has left
        if failure is not None:
            raise failure
        if self._is_down:
            self._is_down = False
            _log.warning("limiter_restored")

    def _hear(self, woken: Iterable[Any]) -> None:
        for one in woken:
            self._heard(one.decode() if isinstance(one, bytes) else one)

    def _undo(self, ask: Ask) -> None:
        """What an ask may have taken is given back: nobody uses it."""
        spent = [0 for take in ask.takes if take.is_held]
        if spent or ask.queue:
            self._to_settle(ask.owner, ask.id, spent)

    def _to_settle(self, owner: str, admission: str, spent: Sequence[int]) -> None:
        until_s = asyncio.get_running_loop().time() + SETTLED_WITHIN_S
        self._settlements.append(_Settlement(owner, admission, spent, until_s))

    def _failed(self, error: Exception) -> None:
        self._try_at_s = asyncio.get_running_loop().time() + RETRY_AFTER_S
        if not self._is_down:
            self._is_down = True
            _log.warning("limiter_degraded", extra={"error": type(error).__name__})


class _Waiting(NamedTuple):
    """One ask on its way; its future holds the answer, or None where Redis could not tell."""

    ask: Ask
    answered: asyncio.Future[Answered | None]

    def answer(self, answered: Answered | None) -> bool:
        """Wake the caller; false where it has left."""
        if self.answered.done():
            return False
        self.answered.set_result(answered)
        return True


class _Settlement(NamedTuple):
    """One admission that has ended; it is repeated until `until_s`."""

    owner: str
    admission: str
    spent: Sequence[int]
    until_s: float


@dataclass(slots=True)
class _Call:
    """The steps of one owner in one round trip."""

    owner: str
    settlements: list[_Settlement] = field(default_factory=list)
    asks: list[_Waiting] = field(default_factory=list)
    renewals: Sequence[str] = ()
    is_answered: bool = False


def _by_owner(settlements: Iterable[_Settlement], asks: Iterable[_Waiting]) -> list[_Call]:
    calls: dict[str, _Call] = {}
    for one in settlements:
        call = calls.get(one.owner) or calls.setdefault(one.owner, _Call(one.owner))
        call.settlements.append(one)
    for waiting in asks:
        owner = waiting.ask.owner
        call = calls.get(owner) or calls.setdefault(owner, _Call(owner))
        call.asks.append(waiting)
    return list(calls.values())


def _renewals(admissions: Mapping[str, Sequence[str]]) -> Iterator[list[_Call]]:
    """The calls that renew them, in round trips of `MAX_TOGETHER` at most."""
    each = ((owner, one) for owner, ids in admissions.items() for one in ids)
    while some := list(itertools.islice(each, MAX_TOGETHER)):
        groups = itertools.groupby(some, key=lambda owned: owned[0])
        yield [_Call(owner, renewals=[one for _, one in group]) for owner, group in groups]


def _reply(now_us: int, flat: Sequence[int]) -> Reply:
    """The script's flat reply: four numbers, then three for each take."""
    return Reply(
        admitted=flat[0] == 1,
        now_us=now_us,
        rows=tuple([Row(flat[i] == 1, flat[i + 1], flat[i + 2]) for i in range(4, len(flat), 3)]),
        ticket=flat[1],
        ahead=flat[2],
        is_queue_full=flat[3] == 1,
    )
