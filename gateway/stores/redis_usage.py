"""The books: what was used up, and what it cost, by day, tenant, task, backend and model, of all workers together.

Layout: `{prefix}usage:{<day>}`, a hash of counts, whose fields are JSON lists `[tenant, task, backend, model, count]`;
and `{prefix}usage:{<day>}:booked`, how far each worker's counts are in it. The day is a date in UTC, in braces: a hash
tag, so that both lie together in a Redis Cluster. Both expire `KEPT_DAYS` after their last word.

What can be lost: a worker that is killed takes what it had not written along, a second of counts while Redis answers;
counts wait in the worker while Redis does not, for as long as that lasts. Nothing is counted twice: every flush has a
number, and the script books a number of a worker once (`lua/book_usage.lua`). Redis keeps what it is set up to keep.
"""

import dataclasses
import json
import logging
import operator
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

from redis.asyncio import Redis

from gateway.admin_ports import UsageRow
from gateway.core.types import Usage
from gateway.core.watching.record import RequestRecord
from gateway.stores.flushing import TIMEOUT_S, Flushing
from gateway.stores.redis_script import answering, in_time, load_script

FLUSH_S: Final = 1.0
READ_TIMEOUT_S: Final = 5.0  # a year and a month of days in one round trip
KEPT_DAYS: Final = 400  # a year, and a month to settle it
KEPT_S: Final = KEPT_DAYS * 86_400
LARGEST: Final = 2**40
"""What one request may add to a count: 1e12 tokens, or 1,099 USD. An upstream's own figure has no other bound."""

NAMES: Final = ("tenant", "task", "backend", "model")
COUNTS: Final = tuple(field.name for field in dataclasses.fields(UsageRow) if field.name not in ("day", *NAMES))
_Name = tuple[str, str, str, str]

_log = logging.getLogger(__name__)


def utc_today() -> date:
    """The day that is booked on: the one on which a request ends."""
    return datetime.now(UTC).date()


@dataclass(frozen=True, slots=True)
class _Flush:
    """Counts on their way: they are sent again, the same under the same number, until Redis has answered."""

    day: date
    number: int
    counts: Mapping[_Name, Sequence[int]]


class RedisUsage(Flushing):
    """An `Observer` that books every request which was answered or used something up; it writes once a second.

    In memory it holds one row of sums for each name that was used since the last write. Servers and rules bound the
    names: callers can only use models that are there.
    """

    def __init__(self, client: Redis, prefix: str, *, today: Callable[[], date] = utc_today) -> None:
        super().__init__("usage", FLUSH_S)
        self._client = client
        self._prefix = prefix
        self._today = today
        self._script = load_script("book_usage")
        self._worker = uuid.uuid4().hex  # never two alike, also not after a restart
        self._number = 0
        self._counts: dict[date, dict[_Name, list[int]]] = {}
        self._under_way: _Flush | None = None

    async def close(self) -> None:
        """Write what is left, and stop. What Redis does not take now is lost, and the log says how much."""
        await super().close()
        if left := [sums for counts in self._left() for sums in counts.values()]:
            lost = dict(zip(COUNTS, (sum(column) for column in zip(*left, strict=True)), strict=True))
            _log.error("usage_lost", extra=lost)

    def began(self, task: str) -> None:
        """Nothing is used up yet."""

    def refused(self, record: RequestRecord) -> None:
        """It has used nothing up."""

    def ended(self, record: RequestRecord) -> None:
        """Book it where it was answered, or was not and has used something up all the same."""
        # A caller who names a model that is not there, and leaves before it is told, must not write its name down.
        if record.route is None or (record.error is not None and record.usage == Usage()):
            return
        name = (record.tenant, record.task, record.route.backend, record.route.model)
        counts = self._counts.setdefault(self._today(), {})
        sums = counts.get(name) or counts.setdefault(name, [0] * len(COUNTS))
        counts[name] = list(map(operator.add, sums, _counts(record)))

    async def _write(self) -> bool:
        """The oldest day first. What Redis does not take waits on."""
        has_written = False
        while flush := self._next():
            async with in_time(TIMEOUT_S):
                _, refused = await self._script.run(self._client, self._keys(flush.day), self._arguments(flush))
            self._under_way, has_written = None, True
            if refused:
                _log.error("usage_refused", extra={"fields": refused, "day": flush.day.isoformat()})
        return has_written

    def _next(self) -> _Flush | None:
        """The flush that has no answer yet, else the next; it stays until it has one, also where we are cancelled."""
        if self._under_way is None and self._counts:
            day = min(self._counts)
            self._number += 1
            self._under_way = _Flush(day, self._number, self._counts.pop(day))
        return self._under_way

    def _keys(self, day: date) -> list[str]:
        key = _key(self._prefix, day)
        return [key, f"{key}:booked"]

    def _arguments(self, flush: _Flush) -> list[str | int]:
        arguments: list[str | int] = [self._worker, flush.number, KEPT_S]
        for name, sums in flush.counts.items():
            for count, value in zip(COUNTS, sums, strict=True):
                if value:
                    arguments += [json.dumps([*name, count]), value]
        return arguments

    def _left(self) -> Iterator[Mapping[_Name, Sequence[int]]]:
        if self._under_way is not None:
            yield self._under_way.counts
        yield from self._counts.values()


class RedisUsageSource:
    """See `admin_ports.UsageSource`."""

    def __init__(self, client: Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    async def read(self, first_day: date, last_day: date) -> Sequence[UsageRow]:
        """Sorted. Raises `RulesUnavailable` when Redis does not answer."""
        days = [first_day + timedelta(days=n) for n in range((last_day - first_day).days + 1)]
        async with (
            answering("the books of usage", READ_TIMEOUT_S),
            self._client.pipeline(transaction=False) as steps,
        ):
            for day in days:
                steps.hgetall(_key(self._prefix, day))
            stored = await steps.execute()
        return [row for day, fields in zip(days, stored, strict=True) for row in _rows(day, fields)]


def _key(prefix: str, day: date) -> str:
    return f"{prefix}usage:{{{day.isoformat()}}}"


def _rows(day: date, fields: Mapping[bytes, bytes]) -> Iterator[UsageRow]:
    """A day's hash as rows. A count that this version does not know is left out: another version may write it."""
    found: dict[_Name, dict[str, int]] = {}
    for field, value in fields.items():
        tenant, task, backend, model, count = json.loads(field)
        counts = found.setdefault((tenant, task, backend, model), {})
        if count in COUNTS:
            counts[count] = int(value)
    for name in sorted(found):
        tenant, task, backend, model = name
        yield UsageRow(day=day, tenant=tenant, task=task, backend=backend, model=model, **found[name])


def _counts(record: RequestRecord) -> tuple[int, ...]:
    """One request's, in the order of `COUNTS`."""
    usage = record.usage
    told = (usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens)
    tokens = [_bounded(count) if count else 0 for count in told]
    cost = _bounded(usage.cost_nano_usd or 0)
    return (1, int(record.error is not None), *tokens, int(usage.is_estimated), cost)


def _bounded(told: int) -> int:
    return min(max(told, 0), LARGEST)
