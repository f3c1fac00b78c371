"""What became of copies that went to shadows, of all workers together, by rule.

Layout:
- `{prefix}shadows`: a sorted set of the rules that have a report, by the Unix millisecond of their last word;
- `{prefix}shadows:counts:<rule>`: a hash whose fields are JSON lists `[task, place, shadow, measure]`. Measures are
  those of `core.shadows.shadow_reports.measures`, and `since_ms` and `last_failure`, which are no counts;
- `{prefix}shadows:last:<rule>`: a list of the last answers that did not agree, the newest first, each the JSON list
  `[task, place, shadow, document]`.
All of a rule's expire `KEPT_S` after its last word.

What Redis does not take is lost, half a second of results each time: a report is a share of very many.
"""

import json
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from gateway.core.shadows.shadow_reports import (
    MOST_DISAGREEMENTS,
    Pair,
    ShadowResult,
    disagreement,
    document,
    measures,
)
from gateway.ports import JsonObject
from gateway.stores.flushing import TIMEOUT_S, Flushing
from gateway.stores.redis_script import UNREACHABLE, answering, in_time

FLUSH_S: Final = 0.5
KEPT_S: Final = 30 * 86_400
MAX_PAIRS: Final = 1_000  # of all rules, between two flushes; rules and servers bound them far below
MAX_LISTED: Final = 100  # answers that did not agree, of all pairs of a rule

_SINCE, _FAILURE = "since_ms", "last_failure"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Added:
    """What has become of a rule's copies since the last flush."""

    results: int = 0
    last_ms: int = 0
    since_ms: dict[Pair, int] = field(default_factory=dict)
    counts: dict[Pair, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    failures: dict[Pair, str] = field(default_factory=dict)
    disagreements: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LISTED))


class RedisShadows(Flushing):
    """See `ports.ShadowResults`; it writes twice a second."""

    def __init__(self, client: Redis, prefix: str) -> None:
        super().__init__("shadows", FLUSH_S)
        self._client = client
        self._prefix = prefix
        self._added: dict[str, _Added] = defaultdict(_Added)
        self._pairs = 0

    def told(self, result: ShadowResult) -> None:
        """Count it."""
        added, pair = self._added[result.rule], result.pair
        if pair not in added.counts:
            if self._pairs >= MAX_PAIRS:
                self.lost += 1
                return
            self._pairs += 1
            added.since_ms[pair] = result.at_ms
        added.results += 1
        added.last_ms = max(added.last_ms, result.at_ms)
        for measure, count in measures(result):
            added.counts[pair][measure] += count
        if result.failure:
            added.failures[pair] = result.failure
        unlike = disagreement(result)
        if unlike is not None:
            added.disagreements.append(json.dumps([*pair, unlike]))

    async def _write(self) -> bool:
        added, self._added, self._pairs = self._added, defaultdict(_Added), 0
        if not added:
            return False
        try:
            async with in_time(TIMEOUT_S), self._client.pipeline(transaction=False) as steps:
                for rule, one in added.items():
                    self._add(steps, rule, one)
                await steps.execute()
        except UNREACHABLE:
            self.lost += sum(one.results for one in added.values())
            raise
        return True

    def _add(self, steps: Any, rule: str, added: _Added) -> None:
        index, counts, last = _keys(self._prefix, rule)
        for pair, measured in added.counts.items():
            for measure, count in measured.items():
                steps.hincrby(counts, json.dumps([*pair, measure]), count)
            steps.hsetnx(counts, json.dumps([*pair, _SINCE]), added.since_ms[pair])
        for pair, failure in added.failures.items():
            steps.hset(counts, json.dumps([*pair, _FAILURE]), failure)
        steps.expire(counts, KEPT_S)
        if added.disagreements:
            steps.lpush(last, *added.disagreements)
            steps.ltrim(last, 0, MAX_LISTED - 1)
            steps.expire(last, KEPT_S)
        steps.zadd(index, {rule: added.last_ms})
        steps.zremrangebyscore(index, "-inf", added.last_ms - KEPT_S * 1000)


class RedisShadowSource:
    """See `admin_ports.ShadowSource`."""

    def __init__(self, client: Redis, prefix: str, timeout_s: float = 1.0) -> None:
        self._client = client
        self._prefix = prefix
        self._timeout_s = timeout_s

    async def read(self) -> Sequence[JsonObject]:
        """The documents of `core.shadows.shadow_reports`, in the order of their names. Raises `RulesUnavailable`."""
        async with self._bounded():
            named: Any = await self._client.zrange(f"{self._prefix}shadows", 0, -1)
            rules = sorted(name.decode() for name in named)
            async with self._client.pipeline(transaction=False) as steps:
                for rule in rules:
                    _, counts, last = _keys(self._prefix, rule)
                    steps.hgetall(counts)
                    steps.lrange(last, 0, -1)
                stored = await steps.execute() if rules else []
        halves = zip(rules, stored[::2], stored[1::2], strict=True)
        return [one for rule, counts, last in halves for one in _documents(rule, counts, last)]

    async def forget(self, rule: str) -> None:
        """Begin its report anew. Raises `RulesUnavailable`."""
        index, counts, last = _keys(self._prefix, rule)
        async with self._bounded(), self._client.pipeline(transaction=False) as steps:
            steps.delete(counts)
            steps.delete(last)
            steps.zrem(index, rule)
            await steps.execute()

    def _bounded(self) -> AbstractAsyncContextManager[None]:
        return answering("the reports on shadows", self._timeout_s)


def _keys(prefix: str, rule: str) -> tuple[str, str, str]:
    """The index, the counts of a rule, and its last answers that did not agree."""
    return f"{prefix}shadows", f"{prefix}shadows:counts:{rule}", f"{prefix}shadows:last:{rule}"


def _documents(rule: str, fields: Mapping[bytes, bytes], last: Sequence[bytes]) -> Iterator[JsonObject]:
    """A rule's hash and list as its documents."""
    counts: dict[Pair, dict[str, int]] = defaultdict(dict)
    failures: dict[Pair, str] = {}
    for name, value in fields.items():
        task, place, shadow, measure = json.loads(name)
        pair = Pair(task, place, shadow)
        if measure == _FAILURE:
            failures[pair] = value.decode()
        else:
            counts[pair][measure] = int(value)
    unlike: dict[Pair, list[Any]] = defaultdict(list)
    for entry in last:
        task, place, shadow, told = json.loads(entry)
        unlike[Pair(task, place, shadow)].append(told)
    for pair in sorted(counts):
        yield document(
            rule,
            pair,
            counts[pair],
            since_ms=counts[pair].get(_SINCE, 0),
            last_failure=failures.get(pair, ""),
            disagreements=unlike[pair][:MOST_DISAGREEMENTS],
        )
